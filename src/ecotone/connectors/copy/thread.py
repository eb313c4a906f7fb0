"""The CPU's copy engine: one copier thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from threading import Condition, Thread
from time import perf_counter

import numpy as np
import torch

from ecotone.connectors.copy.engine import CopyDone, CopyEngine, CopyJob, Direction, ended


class ThreadCopyEngine(CopyEngine):
    """Copies beside the thread that computes; numpy lets go of the interpreter lock while it copies.

    Args:
        wakeup: called from the copier thread after each job that it ended.
        name: of the thread.
    """

    def __init__(self, wakeup: Callable[[], None], name: str = "ecotone-copier") -> None:
        self._wakeup = wakeup
        self._changed = Condition()
        self._queue: deque[CopyJob] = deque()
        self._running: CopyJob | None = None
        self._done: deque[CopyDone] = deque()
        self._closed = False
        self._thread = Thread(target=self._copy_until_closed, name=name, daemon=True)

    def submit(self, job: CopyJob) -> None:
        with self._changed:
            if self._closed:
                self._done.append(ended(job, "closed", 0.0))
                return
            self._queue.append(job)
            self._changed.notify_all()
            if not self._thread.is_alive():
                self._thread.start()

    def fence(self, job: CopyJob) -> None:
        """Waits for the job, or carries it out here and now when the copier has not begun it: a load must not
        queue behind the saves before it."""
        with self._changed:
            while self._running is job:
                self._changed.wait()
            if job not in self._queue:
                return
            self._queue.remove(job)
        done = _carry_out(job)
        with self._changed:
            self._done.append(done)

    def poll(self) -> list[CopyDone]:
        with self._changed:
            done = list(self._done)
            self._done.clear()
        return done

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._done.extend(ended(job, "closed", 0.0) for job in self._queue)
            self._queue.clear()
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join()

    def _copy_until_closed(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                job = self._running = self._queue.popleft()
            done = _carry_out(job)
            with self._changed:
                self._running = None
                self._done.append(done)
                self._changed.notify_all()
            del job, done  # or the tensors of the last job live until the next one
            self._wakeup()


def copy_now(job: CopyJob) -> None:
    """Copy the job's bytes, on this thread alone. Torch's own copy would start a team of threads for it, which
    only gets in the way of those that compute.

    Raises:
        RuntimeError, TypeError, ValueError: the rows are not on the CPU, or the sizes do not match.
    """
    rows = job.rows.view(torch.uint8).numpy().reshape(-1)
    position = 0
    for piece in job.memory:
        inside = np.frombuffer(piece, np.uint8)
        outside = rows[position : position + len(piece)]
        if job.direction is Direction.SAVE:
            np.copyto(inside, outside)
        else:
            np.copyto(outside, inside)
        position += len(piece)


def _carry_out(job: CopyJob) -> CopyDone:
    start = perf_counter()
    error = None
    try:
        copy_now(job)
    except (RuntimeError, TypeError, ValueError) as failure:
        error = f"{type(failure).__name__}: {failure}"
    return ended(job, error, perf_counter() - start)
