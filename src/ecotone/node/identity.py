"""What tells a model's weights, and what computes with them, from all others: for cache keys."""

from __future__ import annotations

import hashlib
from importlib.metadata import version
from pathlib import Path

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth")


def weight_files(path: Path) -> list[Path]:
    """The files of weights in a model folder, in the order of their names."""
    return sorted(file for file in path.iterdir() if file.suffix in WEIGHT_SUFFIXES and file.is_file())


def weights_digest(path: Path) -> str:
    """Digest of ``config.json`` and of every byte of the weights (hex).

    It is the same wherever the folder lies and whenever it was written, and another one when a single weight
    changes. Reading a large checkpoint once more takes seconds to minutes: an operator may name the weights
    instead.

    Raises:
        OSError: a file cannot be read.
    """
    digest = hashlib.sha256()
    for file in (path / "config.json", *weight_files(path)):
        with file.open("rb") as stream:
            content = hashlib.file_digest(stream, "sha256").hexdigest()
        digest.update(f"{file.name}\0{content}\0".encode())
    return digest.hexdigest()


def runtime() -> str:
    """The libraries that compute encodings, with their versions: another release may give other numbers, and what
    is kept on a disk outlives an upgrade.

    Raises:
        PackageNotFoundError: one of them is not installed.
    """
    return ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
