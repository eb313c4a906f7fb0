"""A node whose answers come late."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from ecotone.node.exchange import AnyAnswer, AnyOp, NodeExchange


class DelayedExchange:
    """Carries out operations at once and keeps each answer back for a number of polls.

    Answers keep the order of their operations, so a late one holds up those behind it.

    Args:
        inner: the exchange that does the work.
        delay_polls: polls that return without the answer before one returns it; a function is asked per answer.
    """

    def __init__(self, inner: NodeExchange, delay_polls: Callable[[AnyAnswer], int] | int) -> None:
        self._inner = inner
        self._delay = delay_polls if callable(delay_polls) else lambda _answer: delay_polls
        self._polls = 0
        self._waiting: deque[tuple[int, AnyAnswer]] = deque()

    def submit(self, ops: Sequence[AnyOp]) -> None:
        """See ``NodeExchange``."""
        self._inner.submit(ops)
        self._collect()

    def flush(self) -> None:
        """See ``NodeExchange``."""
        self._inner.flush()
        self._collect()

    def poll(self) -> Sequence[AnyAnswer]:
        """See ``NodeExchange``."""
        self._collect()
        self._polls += 1
        answers = []
        while self._waiting and self._waiting[0][0] < self._polls:
            answers.append(self._waiting.popleft()[1])
        return answers

    def wait(self, timeout_s: float) -> None:
        """See ``NodeExchange``. Answers that are kept back stay so: they wait for polls, not for time."""
        self._inner.wait(timeout_s)

    def statistics(self) -> dict[str, float]:
        """See ``NodeExchange``."""
        return self._inner.statistics()

    def close(self) -> None:
        """See ``NodeExchange``."""
        self._waiting.clear()
        self._inner.close()

    def _collect(self) -> None:
        self._waiting.extend((self._polls + self._delay(answer), answer) for answer in self._inner.poll())
