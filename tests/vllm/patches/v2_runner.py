"""Model runner V2 on a CPU: it asks for Triton with a CPU backend, which no wheel has.

Triton is told of a backend that compiles nothing, and runs its kernels in its own interpreter: slow, and right.
"""

from __future__ import annotations

import os
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"


class _Driver:
    """Of the only backend that is there."""

    @staticmethod
    def is_active() -> bool:
        return True


def _add_backend(backends: Any) -> None:
    backends.backends.setdefault("cpu", backends.Backend(compiler=None, driver=_Driver))


AFTER_IMPORT = {"triton.backends": _add_backend}
