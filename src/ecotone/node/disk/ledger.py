"""What is on the disk, what should be, and what to do next. Pure: no clock, no thread, no I/O.

It is told what becomes of entries in memory and what the disk has done, and keeps the orders that follow in
``jobs``, for its driver to take.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from ecotone.errors import IntegrityError
from ecotone.node.disk.format import charged, file_bytes
from ecotone.node.disk.jobs import Drop, Remove, Reopen
from ecotone.node.exchange import Layout
from ecotone.node.keys import NAMESPACE_HEX

FIRST_RETRY_S, LAST_RETRY_S = 1.0, 60.0

COUNTERS = (
    "writes", "bytes_written", "reads", "bytes_read", "adopted", "evictions", "bytes_evicted", "forgotten",
    "dropped_unwritten", "too_large", "missing", "unverified", "other_layout", "quarantined", "write_errors",
    "read_errors", "remove_errors", "outages", "drops", "drops_retried",
)  # fmt: skip

Order = Remove | Drop | Reopen


class File:
    """One file: what it is charged, and its entry's layout, ``None`` before its header was read."""

    __slots__ = ("charge", "layout")

    def __init__(self, charge: int, layout: Layout | None) -> None:
        self.charge = charge
        self.layout = layout


class Ledger:
    """The books of a disk tier.

    Args:
        budget: bytes that the files may take.

    Attributes:
        files: key -> file, the least recently used first.
        used: bytes they are charged, and those of the file that is being written.
        unwritten: entries in memory that are on no disk, in the order of their commits.
        writing: key of the entry that is being written, and its file.
        jobs: orders that were not taken yet.
        drops: number -> namespace, of the drops that are not known to be durable.
        counters: by name.
        gone_through: every file that was there at the start is known.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.files: OrderedDict[str, File] = OrderedDict()
        self.used = 0
        self.unwritten: OrderedDict[str, None] = OrderedDict()
        self.writing: tuple[str, File] | None = None
        self.jobs: list[Order] = []
        self.drops: dict[int, str] = {}
        self.last_drop = 0
        self.counters = dict.fromkeys(COUNTERS, 0)
        self._void = False  # the entry that is being written was forgotten meanwhile
        self.gone_through = False
        self._disowned: set[str] = set()  # keys and namespaces forgotten before that
        self._found: dict[str, int] = {}
        self._trash = True  # dropped files may still take bytes
        self._failed_drops: list[int] = []
        self._failed_removes: list[str] = []
        self._removing = 0
        self._wait_s = 0.0
        self._retry_at: float | None = None
        self._reopening = False

    # -- what the index says ----------------------------------------------------------------------------------

    def holds(self, key: str, layout: Layout) -> bool:
        """Whether the file of an entry is there, as far as is known without reading it."""
        file = self.files.get(key)
        if file is None:
            return False
        if file.layout is None or file.layout == layout:
            return True
        self.forget(key)
        return False

    def committed(self, key: str) -> None:
        """An entry is in memory, complete."""
        if key in self.files:
            self.files.move_to_end(key)
        else:
            self.unwritten[key] = None

    def evicted(self, key: str) -> None:
        """An entry leaves memory."""
        if key in self.unwritten:
            del self.unwritten[key]
            self.counters["dropped_unwritten"] += 1
        elif key in self.files:
            self.files.move_to_end(key)

    def forget(self, key: str) -> bool:
        """An entry must not be found any more; whether there was anything to find."""
        known = self._disown(key)
        if key in self.files:
            self.counters["forgotten"] += 1
            self._remove(key)
            return True
        if not self.gone_through:
            self._disowned.add(key)
            self._order_remove(key)
        return known

    def forget_all(self, namespace: str) -> bool:
        """As ``forget``, for every entry of a namespace, durably. The disk is asked in any case: what it holds may
        not be known yet."""
        doomed = [key for key in (*self.files, *self.unwritten) if key.startswith(namespace)]
        if self.writing is not None and self.writing[0].startswith(namespace):
            doomed.append(self.writing[0])
        for key in doomed:
            self._disown(key)
            self._lose(key)
        if not self.gone_through:
            self._disowned.add(namespace)
        self.last_drop += 1
        self.drops[self.last_drop] = namespace
        self._order_drop(self.last_drop)
        return bool(doomed)

    def _disown(self, key: str) -> bool:
        known = key in self.unwritten
        self.unwritten.pop(key, None)
        self._found.pop(key, None)
        if self.writing is not None and self.writing[0] == key:
            self._void = True
        return known

    def _lose(self, key: str) -> None:
        """There is no file of this key any more, or will be none."""
        file = self.files.pop(key, None)
        if file is not None:
            self.used -= file.charge

    def _remove(self, key: str) -> None:
        self._lose(key)
        self._order_remove(key)

    def _order_remove(self, key: str) -> None:
        self._removing += 1
        self.jobs.append(Remove(key))

    def _order_drop(self, number: int) -> None:
        self._trash = True
        self.jobs.append(Drop(number, self.drops[number]))

    # -- what there is to write -------------------------------------------------------------------------------

    def next_write(self) -> str | None:
        """The entry to write now. One at a time, so that a promotion waits for one at most; none while the disk
        fails, nor before every file is known and what was dropped is deleted: until then nobody knows how many
        bytes are left of the budget."""
        if self.writing or self.failing or self._trash or not self.gone_through or not self.unwritten:
            return None
        return next(iter(self.unwritten))

    def begin_write(self, key: str, layout: Layout | None) -> bool:
        """The entry is about to be written; ``layout`` is ``None`` where it is not in memory any more. Makes room
        on the disk; whether it may be written."""
        del self.unwritten[key]
        if layout is None:
            return False
        charge = charged(file_bytes(key, layout))
        if charge > self.budget:
            self.counters["too_large"] += 1
            return False
        self._make_room(charge)
        self.used += charge
        self.writing, self._void = (key, File(charge, layout)), False
        return True

    def written(self, nbytes: int, failed: bool, in_memory: bool, now: float) -> None:
        """The write has ended. ``in_memory``: the entry can still be written again."""
        if self.writing is None:
            raise IntegrityError("a write ended that was not begun")
        (key, file), self.writing = self.writing, None
        if failed:
            self.used -= file.charge
            self.counters["write_errors"] += 1
            if in_memory and not self._void:
                self.unwritten[key] = None
                self.unwritten.move_to_end(key, last=False)
            self.fail(now)
            return
        self.counters["writes"] += 1
        self.counters["bytes_written"] += nbytes
        self._wait_s = 0.0
        self._lose(key)
        self.files[key] = file
        if self._void:
            self._remove(key)

    def write_given_up(self) -> None:
        """The write was not done, and nothing more will be."""
        if self.writing is not None:
            self.used -= self.writing[1].charge
            self.writing = None

    def _make_room(self, charge: int) -> None:
        while self.used + charge > self.budget:
            key, file = next(iter(self.files.items()))
            self.counters["evictions"] += 1
            self.counters["bytes_evicted"] += file.charge
            self._remove(key)

    # -- what the disk says -----------------------------------------------------------------------------------

    def found(self, files: Sequence[tuple[str, int, int]]) -> None:
        """Files from an earlier life: key, size, time of change. They are found from now on."""
        for key, size, changed in files:
            if key in self._disowned or key[:NAMESPACE_HEX] in self._disowned or key in self.files:
                continue
            self._found[key] = changed
            file = self.files[key] = File(charged(size), None)
            self.used += file.charge
            self.unwritten.pop(key, None)
            self.counters["adopted"] += 1

    def all_found(self) -> None:
        """There are no others. Those that were used last are evicted last."""
        for key in sorted(self._found, key=self._found.__getitem__):
            if key in self.files:
                self.files.move_to_end(key)
        self._found.clear()
        self._disowned.clear()
        self.gone_through = True
        self._make_room(0)

    def loaded(self, key: str, layout: Layout, problem: str | None, nbytes: int) -> None:
        """A read has ended."""
        if problem is None:
            self.counters["reads"] += 1
            self.counters["bytes_read"] += nbytes
            if key in self.files:
                self.files[key].layout = layout
            return
        self.counters[problem] += 1
        if problem in ("missing", "unverified"):
            self._lose(key)
        else:
            self._remove(key)

    def removed(self, key: str, failed: bool, now: float) -> None:
        """A deletion has ended."""
        self._removing -= 1
        if not failed:
            return
        self.counters["remove_errors"] += 1
        self._failed_removes.append(key)
        self.fail(now)

    def dropped(self, number: int, failed: bool, now: float) -> None:
        """A drop has ended."""
        if not failed:
            del self.drops[number]
            self.counters["drops"] += 1
            return
        self._failed_drops.append(number)
        self.fail(now)

    def reclaimed(self, failed: bool, now: float) -> None:
        """What was dropped is deleted, unless a drop was ordered since: its own deletion is still to come."""
        if failed:
            self.fail(now)
        else:
            self._trash = bool(self.drops)

    def quarantined(self, files: int) -> None:
        """So many more files were put aside."""
        self.counters["quarantined"] += files

    # -- failures ---------------------------------------------------------------------------------------------

    @property
    def failing(self) -> bool:
        """Whether nothing is written, since the disk failed."""
        return self._retry_at is not None

    @property
    def retry_at(self) -> float | None:
        """When the disk is tried again (s), where it failed and is not being tried."""
        return None if self._reopening else self._retry_at

    def fail(self, now: float) -> None:
        """The disk failed: leave it alone for a while, longer each time."""
        if self._retry_at is None:
            self.counters["outages"] += 1
        self._wait_s = min(max(2 * self._wait_s, FIRST_RETRY_S), LAST_RETRY_S)
        self._retry_at = now + self._wait_s

    def tick(self, now: float) -> None:
        """Try the disk again when it is time."""
        if self._retry_at is not None and not self._reopening and now >= self._retry_at:
            self._reopening = True
            self.jobs.append(Reopen())

    def reopened(self, failed: bool, fresh: bool, now: float) -> None:
        """The disk was tried. ``fresh``: what was known of it is void, and it is gone through again."""
        self._reopening = False
        if failed:
            self.fail(now)
            return
        self._retry_at = None
        if fresh:
            self._start_over()
        for key in self._failed_removes:
            self._order_remove(key)
        self._failed_removes.clear()
        for number in self._failed_drops:
            self.counters["drops_retried"] += 1
            self._order_drop(number)
        self._failed_drops.clear()

    def _start_over(self) -> None:
        self.files.clear()
        self._found.clear()
        self._failed_removes.clear()
        self.used = self.writing[1].charge if self.writing else 0
        self.gone_through, self._trash = False, True
        # A reset that never reached the disk still holds for what is found now.
        self._disowned = set(self.drops.values())

    # -- for the owner ----------------------------------------------------------------------------------------

    @property
    def is_settled(self) -> bool:
        """Whether everything is written, and everything forgotten is deleted or dropped."""
        return not (self.unwritten or self.writing or self._removing or self.drops)

    def statistics(self) -> dict[str, float]:
        """Counters and gauges."""
        return {
            **self.counters,
            "files": len(self.files),
            "bytes": self.used,
            "bytes_budget": self.budget,
            "unwritten": len(self.unwritten),
            "failing": int(self.failing),
            "gone_through": int(self.gone_through),
            "drops_pending": len(self.drops),
        }

    def check_integrity(self) -> None:
        """Raises ``IntegrityError``: what is used is not the sum of the files, exceeds the budget, or an entry is
        to be written that is on the disk."""
        used = sum(file.charge for file in self.files.values()) + (self.writing[1].charge if self.writing else 0)
        if used != self.used:
            raise IntegrityError(f"disk files take {used} bytes, not {self.used}")
        if self.gone_through and used > self.budget:
            raise IntegrityError(f"disk files take {used} bytes of {self.budget}")
        both = self.unwritten.keys() & self.files.keys()
        if both:
            raise IntegrityError(f"{len(both)} entries are on the disk and to be written")
