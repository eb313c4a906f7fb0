"""Whether a model can be divided as asked; known from its configuration, before there is any rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoConfig

from ecotone.errors import ConfigError
from ecotone.worker.models.adapter import num_levels


def layers_of_stage(num_layers: int, stages: int, stage: int) -> range:
    """The layers of one stage, the first ones one more where they do not divide evenly."""
    each, more = divmod(num_layers, stages)
    first = stage * each + min(stage, more)
    return range(first, first + each + (stage < more))


def check_division(config: Any, *, tensor: int, stages: int) -> None:
    """Refuse what would leave a rank without heads or layers.

    Args:
        config: transformers' configuration of the model.
        tensor: ranks that divide each layer.
        stages: ranks that divide the layers.

    Raises:
        ConfigError: naming both numbers.
    """
    text = config.get_text_config()
    heads, kv_heads, layers = text.num_attention_heads, text.num_key_value_heads, text.num_hidden_layers
    if heads % tensor or kv_heads % tensor:
        raise ConfigError(
            f"tensor_parallel_size={tensor} does not divide the model's {heads} attention heads and {kv_heads}"
            " key heads evenly"
        )
    if layers < stages:
        raise ConfigError(f"pipeline_parallel_size={stages}: the model has {layers} layers")
    levels = num_levels(config)
    if levels > len(layers_of_stage(layers, stages, 0)):
        raise ConfigError(
            f"pipeline_parallel_size={stages}: the model adds encoder rows in its first {levels} layers, "
            "and all of these must be on the first stage"
        )


def check_folder_division(folder: Path, *, tensor: int, stages: int) -> None:
    """``check_division`` for the model in ``folder``. No weights are read.

    Raises:
        ConfigError: it cannot be divided like that.
    """
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    check_division(config, tensor=tensor, stages=stages)
