"""Configurations of the tiny models: a few layers of 32, and nothing that a family's real checkpoints lack."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import transformers

HIDDEN, LAYERS, MAX_LENGTH = 32, 3, 512
# Side of a patch, of a tile, and of Gemma's and LLaVA's whole images, in pixels.
PATCH, TILE, SIDE = 4, 16, 32
# Height and width that LLaVA-NeXT fits an image into, pixels.
PINPOINTS = [[TILE, SIDE], [SIDE, TILE]]
# Of audio features: mel bins, and positions after the encoder's convolutions.
MELS, AUDIO_POSITIONS = 16, 40


@dataclass(frozen=True)
class TinyArchitecture:
    """What a family's model is built from.

    Attributes:
        model: the transformers class of its checkpoints.
        config: makes the configuration, given the tokenizer.
    """

    model: str
    config: Callable[[Any], Any]

    def build(self, tokenizer: Any) -> Any:
        """The model, with the library's random weights."""
        return getattr(transformers, self.model)(self.config(tokenizer)).eval()


def architectures() -> Mapping[str, TinyArchitecture]:
    """Family name -> what it is built from."""
    return _ARCHITECTURES


def _text(tokenizer: Any, **changes: Any) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": MAX_LENGTH,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": None,
        **changes,
    }


def _tower(**changes: Any) -> dict[str, Any]:
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 2 * HIDDEN, "num_hidden_layers": 2}
    return {**sizes, "num_attention_heads": 4, "patch_size": PATCH, **changes}


def _llava(tokenizer: Any) -> Any:
    return transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**_tower(num_hidden_layers=3, image_size=TILE)),
        text_config=transformers.LlamaConfig(**_text(tokenizer)),
        image_token_index=_id(tokenizer, "<image>"),
        image_seq_length=(TILE // PATCH) ** 2,
    )


def _llava_next(tokenizer: Any) -> Any:
    return transformers.LlavaNextConfig(
        vision_config=transformers.CLIPVisionConfig(**_tower(num_hidden_layers=3, image_size=TILE)),
        text_config=transformers.LlamaConfig(**_text(tokenizer)),
        image_token_index=_id(tokenizer, "<image>"),
        image_grid_pinpoints=PINPOINTS,
    )


def _mistral3(tokenizer: Any) -> Any:
    return transformers.Mistral3Config(
        vision_config=transformers.PixtralVisionConfig(**_tower(image_size=2 * SIDE, head_dim=8)),
        text_config=transformers.MistralConfig(**_text(tokenizer, sliding_window=None)),
        image_token_index=_id(tokenizer, "[IMG]"),
        spatial_merge_size=2,
        vision_feature_layer=-1,
    )


def _aya_vision(tokenizer: Any) -> Any:
    layers = ["sliding_attention", "full_attention", "sliding_attention"]
    return transformers.AyaVisionConfig(
        vision_config={**_tower(image_size=TILE), "model_type": "siglip_vision_model", "vision_use_head": False},
        text_config={
            **_text(tokenizer, sliding_window=24, layer_types=layers, logit_scale=0.25),
            "model_type": "cohere2",
        },
        image_token_index=_id(tokenizer, "<|IMG_PATCH|>"),
        downsample_factor=2,
    )


def _qwen_ids(tokenizer: Any) -> dict[str, int]:
    return {
        "image_token_id": _id(tokenizer, "<|image_pad|>"),
        "video_token_id": _id(tokenizer, "<|video_pad|>"),
        "vision_start_token_id": _id(tokenizer, "<|vision_start|>"),
        "vision_end_token_id": _id(tokenizer, "<|vision_end|>"),
    }


def _qwen_text(tokenizer: Any, **rope: Any) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2], **rope}
    return _text(tokenizer, rope_parameters=rope)


def _qwen_tower(**changes: Any) -> dict[str, Any]:
    sizes = {"hidden_size": HIDDEN, "num_heads": 4, "patch_size": PATCH}
    return {**sizes, "spatial_merge_size": 2, "temporal_patch_size": 2, **changes}


def _qwen2_vl(tokenizer: Any) -> Any:
    return transformers.Qwen2VLConfig(
        text_config=_qwen_text(tokenizer),
        vision_config=_qwen_tower(depth=2, embed_dim=HIDDEN, mlp_ratio=2),
        **_qwen_ids(tokenizer),
    )


def _qwen2_5_vl(tokenizer: Any) -> Any:
    tower = _qwen_tower(
        depth=2, out_hidden_size=HIDDEN, intermediate_size=64, window_size=TILE, fullatt_block_indexes=[1]
    )
    return transformers.Qwen2_5_VLConfig(
        text_config=_qwen_text(tokenizer), vision_config=tower, **_qwen_ids(tokenizer)
    )


