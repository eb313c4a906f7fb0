"""The thread that does the disk's jobs."""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from ecotone.node.disk.jobs import (
    AllFound,
    Drop,
    Dropped,
    Found,
    Job,
    Loaded,
    Quarantined,
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


class DiskThread:
    """See ``TierIO``. Jobs come first; when there are none, it looks for files, and then deletes dropped ones.

    Args:
        store: opened, or not where that failed; this thread's from now on.
        notify: called by the thread when there are results, and when the time given to ``call_after`` is over.
        opened: whether ``store`` is open.
    """

    def __init__(self, store: DiskStore, notify: Callable[[], None], *, opened: bool) -> None:
        self._store = store
        self._notify = notify
        self._news = threading.Condition()
        self._jobs: deque[Job] = deque()
        self._results: deque[Result] = deque()
        self._closed = False
        self._call_at: float | None = None
        self._scan: Iterator[list[tuple[str, int, int]]] | None = store.scan() if opened else None
        self._reclaim = opened
        self._reported = 0
        self._thread = threading.Thread(target=self._run, name="ecotone-disk", daemon=True)
        self._started = False

    def submit(self, job: Job) -> None:
        """See the protocol."""
        with self._news:
            self._start()
            self._jobs.append(job)
            self._news.notify_all()

    def results(self) -> Sequence[Result]:
        """See the protocol."""
        with self._news:
            self._start()
            results = tuple(self._results)
            self._results.clear()
        return results

    def wait(self, timeout_s: float) -> None:
        """See the protocol."""
        with self._news:
            self._news.wait_for(lambda: self._results, timeout_s)

    def call_after(self, seconds: float) -> None:
        """See the protocol."""
        with self._news:
            self._call_at = time.monotonic() + seconds
            self._news.notify_all()

    def close(self) -> None:
        """See the protocol."""
        with self._news:
            self._closed = True
            self._start()
            self._news.notify_all()
        self._thread.join()

    def _start(self) -> None:
        # Not when it is made: before the first call, whoever is notified does not have it yet.
        if not self._started:
            self._started = True
            self._thread.start()

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        finally:
            self._store.close()

    def _turn(self) -> bool:
        """One job, or a little of what is done at leisure; False at the end."""
        with self._news:
            if not self._has_work():
                seconds = None if self._call_at is None else max(0.0, self._call_at - time.monotonic())
                self._news.wait(seconds)
            if self._closed:
                return False
            job = self._jobs.popleft() if self._jobs else None
            called = self._call_at is not None and self._call_at <= time.monotonic()
            if called:
                self._call_at = None
        result = self._at_leisure() if job is None else self._do(job)
        if self._post(result) or called:
            self._notify()
        return True

    def _has_work(self) -> bool:
        return self._closed or bool(self._jobs) or self._scan is not None or self._reclaim

    def _post(self, result: Result | None) -> bool:
        """Make results known; whether there are any."""
        quarantined, self._reported = self._store.quarantined - self._reported, self._store.quarantined
        posted: list[Result] = [] if result is None else [result]
        posted += [Quarantined(quarantined)] if quarantined else []
        with self._news:
            self._results += posted
            self._news.notify_all()
        return bool(posted)

    def _do(self, job: Job) -> Result:
        store = self._store
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
        error = _attempt(lambda: fresh.append(self._store.reopen()))
        if error is not None:
            return Reopened(error, fresh=False)
        self._reclaim = True
        if fresh[0]:
            self._scan = self._store.scan()
        return Reopened(None, fresh[0])

    def _at_leisure(self) -> Result | None:
        if self._scan is not None:
            return self._look_further()
        if self._reclaim:
            empty: list[bool] = []
            error = _attempt(lambda: empty.append(self._store.reclaim(_RECLAIM_STEPS)))
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
