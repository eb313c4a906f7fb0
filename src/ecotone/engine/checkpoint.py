"""A model folder: whether it is one, and what tells its weights from all others."""

from __future__ import annotations

import hashlib
from importlib.metadata import version
from pathlib import Path

from ecotone.errors import ModelError

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")


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
    if weights and not _weight_files(path):
        raise ModelError(f"model folder {str(path)!r} has no weights (*{', *'.join(_WEIGHTS)})")
    return path


def weights_digest(path: Path) -> str:
    """Digest of ``config.json`` and of every byte of the weights (hex).

    It is the same wherever the folder lies and whenever it was written, and another one when a single weight
    changes. Reading a large checkpoint once more takes seconds to minutes: ``EngineConfig.revision`` names the
    weights instead.
    """
    digest = hashlib.sha256()
    for file in (path / "config.json", *_weight_files(path)):
        with file.open("rb") as stream:
            content = hashlib.file_digest(stream, "sha256").hexdigest()
        digest.update(f"{file.name}\0{content}\0".encode())
    return digest.hexdigest()


def _weight_files(path: Path) -> list[Path]:
    return sorted(file for file in path.iterdir() if file.suffix in _WEIGHTS and file.is_file())


def runtime() -> str:
    """The libraries that compute encodings, with their versions: another release may give other numbers, and what
    is kept on a disk outlives an upgrade."""
    return ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
