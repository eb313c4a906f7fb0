"""Does the disk's jobs, one at a time."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterator
from functools import partial

from ecotone.node.disk.jobs import (
    AllFound,
    Drop,
    Dropped,
    Found,
    Job,
    Loaded,
    Read,
    Reclaimed,
    Remove,
    Removed,
    Reopen,
    Reopened,
    Result,
    Write,
    Written,
)
from ecotone.node.disk.store import DiskStore

log = logging.getLogger("ecotone.node.disk")

# Files deleted between two looks at the jobs.
_RECLAIM_STEPS = 32


class DiskWorker:
    """What ``store`` is asked for, and what is done when there is nothing to do: first the directory is gone
    through, then what was dropped is deleted.

    Args:
        store: opened, or not where that failed.
        opened: whether it is.
    """

    def __init__(self, store: DiskStore, *, opened: bool) -> None:
        self.store = store
        self._scan: Iterator[list[tuple[str, int, int]]] | None = store.scan() if opened else None
        self._reclaim = opened
        self._reported = 0

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do at leisure."""
        return self._scan is None and not self._reclaim

    def quarantined(self) -> int:
        """Files that were put aside since the last call."""
        before, self._reported = self._reported, self.store.quarantined
        return self._reported - before

    def do(self, job: Job) -> Result:
        """Do a job. Raises nothing."""
        store = self.store
        match job:
            case Write():
                return Written(job.key, _attempt(partial(store.write, job)))
            case Read():
                loaded: list[str | None] = []
                failed = _attempt(lambda: loaded.append(store.read(job)))
                return Loaded(job.number, "read_errors" if failed else loaded[0])
            case Remove():
                return Removed(job.key, _attempt(partial(store.remove, job.key)))
            case Drop():
                self._reclaim = True
                return Dropped(job.number, job.namespace, _attempt(partial(store.drop, job.namespace)))
            case Reopen():
                return self._reopen()

    def _reopen(self) -> Result:
        fresh: list[bool] = []
        error = _attempt(lambda: fresh.append(self.store.reopen()))
        if error is not None:
            return Reopened(error, fresh=False)
        self._reclaim = True
        if fresh[0]:
            self._scan = self.store.scan()
        return Reopened(None, fresh[0])

    def at_leisure(self) -> Result | None:
        """A little of what is not urgent; its result, if it has one."""
        if self._scan is not None:
            return self._look_further()
        if self._reclaim:
            empty: list[bool] = []
            error = _attempt(lambda: empty.append(self.store.reclaim(_RECLAIM_STEPS)))
            if error is not None or empty[0]:
                self._reclaim = False
                return Reclaimed(error)
        return None

    def _look_further(self) -> Result:
        found: list[list[tuple[str, int, int]] | None] = []
        scan = self._scan or iter(())
        error = _attempt(lambda: found.append(next(scan, None)))
        if error is None and found[0] is not None:
            return Found(found[0])
        self._scan = None
        return AllFound(error)


def _attempt(act: Callable[[], object]) -> OSError | None:
    """The error that ``act`` ends with, if any. A rim: whatever goes wrong here is the disk's trouble, and must
    not end the thread that everybody waits for."""
    try:
        act()
    except OSError as error:
        return error
    except Exception as error:
        log.exception("disk cache: a job failed")
        return OSError(errno.EIO, f"{type(error).__name__}: {error}")
    return None
