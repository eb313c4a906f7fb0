"""A connector's two halves under observation: every call goes through, and is checked on the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ecotone.errors import IntegrityError
from ecotone.protocol.connector import (
    CacheLookup,
    ECConnectorMetadata,
    ECItem,
    ECSchedulerConnector,
    ECSchedulerContext,
    ECWorkerConnector,
    ECWorkerContext,
    EncoderCache,
)
from ecotone.protocol.outputs import ECConnectorOutput, ECConnectorStats, ECConnectorWorkerMetadata
from ecotone.testing.kit.ledger import Ledger
from ecotone.testing.kit.oracle import Library
from ecotone.testing.kit.plan import ITEMS
from ecotone.testing.kit.report import ViolationError

T = TypeVar("T")


def guarded(rule: str, hook: str, call: Callable[[], T]) -> T:
    """What ``call`` returns.

    Raises:
        ViolationError: it raised; of the rule ``rule``.
    """
    try:
        return call()
    except ViolationError:
        raise
    except IntegrityError as error:
        raise ViolationError("books-balance", f"{hook}: {error}") from error
    except Exception as error:  # a rim: whatever the connector raises is what is reported
        raise ViolationError(rule, f"{hook} raised {type(error).__name__}: {error}") from error


class WatchedScheduler(ECSchedulerConnector):
    """The scheduler half.

    Args:
        reports_decide: see ``Capabilities``.
    """

    def __init__(
        self,
        context: ECSchedulerContext,
        inner: ECSchedulerConnector,
        ledger: Ledger,
        library: Library,
        *,
        reports_decide: bool,
    ) -> None:
        super().__init__(context)
        self._inner = inner
        self._ledger = ledger
        self._library = library
        self._reports_decide = reports_decide
        self.ready: set[str] = set()  # keys that were said to be READY, ever
        self.orders = 0

    def lookup(self, req_id: str, item: ECItem) -> CacheLookup:
        """See the contract. Asks twice."""
        said = self._call("lookup", lambda: self._inner.lookup(req_id, item))
        again = self._call("lookup", lambda: self._inner.lookup(req_id, item))
        name = self._library.name(item.key)
        self._ledger.check("same-answer-within-a-pass")
        if not isinstance(said, CacheLookup) or again is not said:
            raise ViolationError(
                "same-answer-within-a-pass", f"asked of {name!r} twice for {req_id!r}: {said!r}, then {again!r}"
            )
        if self.role == "ec_consumer":
            self._ledger.check("consumer-stores-nothing")
        if said is CacheLookup.READY:
            self.ready.add(item.key)
            self._check_ready(item.key, name)
        return said

    def _check_ready(self, key: str, name: str) -> None:
        if self._library.is_stale(key):
            raise ViolationError("reset-forgets", f"{name} is READY after the weights changed")
        if self.role == "ec_consumer" and key not in self._ledger.carried:
            raise ViolationError("consumer-stores-nothing", f"{name!r} is READY, and nobody stores in this engine")
        self._ledger.check_ready(key, name, reports_decide=self._reports_decide)

    def check_stale(self) -> None:
        """Ask of everything that earlier weights made. Within a pass: before ``build_connector_meta``."""
        for key in self._library.stale_keys():
            self._ledger.check("reset-forgets")
            self.lookup("asks-for-stale", ECItem(key, ITEMS[self._library.item(key)]))

    def update_state_after_alloc(self, req_id: str, item: ECItem) -> None:
        """See the contract."""
        self._call("update_state_after_alloc", lambda: self._inner.update_state_after_alloc(req_id, item))

    def build_connector_meta(self) -> ECConnectorMetadata | None:
        """See the contract."""
        orders = self._call("build_connector_meta", self._inner.build_connector_meta)
        if orders is not None and not isinstance(orders, ECConnectorMetadata):
            raise ViolationError(
                "orders-cross-the-wire", f"build_connector_meta returned a {type(orders).__name__}"
            )
        self.orders += orders is not None
        return orders

    def update_connector_output(self, output: ECConnectorOutput) -> None:
        """See the contract."""
        self._call("update_connector_output", lambda: self._inner.update_connector_output(output))

    def request_finished(self, req_id: str) -> None:
        """See the contract."""
        self._call("request_finished", lambda: self._inner.request_finished(req_id))

    def has_pending_work(self) -> bool:
        """See the contract."""
        return bool(self._call("has_pending_work", self._inner.has_pending_work))

    def reset_cache(self, namespace: str) -> None:
        """See the contract."""
        self._call("reset_cache", lambda: self._inner.reset_cache(namespace))

    def statistics(self) -> dict[str, float]:
        """See the contract."""
        return self._call("statistics", self._inner.statistics)

    def check_integrity(self) -> None:
        """See the contract."""
        self._ledger.check("books-balance")
        self._call("check_integrity", self._inner.check_integrity)

    def shutdown(self) -> None:
        """See the contract."""
        self._ledger.check("shutdown-at-any-time")
        guarded("shutdown-at-any-time", "the scheduler half's shutdown", self._inner.shutdown)

    def _call(self, hook: str, call: Callable[[], T]) -> T:
        self._ledger.check("errors-are-reports")
        return guarded("errors-are-reports", f"the scheduler half's {hook}", call)


class WatchedWorker(ECWorkerConnector):
    """A worker half. Build it with ``watch_worker``.

    Args:
        must_load: no load may fail.

    Attributes:
        rank: of the half.
    """

    def __init__(
        self, context: ECWorkerContext, inner: ECWorkerConnector, ledger: Ledger, *, must_load: bool
    ) -> None:
        super().__init__(context)
        self.rank = context.rank
        self._epoch = context.epoch
        self._inner = inner
        self._ledger = ledger
        self._loads_by = "ready-is-loaded" if must_load else "errors-are-reports"
        self._counters: dict[str, float] = {}

    def bind_connector_metadata(self, metadata: ECConnectorMetadata) -> None:
        """See the contract."""
        self._call("bind_connector_metadata", lambda: self._inner.bind_connector_metadata(metadata))

    def clear_connector_metadata(self) -> None:
        """See the contract."""
        self._call("clear_connector_metadata", self._inner.clear_connector_metadata)

    def start_load_caches(self, encoder_cache: EncoderCache) -> None:
        """See the contract."""
        self._load("start_load_caches", lambda: self._inner.start_load_caches(encoder_cache))

    def wait_for_loads(self, encoder_cache: EncoderCache) -> None:
        """See the contract."""
        self._load("wait_for_loads", lambda: self._inner.wait_for_loads(encoder_cache))

    def save_caches(self, encoder_cache: EncoderCache, key: str) -> None:
        """See the contract."""
        self._ledger.saved(self.rank, key)
        self._call("save_caches", lambda: self._inner.save_caches(encoder_cache, key))

    def get_finished(self, finished_req_ids: frozenset[str]) -> tuple[frozenset[str], frozenset[str]]:
        """See the contract."""
        return self._call("get_finished", lambda: self._inner.get_finished(finished_req_ids))

    def build_connector_worker_meta(self) -> ECConnectorWorkerMetadata | None:
        """See the contract."""
        meta = self._call("build_connector_worker_meta", self._inner.build_connector_worker_meta)
        if meta is not None:
            self._ledger.check("metadata-is-declared")
            declared = self._inner.worker_metadata_type
            if type(meta) is not declared:
                said = None if declared is None else declared.__name__
                raise ViolationError(
                    "metadata-is-declared",
                    f"rank {self.rank} reported a {type(meta).__name__}; declared is {said}",
                )
        return meta

    def get_ec_connector_stats(self) -> ECConnectorStats | None:
        """See the contract."""
        stats = self._call("get_ec_connector_stats", self._inner.get_ec_connector_stats)
        for entry in stats.ranks if stats is not None else ():
            self._ledger.check("counters-only-grow")
            if (entry.rank, entry.epoch) != (self.rank, self._epoch):
                raise ViolationError(
                    "counters-only-grow",
                    f"rank {self.rank} of epoch {self._epoch} has counters of rank {entry.rank}, {entry.epoch}",
                )
            for name, before in self._counters.items():
                if entry.counters.get(name, before) < before:
                    raise ViolationError(
                        "counters-only-grow",
                        f"rank {self.rank}: {name} fell from {before:g} to {entry.counters[name]:g}",
                    )
            self._counters.update(entry.counters)
        return stats

    def shutdown(self) -> None:
        """See the contract."""
        self._ledger.check("shutdown-at-any-time")
        guarded("shutdown-at-any-time", f"rank {self.rank}'s shutdown", self._inner.shutdown)

    def _call(self, hook: str, call: Callable[[], T]) -> T:
        self._ledger.check("errors-are-reports")
        return guarded("errors-are-reports", f"rank {self.rank}'s {hook}", call)

    def _load(self, hook: str, call: Callable[[], None]) -> None:
        self._ledger.check("errors-are-reports")
        guarded(self._loads_by, f"rank {self.rank}'s {hook}", call)


def watch_worker(
    context: ECWorkerContext, inner: ECWorkerConnector, ledger: Ledger, *, must_load: bool
) -> WatchedWorker:
    """``inner`` under observation, declaring what it declares."""
    kind = type("WatchedWorker", (WatchedWorker,), {"worker_metadata_type": inner.worker_metadata_type})
    watched: WatchedWorker = kind(context, inner, ledger, must_load=must_load)
    return watched
