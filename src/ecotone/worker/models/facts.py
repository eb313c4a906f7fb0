"""What a checkpoint folder's configuration says about its model. No weights are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from ecotone.errors import ModelError
from ecotone.protocol.connector import EncoderSpec
from ecotone.worker.models.adapter import num_levels
from ecotone.worker.models.families import SUPPORTED_ARCHITECTURES
from ecotone.worker.models.loading import read_architecture
from ecotone.worker.models.tensors import dtype_name

_TOWERS = ("vision_config", "audio_config")
# Families call the same two sizes by other names.
_LAYERS = ("num_hidden_layers", "depth", "encoder_layers")
_WIDTHS = ("embed_dim", "d_model", "hidden_size")


@dataclass(frozen=True)
class ModelFacts:
    """A model, as far as its configuration tells.

    Attributes:
        architecture: the class name.
        family: its name in the documentation.
        towers: each encoder's type, layers and width, e.g. ``siglip_vision_model: 27 layers of 1152``.
        encoder: the shape of what it produces.
        vocab_size: tokens the language model knows.
        max_model_len: longest prompt plus output, tokens.
    """

    architecture: str
    family: str
    towers: tuple[str, ...]
    encoder: EncoderSpec
    vocab_size: int
    max_model_len: int


def read_facts(folder: Path, *, device: torch.device, dtype: torch.dtype | None = None) -> ModelFacts:
    """The facts about the model in ``folder``, when it is loaded as ``load_model`` would.

    Raises:
        UnsupportedModelError: a family there is no adapter for.
        ModelError: the configuration is missing or broken.
    """
    architecture = read_architecture(folder)
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        text = config.get_text_config()
        stored = getattr(config, "dtype", None) or torch.float32
        chosen = dtype or (torch.float32 if device.type == "cpu" else stored)
        return ModelFacts(
            architecture=architecture,
            family=SUPPORTED_ARCHITECTURES[architecture],
            towers=tuple(_tower(getattr(config, name)) for name in _TOWERS if hasattr(config, name)),
            encoder=EncoderSpec(text.hidden_size, num_levels(config), dtype_name(chosen)),
            vocab_size=text.vocab_size,
            max_model_len=text.max_position_embeddings,
        )
    # A rim: what a broken configuration raises depends on its class.
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise ModelError(f"model folder {folder}: its configuration cannot be read: {reason}") from error


def _tower(config: Any) -> str:
    sizes: Mapping[str, Any] = config.to_dict()
    layers, width = (next((sizes[name] for name in names if name in sizes), "?") for names in (_LAYERS, _WIDTHS))
    return f"{config.model_type}: {layers} layers of {width}"
