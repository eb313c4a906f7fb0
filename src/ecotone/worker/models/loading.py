"""From a checkpoint folder to a ModelAdapter. Nothing is fetched, no code of the checkpoint runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from transformers.utils import logging as transformers_logging

from ecotone.errors import ConfigError, ModelError, ResourceError, UnsupportedModelError
from ecotone.worker.models.adapter import ModelAdapter
from ecotone.worker.models.families import SUPPORTED_ARCHITECTURES
from ecotone.worker.models.refusal import refusal

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def load_model(
    path: str,
    *,
    device: torch.device,
    dtype: torch.dtype | None,
    max_model_len: int | None = None,
    divide: Callable[[Any], None] | None = None,
) -> ModelAdapter:
    """The model in folder ``path``, ready to serve.

    Args:
        device: where it runs.
        dtype: of weights and activations; ``None`` is float32 on a CPU, the checkpoint's elsewhere.
        max_model_len: longest prompt plus output in tokens; ``None`` takes the model's own.
        divide: takes from the model, before it goes to ``device``, what other ranks hold.

    Raises:
        UnsupportedModelError: a family there is no adapter for; the message lists the supported ones.
        ModelError: the folder, or a file in it, is missing or broken; the message names it.
        ConfigError: ``max_model_len`` is more than the model can do.
        ResourceError: there is no such device, or no room on it.
    """
    folder = Path(path)
    architecture = read_architecture(folder)
    _check_weights(folder)
    model = _read_model(folder, architecture, dtype or (torch.float32 if device.type == "cpu" else None))
    own_limit = model.config.get_text_config().max_position_embeddings
    if max_model_len is not None and not 1 <= max_model_len <= own_limit:
        raise ConfigError(
            f"max_model_len={max_model_len}: the model in {folder} can do from 1 to {own_limit} tokens"
        )
    eos_token_ids = _eos_token_ids(model)
    if divide is not None:
        divide(model)
    return ModelAdapter(_on(device, model), max_model_len=max_model_len or own_limit, eos_token_ids=eos_token_ids)


def read_architecture(folder: Path) -> str:
    """The class name in the folder's ``config.json``.

    Raises:
        UnsupportedModelError: there is no adapter for it.
        ModelError: there is no such folder, or its configuration cannot be read.
    """
    if not folder.is_dir():
        raise ModelError(f"model folder {folder} does not exist")
    config = _read_json(folder / CONFIG_FILE)
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise ModelError(f"{folder / CONFIG_FILE} names no architecture")
    if names[0] not in SUPPORTED_ARCHITECTURES:
        raise UnsupportedModelError(f"{folder / CONFIG_FILE}: {refusal(names[0], config)}")
    return names[0]


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_bytes())
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ModelError(f"{file} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{file} is not a JSON object")
    return content


def _check_weights(folder: Path) -> None:
    """Open every weights file, so that what is missing or cut short is named; only headers are read."""
    names = {WEIGHTS_FILE}
    if (folder / INDEX_FILE).exists():
        weight_map = _read_json(folder / INDEX_FILE).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelError(f"{folder / INDEX_FILE} has no weight_map")
        names = {str(name) for name in weight_map.values()}
    for name in sorted(names):
        if not (folder / name).is_file():
            raise ModelError(f"weights file {folder / name} is missing")
        try:
            with safe_open(folder / name, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise ModelError(f"weights file {folder / name} is broken: {error}") from error


def _read_model(folder: Path, architecture: str, dtype: torch.dtype | None) -> Any:
    """The model with all of its weights (transformers would draw missing ones at random, and only warn)."""
    try:
        with no_progress_bars():
            model, report = getattr(transformers, architecture).from_pretrained(
                folder,
                dtype=dtype or "auto",
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
            )
    except Exception as error:
        # The rim: a broken config or weights that do not fit it make transformers, huggingface_hub and torch
        # raise nearly anything, and all of it means the same.
        raise ModelError(f"the model in {folder} cannot be loaded: {type(error).__name__}: {error}") from error
    missing = sorted(report["missing_keys"])
    if missing:
        raise ModelError(f"{folder}: {len(missing)} weights are missing, e.g. {', '.join(missing[:3])}")
    return model


def _on(device: torch.device, model: Any) -> Any:
    try:
        return model.to(device)
    except (RuntimeError, AssertionError) as error:  # torch's ways to say: no such device, no room on it
        raise ResourceError(f"the model cannot be moved to {device}: {error}") from error


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """transformers' bars are global: put them back as they were."""
    enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            transformers_logging.enable_progress_bar()


def _eos_token_ids(model: Any) -> tuple[int, ...]:
    ids = getattr(model.generation_config, "eos_token_id", None)
    if ids is None:
        ids = model.config.get_text_config().eos_token_id
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, list) else (ids,)
