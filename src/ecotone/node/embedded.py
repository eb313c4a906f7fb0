"""A node inside the engine's own process: nothing to start, and every answer is there at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import TracebackType

from ecotone.errors import ConfigError, ContractError, ShutDownError
from ecotone.node.attach import RegionServer
from ecotone.node.disk import DiskConfig, DiskTier, open_disk_tier
from ecotone.node.eviction import make_policy
from ecotone.node.exchange import AnyAnswer, AnyOp, ForgetAll, NodeExchange
from ecotone.node.extents import ALIGNMENT
from ecotone.node.index import Index
from ecotone.node.region import Region
from ecotone.node.tier import pump_until

# At the start, for the files of an earlier life to be known (those that are not yet, are misses); at the end, for
# what is in memory to be written out; and in a reset, for it to be durable.
ADOPT_TIMEOUT_S, FLUSH_TIMEOUT_S, RESET_TIMEOUT_S = 5.0, 10.0, 2.0


class EmbeddedNode:
    """Region, index and region server of one engine.

    One lock guards the index: engines in several threads may share a node, and statistics are read from a
    scraper's thread. It is held for one batch at a time, and never while waiting for anything.

    Args:
        capacity_bytes: bytes for encodings.
        engine_id: the name under which ranks attach; unique on the host.
        policy: a name from ``EVICTION_POLICIES``.
        clock: monotonic seconds, for leases.
        max_pieces: the most extents an entry is split into when the memory is fragmented.
        prefault: provide the memory now, not as it is touched.
        disk: where entries are kept that memory has no room for, and from one life to the next.

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
        max_pieces: int = 16,
        prefault: bool = True,
        disk: DiskConfig | None = None,
    ) -> None:
        if capacity_bytes < ALIGNMENT:
            raise ConfigError(f"capacity_bytes={capacity_bytes} must be at least {ALIGNMENT}")
        if max_pieces < 1:
            raise ConfigError(f"max_pieces={max_pieces} must be at least 1")
        chosen = make_policy(policy)
        self._clock = clock
        self._lock = threading.Lock()
        self._clients: dict[str, EmbeddedExchange] = {}
        self._closed = False
        self.region = Region.create(capacity_bytes, engine_id, prefault=prefault)
        own = self.region.descriptor
        self._index = Index(capacity_bytes, own.region_id, own.generation, chosen, max_pieces)
        self._tier: DiskTier | None = None
        with ExitStack() as stack:
            stack.callback(self.region.close)
            self._server = RegionServer(engine_id, self.region)
            stack.callback(self._server.close)
            if disk is not None:
                self._open_tier(disk)
            stack.pop_all()

    def _open_tier(self, disk: DiskConfig) -> None:
        tier = open_disk_tier(self._index, self.region, disk, self._pump, self._clock)
        self._index.tier = self._tier = tier
        pump_until(tier, lambda tier: tier.is_adopted, self._lock, self._clock, ADOPT_TIMEOUT_S)

    def _pump(self) -> None:
        """From the tier's thread: take in what it did."""
        with self._lock:
            if self._tier is not None:
                self._tier.pump(self._clock())

    def connect(self, client_id: str) -> NodeExchange:
        """A new client's end. Its answers are there as soon as ``submit`` returns.

        Raises:
            ContractError: a client of this id is connected.
            ShutDownError: the node was closed.
        """
        with self._lock:
            self._refuse_closed()
            if client_id in self._clients:
                raise ContractError(f"client {client_id!r} is connected already")
            exchange = self._clients[client_id] = EmbeddedExchange(self, client_id)
        return exchange

    def apply(self, exchange: EmbeddedExchange, ops: Sequence[AnyOp]) -> Sequence[AnyAnswer]:
        """Carry out one batch of a connected client.

        Raises:
            ShutDownError: the node was closed, or the client is not connected any more.
        """
        with self._lock:
            self._refuse_closed()
            if self._clients.get(exchange.client_id) is not exchange:
                raise ShutDownError(f"client {exchange.client_id!r} has left the node, or was lost")
            now = self._clock()
            answers = self._index.apply(exchange.client_id, ops, now)
            if self._tier is None:
                return answers
            self._tier.pump(now)
            barrier = self._tier.barrier()
        if any(isinstance(op, ForgetAll) for op in ops):
            # Whoever resets must not find the old entries again after a crash. It is no step that waits here.
            self._tier.wait_durable(barrier, RESET_TIMEOUT_S)
        return answers

    def leave(self, exchange: EmbeddedExchange) -> None:
        """End a client, unless it was ended before; a successor of the same id is not affected."""
        with self._lock:
            if self._clients.get(exchange.client_id) is exchange:
                del self._clients[exchange.client_id]
                self._index.close_client(exchange.client_id)

    def disconnect(self, client_id: str, *, may_still_touch: bool = False) -> None:
        """``client_id`` died. With ``may_still_touch``, what it held is kept until ``client_gone``."""
        with self._lock:
            self._clients.pop(client_id, None)
            self._index.close_client(client_id, may_still_touch=may_still_touch)

    def client_gone(self, client_id: str) -> None:
        """No process of a client that was disconnected with ``may_still_touch`` runs any more."""
        with self._lock:
            self._index.client_gone(client_id)

    def statistics(self) -> dict[str, float]:
        """The index's counters and gauges; also after ``close``."""
        with self._lock:
            self._index.expire(self._clock())
            behind = self._tier.statistics() if self._tier is not None else {}
            return {**self._index.statistics(), **behind}

    def check_integrity(self) -> None:
        """Check the index's books; also after ``close``.

        Raises:
            IntegrityError: the first thing that does not add up.
        """
        with self._lock:
            self._index.check_integrity()
            if self._tier is not None:
                self._tier.check_integrity()

    def close(self) -> None:
        """End every client, hand out nothing more, write out what is on no disk yet (for a bounded time), and give
        the memory back once the last view is gone. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for client_id in self._clients:
                self._index.close_client(client_id)
            self._clients.clear()
        if self._tier is not None:
            pump_until(self._tier, lambda tier: tier.is_flushed, self._lock, self._clock, FLUSH_TIMEOUT_S)
            self._tier.close()
            with self._lock:
                self._tier.let_go(self._clock())
        self._server.close()
        self.region.close()

    def __enter__(self) -> EmbeddedNode:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _refuse_closed(self) -> None:
        if self._closed:
            raise ShutDownError("the node was closed")


class EmbeddedExchange:
    """A client's end of an ``EmbeddedNode``. See ``NodeExchange``."""

    def __init__(self, node: EmbeddedNode, client_id: str) -> None:
        self.client_id = client_id
        self._node = node
        self._answers: list[AnyAnswer] = []

    def submit(self, ops: Sequence[AnyOp]) -> None:
        self._answers += self._node.apply(self, ops)

    def flush(self) -> None:
        """Nothing is ever kept back."""

    def poll(self) -> Sequence[AnyAnswer]:
        # An empty batch: it refuses where the node or this end was closed.
        self._answers += self._node.apply(self, ())
        answers, self._answers = self._answers, []
        return answers

    def wait(self, timeout_s: float) -> None:
        """Every answer is there as soon as ``submit`` returns."""

    def statistics(self) -> dict[str, float]:
        return self._node.statistics()

    def close(self) -> None:
        self._node.leave(self)
