"""A tiny model of every supported family, made on the spot: random weights, a byte-level tokenizer, a processor.

The folders are checkpoints like any other (``config.json``, ``model.safetensors``, processor files), so that the
whole engine and the command line can load them. What such a model says is noise, but the same noise every time.
"""

from __future__ import annotations

from pathlib import Path

import torch

from ecotone.errors import ConfigError
from ecotone.testing.tiny_configs import TinyArchitecture, architectures
from ecotone.testing.tiny_processors import TinyProcessor, processors
from ecotone.worker.models.loading import no_progress_bars

_GENERATOR_SEED = 20_000


def tiny_families() -> tuple[str, ...]:
    """The names ``make_tiny_model`` takes."""
    return tuple(architectures())


def make_tiny_model(family: str, folder: Path | str, *, seed: int = 0) -> Path:
    """Make a tiny random model of ``family`` in ``folder`` (created if need be). Same seed, same weights.

    The prompt placeholders are those of the family's real checkpoints; ``tiny_media_text`` names them.

    Raises:
        ConfigError: no such family.
    """
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    processor, architecture = _lookup(family)
    tokenizer = processor.save(path)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)  # of what the library draws, and ``widen`` leaves alone
        model = architecture.build(tokenizer)
    widen(model, seed)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    with no_progress_bars():
        model.save_pretrained(path)
    return path


def tiny_media_text(family: str) -> dict[str, str]:
    """modality -> what stands for one item of it in a prompt of ``family``.

    Raises:
        ConfigError: no such family.
    """
    return dict(_lookup(family)[0].media)


def _lookup(family: str) -> tuple[TinyProcessor, TinyArchitecture]:
    if family not in architectures():
        raise ConfigError(f"tiny model {family!r} is none of {', '.join(tiny_families())}")
    return processors()[family], architectures()[family]


def widen(model: torch.nn.Module, seed: int) -> None:
    """Draw weights at 1/sqrt(fan_in): with the library's 0.02, wrong encoder rows would hardly move the logits."""
    generator = torch.Generator().manual_seed(_GENERATOR_SEED + seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2 or "class_embedding" in name:
                draw = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(draw * parameter.shape[-1] ** -0.5)
