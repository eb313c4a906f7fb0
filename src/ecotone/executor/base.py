"""How a step reaches the ranks and how their answers come back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Generic, Literal, Protocol, TypeVar, overload

import msgspec

from ecotone.config import EngineConfig
from ecotone.errors import LostReportsError
from ecotone.protocol.aggregate import ECOutputAggregator, KVOutputAggregator, OutputAggregator
from ecotone.protocol.connector import Participant
from ecotone.protocol.outputs import ModelRunnerOutput
from ecotone.protocol.step import SchedulerOutput

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Delivers(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an executor brings back from its ranks.

    Attributes:
        all_ranks: every rank's output of a step. Without it only the output rank's, and what other ranks report
            is lost.
        steps_in_flight: how many steps may be ordered before the first of them is answered.
    """

    all_ranks: bool
    steps_in_flight: int


class Future(Protocol[T_co]):
    """An answer on its way. Only the executor's caller may ask it."""

    def done(self) -> bool:
        """Whether ``result`` would not wait."""
        ...

    def result(self, timeout: float | None = None) -> T_co:
        """The answer, after at most ``timeout`` seconds.

        Raises:
            RankTimeoutError: it did not come in time; it may still come.
            EcotoneError: what went wrong on a rank.
        """
        ...


class Ready(Generic[T]):
    """A ``Future`` whose answer was there at once: a value, or what raises."""

    def __init__(self, get: Callable[[], T]) -> None:
        self._value: T | None = None
        self._error: BaseException | None = None
        try:
            self._value = get()
        except BaseException as error:  # a rim: it belongs to whoever asks for the result
            if not isinstance(error, Exception):
                raise
            self._error = error

    def done(self) -> bool:
        """See ``Future``."""
        return True

    def result(self, timeout: float | None = None) -> T:  # noqa: ARG002 - nothing to wait for
        """See ``Future``."""
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]


