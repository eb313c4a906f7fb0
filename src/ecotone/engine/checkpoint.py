"""A model folder: whether it is one."""

from __future__ import annotations

from pathlib import Path

from ecotone.errors import ModelError
from ecotone.node.identity import WEIGHT_SUFFIXES, weight_files


def check_model_folder(model: str, *, weights: bool = True) -> Path:
    """The folder ``model`` names, if it can hold a checkpoint, or all of one but the ``weights``. Nothing is ever
    fetched.

    Raises:
        ModelError: no such folder, or one without ``config.json`` or without weights.
    """
    path = Path(model).expanduser()
    if not path.is_dir():
        raise ModelError(f"model {model!r} is not a folder; give the path of a Hugging Face checkpoint folder")
    if not (path / "config.json").is_file():
        raise ModelError(f"model folder {str(path)!r} has no config.json")
    if weights and not weight_files(path):
        raise ModelError(f"model folder {str(path)!r} has no weights (*{', *'.join(WEIGHT_SUFFIXES)})")
    return path
