"""``ecotone inspect`` says without the weights what an engine with them does."""

from __future__ import annotations

import json
import shutil
import sys
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from ecotone import Engine, Prompt, inspect_model
from ecotone.cli import app as app_module
from ecotone.errors import InvalidMediaError, ModelError, UnsupportedModelError
from ecotone.testing.tiny_models import make_tiny_model, tiny_media_text

RUNNER = CliRunner()
MEMORY = 1 << 20


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("inspected")
    return {family: make_tiny_model(family, root / family) for family in ("qwen3_vl", "idefics3", "qwen2_audio")}


def wav(path: Path, seconds: float = 0.5, rate: int = 16_000) -> Path:
    samples = (np.sin(np.arange(int(seconds * rate)) / 20) * 20_000).astype("<i2")
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(samples.tobytes())
    return path


def invoke(*arguments: str) -> Any:
    done = RUNNER.invoke(app_module.app, ["inspect", *arguments])
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.mark.parametrize("family", ["qwen3_vl", "idefics3", "qwen2_audio"])
def test_figures_are_those_of_an_engine(models: dict[str, Path], family: str, tmp_path: Path) -> None:
    bare = Path(shutil.copytree(models[family], tmp_path / "bare"))
    (bare / "model.safetensors").unlink()
    if family == "qwen2_audio":
        media = str(wav(tmp_path / "a.wav"))
        option, prompt = "--audio", Prompt(tiny_media_text(family)["audio"] + "?", audio=[media])
    else:
        media = str(tmp_path / "a.png")
        Image.fromarray(np.random.default_rng(0).integers(0, 255, (30, 40, 3), dtype=np.uint8)).save(media)
        option, prompt = "--image", Prompt(tiny_media_text(family)["image"] + "?", images=[media])
    found = json.loads(invoke(str(bare), "--json", option, media, "--memory", "1MiB", "--dtype", "float32"))
    with Engine(models[family], device="cpu", kv_blocks=64) as engine:
        info = engine.model_info
        engine.generate(prompt)
        rows = engine.statistics()["ranks"][0]["encoded_rows"]
    assert (found["architecture"], found["width"]) == (info.architecture, info.encoder.width)
    assert (found["hidden_size"], found["levels"]) == (info.encoder.hidden_size, info.encoder.levels)
    assert (found["dtype"], found["vocab_size"]) == (info.encoder.dtype, info.vocab_size)
    assert found["max_model_len"] == info.max_model_len
    [item] = found["items"]
    assert item["rows"] == rows
    assert item["bytes"] == rows * info.encoder.width * 4
    assert 0 < item["entries"] * item["bytes"] <= MEMORY


def test_nominal_items_and_another_dtype(models: dict[str, Path]) -> None:
    full = inspect_model(models["idefics3"], memory=MEMORY, dtype="float32")
    half = inspect_model(models["idefics3"], memory=MEMORY, dtype="bfloat16")
    assert [item["name"] for item in full["items"]] == ["224 x 224", "448 x 448", "1024 x 1024"]
    assert [item["bytes"] for item in full["items"]] == [2 * item["bytes"] for item in half["items"]]
    assert all(item["prompt_tokens"] > item["rows"] for item in full["items"])


def test_as_tables(models: dict[str, Path]) -> None:
    printed = invoke(str(models["qwen3_vl"]), "--memory", "8GiB")
    for text in ("Qwen3-VL", "Qwen3VLForConditionalGeneration", "<|image_pad|>", "2 more levels", "8,589,934,592"):
        assert text in printed
    assert "of 1 seconds" in invoke(str(models["qwen2_audio"]))


def test_what_cannot_be_inspected(models: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(InvalidMediaError, match="No such file"):
        inspect_model(models["qwen3_vl"], memory=MEMORY, images=["no.png"])
    for content, kind, says in (
        ('{"architectures": ["LlamaForCausalLM"]}', UnsupportedModelError, "LlamaForCausalLM"),
        ('{"architectures": ["LlavaForConditionalGeneration"], "model_type": "x"}', ModelError, "configuration"),
    ):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(kind, match=says):
            inspect_model(tmp_path, memory=MEMORY)


def test_generate_about_a_clip(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*arguments: str) -> tuple[object, str, str]:
        monkeypatch.setattr(
            sys, "argv", ["ecotone", "generate", str(models["qwen2_audio"]), "-p", "what?", *arguments]
        )
        code: object = None
        try:
            app_module.main()
        except SystemExit as end:
            code = end.code
        return code, *capsys.readouterr()

    code, out, _ = run("--audio", str(wav(tmp_path / "a.wav")), "--max-tokens", "5")
    assert code in (0, None)
    assert out.endswith("\n")
    code, out, err = run("--audio", str(wav(tmp_path / "b.wav", rate=8_000)))
    assert (code, out) == (1, "")
    assert "8000 samples in a second" in err
    code, out, err = run("--image", "a.png")
    assert (code, out) == (1, "")
    assert "audio, which this model takes" in err
