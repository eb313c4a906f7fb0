"""What every executor with ranks outside this process does alike: calls, answers, folds, failures.

How messages get there and back is a ``Transport``'s business. There is one such routine and not one per transport,
so that what is true of one executor is true of all.
"""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from typing import Any

from ecotone.config import EngineConfig
from ecotone.errors import ContractError, EcotoneError, RankFailedError, RankTimeoutError, ShutDownError, WireError
from ecotone.executor.base import Executor
from ecotone.executor.messages import Call, Reply, Start, Started, encode_config, to_error
from ecotone.executor.methods import METHODS, SHUTDOWN, bind, decode_result, encode_args
from ecotone.executor.rank import WORKER
from ecotone.executor.transport import Answered, Died, Event, Interrupted, Signalled, Transport
from ecotone.protocol.aggregate import OutputAggregator, fold_outputs
from ecotone.protocol.connector import ECConnectorFactory, Participant
from ecotone.protocol.wire import decode, encode
from ecotone.worker.ranks import output_rank, rank_specs

SHUTDOWN_GRACE_S = 5.0
_START = 0  # its number; calls count from 1


class PendingCall:
    """A call and the answers it awaits. A ``Future``."""

    def __init__(
        self,
        executor: RankedExecutor,
        method: str,
        awaited: Iterable[int],
        finish: Callable[[dict[int, bytes]], Any],
    ) -> None:
        self.method = method
        self.awaited = set(awaited)
        self.answers: dict[int, bytes] = {}
        self.error: EcotoneError | None = None
        self._executor = executor
        self._finish: Callable[[dict[int, bytes]], Any] | None = finish
        self._value: Any = None

    @property
    def settled(self) -> bool:
        """Whether nothing more is awaited."""
        return self.error is not None or not self.awaited

    def done(self) -> bool:
        """See ``Future``."""
        return self.settled

    def result(self, timeout: float | None = None) -> Any:
        """See ``Future``."""
        self._executor.settle(self, timeout)
        if self.error is not None:
            raise self.error
        if self._finish is not None:
            # Once: a fold may count.
            finish, self._finish = self._finish, None
            try:
                self._value = finish(self.answers)
            except EcotoneError as error:
                self.error = error
                raise
            self.answers = {}
        return self._value


