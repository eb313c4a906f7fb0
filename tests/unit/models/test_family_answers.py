"""Every family from a prompt with media to text: the whole engine generates the tokens that transformers generates
from its own processor's output for the whole prompt."""

from __future__ import annotations

import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from typer.testing import CliRunner

import ecotone
from ecotone.cli.app import app
from ecotone.engine.processors import has_torchvision, load_processor
from ecotone.testing.tiny_models import make_tiny_model, tiny_families, tiny_media_text

NUM_TOKENS = 8
SAMPLING_RATE = 16_000
# Its processor cannot be imported without torchvision.
NEEDS_TORCHVISION = ("mistral3",)
NESTED = ("gemma3", "smolvlm", "idefics3")  # take a list of images for each text
FAMILIES = [name for name in tiny_families() if has_torchvision() or name not in NEEDS_TORCHVISION]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = make_tiny_model(name, tmp_path_factory.mktemp(name))
        return made[name]

    return get


def images() -> list[Image.Image]:
    random = np.random.default_rng(0)
    return [Image.fromarray(random.integers(0, 256, (*size, 3), dtype=np.uint8)) for size in ((30, 40), (20, 20))]


def clips(name: str) -> list[Any]:
    """Of less than a second, which is the tiny model's window; Voxtral takes several windows."""
    lengths = (9_000, 23_000 if name == "voxtral" else 15_000)
    return [np.sin(np.arange(length) / 20).astype(np.float32) for length in lengths]


def whole(name: str, processor: Any, text: str) -> dict[str, torch.Tensor]:
    """What transformers' processor makes of the prompt, all media at once."""
    if "image" in tiny_media_text(name):
        given = [images()] if name in NESTED else images()
        return dict(processor(text=[text], images=given, return_tensors="pt"))
    if name != "voxtral":
        return dict(processor(text=[text], audio=clips(name), sampling_rate=SAMPLING_RATE, return_tensors="pt"))
    # Its own processor needs mistral-common. 10 rows to a second, whole seconds: 1 and 2.
    extractor = processor.feature_extractor
    features = [
        extractor(part, sampling_rate=SAMPLING_RATE, return_tensors="pt")["input_features"]
        for clip in clips(name)
        for part in np.split(np.pad(clip, (0, -len(clip) % SAMPLING_RATE)), -(-len(clip) // SAMPLING_RATE))
    ]
    start, *parts = text.split("[AUDIO]")
    full = start + "".join("[AUDIO]" * 10 * n + part for n, part in zip((1, 2), parts, strict=True))
    return {
        "input_ids": processor.tokenizer([full], return_tensors="pt")["input_ids"],
        "input_features": torch.cat(features),
    }


def prompt_for(name: str) -> ecotone.Prompt:
    media = tiny_media_text(name)
    if "image" in media:
        return ecotone.Prompt(f"What is {media['image']} and {media['image']}?", images=images())
    audio = [(clip, SAMPLING_RATE) for clip in clips(name)]
    return ecotone.Prompt(f"What is {media['audio']} and {media['audio']}?", audio=audio)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_engine_generates_what_transformers_generates(name: str, folder: Callable[[str], Path]) -> None:
    path, prompt = folder(name), prompt_for(name)
    inputs = whole(name, load_processor(path), str(prompt.text))
    config = ecotone.EngineConfig(
        model=str(path),
        device="cpu",
        max_num_batched_tokens=48,
        ec=ecotone.ECConfig(options={"memory": "4MiB", "prefault": False}),
    )
    params = ecotone.SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    with ecotone.Engine(config) as engine:
        answers = engine.generate([prompt, ecotone.Prompt("Only text."), prompt], params)
        again = engine.generate(prompt, params)
    kind = getattr(transformers, transformers.AutoConfig.from_pretrained(path).architectures[0])
    plain = kind.from_pretrained(path).eval()
    length = inputs["input_ids"].shape[1]
    with torch.no_grad():
        ids = plain.generate(**inputs, max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS, do_sample=False)
    expected = tuple(ids[0, length:].tolist())
    assert answers[0].token_ids == answers[2].token_ids == again[0].token_ids == expected
    assert answers[1].token_ids != expected


@pytest.mark.parametrize("name", FAMILIES)
def test_the_command_line_answers(name: str, folder: Callable[[str], Path], tmp_path: Path) -> None:
    options = ["-p", "What is this?", "--max-tokens", "4", "--device", "cpu", "--memory", "4MiB"]
    if "image" in tiny_media_text(name):
        images()[0].save(tmp_path / "image.png")
        options += ["--image", str(tmp_path / "image.png")]
    else:
        with wave.open(str(tmp_path / "clip.wav"), "wb") as clip:
            clip.setparams((1, 2, SAMPLING_RATE, 0, "NONE", "not compressed"))
            clip.writeframes((clips(name)[0] * 30_000).astype("<i2").tobytes())
        options += ["--audio", str(tmp_path / "clip.wav")]
    result = CliRunner().invoke(app, ["generate", str(folder(name)), *options])
    assert result.exit_code == 0, result.output
    assert result.stdout.endswith("\n")
