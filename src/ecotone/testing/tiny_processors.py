"""Processors of the tiny models: byte-level tokenizers and image or audio processors for a few pixels.

They are written file by file, as real checkpoints have them: a processor object with a video processor cannot
be made, nor saved, where torchvision is missing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, WhisperFeatureExtractor

from ecotone.testing.tiny_configs import AUDIO_POSITIONS, MELS, PATCH, PINPOINTS, SIDE, TILE

EOS = "</s>"
# Voxtral's processor takes the token with this id for its audio token, whatever the tokenizer says.
_VOXTRAL_AUDIO_ID = 24
_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for c in m['content'] %}CASES{{ c['text'] }}{% endif %}{% endfor %}{% endif %}\n{% endfor %}assistant:"
)


@dataclass(frozen=True)
class TinyProcessor:
    """A family's processor.

    Attributes:
        name: its transformers class.
        media: modality -> the text of one item in a prompt.
        tokens: special tokens of the tokenizer, besides the end of text.
        named: attribute of the tokenizer -> the token it names.
        files: makes further files, name -> content.
        options: the processor's own.
        reserved: tokens before all others in the vocabulary.
    """

    name: str
    media: Mapping[str, str]
    tokens: tuple[str, ...]
    files: Callable[[], Mapping[str, Mapping[str, Any]]]
    named: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    reserved: tuple[str, ...] = ()

    def save(self, folder: Path) -> Any:
        """Write it to ``folder``; returns its tokenizer."""
        tokenizer = _tokenizer(self)
        tokenizer.save_pretrained(folder)
        _write(folder / "processor_config.json", {"processor_class": self.name, **self.options})
        for name, content in self.files().items():
            _write(folder / name, {"processor_class": self.name, **content})
        (folder / "chat_template.jinja").write_text(_template(self.media))
        return tokenizer


def processors() -> Mapping[str, TinyProcessor]:
    """Family name -> its processor."""
    return _PROCESSORS


def _write(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n")


def _template(media: Mapping[str, str]) -> str:
    cases = "".join(f"{{% elif c['type'] == '{name}' %}}{text}" for name, text in media.items())
    return _TEMPLATE.replace("CASES", "{% if" + cases.removeprefix("{% elif") + "{% else %}")


def _tokenizer(processor: TinyProcessor) -> Any:
    """Bytes are tokens, and nothing merges."""
    words = [*processor.reserved, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = dict.fromkeys((EOS, *processor.reserved, *processor.tokens))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=EOS, pad_token=EOS, extra_special_tokens=dict(processor.named)
    )


def _image(kind: str, **options: Any) -> Callable[[], Mapping[str, Mapping[str, Any]]]:
    """``preprocessor_config.json`` of an image processor. Its backend is chosen when it is loaded."""
    plain = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}

    def files() -> Mapping[str, Mapping[str, Any]]:
        processor = getattr(transformers, f"{kind}Pil")(**plain, **options)
        return {"preprocessor_config.json": {**processor.to_dict(), "image_processor_type": kind}}

    return files


def _with_video(
    files: Callable[[], Mapping[str, Mapping[str, Any]]], kind: str, **options: Any
) -> Callable[[], Mapping[str, Mapping[str, Any]]]:
    plain = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "do_sample_frames": False}
    return lambda: {
        **files(),
        "video_preprocessor_config.json": {"video_processor_type": kind, **plain, **options},
    }


def _audio() -> Mapping[str, Mapping[str, Any]]:
    """One second becomes 80 frames, of which the encoder's convolutions leave ``AUDIO_POSITIONS``."""
    extractor = WhisperFeatureExtractor(
        feature_size=MELS, sampling_rate=16_000, hop_length=8_000 // AUDIO_POSITIONS, chunk_length=1
    )
    content = extractor.to_dict()
    return {"preprocessor_config.json": {**content, "feature_extractor_type": "WhisperFeatureExtractor"}}


def _qwen(name: str, video: str) -> TinyProcessor:
    # One row is a square of 2 x 2 patches; an image has 4 to 24 rows.
    row = (2 * PATCH) ** 2
    pixels = {"shortest_edge": 4 * row, "longest_edge": 24 * row}
    sizes = {"patch_size": PATCH, "merge_size": 2, "temporal_patch_size": 2, "size": pixels}
    return TinyProcessor(
        name=name,
        media={
            "image": "<|vision_start|><|image_pad|><|vision_end|>",
            "video": "<|vision_start|><|video_pad|><|vision_end|>",
        },
        tokens=("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"),
        files=_with_video(_image("Qwen2VLImageProcessor", **sizes), video, **sizes),
    )


