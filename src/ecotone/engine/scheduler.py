"""The scheduler: what each step does, and what its result means for every request.

A request's state advances only when a step's result is taken in. A result that is discarded (a load failed) leaves
the request as it was before the step, and the next pass orders the same tokens again.

Several steps may be in flight, of different requests; their results are taken in in order. What a request gives
back while a step with it is in flight (it was aborted: its KV blocks, its room in the encoder cache) may be
given to others at once: each rank, of whatever pipeline stage, carries out the steps in order on memory of its
own, and so is through with the step that still uses it before it begins the one that uses it anew.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Set

from ecotone.engine.admission import SchedulerLimits, check_request
from ecotone.engine.batching import Batch, Batcher
from ecotone.engine.encoder_cache_manager import EncoderCacheManager
from ecotone.engine.in_flight import StepsInFlight
from ecotone.engine.kv_cache_manager import KVCacheManager
from ecotone.engine.request import Request, RequestStatus
from ecotone.engine.request_pool import RequestPool
from ecotone.engine.step_result import (
    RequestDelta,
    RowResult,
    check_row,
    check_stop,
    requests_with_rows_of,
    rows_of,
)
from ecotone.errors import ContractError, IllegalTransitionError, RequestError
from ecotone.protocol.connector import ECConnectorMetadata, ECSchedulerConnector
from ecotone.protocol.outputs import ECConnectorOutput, ModelRunnerOutput
from ecotone.protocol.params import SamplingParams
from ecotone.protocol.step import ScheduledRequest, SchedulerOutput

# A request fails when as many steps lost what they had encoded for it.
MAX_LOST_ENCODINGS = 3


class Scheduler:
    """Pure: it decides; the executor acts. One step is ``schedule``, the step itself, ``update_from_output``.

    Args:
        limits: what there is to share out.
        connector: the EC connector's scheduler half; ``None`` encodes everything here.
        eos_token_ids: tokens that end a text.
        clock: seconds; stamps requests.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        connector: ECSchedulerConnector | None,
        eos_token_ids: tuple[int, ...],
        clock: Callable[[], float],
    ) -> None:
        self.limits = limits
        self._connector = connector
        self._encode_only = connector is not None and connector.is_encode_only
        self._eos_token_ids = frozenset(eos_token_ids)
        self._clock = clock
        self._encoder_cache = EncoderCacheManager(limits.encoder_cache_rows)
        self._pool = RequestPool(KVCacheManager(limits.kv_blocks, limits.block_size), self._encoder_cache)
        self._batcher = Batcher(limits, self._pool, connector)
        self._step = 0
        self._in_flight = StepsInFlight()
        self._counters: Counter[str] = Counter(rollbacks=0, fallbacks_load_failed=0, steps_ahead=0)

    def add_request(self, request: Request) -> None:
        """Take in a request.

        Raises:
            RequestError: it could never run, or its id is in flight. A subclass says why.
        """
        if request.req_id in self._pool.requests:
            raise RequestError(f"request id {request.req_id!r} is in flight already; ids must be unique")
        check_request(request, self.limits, encode_only=self._encode_only)
        self._pool.add(request)

    def finish_request(self, req_id: str, status: RequestStatus, error: str = "") -> bool:
        """End a request from outside a step: an abort, a stop string, an error. Whether it was in flight.

        Raises:
            IllegalTransitionError: ``status`` is not a final one, or cannot follow on the request's.
        """
        if not status.is_finished:
            raise IllegalTransitionError(f"request {req_id!r} cannot finish as {status}")
        request = self._pool.requests.get(req_id)
        if request is None:
            return False
        self._finish(request, status, error)
        return True

    def has_unfinished(self) -> bool:
        """Whether a request is in flight."""
        return bool(self._pool.requests)

    def has_work(self) -> bool:
        """Whether a step is in flight, or needed: for a request, so that ranks hear what to forget, or for the
        connector."""
        return (
            len(self._in_flight) > 0
            or self.has_unfinished()
            or self._pool.has_announcements
            or self._encoder_cache.has_notices
            or (self._connector is not None and self._connector.has_pending_work())
        )

    def reset_encoder_cache(self, rekey: Callable[[Request], tuple[str, ...]]) -> None:
        """Forget every encoding, here and (with the next step) on the ranks. Keys and values already computed
        from them stay. ``rekey`` gives the new keys of a request in flight, parallel to its items.

        Raises:
            ContractError: ``rekey`` gave another number of keys. Nothing was changed then.
        """
        keys = {req_id: rekey(request) for req_id, request in self._pool.requests.items()}
        for req_id, request in self._pool.requests.items():
            if len(keys[req_id]) != len(request.items):
                raise ContractError(f"request {req_id!r}: {len(keys[req_id])} keys for {len(request.items)} items")
        self._encoder_cache.reset()
        for req_id, request in self._pool.requests.items():
            request.item_keys = keys[req_id]

    def schedule(self) -> SchedulerOutput:
        """Order the next step. With nothing to compute it is a step without tokens, which still runs the
        connector."""
        return self._order(*self._build())

    def schedule_ahead(self) -> SchedulerOutput | None:
        """Order a step while others are in flight. ``None`` when as many are as may be, or when there is nothing
        to compute meanwhile; what else the ranks are to hear waits for a later step then."""
        if len(self._in_flight) >= self.limits.max_concurrent_steps:
            return None
        batch, metadata = self._build()
        if not batch.scheduled and metadata is None:
            return None
        self._counters["steps_ahead"] += 1
        return self._order(batch, metadata)

    def _build(self) -> tuple[Batch, ECConnectorMetadata | None]:
        batch = self._batcher.build(self._in_flight.keys)
        return batch, None if self._connector is None else self._connector.build_connector_meta()

    def _order(self, batch: Batch, metadata: ECConnectorMetadata | None) -> SchedulerOutput:
        self._step += 1
        order = SchedulerOutput(
            step=self._step,
            new_requests=tuple(batch.new_requests),
            scheduled=tuple(batch.scheduled),
            finished_req_ids=self._pool.take_announcements(),
            free_encoder_keys=self._encoder_cache.get_freed_keys(),
            ec_connector_metadata=metadata,
        )
        self._in_flight.begin(order, self._pool.requests)
        return order

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> list[RequestDelta]:
        """Take in the result of the oldest step in flight, all ranks' reports folded onto it. Requests that ended
        since the step was scheduled are passed over.

        Raises:
            ContractError: the result is not one of that step, or another step's is due. Nothing was changed then.
        """
        before = self._in_flight.requests_of(scheduler_output)
        ec = model_runner_output.ec_connector_output
        reported = model_runner_output.request_errors
        ran = {i: s for s in scheduler_output.scheduled if self._pool.requests.get(i := s.req_id) is before[i]}
        failed = ec.failed_loads if ec is not None else frozenset()
        # Nobody knows whether the ranks hold what a failing request was to encode: others must not build on it.
        doubtful = {s.item_keys[i] for s in scheduler_output.scheduled if s.req_id in reported for i in s.encode}
        # An error on rows that were not there may be due to just that; a real one comes again.
        discarded = requests_with_rows_of(failed, ran, self._pool.requests)
        errors = {i: e for i, e in reported.items() if i in ran and i not in discarded}
        discarded |= requests_with_rows_of(doubtful, ran, self._pool.requests) - errors.keys()
        kept = {req_id: s for req_id, s in ran.items() if req_id not in discarded and req_id not in errors}
        rows = self._rows(model_runner_output, kept)

        self._in_flight.end()
        self._apply_ec_output(ec, failed | doubtful)
        deltas = [self._fail(req_id, reason) for req_id, reason in errors.items()]
        for req_id in sorted(discarded):  # sorted: the order in which room is freed must not depend on hashes
            deltas += self._roll_back(self._pool.requests[req_id], ran[req_id], failed)
        for req_id, scheduled in kept.items():
            deltas += self._advance(self._pool.requests[req_id], scheduled, rows[req_id])
        return deltas

    def statistics(self) -> dict[str, float]:
        """Gauges of the queues and caches, counters of what was ordered, preempted, deferred, discarded."""
        steps = {"steps": self._step, "steps_in_flight": len(self._in_flight)}
        return {**steps, **self._pool.gauges(), **self._batcher.statistics(), **self._counters}

    def check_integrity(self) -> None:
        """Compare the books of everything that is owned.

        Raises:
            IntegrityError: naming what does not add up.
        """
        self._pool.check_integrity()

    def _rows(self, output: ModelRunnerOutput, kept: Mapping[str, ScheduledRequest]) -> Mapping[str, RowResult]:
        """The row of every request whose result counts; checked before anything is changed by it."""
        if self._encode_only:
            return dict.fromkeys(kept, RowResult())
        rows = rows_of(output)
        for req_id, scheduled in kept.items():
            check_row(scheduled, self._pool.requests[req_id], rows.get(req_id))
        return rows

    def _apply_ec_output(self, ec: ECConnectorOutput | None, gone: Set[str]) -> None:
        if ec is not None:
            self._counters["fallbacks_load_failed"] += len(ec.failed_loads)
            if self._connector is not None:
                self._connector.update_connector_output(ec)
        for key in sorted(gone):
            self._encoder_cache.drop(key)

    def _fail(self, req_id: str, reason: str) -> RequestDelta:
        self._finish(self._pool.requests[req_id], RequestStatus.FINISHED_ERROR, reason)
        return RequestDelta(req_id=req_id, finished=RequestStatus.FINISHED_ERROR, error=reason)

    def _roll_back(self, request: Request, scheduled: ScheduledRequest, failed: Set[str]) -> list[RequestDelta]:
        """The step's result counts for nothing. Encoder references go too: what was taken ahead of its tokens
        could otherwise keep the room that it, or another one like it, needs to go on.

        What a step encodes and does not hold at its end was taken away by a connector: encoding it again and
        again would never end."""
        self._encoder_cache.free(request)
        for key in failed & set(request.item_keys):
            request.load_failures[key] = request.load_failures.get(key, 0) + 1
        self._counters["rollbacks"] += 1
        lost = [key for key in (scheduled.item_keys[index] for index in scheduled.encode) if key in failed]
        request.num_lost_encodings += bool(lost)
        if request.num_lost_encodings < MAX_LOST_ENCODINGS:
            return []
        reason = (
            f"what its steps encoded was gone at their end, {MAX_LOST_ENCODINGS} times; the last was {lost[0]}"
        )
        return [self._fail(request.req_id, reason)]

    def _advance(self, request: Request, scheduled: ScheduledRequest, row: RowResult) -> list[RequestDelta]:
        request.num_computed_tokens += scheduled.num_tokens
        for index in sorted(self._encoder_cache.get_cached_input_ids(request)):
            if request.num_computed_tokens >= request.items[index].end:
                self._encoder_cache.free_encoder_input(request, index)
        if row.token_ids and request.first_token_time is None:
            request.first_token_time = self._clock()
        request.output_token_ids += row.token_ids
        status = self._end_of(request, row)
        if status is not None:
            self._finish(request, status, "")
        elif not row.token_ids:
            return []
        return [
            RequestDelta(
                req_id=request.req_id,
                new_token_ids=row.token_ids,
                logprobs=row.logprobs,
                pooled=row.pooled,
                finished=status,
                stop_reason=request.stop_reason,
            )
        ]

    def _end_of(self, request: Request, row: RowResult) -> RequestStatus | None:
        """How ``request`` ends with this step, if it does."""
        if row.token_ids and isinstance(request.params, SamplingParams):
            return check_stop(request, request.params, self._eos_token_ids, self.limits.max_request_tokens)
        encoded = self._encode_only and request.num_computed_tokens == request.num_tokens
        return RequestStatus.FINISHED_STOPPED if encoded or row.pooled is not None else None

    def _finish(self, request: Request, status: RequestStatus, error: str) -> None:
        self._pool.finish(request, status, error)
        if self._connector is not None:
            self._connector.request_finished(request.req_id)