class Executor(ABC):
    """Drives every rank of one engine. One caller at a time; only ``shutdown`` may come from any thread.

    Args:
        config: the engine's.

    Raises:
        LostReportsError: reports that the configuration needs would be lost; nothing was started.
    """

    delivers: ClassVar[Delivers]

    def __init__(self, config: EngineConfig) -> None:
        if config.ec is not None:
            self._refuse_to_lose("EC", config.world_size)
        self._world_size = config.world_size
        self._max_concurrent_steps = min(config.pipeline_parallel_size, self.delivers.steps_in_flight)
        self._ec_aggregator: ECOutputAggregator | None = None
        self._kv_aggregator: KVOutputAggregator | None = None

    @overload
    def execute_model(
        self, scheduler_output: SchedulerOutput, *, non_block: Literal[False] = False
    ) -> ModelRunnerOutput | None: ...
    @overload
    def execute_model(
        self, scheduler_output: SchedulerOutput, *, non_block: Literal[True]
    ) -> Future[ModelRunnerOutput | None]: ...
    def execute_model(
        self, scheduler_output: SchedulerOutput, *, non_block: bool = False
    ) -> ModelRunnerOutput | Future[ModelRunnerOutput | None] | None:
        """Run one step on every rank.

        Returns the output rank's result with every rank's reports folded onto it, or ``None`` when the step
        goes on in ``sample_tokens``. With ``non_block``, a future of it.
        """
        answer: ModelRunnerOutput | Future[ModelRunnerOutput | None] | None
        answer = self._step("execute_model", (scheduler_output,), non_block)
        return answer

    @overload
    def sample_tokens(self, *, non_block: Literal[False] = False) -> ModelRunnerOutput: ...
    @overload
    def sample_tokens(self, *, non_block: Literal[True]) -> Future[ModelRunnerOutput]: ...
    def sample_tokens(self, *, non_block: bool = False) -> ModelRunnerOutput | Future[ModelRunnerOutput]:
        """Finish the step that ``execute_model`` answered with ``None``."""
        answer: ModelRunnerOutput | Future[ModelRunnerOutput] = self._step("sample_tokens", (), non_block)
        return answer

    @property
    def max_concurrent_steps(self) -> int:
        """How many steps keep all ranks busy: one for each pipeline stage."""
        return self._max_concurrent_steps

    def submit_step(self, scheduler_output: SchedulerOutput) -> Future[ModelRunnerOutput]:
        """Order a whole step, both its phases, and return at once. Each rank carries out its steps in the order in
        which they were submitted, and none before it is through with the last one; results are to be asked for in
        that order too."""
        answer: Future[ModelRunnerOutput] = self._step("execute_step", (scheduler_output,), True)
        return answer

    def _step(self, method: str, args: tuple[Any, ...], non_block: bool) -> Any:
        return self.collective_rpc(
            method,
            args,
            non_block=non_block,
            unique_reply_rank=self.output_rank,
            kv_output_aggregator=self._kv_aggregator,
            ec_output_aggregator=self._ec_aggregator,
        )

    @abstractmethod
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
        """Call ``method`` (see ``methods``) by name on every rank.

        Args:
            timeout: seconds to wait for the answers; ``None`` waits for as long as all ranks live.
            non_block: return a ``Future`` at once.
            unique_reply_rank: the one rank that answers.
            kv_output_aggregator, ec_output_aggregator: fetch every rank's answer and fold them onto that of
                ``unique_reply_rank``, or of the output rank.

        Returns:
            The results in rank order; with a reply rank or an aggregator, one result.

        Raises:
            ContractError: no rank has such a method, or it takes other arguments.
            RankTimeoutError: some ranks did not answer in time.
            RankFailedError: a rank died, or raised an error that is not Ecotone's.
            EcotoneError: a rank raised it.
            ShutDownError: the executor was shut down.
        """

    @property
    @abstractmethod
    def output_rank(self) -> int:
        """The rank whose tokens and vectors count."""

    @abstractmethod
    def participants(self) -> tuple[Participant, ...]:
        """The ranks that take part in EC transfers, by identity. None where no EC connector is configured."""

    def init_ec_output_aggregator(self) -> None:
        """Fold EC reports from now on; called only when an EC connector is configured.

        Raises:
            LostReportsError: this executor would lose reports.
        """
        self._refuse_to_lose("EC", self._world_size)
        self._ec_aggregator = ECOutputAggregator()

    def init_kv_output_aggregator(self, expected_finished_count: int) -> None:
        """Fold KV reports from now on; called only when a KV connector is configured.

        Raises:
            LostReportsError: this executor would lose reports.
            ContractError: a count less than 1.
        """
        self._refuse_to_lose("KV", self._world_size)
        self._kv_aggregator = KVOutputAggregator(expected_finished_count)

    @abstractmethod
    def wait_for_progress(self, timeout_s: float) -> None:
        """Block until some rank has something to report outside a step, or ``timeout_s`` went by. What was
        signalled before the call counts."""

    @abstractmethod
    def check_health(self) -> None:
        """Raise what is wrong with a rank, if anything.

        Raises:
            RankFailedError: a rank died.
            ShutDownError: the executor was shut down.
        """

    @abstractmethod
    def shutdown(self) -> None:
        """End every rank and give back what they held. Idempotent. A call under way on another thread ends with
        ``ShutDownError``."""

    def interrupt(self) -> None:
        """End a call that another thread waits for, where ranks can be ended from outside. Only ``shutdown`` may
        follow. Safe from any thread."""

    def _refuse_to_lose(self, reports: str, world_size: int) -> None:
        if world_size > 1 and not self.delivers.all_ranks:
            raise LostReportsError(
                f"{type(self).__name__} fetches the output rank's answers alone: with {world_size} ranks the "
                f"{reports} connector's reports of the others would be lost. Use executor='multiproc' or "
                "executor='ray' (RayExecutorV2)"
            )
