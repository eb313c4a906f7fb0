"""The thread that takes the steps nobody waits for: those that settle what finished requests left behind."""

from __future__ import annotations

import threading
from collections.abc import Callable

# Between two steps without effect; doubled from the first to the last.
FIRST_WAIT_S, LAST_WAIT_S = 0.001, 0.02


class Settler:
    """Calls ``settle`` after each ``wake``, again and again until it says that nothing is pending; then rests.

    Args:
        settle: does one step if one is needed; whether more are.
    """

    def __init__(self, settle: Callable[[], bool]) -> None:
        self._settle = settle
        self._wake = threading.Event()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ecotone-settler", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Something may be pending."""
        self._wake.set()

    def close(self) -> None:
        """End the thread. Idempotent. Not to be called while holding what ``settle`` waits for."""
        self._closed.set()
        self._wake.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.is_set():
            self._wake.wait()
            self._wake.clear()
            wait_s = FIRST_WAIT_S
            while not self._closed.is_set() and self._settle():
                self._closed.wait(wait_s)
                wait_s = min(2 * wait_s, LAST_WAIT_S)
