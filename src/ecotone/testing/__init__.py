"""Test doubles, and the conformance kit: what holds connectors, their metadata and executors to the contracts.

The names below are imported when they are first used: the pytest plug-in is loaded wherever pytest runs.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ecotone.testing.kit import (
        Capabilities,
        Report,
        Rule,
        Subject,
        Verdict,
        Violation,
        check_connector,
        check_executor,
        check_worker_metadata,
    )

__all__ = [
    "Capabilities",
    "Report",
    "Rule",
    "Subject",
    "Verdict",
    "Violation",
    "check_connector",
    "check_executor",
    "check_worker_metadata",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("ecotone.testing.kit"), name)
