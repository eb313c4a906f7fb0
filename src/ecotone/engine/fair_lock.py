"""A lock that is given in the order it was asked for."""

from __future__ import annotations

import threading
from collections import deque


class FairLock:
    """First come, first served. Not reentrant.

    With ``threading.Lock`` a thread that steps in a loop takes the lock back before those who wait for it wake up.

    A thread that asks for what it holds was interrupted (``KeyboardInterrupt``) while it gave it back: it starts
    anew, at the end of the queue, instead of waiting for itself for ever.
    """

    def __init__(self) -> None:
        self._turn = threading.Condition()
        self._queue: deque[int] = deque()  # threads; the first one holds the lock

    @property
    def num_waiting(self) -> int:
        """Threads that asked for it and do not have it."""
        with self._turn:
            return max(len(self._queue) - 1, 0)

    def __enter__(self) -> None:
        me = threading.get_ident()
        with self._turn:
            self._leave(me)
            self._queue.append(me)
            try:
                self._turn.wait_for(lambda: self._queue[0] == me)
            except BaseException:  # an interrupt: whoever comes next must not wait for us
                self._leave(me)
                raise

    def __exit__(self, *_: object) -> None:
        with self._turn:
            self._leave(threading.get_ident())

    def _leave(self, me: int) -> None:
        if me in self._queue:
            self._queue.remove(me)
        self._turn.notify_all()