def _tiles(name: str) -> TinyProcessor:
    """Idefics3 and SmolVLM: an image becomes tiles of 4 rows, with tokens for row and column between them."""
    places = tuple(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7))
    size, tile = {"longest_edge": 2 * TILE}, {"longest_edge": TILE}
    files = _image(f"{name}ImageProcessor", size=size, max_image_size=tile)
    if name == "SmolVLM":
        sampling = {"fps": 1, "max_frames": 8}
        files = _with_video(
            files, "SmolVLMVideoProcessor", size=tile, max_image_size=tile, video_sampling=sampling
        )
    return TinyProcessor(
        name=f"{name}Processor",
        media={"image": "<image>", "video": "<video>"} if name == "SmolVLM" else {"image": "<image>"},
        tokens=(
            "<fake_token_around_image>",
            "<image>",
            "<end_of_utterance>",
            "<global-img>",
            *places,
            *(("<video>",) if name == "SmolVLM" else ()),
        ),
        files=files,
        options={"image_seq_len": 4},
    )


_GEMMA = {
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
    "image_token": "<image_soft_token>",
}
_INTERN = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}
_TILE_SIZE = {"height": TILE, "width": TILE}
_SIDE_SIZE = {"height": SIDE, "width": SIDE}
_CROPS = {"size": _TILE_SIZE, "crop_to_patches": True, "min_patches": 1, "max_patches": 4}

_CLIP = {
    "patch_size": PATCH,
    "vision_feature_select_strategy": "default",
    "num_additional_image_tokens": 1,
}

_PROCESSORS: Mapping[str, TinyProcessor] = {
    "llava": TinyProcessor(
        name="LlavaProcessor",
        media={"image": "<image>"},
        tokens=("<image>",),
        files=_image("CLIPImageProcessor", size=_TILE_SIZE, crop_size=_TILE_SIZE),
        options=_CLIP,
    ),
    "llava_next": TinyProcessor(
        name="LlavaNextProcessor",
        media={"image": "<image>"},
        tokens=("<image>",),
        files=_image(
            "LlavaNextImageProcessor",
            size={"shortest_edge": TILE},
            crop_size=_TILE_SIZE,
            image_grid_pinpoints=PINPOINTS,
        ),
        options=_CLIP,
    ),
    "qwen2_vl": _qwen("Qwen2VLProcessor", "Qwen2VLVideoProcessor"),
    "qwen2_5_vl": _qwen("Qwen2_5_VLProcessor", "Qwen2VLVideoProcessor"),
    "qwen3_vl": _qwen("Qwen3VLProcessor", "Qwen3VLVideoProcessor"),
    "gemma3": TinyProcessor(
        name="Gemma3Processor",
        media={"image": "<start_of_image>"},
        tokens=tuple(_GEMMA.values()),
        named=_GEMMA,
        files=_image("Gemma3ImageProcessor", size=_SIDE_SIZE),
        options={"image_seq_length": 16},
    ),
    "smolvlm": _tiles("SmolVLM"),
    "idefics3": _tiles("Idefics3"),
    "internvl": TinyProcessor(
        name="InternVLProcessor",
        media={"image": "<IMG_CONTEXT>", "video": "<video>"},
        tokens=tuple(_INTERN.values()),
        named=_INTERN,
        files=_with_video(_image("GotOcr2ImageProcessor", **_CROPS), "InternVLVideoProcessor", size=_TILE_SIZE),
        options={"image_seq_length": 4},
    ),
    "qwen2_audio": TinyProcessor(
        name="Qwen2AudioProcessor",
        media={"audio": "<|audio_bos|><|AUDIO|><|audio_eos|>"},
        tokens=("<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>"),
        files=_audio,
    ),
    "voxtral": TinyProcessor(
        name="VoxtralProcessor",
        media={"audio": "[BEGIN_AUDIO][AUDIO]"},
        tokens=("[BEGIN_AUDIO]",),
        files=_audio,
        reserved=(*(f"[CONTROL_{number}]" for number in range(_VOXTRAL_AUDIO_ID)), "[AUDIO]"),
    ),
    "aya_vision": TinyProcessor(
        name="AyaVisionProcessor",
        media={"image": "<image>"},
        tokens=(
            "<image>",
            "<|START_OF_IMG|>",
            "<|END_OF_IMG|>",
            "<|IMG_PATCH|>",
            "<|IMG_LINE_BREAK|>",
            "TILE_GLOBAL",
            "TILE",
        ),
        files=_image("GotOcr2ImageProcessor", **_CROPS),
        options={"patch_size": PATCH, "img_size": TILE, "downsample_factor": 2},
    ),
    "mistral3": TinyProcessor(
        name="PixtralProcessor",
        media={"image": "[IMG]"},
        tokens=("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
        files=_image("PixtralImageProcessor", size={"longest_edge": SIDE}, patch_size=2 * PATCH),
        options={"patch_size": PATCH, "spatial_merge_size": 2},
    ),
}
