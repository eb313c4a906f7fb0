"""Checkpoint folders: what loads, and a clear error for what does not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from model_cases import llava
from safetensors.torch import load_file, save_file
from transformers.utils import logging as transformers_logging

from ecotone.errors import ConfigError, ModelError, ResourceError, UnsupportedModelError
from ecotone.protocol.connector import EncoderSpec
from ecotone.worker.models import ModelAdapter, load_model
from ecotone.worker.models.families import SUPPORTED_ARCHITECTURES
from ecotone.worker.models.refusal import what_is_missing

CPU = torch.device("cpu")


def load(folder: Path, **options: Any) -> ModelAdapter:
    return load_model(str(folder), device=CPU, **{"dtype": None, **options})


@pytest.fixture
def folder(tiny_folder: Path, tmp_path: Path) -> Path:
    """A copy that a test may break."""
    return Path(shutil.copytree(tiny_folder, tmp_path / "model"))


def edit(file: Path, **changes: Any) -> None:
    content = json.loads(file.read_bytes())
    content.update(changes)
    file.write_text(json.dumps(content))


def test_what_a_model_says_about_itself(tiny_folder: Path) -> None:
    adapter = load(tiny_folder)
    assert adapter.info.architecture == "LlavaForConditionalGeneration"
    assert adapter.info.encoder == EncoderSpec(32, 0, "float32")
    assert adapter.info.vocab_size == 100
    assert adapter.info.max_model_len == 512
    assert adapter.info.eos_token_ids == (2,)
    assert (adapter.hidden_size, adapter.num_layers) == (32, 3)
    assert (adapter.device, adapter.dtype) == (CPU, torch.float32)


def test_dtype_and_length_are_asked_for(tiny_folder: Path) -> None:
    adapter = load(tiny_folder, dtype=torch.bfloat16, max_model_len=100)
    assert adapter.dtype == torch.bfloat16
    assert adapter.info.encoder.dtype == "bfloat16"
    assert adapter.info.max_model_len == 100


def test_float32_on_a_cpu_whatever_the_checkpoint_has(tmp_path: Path) -> None:
    llava().to(torch.bfloat16).save_pretrained(tmp_path)
    assert load(tmp_path).dtype == torch.float32


@pytest.mark.parametrize("max_model_len", [0, -1, 513, 10**12])
def test_absurd_lengths(tiny_folder: Path, max_model_len: int) -> None:
    with pytest.raises(ConfigError, match=rf"max_model_len={max_model_len}: .* from 1 to 512"):
        load(tiny_folder, max_model_len=max_model_len)


def test_several_ends_of_sequence_or_none(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 5]}))
    assert load(folder).info.eos_token_ids == (2, 5)
    (folder / "generation_config.json").unlink()
    config = json.loads((folder / "config.json").read_bytes())
    config["text_config"]["eos_token_id"] = 7
    (folder / "config.json").write_text(json.dumps(config))
    assert load(folder).info.eos_token_ids == (7,)
    config["text_config"]["eos_token_id"] = None
    (folder / "config.json").write_text(json.dumps(config))
    assert load(folder).info.eos_token_ids == ()


def test_weights_in_shards(tmp_path: Path, tiny_folder: Path) -> None:
    llava().save_pretrained(tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    ids = torch.arange(10)
    assert torch.equal(load(tmp_path).embed_tokens(ids), load(tiny_folder).embed_tokens(ids))


@pytest.mark.parametrize("enabled", [True, False])
def test_progress_bars_stay_as_they_were(
    tiny_folder: Path, enabled: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    (transformers_logging.enable_progress_bar if enabled else transformers_logging.disable_progress_bar)()
    try:
        load(tiny_folder)
        assert transformers_logging.is_progress_bar_enabled() is enabled
        assert capfd.readouterr() == ("", "")
    finally:
        transformers_logging.disable_progress_bar()


@pytest.mark.parametrize(
    ("architecture", "config", "missing"),
    [
        ("MadeUpForConditionalGeneration", {}, r"transformers 5\.\S+ has no such class"),
        ("BertForMaskedLM", {}, "no encoder that can be called by itself"),
        ("LlamaForCausalLM", {}, "no encoder that can be called by itself"),
        ("MllamaForConditionalGeneration", {}, "no encoder that can be called by itself"),
        ("LlavaOnevisionForConditionalGeneration", {}, "depends on how many other images the prompt has"),
        ("GlmAsrForConditionalGeneration", {}, "nobody has tested it"),
        ("VipLlavaForConditionalGeneration", {}, "nobody has tested it; docs/models.md"),
        ("VipLlavaForConditionalGeneration", {"cross_attention_layers": [1]}, "attends to the encoder's output"),
        (
            "VipLlavaForConditionalGeneration",
            {"layer_types": ["full_attention", "linear_attention"]},
            "has layers of linear_attention, which",
        ),
        ("VipLlavaForConditionalGeneration", {"attn_logit_softcapping": 50.0}, "soft-caps attention scores"),
        ("VipLlavaForConditionalGeneration", {"rope_scaling": {"type": "dynamic"}}, "dynamic rotary positions"),
    ],
)
def test_unsupported_architectures_are_told_what_is_missing_and_what_is_supported(
    folder: Path, architecture: str, config: dict[str, Any], missing: str
) -> None:
    edit(folder / "config.json", architectures=[architecture], text_config=config)
    with pytest.raises(UnsupportedModelError, match=rf"{architecture} is not supported: .*{missing}") as caught:
        load(folder)
    assert all(name in str(caught.value) for name in SUPPORTED_ARCHITECTURES)


def test_what_is_missing_is_read_from_configs_without_a_text_config() -> None:
    config = {"layer_types": ["mamba"]}
    assert "layers of mamba" in what_is_missing("VipLlavaForConditionalGeneration", config)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=rf"model folder {tmp_path / 'nowhere'} does not exist"):
        load(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: No such file"),
        (b"{", "is not JSON"),
        (b"\xff\xfe\x00", "is not JSON"),
        (b"[]", "is not a JSON object"),
        (b"{}", "names no architecture"),
        (b'{"architectures": "Llava"}', "names no architecture"),
        (b'{"architectures": [7]}', "names no architecture"),
    ],
)
def test_broken_configs(folder: Path, content: bytes | None, message: str) -> None:
    if content is None:
        (folder / "config.json").unlink()
    else:
        (folder / "config.json").write_bytes(content)
    with pytest.raises(ModelError, match=f"config.json.*{message}"):
        load(folder)


def test_missing_weights_file(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model\.safetensors is missing"):
        load(folder)


@pytest.mark.parametrize("keep", [0, 5, 100, -8])
def test_weights_cut_short(folder: Path, keep: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"model\.safetensors is broken"):
        load(folder)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"weight_map": {"a": "model-1.safetensors"}}, r"weights file .*model-1\.safetensors is missing"),
        ({"weight_map": {}}, "has no weight_map"),
        ({}, "has no weight_map"),
    ],
)
def test_broken_index(folder: Path, index: Any, message: str) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=message):
        load(folder)


def test_weights_that_are_not_there_are_not_drawn_at_random(folder: Path) -> None:
    file = folder / "model.safetensors"
    weights = load_file(file)
    name = next(n for n in weights if n.endswith("layers.1.mlp.down_proj.weight"))
    del weights[name]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"1 weights are missing, e\.g\. .*layers\.1\.mlp\.down_proj"):
        load(folder)


@pytest.mark.parametrize("change", [{"hidden_size": 48}, {"hidden_size": "wide"}, {"model_type": "no-such-model"}])
def test_weights_and_config_that_do_not_belong_together(folder: Path, change: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_bytes())
    config["text_config"].update(change)
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="cannot be loaded"):
        load(folder)


def test_a_device_that_is_not_there(tiny_folder: Path) -> None:
    with pytest.raises(ResourceError, match="cannot be moved to cuda:99"):
        load_model(str(tiny_folder), device=torch.device("cuda:99"), dtype=None)
