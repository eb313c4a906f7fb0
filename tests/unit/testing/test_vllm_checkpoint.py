"""A checkpoint under the names that vLLM looks for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ecotone.testing.vllm_checkpoint import copy_for_vllm


def _folder(path: Path, names: list[str]) -> tuple[Path, dict[str, torch.Tensor]]:
    path.mkdir()
    weights = {name: torch.full((2,), float(i)) for i, name in enumerate(names)}
    save_file(weights, path / "model.safetensors")
    (path / "config.json").write_text("{}")
    (path / "images").mkdir()
    return path, weights


def test_tower_keys_are_renamed_and_nothing_else(tmp_path: Path) -> None:
    given = [
        "model.vision_tower.embeddings.class_embedding",
        "model.vision_tower.vision_model.pre_layrnorm.weight",
        "model.language_model.norm.weight",
    ]
    source, weights = _folder(tmp_path / "saved", given)

    target = copy_for_vllm(source, tmp_path / "a" / "b")

    found = load_file(target / "model.safetensors")
    assert set(found) == {
        "model.vision_tower.vision_model.embeddings.class_embedding",
        "model.vision_tower.vision_model.pre_layrnorm.weight",
        "model.language_model.norm.weight",
    }
    for name, tensor in weights.items():
        renamed = name if "vision_model" in name else name.replace("vision_tower.", "vision_tower.vision_model.")
        assert torch.equal(found[renamed], tensor)
    assert (target / "config.json").read_text() == "{}"
    assert set(load_file(source / "model.safetensors")) == set(given)


def test_copying_twice_is_copying_once(tmp_path: Path) -> None:
    source, _ = _folder(tmp_path / "saved", ["vision_tower.x"])

    once = copy_for_vllm(source, tmp_path / "once")
    twice = copy_for_vllm(once, tmp_path / "twice")

    assert (once / "model.safetensors").read_bytes() == (twice / "model.safetensors").read_bytes()


def test_a_folder_without_weights_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"model\.safetensors"):
        copy_for_vllm(tmp_path, tmp_path / "copy")
