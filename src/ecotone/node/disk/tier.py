"""The disk tier: between a region's index and a directory."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from ecotone.errors import ConfigError
from ecotone.node.disk.jobs import (
    AllFound,
    Dropped,
    Found,
    Loaded,
    Quarantined,
    Read,
    Reclaimed,
    Removed,
    Reopened,
    Result,
    TierIO,
    Write,
    Written,
)
from ecotone.node.disk.ledger import Ledger
from ecotone.node.disk.store import DiskStore, make_root
from ecotone.node.disk.thread import DiskThread
from ecotone.node.disk.worker import DiskWorker
from ecotone.node.entry import Entry
from ecotone.node.exchange import Extent, Layout
from ecotone.node.index import Index
from ecotone.node.region import Region

log = logging.getLogger("ecotone.node.disk")

Fsync = Literal["none", "data"]


class DiskTier:
    """See ``OwnedTier``. Its methods are called by whoever may touch the index, but for those that say otherwise.

    Args:
        index, region: the memory it stands behind; the region is writable.
        budget: bytes that files may take on the disk.
        io: does the jobs; closed with the tier.
        clock: monotonic seconds, the one whose readings ``pump`` is given.
    """

    def __init__(
        self, index: Index, region: Region, budget: int, io: TierIO, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.ledger = Ledger(budget)
        self._index = index
        self._region = region
        self._io = io
        self._clock = clock
        self._pinned: tuple[int, Entry] | None = None
        self._reading: dict[int, tuple[str, Layout]] = {}
        self._unread: list[Read] = []
        self._settled = threading.Condition()
        self._undurable: frozenset[int] = frozenset()
        self._was_failing = False

    # -- what the index says ----------------------------------------------------------------------------------

    def holds(self, key: str, layout: Layout) -> bool:
        """See ``Tier``."""
        return self.ledger.holds(key, layout)

    def promote(self, key: str, layout: Layout, transfer_id: int, extents: Sequence[Extent]) -> None:
        """See ``Tier``."""
        self._reading[transfer_id] = key, layout
        views = [self._region.view(extent, writable=True) for extent in extents]
        self._unread.append(Read(transfer_id, key, layout, views))

    def committed(self, entry: Entry) -> None:
        """See ``Tier``."""
        self.ledger.committed(entry.key)

    def evicted(self, entry: Entry) -> None:
        """See ``Tier``."""
        self.ledger.evicted(entry.key)

    def forget(self, key: str) -> bool:
        """See ``Tier``."""
        return self.ledger.forget(key)

    def forget_all(self, namespace: str) -> bool:
        """See ``Tier``."""
        known = self.ledger.forget_all(namespace)
        self._publish()
        return known

    # -- what the owner says ----------------------------------------------------------------------------------

    def pump(self, now: float) -> None:
        """See ``OwnedTier``."""
        for result in self._io.results():
            self._take_in(result, now)
        self.ledger.tick(now)
        self._order()
        if self.ledger.retry_at is not None:
            self._io.call_after(max(0.0, self.ledger.retry_at - now))
        self._publish()

    def barrier(self) -> int:
        """See ``OwnedTier``."""
        return self.ledger.last_drop

    def is_durable(self, barrier: int) -> bool:
        """See ``OwnedTier``. From any thread."""
        return not any(number <= barrier for number in self._undurable)

    def wait_durable(self, barrier: int, timeout_s: float) -> bool:
        """See ``OwnedTier``. From any thread."""
        with self._settled:
            return self._settled.wait_for(lambda: self.is_durable(barrier), timeout_s)

    def wait(self, timeout_s: float) -> None:
        """See ``OwnedTier``. From any thread."""
        self._io.wait(timeout_s)

    @property
    def is_adopted(self) -> bool:
        """See ``OwnedTier``."""
        return self.ledger.gone_through or self.ledger.failing

    @property
    def is_flushed(self) -> bool:
        """See ``OwnedTier``."""
        return self.ledger.is_settled or self.ledger.failing

    def files(self) -> dict[str, int]:
        """The bytes of every file that is known, by its entry's key."""
        return {key: file.charge for key, file in self.ledger.files.items()}

    def statistics(self) -> dict[str, float]:
        """See ``OwnedTier``. Every name begins with ``disk_``."""
        return {
            **{f"disk_{name}": value for name, value in self.ledger.statistics().items()},
            "disk_reading": len(self._reading),
        }

    def check_integrity(self) -> None:
        """See ``OwnedTier``."""
        self.ledger.check_integrity()

    def close(self) -> None:
        """See ``OwnedTier``."""
        self._io.close()

    def let_go(self, now: float) -> None:
        """See ``OwnedTier``."""
        for result in self._io.results():
            self._take_in(result, now)
        if self._pinned is not None:
            self._index.unpin_for_tier(self._pinned[0])
            self._pinned = None
            self.ledger.write_given_up()
        for number in self._reading:
            self._index.end_promotion(number, verified=False)
        self._reading.clear()
        self._unread.clear()

    # -- its parts --------------------------------------------------------------------------------------------

    def _order(self) -> None:
        """Hand over what there is to do: deletions first, so that a write of the same name comes after."""
        ledger = self.ledger
        self._submit_jobs()
        for read in self._unread:
            self._io.submit(read)
        self._unread.clear()
        while (key := ledger.next_write()) is not None:
            pinned = self._index.pin_for_tier(key)
            if ledger.begin_write(key, pinned[1].layout if pinned else None) and pinned is not None:
                self._submit_jobs()
                self._pinned = pinned
                views = [self._region.view(extent) for extent in pinned[1].extents]
                self._io.submit(Write(key, pinned[1].layout, views))
            elif pinned is not None:
                self._index.unpin_for_tier(pinned[0])

    def _submit_jobs(self) -> None:
        for job in self.ledger.jobs:
            self._io.submit(job)
        self.ledger.jobs.clear()

    def _take_in(self, result: Result, now: float) -> None:
        ledger = self.ledger
        match result:
            case Written():
                self._end_write(result, now)
            case Loaded():
                key, layout = self._reading.pop(result.number)
                ledger.loaded(key, layout, result.problem, layout.nbytes)
                self._index.end_promotion(result.number, verified=result.problem is None)
            case Removed():
                ledger.removed(result.key, result.error is not None, now)
                self._complain(result.error)
            case Dropped():
                ledger.dropped(result.number, result.error is not None, now)
                self._complain(result.error)
            case Reclaimed():
                ledger.reclaimed(result.error is not None, now)
                self._complain(result.error)
            case Found():
                ledger.found(result.files)
            case AllFound():
                ledger.all_found()
                if result.error is not None:
                    ledger.fail(now)
                self._complain(result.error)
            case Reopened():
                ledger.reopened(result.error is not None, result.fresh, now)
                self._complain(result.error)
                if result.error is None:
                    self._was_failing = False
                    log.warning("disk cache: in use again")
            case Quarantined():
                ledger.quarantined(result.files)

    def _end_write(self, result: Written, now: float) -> None:
        if self._pinned is None:
            return
        (pin_id, entry), self._pinned = self._pinned, None
        self._index.unpin_for_tier(pin_id)
        in_memory = self._index.entries.get(entry.key) is entry
        self.ledger.written(entry.layout.nbytes, result.error is not None, in_memory, now)
        self._complain(result.error)

    def start_failing(self, error: OSError) -> None:
        """The directory could not be opened: it is tried again later."""
        self.ledger.fail(self._clock())
        self._complain(error)

    def _complain(self, error: OSError | None) -> None:
        """One line for each outage."""
        if error is not None and not self._was_failing:
            self._was_failing = True
            log.warning("disk cache: not in use for now, encodings stay in memory only: %s", error)

    def _publish(self) -> None:
        undurable = frozenset(self.ledger.drops)
        if undurable != self._undurable:
            with self._settled:
                self._undurable = undurable
                self._settled.notify_all()


class DiskConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Where, and how much.

    Attributes:
        root: the directory. One directory serves one region: a node with several tenants gives each one of its
            own, named by a digest.
        budget: bytes that files may take.
        fsync: ``data`` writes every entry through to the device before it gets its name; ``none`` leaves that to
            the kernel, and a crash of the machine may lose entries, which is then noticed.
    """

    root: str
    budget: int
    fsync: Fsync = "none"

    def __post_init__(self) -> None:
        # An empty path would be the working directory of whoever starts here.
        if not self.root or "\0" in self.root:
            raise ConfigError(f"disk={self.root!r} is not the path of a directory")


def open_disk_tier(
    index: Index,
    region: Region,
    config: DiskConfig,
    notify: Callable[[], None],
    clock: Callable[[], float] = time.monotonic,
) -> DiskTier:
    """A tier in a directory, with a thread of its own that starts with the first ``pump``. The caller sets
    ``index.tier``.

    Raises:
        ConfigError: another node uses the directory, or it is none, or there can be none.
    """
    store = DiskStore(Path(config.root).absolute(), fsync=config.fsync == "data")
    make_root(store.root)
    problem: OSError | None = None
    try:
        store.open()
    except OSError as error:
        problem = error
    tier = DiskTier(
        index, region, config.budget, DiskThread(DiskWorker(store, opened=problem is None), notify), clock
    )
    if problem is not None:
        tier.start_failing(problem)
    return tier
