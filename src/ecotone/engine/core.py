"""The step loop's body: schedule, execute, take in, and tell whoever listens. One caller at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from ecotone.engine.detokenizer import IncrementalDetokenizer, Tokenizer
from ecotone.engine.outputs import StreamDelta
from ecotone.engine.record import Record
from ecotone.engine.request import Request, RequestStatus
from ecotone.engine.scheduler import Scheduler
from ecotone.errors import EcotoneError, IntegrityError, RequestError, RequestFailedError, ShutDownError
from ecotone.executor.base import Executor, Future
from ecotone.protocol.outputs import ModelRunnerOutput
from ecotone.protocol.params import SamplingParams
from ecotone.protocol.step import SchedulerOutput

# A step that computed nothing is followed by a wait for news, this long at most.
PROGRESS_TIMEOUT_S = 0.002


class EngineCore:
    """Scheduler, executor, and the requests in flight. Not thread-safe.

    A step that raises leaves ranks and scheduler in a state nobody knows: the requests in flight fail, and the
    engine takes no more work.
    """

    def __init__(
        self, scheduler: Scheduler, executor: Executor, tokenizer: Tokenizer, clock: Callable[[], float]
    ) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._tokenizer = tokenizer
        self._clock = clock
        self._records: dict[str, Record] = {}
        self._samples: dict[str, list[Record]] = {}  # a caller's id -> those of its outputs that are in flight
        self._in_flight: deque[tuple[SchedulerOutput, Future[ModelRunnerOutput]]] = deque()  # oldest first
        self._unusable: str | None = None

    @property
    def num_records(self) -> int:
        """Requests in flight."""
        return len(self._records)

    @property
    def has_work(self) -> bool:
        """Whether a step is needed, for a request or for what requests left behind."""
        return self._unusable is None and self._guarded(self._scheduler.has_work, False)

    def check_usable(self) -> None:
        """Raise unless the engine can take work.

        Raises:
            ShutDownError: it was closed, or a step failed; the message says why.
        """
        if self._unusable is not None:
            raise ShutDownError(self._unusable)

    def add(self, request_id: str, samples: Sequence[Request], sink: deque[StreamDelta]) -> list[Record]:
        """Take in a caller's request, one of the scheduler's for each of its outputs. Deltas go to ``sink``.

        Raises:
            RequestError: it could never run, or its id is in flight. Nothing was taken in then.
            ShutDownError: the engine takes no more work.
        """
        self.check_usable()
        if request_id in self._samples:
            raise RequestError(f"request id {request_id!r} is in flight already; ids must be unique")
        added: list[Record] = []
        try:
            for index, request in enumerate(samples):
                self._scheduler.add_request(request)
                added.append(Record(request_id, index, request, self._detokenizer(request), sink, self._clock))
        except RequestError:
            for record in added:
                self._scheduler.finish_request(record.request.req_id, RequestStatus.FINISHED_ABORTED)
            raise
        self._records.update((record.request.req_id, record) for record in added)
        self._samples[request_id] = added.copy()
        return added

    def _detokenizer(self, request: Request) -> IncrementalDetokenizer:
        params = request.params
        if isinstance(params, SamplingParams):
            return IncrementalDetokenizer(self._tokenizer, params.stop, params.min_tokens)
        return IncrementalDetokenizer(self._tokenizer)

    def _forget(self, record: Record) -> None:
        del self._records[record.request.req_id]
        left = self._samples[record.request_id]
        left.remove(record)
        if not left:
            del self._samples[record.request_id]

    def step(self) -> bool:
        """One step, if there is anything to do. Whether tokens were computed or requests ended."""
        return self.has_work and self._guarded(self._step, True)

    def _guarded(self, act: Callable[[], bool], otherwise: bool) -> bool:
        """What ``act`` says. Nobody knows what state an error leaves ranks and scheduler in: it ends everything,
        and the answer is ``otherwise``."""
        try:
            return act()
        # A rim: whatever a model, a connector or a device raises is the cause of the requests' failures.
        except Exception as error:  # noqa: BLE001
            self.fail(f"the engine stopped: a step failed with {type(error).__name__}: {error}", error)
            return otherwise
        except BaseException as interrupt:
            self.fail(f"the engine stopped: {type(interrupt).__name__} interrupted a step", interrupt)
            raise

    def _step(self) -> bool:
        """Keep as many steps in flight as keep all ranks busy, and take in the result of the oldest."""
        if not self._in_flight:
            self._submit(self._scheduler.schedule())
        while (ahead := self._scheduler.schedule_ahead()) is not None:
            self._submit(ahead)
        return self._take_in()

    def _submit(self, scheduler_output: SchedulerOutput) -> None:
        self._in_flight.append((scheduler_output, self._executor.submit_step(scheduler_output)))

    def _take_in(self) -> bool:
        scheduler_output, answer = self._in_flight.popleft()
        deltas = self._scheduler.update_from_output(scheduler_output, answer.result())
        for delta in deltas:
            record = self._records[delta.req_id]
            record.apply(delta)
            if record.output is not None:
                self._forget(record)
            if record.has_stopped and delta.finished is None:
                self._scheduler.finish_request(delta.req_id, RequestStatus.FINISHED_STOPPED)
        return bool(scheduler_output.scheduled or deltas)

    def drain(self) -> None:
        """Take in the results of all steps in flight, and order none."""
        while self._in_flight:
            self._guarded(self._take_in, True)

    def wait_for_progress(self) -> None:
        """Wait a little for news from the ranks."""
        self._executor.wait_for_progress(PROGRESS_TIMEOUT_S)

    def abort(self, request_id: str) -> bool:
        """End a request, all of its outputs. Whether it was in flight."""
        records = list(self._samples.get(request_id, ()))
        for record in records:
            self._forget(record)
            record.finish("abort")  # before a connector hears of it: whoever waits is answered, whatever it does
        for record in records:
            self._guarded(partial(self._end, record.request.req_id), False)
        return bool(records)

    def _end(self, req_id: str) -> bool:
        return self._scheduler.finish_request(req_id, RequestStatus.FINISHED_ABORTED)

    def fail(self, reason: str, cause: BaseException | None = None) -> None:
        """End every request in flight with an error, and take no more work."""
        if self._unusable is None:
            self._unusable = reason
        for record in list(self._records.values()):
            error: EcotoneError = RequestFailedError(f"request {record.request_id!r}: {reason}")
            error.__cause__ = cause
            record.finish("error", error)
        self._records.clear()
        self._samples.clear()
        self._in_flight.clear()

    def check_integrity(self) -> None:
        """Compare the requests listened to with those scheduled.

        Raises:
            IntegrityError: one without the other.
        """
        scheduled = self._scheduler.has_unfinished()
        if self._unusable is None and scheduled != bool(self._records):
            some = "some are" if scheduled else "none is"
            raise IntegrityError(f"{len(self._records)} requests are listened to, while {some} scheduled")
