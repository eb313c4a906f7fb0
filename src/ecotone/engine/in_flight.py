"""The steps that were ordered and whose results are not taken in yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Set
from typing import NamedTuple

from ecotone.engine.request import Request
from ecotone.errors import ContractError
from ecotone.protocol.step import SchedulerOutput


class _Step(NamedTuple):
    number: int
    requests: Mapping[str, Request]  # not their ids alone: another request may take one over in the meantime
    keys: Set[str]


class StepsInFlight:
    """In order. A request is in one of them at most; its ``in_flight`` says so."""

    def __init__(self) -> None:
        self._steps: deque[_Step] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def keys(self) -> Set[str]:
        """What they encode or load."""
        return frozenset[str]().union(*(step.keys for step in self._steps))

    def begin(self, order: SchedulerOutput, requests: Mapping[str, Request]) -> None:
        """``order`` is on its way. ``requests``: by id, those that it schedules among them."""
        keys = frozenset(s.item_keys[i] for s in order.scheduled for i in (*s.encode, *s.load))
        self._steps.append(_Step(order.step, {s.req_id: requests[s.req_id] for s in order.scheduled}, keys))
        for request in self._steps[-1].requests.values():
            request.in_flight = True

    def requests_of(self, order: SchedulerOutput) -> Mapping[str, Request]:
        """Who was scheduled in the oldest step, which must be ``order``.

        Raises:
            ContractError: it is another one.
        """
        oldest = self._steps[0].number if self._steps else None
        if order.step != oldest:
            raise ContractError(f"a result of step {order.step}, where that of step {oldest} is due")
        return self._steps[0].requests

    def end(self) -> None:
        """The oldest step's result is taken in."""
        for request in self._steps.popleft().requests.values():
            request.in_flight = False
