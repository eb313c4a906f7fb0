"""The models that the real vLLM serves in these tests, made from what the repository ships.

``python bed_models.py FOLDER`` makes them, each in a folder of its name, and pictures for the second one.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image

from ecotone.testing.tiny_models import widen
from ecotone.testing.tiny_processors import processors
from ecotone.testing.vllm_checkpoint import copy_for_vllm

DIGITS = Path(__file__).resolve().parents[2] / "models" / "digits-llava"


def make_digits(folder: Path) -> Path:
    """The shipped model."""
    shutil.copytree(DIGITS / "images", folder / "images")
    return copy_for_vllm(DIGITS, folder)


def make_qwen3_vl(folder: Path, seed: int = 0) -> Path:
    """A random Qwen3-VL: images of any size, and rows four times as wide as the language model's (DeepStack).

    ``ecotone.testing.make_tiny_model`` has heads of 8, and vLLM's CPU attention wants 32 at least.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = processors()["qwen3_vl"].save(folder)
    torch.manual_seed(seed)
    model = transformers.Qwen3VLForConditionalGeneration(_qwen3_vl_config(tokenizer)).eval()
    widen(model, seed)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    return folder


def _qwen3_vl_config(tokenizer: Any) -> Any:
    def token(name: str) -> int:
        return int(tokenizer.convert_tokens_to_ids(name))

    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": None,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "mrope_section": [6, 5, 5],
            "mrope_interleaved": True,
        },
    }
    tower = {
        "hidden_size": 64,
        "num_heads": 2,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "depth": 4,
        "out_hidden_size": 64,
        "intermediate_size": 128,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1, 2],
    }
    return transformers.Qwen3VLConfig(
        text_config=text,
        vision_config=tower,
        image_token_id=token("<|image_pad|>"),
        video_token_id=token("<|video_pad|>"),
        vision_start_token_id=token("<|vision_start|>"),
        vision_end_token_id=token("<|vision_end|>"),
    )


SIDES = [(32, 32), (24, 16), (48, 32), (16, 40), (56, 56), (16, 16)]


def make_images(folder: Path, count: int, seed: int = 0) -> list[Path]:
    """Random pictures of several sizes: with the Qwen model 4 to 24 rows."""
    folder.mkdir(parents=True, exist_ok=True)
    chance = np.random.default_rng(seed)
    paths = []
    for number in range(count):
        width, height = SIDES[number % len(SIDES)]
        pixels = chance.integers(0, 256, (height, width, 3), dtype=np.uint8)
        paths.append(folder / f"picture{number:02d}.png")
        Image.fromarray(pixels).save(paths[-1])
    return paths


if __name__ == "__main__":
    make_digits(Path(sys.argv[1]) / "digits")
    make_qwen3_vl(Path(sys.argv[1]) / "qwen3_vl")
    make_images(Path(sys.argv[1]) / "pictures", 24)
