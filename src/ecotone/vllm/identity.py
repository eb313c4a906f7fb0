"""What tells one encoding from another in vLLM: the namespace that its own item identifiers are read in, and the
shape of rows."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ecotone.errors import ConfigError
from ecotone.node.identity import runtime, weight_files, weights_digest
from ecotone.node.keys import Namespace, options_digest
from ecotone.protocol.connector import EncoderSpec
from ecotone.vllm.options import VllmOptions

logger = logging.getLogger(__name__)

# Of vLLM's multimodal configuration: what changes the bytes of an encoding, and is in no item's identifier.
_MULTIMODAL = (
    "mm_processor_kwargs",
    "mm_device_do_normalize",
    "mm_encoder_attn_backend",
    "mm_encoder_attn_dtype",
    "mm_encoder_fp8_scale_path",
    "mm_encoder_tp_mode",
    "video_pruning_rate",
    "video_pruning_method",
)
_DEEPSTACK = "deepstack_visual_indexes"


def encoder_widths(vllm_config: Any, options: VllmOptions) -> dict[str, int]:
    """Elements in one row of the encoder's output, by modality.

    vLLM measures them in producers. A consumer takes them from its options, or from the model's configuration:
    the width of a text embedding, and for models with DeepStack levels so many times that of it.
    """
    derived = _derived_widths(vllm_config.model_config)
    measured = vllm_config.ec_transfer_config.mm_encoder_output_widths
    surprising = {name: width for name, width in measured.items() if derived.get(name) != width}
    if surprising and options.node_path is not None:
        logger.warning(
            "this model's encoder rows are wider than its configuration tells: every ec_consumer of it needs "
            '"encoder_widths": %s among its options',
            surprising,
        )
    return {**derived, **options.encoder_widths, **measured}


def _derived_widths(model_config: Any) -> dict[str, int]:
    width = model_config.get_inputs_embeds_size()
    vision = getattr(model_config.hf_config, "vision_config", None)
    levels = getattr(vision, _DEEPSTACK, None) or ()
    return {"image": width * (1 + len(levels)), "video": width * (1 + len(levels)), "audio": width}


def encoder_spec(vllm_config: Any, widths: Mapping[str, int]) -> EncoderSpec:
    """The rows of an image, and of what has no width of its own."""
    dtype = str(vllm_config.model_config.dtype).removeprefix("torch.")
    return EncoderSpec(hidden_size=widths["image"], levels=0, dtype=dtype)


def namespace(vllm_config: Any, options: VllmOptions, encoder: EncoderSpec, vllm_version: str) -> Namespace:
    """All that changes the bytes of an encoding besides vLLM's own identifier of the item.

    Raises:
        ConfigError: nothing names the weights, and the encodings outlive the engine; or options that cannot be
            written down.
    """
    config = vllm_config.model_config
    multimodal = config.multimodal_config
    numerics = {
        "quantization": None if config.quantization is None else str(config.quantization),
        "hf_overrides": _written(config.hf_overrides),
        **{name: _written(getattr(multimodal, name, None)) for name in _MULTIMODAL},
    }
    return Namespace(
        model=f"vllm:{config.architecture}",  # what it is run as: also whether by transformers' code
        revision=f"{_revision(vllm_config, options)} on vllm {vllm_version}, {runtime()}",
        dtype=encoder.dtype,
        width=encoder.width,
        processor=options_digest(numerics),
        tenant=options.tenant,
    )


def _written(value: Any) -> Any:
    """A configured value as JSON has it. An enumeration or a function goes by its name."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(name): _written(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_written(inner) for inner in value]
    return getattr(value, "__qualname__", str(value))


def _revision(vllm_config: Any, options: VllmOptions) -> str:
    if options.revision is not None:
        return options.revision
    if not options.outlive_engine:
        return str(vllm_config.ec_transfer_config.engine_id)  # found by this engine alone: no need to read weights
    config = vllm_config.model_config
    if str(vllm_config.load_config.load_format) == "dummy":
        raise ConfigError("load_format='dummy' makes up the weights: say \"revision\" to share their encodings")
    if config.model_weights:
        raise ConfigError(f'the weights are at {config.model_weights}: say "revision" to name them')
    path = Path(config.model)
    if path.is_dir() and weight_files(path):
        logger.info('reading the weights of %s once more to name them; "revision" saves this', config.model)
        return weights_digest(path)
    if path.exists():
        raise ConfigError(f'no weights that can be told apart are in {config.model}: say "revision" to name them')
    return _hub_commit(config.model, config.revision)


def _hub_commit(model: str, revision: str | None) -> str:
    """The commit that a model from a hub was downloaded at: the name of its snapshot's folder."""
    # There with vLLM, not with Ecotone.
    from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415
    from huggingface_hub.errors import HFValidationError  # noqa: PLC0415

    try:
        found = try_to_load_from_cache(model, "config.json", revision=revision)
    except HFValidationError:
        found = None  # it has no name that a hub could have
    if not isinstance(found, str):
        raise ConfigError(
            f'model {model!r} is no folder and not in the cache of the hub: say "revision" to name its weights'
        )
    return Path(found).parent.name
