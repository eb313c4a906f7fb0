"""Processes of ranks that are used again, so that tests do not start one for each executor."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from ecotone.executor.messages import Call, Reply
from ecotone.executor.methods import SHUTDOWN
from ecotone.executor.ranked import RankedExecutor
from ecotone.executor.transport import Answered, Died, Event, Transport
from ecotone.protocol.wire import decode, encode

_LAST = encode(Call(0, SHUTDOWN))
_GRACE_S = 5.0


class RankPool:
    """Processes of ranks that serve one executor after another: starting one takes seconds.

    Args:
        open_transport: starts the processes; called when there are none, or the last ones were spoilt.
    """

    def __init__(self, open_transport: Callable[[], Transport]) -> None:
        self._open = open_transport
        self._idle: Transport | None = None

    def lend(self) -> Transport:
        """Ranks that wait for their first message. One executor at a time."""
        transport, self._idle = self._idle, None
        return _Lent(self._open() if transport is None else transport, self)

    def give_back(self, transport: Transport) -> None:
        """They wait for their first message again."""
        if self._idle is None:
            self._idle = transport
        else:
            transport.close(_LAST, _GRACE_S)

    def close(self) -> None:
        """End the processes."""
        if self._idle is not None:
            self._idle.close(_LAST, _GRACE_S)
            self._idle = None


class _Lent(Transport):
    """Another transport, which goes back to its pool when it is closed in good health."""

    def __init__(self, inner: Transport, pool: RankPool) -> None:
        self.init_method = inner.init_method
        self._inner = inner
        self._pool = pool
        self._num_ranks = 0
        self._spoilt = False
        self._closed = False

    def send_starts(self, messages: Sequence[bytes]) -> None:
        self._num_ranks = len(messages)
        self._inner.send_starts(messages)

    def send(self, message: bytes, reply_rank: int | None) -> None:
        self._inner.send(message, reply_rank)

    def wait(self, timeout: float | None) -> list[Event]:
        events = self._inner.wait(timeout)
        self._spoilt |= any(isinstance(event, Died) for event in events)
        return events

    def interrupt(self) -> None:
        if not self._closed:
            self._inner.interrupt()

    def close(self, last_message: bytes, grace_s: float) -> None:
        self._closed = True
        if not self._spoilt and self._all_ended(last_message, time.monotonic() + grace_s):
            self._pool.give_back(self._inner)
        else:
            self._inner.close(last_message, grace_s)

    def _all_ended(self, last_message: bytes, deadline: float) -> bool:
        last = decode(last_message, Call).seq
        self._inner.send(last_message, None)
        ended: set[int] = set()
        while len(ended) < self._num_ranks and not self._spoilt and time.monotonic() < deadline:
            for event in self.wait(max(deadline - time.monotonic(), 0)):
                if isinstance(event, Answered) and decode(event.message, Reply).seq == last:
                    ended.add(event.rank)
        while self.wait(0):
            pass  # the next executor is not to hear of it
        return len(ended) == self._num_ranks and not self._spoilt


def pooled(kind: type[RankedExecutor], pool: RankPool) -> type[RankedExecutor]:
    """``kind`` with ranks of ``pool``."""
    return type(f"Pooled{kind.__name__}", (kind,), {"_open_transport": lambda _: pool.lend()})
