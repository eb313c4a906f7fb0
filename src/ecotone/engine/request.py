"""A request inside the engine: what was asked, how far it has come, and the one table of its states."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum

from ecotone.errors import IllegalTransitionError
from ecotone.protocol.params import PoolingParams, SamplingParams
from ecotone.protocol.step import MultiModalItem


class RequestStatus(StrEnum):
    """Where a request stands. PREEMPTED waits like WAITING, but has been announced to the ranks before."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED_STOPPED = "finished_stopped"
    FINISHED_LENGTH = "finished_length"
    FINISHED_ABORTED = "finished_aborted"
    FINISHED_ERROR = "finished_error"

    @property
    def is_finished(self) -> bool:
        """Whether nothing can follow."""
        return self in FINISH_REASONS


_FINISHED = frozenset(status for status in RequestStatus if status.name.startswith("FINISHED_"))

# A stop string is found in text, which may be looked at after the request was preempted: PREEMPTED -> STOPPED.
# LENGTH follows from a token that a step produced, so only from RUNNING.
TRANSITIONS: Mapping[RequestStatus, frozenset[RequestStatus]] = {
    RequestStatus.WAITING: frozenset(
        {RequestStatus.RUNNING, RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR}
    ),
    RequestStatus.RUNNING: frozenset({RequestStatus.PREEMPTED, *_FINISHED}),
    RequestStatus.PREEMPTED: frozenset({RequestStatus.RUNNING, *_FINISHED - {RequestStatus.FINISHED_LENGTH}}),
    **{status: frozenset() for status in _FINISHED},
}

FINISH_REASONS: Mapping[RequestStatus, str] = {
    RequestStatus.FINISHED_STOPPED: "stop",
    RequestStatus.FINISHED_LENGTH: "length",
    RequestStatus.FINISHED_ABORTED: "abort",
    RequestStatus.FINISHED_ERROR: "error",
}


class Request:
    """One request. The scheduler alone changes it; everyone else reads.

    Attributes:
        req_id: unique among the requests in flight.
        prompt_token_ids: the prompt, placeholders expanded to one per encoder row.
        params: what is asked of the output.
        items: in prompt order.
        item_keys: parallel to ``items``: their present cache keys.
        seed: of this request's random numbers.
        output_token_ids: tokens generated so far.
        num_computed_tokens: tokens whose keys and values are stored. In an engine that only encodes: the
            length of the prompt's prefix whose items are all encoded or known to be stored.
        status: see ``TRANSITIONS``.
        stop_reason: the stop token that ended it, if one of ``stop_token_ids`` did.
        error: why it failed; empty otherwise.
        in_flight: whether a step that computes something of it is under way. Until its result is taken in, no
            other step has the request, nor is it preempted.
        deferred: whether the last pass left it out because an encoding of it is not ready yet.
        load_failures: key -> how often a load of it failed for this request.
        num_lost_encodings: how many steps encoded an item of it and did not hold it at their end.
        num_encoded_items, num_loaded_items, num_cached_items: how its encoder rows came to be there: encoded
            for it, loaded for it, or already held by the ranks. A repeated step counts again.
        arrival_time, first_token_time: seconds of the engine's clock; ``None`` before it happened.
    """

    def __init__(
        self,
        req_id: str,
        prompt_token_ids: tuple[int, ...],
        params: SamplingParams | PoolingParams,
        *,
        items: tuple[MultiModalItem, ...] = (),
        item_keys: tuple[str, ...] = (),
        seed: int = 0,
        arrival_time: float,
    ) -> None:
        self.req_id = req_id
        self.prompt_token_ids = prompt_token_ids
        self.params = params
        self.items = items
        self.item_keys = item_keys
        self.seed = seed
        self.output_token_ids: list[int] = []
        self.num_computed_tokens = 0
        self.status = RequestStatus.WAITING
        self.stop_reason: int | None = None
        self.error = ""
        self.in_flight = False
        self.deferred = False
        self.load_failures: dict[str, int] = {}
        self.num_lost_encodings = 0
        self.num_encoded_items = 0
        self.num_loaded_items = 0
        self.num_cached_items = 0
        self.arrival_time = arrival_time
        self.first_token_time: float | None = None
        self._items_end = max((item.end for item in items), default=0)

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.output_token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens known so far: prompt and output."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def is_finished(self) -> bool:
        """Whether it has ended, in whichever way."""
        return self.status.is_finished

    def items_in(self, start: int, end: int) -> Iterator[int]:
        """Indices of the items that reach into the positions ``start <= p < end``, in prompt order."""
        if start >= self._items_end:
            return
        for index, item in enumerate(self.items):
            if item.offset < end and item.end > start:
                yield index

    def transition(self, status: RequestStatus) -> None:
        """Go to ``status``.

        Raises:
            IllegalTransitionError: the table has no such step.
        """
        if status not in TRANSITIONS[self.status]:
            raise IllegalTransitionError(f"request {self.req_id!r} cannot go from {self.status} to {status}")
        self.status = status
