"""What the cache will hold for a model, before any weight of it is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ecotone.engine.audio import AudioInput
from ecotone.engine.inputs import InputProcessor, Prompt
from ecotone.engine.media import ImageInput
from ecotone.errors import RequestError
from ecotone.node.extents import round_up
from ecotone.protocol.arrays import ITEM_SIZES
from ecotone.protocol.connector import EncoderSpec
from ecotone.worker.models.facts import read_facts

_SIDES = (224, 448, 1024)
_FRAMES = 8
_SECONDS = 10.0
_MAX_PIXELS = 100_000_000


def inspect_model(
    folder: Path,
    *,
    memory: int,
    dtype: str = "auto",
    images: Sequence[ImageInput] = (),
    audio: Sequence[AudioInput] = (),
) -> dict[str, Any]:
    """Facts about the model in ``folder``, its items and how many of each ``memory`` bytes hold, as plain data.

    Args:
        dtype: of the encodings; ``auto`` is what an engine on this machine would take.
        images, audio: media to count the rows of, instead of nominal ones.

    Raises:
        EcotoneError: the model is not supported, or a file cannot be used.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    facts = read_facts(folder, device=device, dtype=None if dtype == "auto" else getattr(torch, dtype))
    inputs = InputProcessor(folder, max_image_pixels=_MAX_PIXELS)
    if images or audio:
        asked: list[tuple[str, str, Any]] = [("image", str(image)[:80], image) for image in images]
        asked += [("audio", str(clip)[:80], clip) for clip in audio]
        items = [_item(inputs, facts.encoder, memory, *each) for each in asked]
    else:
        items = [_nominal_item(inputs, facts.encoder, memory, *each) for each in _nominal(inputs)]
    return {
        "model": str(folder),
        "architecture": facts.architecture,
        "family": facts.family,
        "towers": list(facts.towers),
        "placeholders": dict(inputs.placeholders),
        "hidden_size": facts.encoder.hidden_size,
        "levels": facts.encoder.levels,
        "width": facts.encoder.width,
        "dtype": facts.encoder.dtype,
        "bytes_per_row": _row_bytes(facts.encoder),
        "vocab_size": facts.vocab_size,
        "max_model_len": facts.max_model_len,
        "memory": memory,
        "items": items,
    }


def _nominal(inputs: InputProcessor) -> list[tuple[str, str, Any]]:
    """Modality, name and medium of what the model takes."""
    found: list[tuple[str, str, Any]] = []
    if "image" in inputs.placeholders:
        found += [("image", f"{side} x {side}", _picture(side)) for side in _SIDES]
    if "video" in inputs.placeholders:
        frames = [_picture(_SIDES[0])] * _FRAMES
        found.append(("video", f"{_FRAMES} frames of {_SIDES[0]} x {_SIDES[0]}", frames))
    if inputs.sampling_rate is not None:
        seconds = min(_SECONDS, inputs.max_audio_seconds)
        silence = np.zeros(int(seconds * inputs.sampling_rate), np.float32)
        found.append(("audio", f"of {seconds:g} seconds", (silence, inputs.sampling_rate)))
    return found


def _picture(side: int) -> Any:
    return np.zeros((side, side, 3), np.uint8)


def _nominal_item(
    inputs: InputProcessor, encoder: EncoderSpec, memory: int, modality: str, name: str, medium: Any
) -> dict[str, Any]:
    try:
        return _item(inputs, encoder, memory, modality, name, medium)
    except RequestError as error:  # what this machine cannot process must not hide the rest
        return {"modality": modality, "name": name, "error": str(error)}


def _item(
    inputs: InputProcessor, encoder: EncoderSpec, memory: int, modality: str, name: str, medium: Any
) -> dict[str, Any]:
    field = {"image": "images", "video": "videos", "audio": "audio"}[modality]
    text = inputs.placeholders.get(modality, "")
    [item] = inputs.process(Prompt(f"{text} ", **{field: [medium]})).items
    nbytes = item.num_rows * _row_bytes(encoder)
    return {
        "modality": modality,
        "name": name,
        "rows": item.num_rows,
        "prompt_tokens": item.length,
        "bytes": nbytes,
        "entries": memory // round_up(nbytes),
    }


def _row_bytes(encoder: EncoderSpec) -> int:
    return encoder.width * ITEM_SIZES[encoder.dtype]
