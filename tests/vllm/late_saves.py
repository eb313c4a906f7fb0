"""Saves of a worker's process that begin when a test says so."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ecotone.connectors.copy.engine import CopyJob, Direction
from ecotone.connectors.copy.thread import ThreadCopyEngine

RELEASE_S = 30.0


class Gate:
    """Of this process's saves. Open until somebody holds it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._holding = False
        self._held: list[tuple[CopyJob, Callable[[CopyJob], None]]] = []
        self._unfinished = 0

    def pass_or_hold(self, job: CopyJob, submit: Callable[[CopyJob], None]) -> None:
        """``submit(job)``, now or when the gate is released."""
        with self._changed:
            if self._holding:
                self._held.append((job, submit))
                return
        submit(job)

    def let_through(self, job: CopyJob) -> None:
        """Somebody waits for ``job``: it cannot be held any longer."""
        with self._changed:
            found = [(held, submit) for held, submit in self._held if held is job]
            self._held = [(held, submit) for held, submit in self._held if held is not job]
        for held, submit in found:
            submit(held)

    def hold(self) -> None:
        with self._changed:
            self._holding = True

    def held(self) -> int:
        with self._changed:
            return len(self._held)

    def release(self) -> int:
        """Returns the number of saves that were held, after all of them have ended.

        Raises:
            TimeoutError: they do not end.
        """
        with self._changed:
            self._holding = False
            held, self._held = self._held, []
            self._unfinished = len(held)
        for job, submit in held:
            job.on_end = self._and_count(job.on_end)
            submit(job)
        with self._changed:
            if not self._changed.wait_for(lambda: self._unfinished == 0, RELEASE_S):
                raise TimeoutError(f"{self._unfinished} of {len(held)} saves do not end")
        return len(held)

    def _and_count(self, on_end: Callable[[str | None], object] | None) -> Callable[[str | None], object]:
        def ended(error: str | None) -> None:
            if on_end is not None:
                on_end(error)
            with self._changed:
                self._unfinished -= 1
                self._changed.notify_all()

        return ended


GATE = Gate()


class LateCopyEngine(ThreadCopyEngine):
    """The engine of the product, behind the gate."""

    def submit(self, job: CopyJob) -> None:
        if job.direction is Direction.SAVE:
            GATE.pass_or_hold(job, super().submit)
        else:
            super().submit(job)

    def fence(self, job: CopyJob) -> None:
        GATE.let_through(job)
        super().fence(job)
