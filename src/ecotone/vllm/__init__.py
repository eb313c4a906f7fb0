"""Ecotone inside unmodified vLLM: the EC connector that ``--ec-transfer-config`` names ``EcotoneConnector``.

    connector.py   what vLLM builds, once in its scheduler and once in each worker
    scheduler.py   the scheduler's side of it, worker.py a worker's; neither knows vLLM's types but by their shape
    messages.py    what the two say to each other through vLLM's step
    options.py     ``ec_connector_extra_config``; support.py what is refused at the start, and why
    identity.py    what tells one encoding from another; reset.py how a weight update is heard of
    metrics.py     counters for vLLM's log and its ``/metrics``
    plugin.py      registers the name

See docs/vllm.md. This package needs vLLM where it is used; importing it does not.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ecotone.vllm.connector import EcotoneConnector

__all__ = ["EcotoneConnector"]


def __getattr__(name: str) -> Any:
    # vLLM loads plug-ins while it is being imported itself: the connector can only be imported later.
    if name == "EcotoneConnector":
        return import_module("ecotone.vllm.connector").EcotoneConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
