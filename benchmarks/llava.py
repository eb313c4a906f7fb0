"""Random LLaVA models with an encoder that costs something, before a small language model.

Tokenizer and processor are the shipped model's, so that the same prompts work.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoProcessor, CLIPVisionConfig, LlavaConfig, LlavaForConditionalGeneration

from ecotone.testing.tiny_models import widen
from ecotone.worker.models.loading import no_progress_bars

DIGITS = Path(__file__).parents[1] / "models" / "digits-llava"
PATCH = 14


def rows_of(side: int) -> int:
    """Encoder rows of an image of ``side`` x ``side`` pixels."""
    return (side // PATCH) ** 2


def make_llava(folder: Path, side: int, layers: int = 12, *, seed: int = 0, **text: Any) -> Path:
    """A checkpoint in ``folder`` for images of ``side`` x ``side`` pixels.

    Its tower is 384 wide and has ``layers`` layers, of which the last one's output is not used, as in LLaVA;
    ``text`` changes the shipped model's language model. The same ``seed`` makes the same weights.
    """
    config = LlavaConfig.from_pretrained(DIGITS)
    config.vision_config = CLIPVisionConfig(
        hidden_size=384, intermediate_size=1536, num_hidden_layers=layers, num_attention_heads=6, image_size=side,
        patch_size=PATCH,
    )  # fmt: skip
    config.image_seq_length = rows_of(side)
    for name, value in text.items():
        setattr(config.text_config, name, value)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        model = LlavaForConditionalGeneration(config)
    widen(model, seed)
    with no_progress_bars():
        model.save_pretrained(folder)
    processor = AutoProcessor.from_pretrained(DIGITS)
    processor.image_processor.size = {"shortest_edge": side}
    processor.image_processor.crop_size = {"height": side, "width": side}
    processor.save_pretrained(folder)
    return folder
