"""Virtual time: what happens, when, and what was said about it. Nothing here knows of encoder caches."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from random import Random

from ecotone.errors import EcotoneError


class ViolationError(EcotoneError):
    """A rule of the protocol does not hold.

    Attributes:
        rule: its short name.
    """

    def __init__(self, rule: str, detail: str) -> None:
        super().__init__(f"{rule}: {detail}")
        self.rule = rule
        self.detail = detail


class World:
    """A queue of events. The same seed and the same calls give the same order, on every machine.

    Args:
        seed: of every random draw.
        tracing: keep a timeline.
        max_events: more than this is a loop that gets nowhere.

    Attributes:
        now: virtual seconds since the start.
        timeline: (time, text), empty unless tracing.
        events: how many happened.
    """

    def __init__(self, seed: int, *, tracing: bool = False, max_events: int = 60_000) -> None:
        self.now = 0.0
        self.timeline: list[tuple[float, str]] = []
        self.events = 0
        self._seed = seed
        self._tracing = tracing
        self._max_events = max_events
        self._queue: list[tuple[float, int, Callable[[], object]]] = []
        self._ticks = count()

    def clock(self) -> float:
        """``now``, as components take it."""
        return self.now

    def random(self, name: str) -> Random:
        """A stream of its own for ``name``, so that what is left out of a plan disturbs the others little."""
        return Random(f"{self._seed}/{name}")

    def after(self, delay_s: float, act: Callable[[], object]) -> None:
        """Let ``act`` happen in ``delay_s``; of what is due at the same time, what was asked for first."""
        self.at(self.now + delay_s, act)

    def at(self, when: float, act: Callable[[], object]) -> None:
        """As ``after``, for who must not lose its place in a queue to the rounding of a sum."""
        heappush(self._queue, (when, next(self._ticks), act))

    def say(self, text: str, *args: object) -> None:
        """A line of the timeline, ``str.format`` of its arguments."""
        if self._tracing:
            self.timeline.append((self.now, text.format(*args)))

    def run(self, until: float) -> None:
        """Let everything happen that is due by ``until``.

        Raises:
            ViolationError: a rule was broken, or something raised what nobody expects.
        """
        while self._queue and self._queue[0][0] <= until:
            self.now, _, act = heappop(self._queue)
            self.events += 1
            if self.events > self._max_events:
                raise ViolationError("progress", f"{self._max_events} events, and still no end")
            self.guard(act)
        self.now = max(self.now, until)

    def guard(self, act: Callable[[], object]) -> None:
        """Call ``act``; whatever it raises is a violation."""
        try:
            act()
        except ViolationError:
            raise
        # A rim: whatever a component raises here is a finding, whoever raised it.
        except Exception as error:
            raise ViolationError("crash", f"{type(error).__name__}: {error}") from error
