"""What the plug-in accepts and refuses, and what tells one encoding from another."""

from __future__ import annotations

import logging
from enum import Enum
from types import SimpleNamespace

import pytest
from plugin_doubles import vllm_config

from ecotone.errors import ConfigError
from ecotone.vllm.identity import encoder_spec, encoder_widths, namespace
from ecotone.vllm.options import VllmOptions, parse_vllm_options
from ecotone.vllm.support import check_same_host, check_supported, check_version

SHARED = VllmOptions(node="unix:/run/node.sock")


def namespace_of(options: VllmOptions = SHARED, version: str = "0.32.0", **changes):
    config = vllm_config(**changes)
    return namespace(config, options, encoder_spec(config, encoder_widths(config, options)), version)


# -- options --------------------------------------------------------------------------------------------------


def test_options_are_ecotones_and_the_plug_ins_own():
    options, for_connector = parse_vllm_options(
        {"memory": "1MiB", "revision": "v1", "encoder_widths": {"image": 8}}
    )
    assert options == VllmOptions(memory="1MiB", revision="v1", encoder_widths={"image": 8})
    assert for_connector == {"memory": "1MiB"}


def test_an_unknown_option_names_the_known_ones():
    with pytest.raises(
        ConfigError, match=r"unknown option 'memori'; known are .*encoder_widths.*memory.*revision"
    ):
        parse_vllm_options({"memori": "1MiB"})


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"memory": "lots"}, "memory='lots'"),
        ({"revision": ""}, "revision=''"),
        ({"encoder_widths": {"image": 0}}, "encoder_widths"),
        ({"node": "unix:/x", "memory": "1MiB"}, "a shared node has its own"),
        ({"eviction": "random"}, "eviction='random'"),
    ],
)
def test_a_bad_option_is_named(extra, named):
    with pytest.raises(ConfigError, match=named):
        parse_vllm_options(extra)


# -- support --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["0.32.0", "0.32.0+cpu", "0.32.5.dev1"])
def test_supported_versions(version):
    check_version(version)


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0", "1.0.0", "dev", "7"])
def test_other_versions_are_refused(version):
    with pytest.raises(ConfigError, match=version):
        check_version(version)


def test_a_plain_configuration_is_supported():
    check_supported(vllm_config(), VllmOptions())


@pytest.mark.parametrize("role", ["ec_producer", "ec_consumer"])
def test_half_a_role_needs_a_node_that_others_reach(role):
    config = vllm_config(ec_transfer_config__ec_role=role)
    check_supported(config, SHARED)
    with pytest.raises(ConfigError, match=f"{role}.*embedded node.*ecotone node"):
        check_supported(config, VllmOptions())


def test_an_adapter_in_the_tower_stays_within_the_engine():
    config = vllm_config(lora_config=SimpleNamespace(enable_tower_connector_lora=True))
    check_supported(config, VllmOptions())
    for options in (SHARED, VllmOptions(disk="/var/cache")):
        with pytest.raises(ConfigError, match="adapter's name"):
            check_supported(config, options)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_config__is_encoder_decoder": True}, "encoder-decoder"),
        ({"parallel_config__prefill_context_parallel_size": 2}, "prefill_context_parallel_size"),
        ({"parallel_config__distributed_executor_backend": "external_launcher"}, "external_launcher"),
        ({"parallel_config__nnodes_within_dp": 2}, "on 2 machines"),
    ],
)
def test_combinations_that_would_lose_encodings_are_refused(changes, named):
    with pytest.raises(ConfigError, match=named):
        check_supported(vllm_config(**changes), VllmOptions())


def test_a_rank_elsewhere_is_refused():
    with pytest.raises(ConfigError, match="'elsewhere'"):
        check_same_host("elsewhere")


# -- widths ---------------------------------------------------------------------------------------------------


def test_widths_are_measured_or_derived():
    assert encoder_widths(vllm_config(), SHARED) == {"image": 128, "video": 128, "audio": 128}
    deep = SimpleNamespace(vision_config=SimpleNamespace(deepstack_visual_indexes=[1, 2, 3]))
    assert encoder_widths(vllm_config(model_config__hf_config=deep), SHARED)["image"] == 512
    config = vllm_config(ec_transfer_config__mm_encoder_output_widths={"image": 256})
    assert encoder_widths(config, VllmOptions(encoder_widths={"image": 9, "depth": 64})) == {
        "image": 256, "video": 128, "audio": 128, "depth": 64,
    }  # fmt: skip


