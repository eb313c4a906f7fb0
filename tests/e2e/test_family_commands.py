"""``ecotone generate`` on a tiny model of every family, and a clip that is longer than its model's window."""

from __future__ import annotations

import wave
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import VoxtralForConditionalGeneration
from transformers.utils import is_torchvision_available
from typer.testing import CliRunner

from ecotone import Engine, InputProcessor, Prompt, SamplingParams
from ecotone.cli.app import app
from ecotone.testing.tiny_models import make_tiny_model, tiny_families, tiny_media_text

RATE = 16_000
# Their processors do not load without it.
NEED_TORCHVISION = ("mistral3",)
FAMILIES = [name for name in tiny_families() if is_torchvision_available() or name not in NEED_TORCHVISION]

Folder = Callable[[str], Path]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    root = tmp_path_factory.mktemp("commands")

    def get(family: str) -> Path:
        return root / family if (root / family).exists() else make_tiny_model(family, root / family)

    return get


def tone(length: int) -> np.ndarray:
    return np.sin(np.arange(length) / 20).astype(np.float32)


def write_wav(file: Path, samples: np.ndarray) -> None:
    with wave.open(str(file), "wb") as clip:
        clip.setparams((1, 2, RATE, 0, "NONE", "not compressed"))
        clip.writeframes((samples * 30_000).astype("<i2").tobytes())


@pytest.mark.parametrize("family", FAMILIES)
def test_generate(family: str, folder: Folder, tmp_path: Path) -> None:
    options = ["-p", "What is this?", "--max-tokens", "4", "--device", "cpu", "--memory", "4MiB"]
    if "image" in tiny_media_text(family):
        pixels = np.random.default_rng(0).integers(0, 256, (30, 40, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "image.png")
        options += ["--image", str(tmp_path / "image.png")]
    else:
        write_wav(tmp_path / "clip.wav", tone(9_000))
        options += ["--audio", str(tmp_path / "clip.wav")]
    result = CliRunner().invoke(app, ["generate", str(folder(family)), *options])
    assert result.exit_code == 0, result.output
    assert result.stdout.endswith("\n")


def test_a_clip_of_several_windows_is_one_item(folder: Folder) -> None:
    """Voxtral sees a window of one second, here; 1.4 seconds are two windows, the second one padded."""
    path, samples = folder("voxtral"), tone(23_000)
    prompt = Prompt("What is [BEGIN_AUDIO][AUDIO]?", audio=[(samples, RATE)])
    processed = InputProcessor(path, max_image_pixels=10_000).process(prompt)
    [item] = processed.items
    features = torch.from_numpy(item.inputs["input_features"].to_numpy().copy())
    assert (item.num_rows, features.shape) == (20, (2, 16, 80))
    with Engine(str(path), device="cpu") as engine:
        [answer] = engine.generate([prompt], SamplingParams(max_tokens=6, ignore_eos=True))
    model = VoxtralForConditionalGeneration.from_pretrained(path).eval()
    ids = torch.tensor([processed.token_ids])
    with torch.no_grad():
        expected = model.generate(
            input_ids=ids, input_features=features, max_new_tokens=6, min_new_tokens=6, do_sample=False
        )
    assert list(answer.token_ids) == expected[0, ids.shape[1] :].tolist()
