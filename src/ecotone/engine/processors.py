"""A model folder's processor, made to serve where transformers' own does not.

Without torchvision: every video processor of transformers needs it, and a processor is loaded with all of its
parts or not at all. A family that can see videos would then not even see images, which need no torchvision. Such
a processor is put together without the one part. (torchvision is no dependency: each of its builds goes with one
build of torch, and another one fails to import.)

Voxtral: its processor takes sound only through the chat template of a mistral-common tokenizer. With a tokenizer
that can be loaded without that, sound is given to the feature extractor here, as the processor itself does it.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import transformers
from transformers import (
    AutoConfig,
    AutoFeatureExtractor,
    AutoImageProcessor,
    AutoProcessor,
    AutoTokenizer,
    BatchFeature,
    ProcessorMixin,
)
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

from ecotone.errors import ModelError, UnsupportedModelError

MODALITIES = ("image", "video", "audio")

_CLASS_FILES = ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json")
_LOADERS = {
    "image_processor": AutoImageProcessor,
    "feature_extractor": AutoFeatureExtractor,
    "tokenizer": AutoTokenizer,
}
_LOCAL = {"local_files_only": True, "trust_remote_code": False}
# Voxtral's encoder and projector make one row of as many frames of the spectrogram.
_VOXTRAL_FRAMES_PER_ROW = 8


def load_processor(path: Path) -> Any:
    """The folder's Hugging Face processor, from its files alone.

    Raises:
        ModelError: the files are missing or unreadable, or need a package that is not installed.
        UnsupportedModelError: it takes no media.
    """
    try:
        processor = _load(path)
    except ModelError:
        raise
    # A rim: what a broken folder raises depends on which of its files is broken.
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise ModelError(f"model folder {str(path)!r}: its processor cannot be loaded: {reason}") from error
    if not isinstance(processor, ProcessorMixin) or not any(placeholders(processor)):
        raise UnsupportedModelError(
            f"model folder {str(path)!r}: its processor ({type(processor).__name__}) takes no media"
        )
    return processor


def placeholders(processor: Any) -> dict[str, str]:
    """modality -> what stands for one item of it in a prompt, of those that the processor knows."""
    tokens = {modality: getattr(processor, f"{modality}_token", None) for modality in MODALITIES}
    return {modality: token for modality, token in tokens.items() if token is not None}


def load_row_token_ids(path: Path) -> frozenset[int]:
    """The ids of tokens that stand for one encoder row each. The model's configuration says them, as it says them
    to the model; a processor may mean the tokens around them.

    Raises:
        ModelError: the configuration cannot be read, or names none.
    """
    try:
        config = AutoConfig.from_pretrained(path, **_LOCAL)
    # A rim: what a broken configuration raises depends on its class.
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise ModelError(f"model folder {str(path)!r}: its configuration cannot be loaded: {reason}") from error
    ids = (getattr(config, f"{modality}_token_id", None) for modality in MODALITIES)
    found = frozenset(token_id for token_id in ids if token_id is not None)
    if not found:
        raise UnsupportedModelError(
            f"model folder {str(path)!r}: its configuration ({type(config).__name__}) names no placeholder token"
        )
    return found


def has_torchvision() -> bool:
    """Whether it is installed."""
    return importlib.util.find_spec("torchvision") is not None


def _load(path: Path) -> Any:
    kind = _processor_class(path)
    if kind is None:
        return AutoProcessor.from_pretrained(path, **_LOCAL)
    if kind is transformers.VoxtralProcessor:
        if (path / "tekken.json").exists() and not (path / "tokenizer.json").exists():
            raise UnsupportedModelError(
                f"model folder {str(path)!r} has the tokenizer of mistral-common (tekken.json), and its processor "
                "works with that alone: it is not supported; a folder with a tokenizer.json is"
            )
        return _assemble(_Voxtral, path)
    if "video_processor" in kind.get_attributes() and not has_torchvision():
        # Named like the original: the name is part of what keys are made from.
        return _assemble(type(kind.__name__, (_WithoutVideo, kind), {}), path)
    return AutoProcessor.from_pretrained(path, **_LOCAL)


def _processor_class(path: Path) -> Any:
    """The class that ``AutoProcessor`` would load; ``None`` where that has to find out for itself."""
    for name in _CLASS_FILES:
        if (path / name).is_file():
            named = json.loads((path / name).read_bytes()).get("processor_class")
            if named is not None:
                return getattr(transformers, named, None)
    config = AutoConfig.from_pretrained(path, **_LOCAL)
    return PROCESSOR_MAPPING.get(type(config), None)


def _assemble(kind: Any, path: Path) -> Any:
    parts = [
        _LOADERS[name].from_pretrained(path, **_LOCAL) if name in _LOADERS else None
        for name in kind.get_attributes()
    ]
    options, _ = kind.get_processor_dict(path, **_LOCAL)
    processor = kind.from_args_and_dict(parts, options)
    if processor.chat_template is None:  # some constructors do not take it
        processor.chat_template = options.get("chat_template")
    return processor


class _WithoutVideo:
    """Before a processor class: its video processor may be ``None``."""

    # Some families' own asks the video processor for its defaults, whatever the messages.
    apply_chat_template = ProcessorMixin.apply_chat_template

    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
        if argument_name == "video_processor" and argument is None:
            return None
        return super().check_argument_for_proper_class(argument_name, argument)  # type: ignore[misc]


class _Voxtral(transformers.VoxtralProcessor):  # type: ignore[misc]
    """With the call and the chat template that other processors have, for one clip.

    Attributes:
        takes_windows: clips longer than the extractor's window are taken window by window.
    """

    takes_windows = True
    # The family's own needs a mistral-common tokenizer.
    apply_chat_template = ProcessorMixin.apply_chat_template

    def __call__(self, *, audio: list[Any], sampling_rate: int, **_: Any) -> BatchFeature:
        """``audio`` is one clip, float32 ``[samples]``; the text is its placeholder."""
        extractor = self.feature_extractor
        # Whole windows: the encoder takes nothing else.
        features = extractor(
            audio[0],
            sampling_rate=sampling_rate,
            padding=True,
            truncation=False,
            pad_to_multiple_of=extractor.n_samples,
            return_tensors="np",
        )["input_features"]
        windows = features.reshape(extractor.feature_size, -1, extractor.nb_max_frames).swapaxes(0, 1)
        rows = len(windows) * extractor.nb_max_frames // _VOXTRAL_FRAMES_PER_ROW
        replacement = self.audio_token * rows
        return BatchFeature(
            {
                "input_ids": self.tokenizer([replacement], return_tensors="np")["input_ids"],
                "input_features": windows,
                "text_replacement_offsets": [[{"replacement": replacement}]],
            }
        )