class RankedExecutor(Executor):
    """Ranks outside this process.

    Args:
        config: the engine's.
        ec_factory: checks the connector's configuration; each rank makes its own from ``config.ec``.
        engine_id: of this start of the engine.
        make_rank: ``module:attribute`` of the ``RankFactory`` that each rank calls in its process.
        shutdown_grace_s: how long ranks may take to end by themselves, in seconds.

    Raises:
        ConfigError: a configuration that cannot work; where it can be seen from here, nothing was started.
        ModelError, ResourceError: a rank cannot be built; nothing is left of the others.
        RankFailedError: a rank died on the way.
    """

    def __init__(
        self,
        config: EngineConfig,
        ec_factory: ECConnectorFactory | None,
        engine_id: str,
        *,
        make_rank: str = WORKER,
        shutdown_grace_s: float = SHUTDOWN_GRACE_S,
    ) -> None:
        super().__init__(config)
        if config.ec is not None and ec_factory is not None:
            ec_factory.validate(config.ec.role, config.ec.options)
        sent_config = encode_config(config)
        self._config = config
        self._output_rank = output_rank(config)
        self._grace_s = shutdown_grace_s
        self._numbers = count(_START + 1)
        self._calls: dict[int, PendingCall] = {}
        self._failure: RankFailedError | None = None
        self._signalled = False
        self._closing = False
        self._closed = False
        self._lock = threading.RLock()
        self._transport = self._open_transport()
        try:
            specs = rank_specs(config, self._transport.init_method if config.world_size > 1 else "")
            starting = self._register(_START, "start", range(self._world_size), _started)
            self._transport.send_starts(
                [
                    encode(Start(config=sent_config, engine_id=engine_id, spec=spec, epoch=0, make_rank=make_rank))
                    for spec in specs
                ]
            )
            self.ranks: tuple[Started, ...] = starting.result()
        except BaseException:
            self.shutdown()
            raise

    @abstractmethod
    def _open_transport(self) -> Transport:
        """Start ``world_size`` ranks that wait for their first message."""

    @property
    def output_rank(self) -> int:
        """See ``Executor``."""
        return self._output_rank

    def collective_rpc(
        self,
        method: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        timeout: float | None = None,
        non_block: bool = False,
        unique_reply_rank: int | None = None,
        kv_output_aggregator: OutputAggregator | None = None,
        ec_output_aggregator: OutputAggregator | None = None,
    ) -> Any:
        """See ``Executor``."""
        sent = encode_args(bind(method, args, kwargs))
        self._check_rank(unique_reply_rank)
        aggregators = [each for each in (ec_output_aggregator, kv_output_aggregator) if each is not None]
        onto = self._output_rank if unique_reply_rank is None else unique_reply_rank
        reply_rank = None if aggregators else unique_reply_rank

        def finish(answers: dict[int, bytes]) -> Any:
            results = [self._decode(rank, method, answers[rank]) for rank in sorted(answers)]
            if aggregators:
                return fold_outputs(results, onto, aggregators)
            return results if reply_rank is None else results[0]

        with self._lock:
            self._check_usable(method)
            number = next(self._numbers)
            awaited = range(self._world_size) if reply_rank is None else (reply_rank,)
            call = self._register(number, method, awaited, finish)
            self._transport.send(encode(Call(number, method, sent, reply_rank)), reply_rank)
        return call if non_block else call.result(timeout)

    def participants(self) -> tuple[Participant, ...]:
        """See ``Executor``."""
        return tuple(Participant(rank, each.host) for rank, each in enumerate(self.ranks) if each.takes_part)

    def wait_for_progress(self, timeout_s: float) -> None:
        """See ``Executor``. Ends at once when a rank is lost: the next call says so."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            while not (self._signalled or self._failure or self._closing):
                left = deadline - time.monotonic()
                self._take_in(self._transport.wait(max(left, 0)))
                if left <= 0:
                    break
            self._signalled = False

    def check_health(self) -> None:
        """See ``Executor``."""
        with self._lock:
            if not self._closing:
                self._take_in(self._transport.wait(0))
            self._check_usable("check_health")

    def shutdown(self) -> None:
        """See ``Executor``. A rank that is in the middle of something gets a few seconds, and is then killed."""
        if self._closed:
            return
        self._closing = True
        self._transport.interrupt()
        with self._lock:
            if not self._closed:
                self._closed = True
                self._end_calls(ShutDownError("the executor was shut down"))
                self._transport.close(encode(Call(next(self._numbers), SHUTDOWN)), self._grace_s)

    def interrupt(self) -> None:
        """See ``Executor``."""
        self.shutdown()

    def settle(self, call: PendingCall, timeout: float | None) -> None:
        """Wait until nothing more is awaited of ``call``.

        Raises:
            RankTimeoutError: not within ``timeout`` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            while not call.settled:
                left = None if deadline is None else max(deadline - time.monotonic(), 0)
                events = self._transport.wait(left)
                self._take_in(events)
                if left == 0 and not events:
                    late = tuple(sorted(call.awaited))
                    names = ", ".join(map(str, late))
                    raise RankTimeoutError(f"{call.method}: no answer of ranks {names} in {timeout} s", late)

    # -- inside -----------------------------------------------------------------------------------------------

    def _register(
        self, number: int, method: str, awaited: Iterable[int], finish: Callable[[dict[int, bytes]], Any]
    ) -> PendingCall:
        call = self._calls[number] = PendingCall(self, method, awaited, finish)
        return call

    def _take_in(self, events: Iterable[Event]) -> None:
        for event in events:
            match event:
                case Answered(rank, message):
                    self._answer(rank, message)
                case Died(rank, cause):
                    self._fail(RankFailedError(f"rank {rank} {cause}", rank), rank)
                case Signalled():
                    self._signalled = True
                case Interrupted():
                    self._end_calls(ShutDownError("the executor was shut down"))

    def _answer(self, rank: int, message: bytes | memoryview) -> None:
        try:
            reply = decode(message, Reply)
        except WireError as error:
            self._fail(RankFailedError(f"rank {rank} sent what is no answer: {error}", rank), rank)
            return
        call = self._calls.get(reply.seq)
        if reply.fault is not None:
            raised = to_error(reply.fault, rank)
            if call is not None:
                call.error = raised
                del self._calls[reply.seq]
            method = METHODS.get(reply.fault.method)
            if method is not None and method.is_step:
                # The others may wait for it within the step, for ever.
                self._fail(raised, rank)
        elif call is not None and reply.result is not None and rank in call.awaited:
            call.answers[rank] = reply.result
            call.awaited.discard(rank)
            if not call.awaited:
                del self._calls[reply.seq]

    def _fail(self, error: EcotoneError, rank: int) -> None:
        if self._failure is None:
            self._failure = RankFailedError(str(error), rank)
        self._end_calls(error)

    def _end_calls(self, error: EcotoneError) -> None:
        for call in self._calls.values():
            call.error = error
        self._calls.clear()

    def _check_usable(self, method: str) -> None:
        if self._closing:
            raise ShutDownError(f"{method}: the executor was shut down")
        if self._failure is not None:
            raise RankFailedError(f"{method}: {self._failure}", self._failure.rank)

    def _check_rank(self, rank: int | None) -> None:
        if rank is not None and not 0 <= rank < self._world_size:
            raise ContractError(f"unique_reply_rank={rank} is none of the {self._world_size} ranks")

    def _decode(self, rank: int, method: str, data: bytes) -> Any:
        try:
            return decode_result(method, data)
        except WireError as error:
            raise type(error)(f"rank {rank}, {method}: {error}") from error


def _started(answers: dict[int, bytes]) -> tuple[Started, ...]:
    return tuple(decode(answers[rank], Started) for rank in sorted(answers))
