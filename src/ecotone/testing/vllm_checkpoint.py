"""A LLaVA checkpoint as vLLM reads it.

transformers 5 saves the keys of a CLIP tower without the ``vision_model.`` that vLLM's loader expects; models made
here, and the one that is shipped, are saved by it.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

_TOWER, _NAMED = "vision_tower.", "vision_tower.vision_model."
_WEIGHTS = "model.safetensors"


def copy_for_vllm(source: Path | str, target: Path | str) -> Path:
    """Copy the LLaVA checkpoint folder ``source`` to ``target`` (created if need be), under vLLM's names.

    The weights are the same bytes; a key that has its name already keeps it.

    Raises:
        OSError: there is no checkpoint of one file in ``source``, or ``target`` cannot be written.
    """
    source, target = Path(source), Path(target)
    target.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.is_file() and file.name != _WEIGHTS:
            shutil.copyfile(file, target / file.name)
    weights = {_renamed(key): tensor for key, tensor in load_file(source / _WEIGHTS).items()}
    save_file(weights, target / _WEIGHTS, metadata={"format": "pt"})
    return target


def _renamed(key: str) -> str:
    head, tower, rest = key.partition(_TOWER)
    return key if not tower or _NAMED in key else f"{head}{_NAMED}{rest}"
