"""What differs between model families. Everything else is found out from signatures and attributes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from transformers.masking_utils import create_bidirectional_mask

# Class names in ``config.json`` that there are tests for, by family.
SUPPORTED_ARCHITECTURES: Mapping[str, str] = {
    "AyaVisionForConditionalGeneration": "Aya Vision",
    "Gemma3ForConditionalGeneration": "Gemma 3",
    "Idefics3ForConditionalGeneration": "Idefics3",
    "InternVLForConditionalGeneration": "InternVL",
    "LlavaForConditionalGeneration": "LLaVA",
    "LlavaNextForConditionalGeneration": "LLaVA-NeXT",
    "Mistral3ForConditionalGeneration": "Mistral 3",
    "Qwen2AudioForConditionalGeneration": "Qwen2-Audio",
    "Qwen2VLForConditionalGeneration": "Qwen2-VL",
    "Qwen2_5_VLForConditionalGeneration": "Qwen2.5-VL",
    "Qwen3VLForConditionalGeneration": "Qwen3-VL",
    "SmolVLMForConditionalGeneration": "SmolVLM",
    "VoxtralForConditionalGeneration": "Voxtral",
}

# model_type -> the axis along which the processor's tensors of several items are put together for one encoder
# call. 0 where not listed. These two have [prompts, tiles, ...]: the items are tiles of one prompt.
CONCAT_AXIS: Mapping[str, int] = {"idefics3": 1, "smolvlm": 1}


def qwen2_audio_features(core: Any, input_features: Tensor, feature_attention_mask: Tensor) -> list[Tensor]:
    """Rows ``[n_i, hidden]`` of each clip, by the steps of the model's own forward.

    Args:
        core: transformers' ``Qwen2AudioModel``.
        input_features: ``[clips, mels, frames]``.
        feature_attention_mask: ``[clips, frames]``: 0 where a clip was padded.
    """
    tower = core.audio_tower
    frames, rows = tower._get_feat_extract_output_lengths(feature_attention_mask.sum(-1))
    positions = (input_features.shape[-1] - 2) // 2 + 1
    inside = frames.new_ones(len(frames), positions).cumsum(-1) <= frames[:, None]
    mask = create_bidirectional_mask(
        config=tower.config,
        inputs_embeds=input_features.new_empty(len(frames), positions, 1),
        attention_mask=inside.long(),
    )
    hidden = tower(input_features, attention_mask=mask).last_hidden_state
    features = core.multi_modal_projector(hidden)
    return [clip[:count] for clip, count in zip(features, rows.tolist(), strict=True)]


# (model_type, modality) -> a function (core model, **processor tensors) -> rows, for families without a
# ``get_<modality>_features`` method.
FEATURE_FUNCTIONS: Mapping[tuple[str, str], Callable[..., Any]] = {("qwen2_audio", "audio"): qwen2_audio_features}
