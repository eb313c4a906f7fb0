"""Model names of the command line."""

from __future__ import annotations

from pathlib import Path

from ecotone.errors import ModelError

# The checkout that this package was installed from: <root>/src/ecotone/cli/models.py
_ROOT = Path(__file__).resolve().parents[3]
SHIPPED = {"digits": _ROOT / "models" / "digits-llava"}


def find_model(name: str) -> Path:
    """The folder of a shipped model, or the folder that ``name`` is the path of.

    Raises:
        ModelError: there is no such folder.
    """
    folder = SHIPPED.get(name)
    if folder is not None and not folder.is_dir():
        raise ModelError(
            f"model {name!r} comes with a checkout of the repository, and {str(folder)!r} is not there: "
            "install ecotone from a checkout (pip install -e), or give the path of a model folder"
        )
    if folder is None and not Path(name).is_dir():
        raise ModelError(f"model {name!r} is neither a folder nor one of {', '.join(SHIPPED)}")
    return folder or Path(name)
