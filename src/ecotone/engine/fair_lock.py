"""A lock that is given in the order it was asked for."""

from __future__ import annotations

import threading
from collections import deque


class FairLock:
    """First come, first served. Not reentrant.

    With ``threading.Lock`` a thread that steps in a loop takes the lock back before those who wait for it wake up.
    """

    def __init__(self) -> None:
        self._turn = threading.Condition()
        self._queue: deque[object] = deque()

    @property
    def num_waiting(self) -> int:
        """Threads that asked for it and do not have it."""
        with self._turn:
            return max(len(self._queue) - 1, 0)

    def __enter__(self) -> None:
        me = object()
        with self._turn:
            self._queue.append(me)
            try:
                self._turn.wait_for(lambda: self._queue[0] is me)
            except BaseException:  # an interrupt: whoever comes next must not wait for us
                self._queue.remove(me)
                self._turn.notify_all()
                raise

    def __exit__(self, *_: object) -> None:
        with self._turn:
            self._queue.popleft()
            self._turn.notify_all()
