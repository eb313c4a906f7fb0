"""The thread that does the disk's jobs."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from ecotone.node.disk.jobs import Job, Quarantined, Result
from ecotone.node.disk.worker import DiskWorker


class DiskThread:
    """See ``TierIO``.

    Args:
        worker: does the work; this thread's from now on, with its store, which is closed in the end.
        notify: called by the thread when there are results, and when the time given to ``call_after`` is over.
    """

    def __init__(self, worker: DiskWorker, notify: Callable[[], None]) -> None:
        self._worker = worker
        self._notify = notify
        self._news = threading.Condition()
        self._jobs: deque[Job] = deque()
        self._results: deque[Result] = deque()
        self._posted = self._seen = 0
        self._closed = False
        self._call_at: float | None = None
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
            # Counted, not looked at: whoever is notified may have taken the results by now.
            self._news.wait_for(lambda: self._posted != self._seen, timeout_s)
            self._seen = self._posted

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
            self._worker.store.close()

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
        result = self._worker.at_leisure() if job is None else self._worker.do(job)
        if self._post(result) or called:
            self._notify()
        return True

    def _has_work(self) -> bool:
        return self._closed or bool(self._jobs) or not self._worker.is_idle

    def _post(self, result: Result | None) -> bool:
        """Make results known; whether there are any."""
        quarantined = self._worker.quarantined()
        posted: list[Result] = [] if result is None else [result]
        posted += [Quarantined(quarantined)] if quarantined else []
        with self._news:
            self._results += posted
            self._posted += len(posted)
            self._news.notify_all()
        return bool(posted)
