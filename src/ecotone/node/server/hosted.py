"""A shared node inside a process that is not its own: on a thread, for one engine and its workers."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from hashlib import sha256
from types import TracebackType

from ecotone.errors import ConfigError
from ecotone.node.disk import DiskConfig
from ecotone.node.server.messages import MAX_RANKS
from ecotone.node.server.node import SharedNode

logger = logging.getLogger(__name__)

# Two for every rank, its scheduler's and some tools': the process's own limit of descriptors is left as it is.
_MAX_CONNECTIONS = 2 * MAX_RANKS + 64


def hosted_address(engine_id: str) -> str:
    """The abstract socket address at which the hosted node of ``engine_id`` serves."""
    name = sha256(engine_id.encode("utf-8", "surrogatepass")).hexdigest()
    return f"\0ecotone-node/{name}"


class HostedNode:
    """A ``SharedNode`` of one tenant that serves on a daemon thread, at an address made from the engine's id.

    For engines whose scheduler does not hear everything its workers report: here the workers tell the node
    themselves. Nothing of it is in the file system, and it is gone with the process.

    An error that ends the thread is logged; every client then sees its connection end, and the engine goes on
    without a cache.

    Args:
        capacity_bytes: bytes for encodings.
        engine_id: the name under which workers find it; unique on the host.
        policy: a name from ``EVICTION_POLICIES``.
        clock: monotonic seconds.
        prefault: provide the memory now, not as it is touched.
        disk: where entries are kept that memory has no room for, and from one life to the next.

    Attributes:
        address: what ``SharedNodeExchange``, ``WorkerNode`` and ``NodeTool`` take.

    Raises:
        ConfigError: a value out of range, an unknown policy, an engine id in use, or a disk directory in use.
        ResourceError: more memory than the machine has.
    """

    def __init__(
        self,
        capacity_bytes: int,
        engine_id: str,
        *,
        policy: str = "lru",
        clock: Callable[[], float] = time.monotonic,
        prefault: bool = True,
        disk: DiskConfig | None = None,
    ) -> None:
        self.address = hosted_address(engine_id)
        try:
            self._node = SharedNode(
                self.address,
                {"": capacity_bytes},
                disk=disk,
                policy=policy,
                prefault=prefault,
                clock=clock,
                max_connections=_MAX_CONNECTIONS,
            )
        except ConfigError as error:
            raise ConfigError(f"the node of engine id {engine_id!r}: {error}") from error
        self._closing = threading.Lock()
        self._thread = threading.Thread(target=self._serve, name="ecotone-hosted-node", daemon=True)
        self._thread.start()

    def statistics(self) -> dict[str, float]:
        """The counters and gauges of the index, and of the disk behind it. Safe from any thread; also after
        ``close``."""
        return self._node.tenant_statistics()

    def check_integrity(self) -> None:
        """Check the node's books. Safe from any thread; also after ``close``.

        Raises:
            IntegrityError: the first thing that does not add up.
        """
        self._node.check_integrity()

    def close(self) -> None:
        """Hang up on every client, write out what is on no disk yet (for a bounded time), and give the memory
        back; who maps it keeps it as long as that. Idempotent, from any thread."""
        self._node.stop()
        self._thread.join()
        with self._closing:
            self._node.close()

    def __enter__(self) -> HostedNode:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _serve(self) -> None:
        try:
            self._node.run()
        except Exception:
            # The rim of the thread: nobody is above it who would hear of it. The loop has hung up on every client.
            logger.exception("the node at %s ended with an error: encodings are not kept any more", self.address)
