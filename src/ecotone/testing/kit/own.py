"""Ecotone's own connector as the kit checks it: with a node in the engine's process, with a disk behind it, over a
shared node, and over one that the engine's process serves to its ranks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ecotone.connectors.factory import EcotoneConnectorFactory
from ecotone.node.server.node import SharedNode
from ecotone.testing.kit.capabilities import Capabilities, Subject

_MEMORY = 4096  # bytes; less than the item ``large`` takes
_SCARCE_MEMORY = 512  # one or two items: what else was saved comes back from the disk
_ANSWERS_WITHIN_S = 0.5


@contextmanager
def _node_in(scratch: Path) -> Iterator[None]:
    """A shared node on a thread. Its books must be right at the end."""
    with SharedNode(scratch / "node", {"": _MEMORY}) as node:
        thread = threading.Thread(target=node.run, name="ecotone-kit-node")
        thread.start()
        try:
            yield
        finally:
            node.stop()
            thread.join()
        node.check_integrity()


def _lose_files(scratch: Path) -> None:
    """Take the disk's files away."""
    for file in (scratch / "disk").rglob("*.safetensors"):
        file.unlink(missing_ok=True)


BUILT_IN = {
    "EcotoneConnector": Subject(
        factory=EcotoneConnectorFactory(),
        capabilities=Capabilities(zero_copy=True, background=True),
        options={"memory": _MEMORY},
        name="EcotoneConnector",
    ),
    "EcotoneConnector-disk": Subject(
        factory=EcotoneConnectorFactory(),
        capabilities=Capabilities(
            zero_copy=True, background=True, durable=True, answers_within_s=_ANSWERS_WITHIN_S
        ),
        options={"memory": _SCARCE_MEMORY, "disk": "{scratch}/disk"},
        lose=_lose_files,
        name="EcotoneConnector-disk",
    ),
    "EcotoneConnector-node": Subject(
        factory=EcotoneConnectorFactory(),
        # Ranks tell the node themselves, and it outlives the engines.
        capabilities=Capabilities(
            zero_copy=True,
            background=True,
            durable=True,
            reports_decide=False,
            answers_within_s=_ANSWERS_WITHIN_S,
        ),
        options={"node": "unix:{scratch}/node"},
        beside=_node_in,
        name="EcotoneConnector-node",
    ),
    "EcotoneConnector-hosted": Subject(
        factory=EcotoneConnectorFactory(hosted=True),
        capabilities=Capabilities(
            zero_copy=True, background=True, reports_decide=False, answers_within_s=_ANSWERS_WITHIN_S
        ),
        options={"memory": _MEMORY},
        name="EcotoneConnector-hosted",
    ),
}