def test_a_producer_says_what_consumers_cannot_derive(caplog):
    config = vllm_config(ec_transfer_config__mm_encoder_output_widths={"image": 256})
    with caplog.at_level(logging.WARNING):
        encoder_widths(config, VllmOptions())  # nobody else is there
        assert not caplog.records
        encoder_widths(config, SHARED)
    assert "{'image': 256}" in caplog.text


# -- identity -------------------------------------------------------------------------------------------------


class Backend(Enum):
    SDPA = 1
    FLASH = 2


def test_whatever_changes_the_bytes_changes_the_key():
    revision = VllmOptions(node="unix:/x", revision="r")
    spaces = [
        namespace_of(revision),
        namespace_of(VllmOptions(node="unix:/x", revision="s")),
        namespace_of(VllmOptions(node="unix:/x", revision="r", tenant="t")),
        namespace_of(revision, version="0.32.1"),
        namespace_of(revision, model_config__dtype="torch.float16"),
        namespace_of(revision, model_config__architecture="TransformersMultiModalForCausalLM"),
        namespace_of(revision, model_config__quantization="fp8"),
        namespace_of(revision, model_config__hf_overrides={"a": [1, None]}),
        namespace_of(revision, model_config__hf_overrides=vllm_config),
        namespace_of(revision, model_config__multimodal_config=SimpleNamespace(mm_processor_kwargs={"x": 1})),
        namespace_of(revision, model_config__multimodal_config=SimpleNamespace(mm_encoder_attn_dtype="fp8")),
        namespace_of(revision, model_config__multimodal_config=SimpleNamespace(mm_encoder_fp8_scale_path="s")),
        namespace_of(revision, model_config__multimodal_config=SimpleNamespace(mm_device_do_normalize=True)),
        namespace_of(revision, model_config__multimodal_config=SimpleNamespace(video_pruning_method="evs")),
        namespace_of(
            revision, model_config__multimodal_config=SimpleNamespace(mm_encoder_attn_backend=Backend.SDPA)
        ),
        namespace_of(
            revision, model_config__multimodal_config=SimpleNamespace(mm_encoder_attn_backend=Backend.FLASH)
        ),
    ]
    assert len({space.digest for space in spaces}) == len(spaces)


def test_the_same_configuration_has_the_same_keys():
    options = VllmOptions(node="unix:/x", revision="r")
    assert namespace_of(options).digest == namespace_of(options, ec_transfer_config__engine_id="other").digest


def test_what_nobody_else_finds_is_named_after_the_engine():
    one, other = namespace_of(VllmOptions()), namespace_of(VllmOptions(), ec_transfer_config__engine_id="other")
    assert one.digest != other.digest


def test_a_folder_is_named_after_its_weights(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    weights = folder / "model.safetensors"
    weights.write_bytes(b"one")
    first = namespace_of(model_config__model=str(folder))
    weights.write_bytes(b"two")
    second = namespace_of(model_config__model=str(folder))
    weights.write_bytes(b"one")
    assert first.digest == namespace_of(model_config__model=str(folder)).digest != second.digest


def test_a_folder_without_weights_names_none(tmp_path):
    (tmp_path / "config.json").write_text("{}")  # as where vLLM streams them from an object store
    with pytest.raises(ConfigError, match=r'no weights .* say "revision"'):
        namespace_of(model_config__model=str(tmp_path))
    (tmp_path / "model.gguf").write_bytes(b"weights")
    for model in (tmp_path, tmp_path / "model.gguf"):
        with pytest.raises(ConfigError, match=r'no weights .* say "revision"'):
            namespace_of(model_config__model=str(model))


def test_weights_that_are_elsewhere_need_a_name(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "other.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match='s3://bucket/model: say "revision"'):
        namespace_of(model_config__model=str(tmp_path), model_config__model_weights="s3://bucket/model")


@pytest.mark.parametrize("model", ["/gone/model.gguf", "org/model:Q4_K_M"])
def test_what_no_hub_can_name_needs_a_name(model):
    with pytest.raises(ConfigError, match='say "revision"'):
        namespace_of(model_config__model=model)


def test_made_up_weights_need_a_name(tmp_path):
    with pytest.raises(ConfigError, match="load_format='dummy'"):
        namespace_of(load_config__load_format="dummy", model_config__model=str(tmp_path))


def test_a_model_of_a_hub_is_named_after_its_commit(monkeypatch):
    found = "/cache/snapshots/0123abc/config.json"
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *args, **kwargs: found)
    assert namespace_of().revision.startswith("0123abc on vllm 0.32.0")
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *args, **kwargs: None)
    with pytest.raises(ConfigError, match='say "revision"'):
        namespace_of()