def _qwen3_vl(tokenizer: Any) -> Any:
    tower = _qwen_tower(
        depth=3,
        out_hidden_size=HIDDEN,
        intermediate_size=64,
        num_position_embeddings=64,
        deepstack_visual_indexes=[0, 1],
    )
    text = _qwen_text(tokenizer, mrope_interleaved=True)
    return transformers.Qwen3VLConfig(text_config=text, vision_config=tower, **_qwen_ids(tokenizer))


def _gemma3(tokenizer: Any) -> Any:
    layers = ["sliding_attention", "full_attention", "sliding_attention"]
    return transformers.Gemma3Config(
        # Wider than an image, as in real checkpoints: where it is narrower, releases of transformers differ.
        text_config=_text(tokenizer, sliding_window=20, layer_types=layers, query_pre_attn_scalar=8),
        vision_config=_tower(image_size=SIDE),
        mm_tokens_per_image=16,
        image_token_index=_id(tokenizer, "<image_soft_token>"),
        boi_token_index=_id(tokenizer, "<start_of_image>"),
        eoi_token_index=_id(tokenizer, "<end_of_image>"),
    )


def _tiled(config: Any) -> Callable[[Any], Any]:
    """Idefics3 and SmolVLM: tiles of an image, each a row of 4."""
    return lambda tokenizer: config(
        vision_config=_tower(image_size=TILE),
        text_config={**_text(tokenizer), "model_type": "llama"},
        image_token_id=_id(tokenizer, "<image>"),
        scale_factor=2,
        pad_token_id=0,
    )


def _internvl(tokenizer: Any) -> Any:
    text = _text(tokenizer, model_type="qwen2")
    del text["head_dim"]
    tower = _tower(image_size=[TILE, TILE], patch_size=[PATCH, PATCH], num_mask_tokens=0)
    return transformers.InternVLConfig(
        vision_config=tower,
        text_config=text,
        image_token_id=_id(tokenizer, "<IMG_CONTEXT>"),
        image_seq_length=4,
        downsample_ratio=0.5,
    )


def _qwen2_audio(tokenizer: Any) -> Any:
    text = _text(tokenizer, model_type="qwen2")
    del text["head_dim"]
    tower = {
        "d_model": HIDDEN,
        "encoder_layers": 2,
        "encoder_attention_heads": 4,
        "encoder_ffn_dim": 64,
        "num_mel_bins": MELS,
        "max_source_positions": AUDIO_POSITIONS,
    }
    return transformers.Qwen2AudioConfig(
        audio_config=tower, text_config=text, audio_token_index=_id(tokenizer, "<|AUDIO|>")
    )


def _voxtral(tokenizer: Any) -> Any:
    tower = {
        "hidden_size": HIDDEN,
        "intermediate_size": 4 * HIDDEN,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_mel_bins": MELS,
        "max_source_positions": AUDIO_POSITIONS,
        "head_dim": 8,
    }
    return transformers.VoxtralConfig(
        audio_config=tower,
        text_config=_text(tokenizer, model_type="llama"),
        audio_token_id=_id(tokenizer, "[AUDIO]"),
    )


def _id(tokenizer: Any, token: str) -> int:
    return int(tokenizer.convert_tokens_to_ids(token))


_ARCHITECTURES: Mapping[str, TinyArchitecture] = {
    "llava": TinyArchitecture("LlavaForConditionalGeneration", _llava),
    "llava_next": TinyArchitecture("LlavaNextForConditionalGeneration", _llava_next),
    "qwen2_vl": TinyArchitecture("Qwen2VLForConditionalGeneration", _qwen2_vl),
    "qwen2_5_vl": TinyArchitecture("Qwen2_5_VLForConditionalGeneration", _qwen2_5_vl),
    "qwen3_vl": TinyArchitecture("Qwen3VLForConditionalGeneration", _qwen3_vl),
    "gemma3": TinyArchitecture("Gemma3ForConditionalGeneration", _gemma3),
    "smolvlm": TinyArchitecture("SmolVLMForConditionalGeneration", _tiled(transformers.SmolVLMConfig)),
    "idefics3": TinyArchitecture("Idefics3ForConditionalGeneration", _tiled(transformers.Idefics3Config)),
    "internvl": TinyArchitecture("InternVLForConditionalGeneration", _internvl),
    "qwen2_audio": TinyArchitecture("Qwen2AudioForConditionalGeneration", _qwen2_audio),
    "voxtral": TinyArchitecture("VoxtralForConditionalGeneration", _voxtral),
    "aya_vision": TinyArchitecture("AyaVisionForConditionalGeneration", _aya_vision),
    "mistral3": TinyArchitecture("Mistral3ForConditionalGeneration", _mistral3),
}
