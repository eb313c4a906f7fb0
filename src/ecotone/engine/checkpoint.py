"""A model folder: whether it is one, its processor, and what tells its weights from all others."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from transformers import AutoProcessor, ProcessorMixin

from ecotone.errors import ModelError, UnsupportedModelError

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")


def check_model_folder(model: str) -> Path:
    """The folder ``model`` names, if it can hold a checkpoint. Nothing is ever fetched.

    Raises:
        ModelError: no such folder, or one without ``config.json`` or without weights.
    """
    path = Path(model).expanduser()
    if not path.is_dir():
        raise ModelError(f"model {model!r} is not a folder; give the path of a Hugging Face checkpoint folder")
    if not (path / "config.json").is_file():
        raise ModelError(f"model folder {str(path)!r} has no config.json")
    if not _weight_files(path):
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


def load_processor(path: Path) -> Any:
    """The folder's Hugging Face processor, from its files alone.

    Raises:
        ModelError: the files are missing or unreadable.
        UnsupportedModelError: it takes no images.
    """
    try:
        processor = AutoProcessor.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    # A rim: what a broken folder raises depends on which of its files is broken.
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise ModelError(f"model folder {str(path)!r}: its processor cannot be loaded: {reason}") from error
    if not isinstance(processor, ProcessorMixin) or getattr(processor, "image_token_id", None) is None:
        raise UnsupportedModelError(
            f"model folder {str(path)!r}: its processor ({type(processor).__name__}) takes no images"
        )
    return processor


def _weight_files(path: Path) -> list[Path]:
    return sorted(file for file in path.iterdir() if file.suffix in _WEIGHTS and file.is_file())
