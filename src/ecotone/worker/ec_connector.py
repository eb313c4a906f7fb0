"""How a step drives the EC connector's worker half.

Every step runs the hook exactly once, whatever else it does or fails to do::

    with hook.step(scheduler_output, loads) as step:    bind, start the loads
        step.save(key)                                  after each item encoded
        step.settle()                                   before rows are gathered
        step.collect()                                  the report
                                                        clear, also when something raised
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

from ecotone.errors import ContractError
from ecotone.protocol.connector import ECWorkerConnector
from ecotone.protocol.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ECConnectorOutput, ModelRunnerOutput
from ecotone.protocol.roundtrip import check_round_trip
from ecotone.protocol.step import SchedulerOutput
from ecotone.worker.encoder_cache import RankEncoderCache


class ECStep(ABC):
    """The hook within one step."""

    @abstractmethod
    def save(self, key: str) -> None:
        """The encoder cache's ``key`` was just encoded."""

    @abstractmethod
    def settle(self) -> None:
        """Wait for the loads, and drop and list those that are not what was ordered."""

    @abstractmethod
    def fail(self, key: str) -> None:
        """The step needs ``key`` and this rank does not hold it: drop it and list it among the failed loads.

        Raises:
            ContractError: there is no connector, so nobody would hear of it.
        """

    @abstractmethod
    def is_failed(self, key: str) -> bool:
        """Whether ``key`` is listed among the failed loads."""

    @abstractmethod
    def collect(self) -> ECConnectorOutput | None:
        """The step's report; ``None`` when there is nothing to report."""


class ECHook(ABC):
    """One rank's side of the EC connector, as the model runner sees it."""

    is_encode_only: bool
    """Whether this engine encodes and stops there."""

    @abstractmethod
    def step(self, scheduler_output: SchedulerOutput, loads: Mapping[str, int]) -> AbstractContextManager[ECStep]:
        """Begin the step. ``loads``: key -> number of rows, of every load that the step orders."""

    @abstractmethod
    def no_forward(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """The hook of a step that computes no tokens, as an output with nothing but its report. Within a step
        that has begun it settles and collects that one."""

    @abstractmethod
    def shutdown(self) -> None:
        """Close the worker half. Idempotent."""


class _ActiveStep(ECStep):
    def __init__(
        self,
        connector: ECWorkerConnector,
        encoder_cache: RankEncoderCache,
        scheduler_output: SchedulerOutput,
        loads: Mapping[str, int],
    ) -> None:
        self._connector = connector
        self._cache = encoder_cache
        self._finished_req_ids = scheduler_output.finished_req_ids
        self._bound = scheduler_output.ec_connector_metadata is not None
        self._loads = loads
        self._failed: set[str] = set()

    def save(self, key: str) -> None:
        if self._bound and self._connector.is_producer:
            self._connector.save_caches(self._cache, key)

    def settle(self) -> None:
        if self._bound:
            self._connector.wait_for_loads(self._cache)
        for key, num_rows in self._loads.items():
            if self._cache.rows(key, num_rows) is None:
                self.fail(key)

    def fail(self, key: str) -> None:
        self._cache.drop((key,))
        self._failed.add(key)

    def is_failed(self, key: str) -> bool:
        return key in self._failed

    def collect(self) -> ECConnectorOutput | None:
        sending, recving = self._connector.get_finished(self._finished_req_ids)
        meta = self._connector.build_connector_worker_meta()
        declared = self._connector.worker_metadata_type
        if meta is not None and type(meta) is not declared:
            # In one process it would pass unnoticed, and fail in the first deployment with two.
            raise ContractError(
                f"{type(self._connector).__name__} reported a {type(meta).__name__}; its worker_metadata_type is "
                f"{None if declared is None else declared.__name__}"
            )
        output = ECConnectorOutput(
            finished_sending=sending,
            finished_recving=recving,
            failed_loads=frozenset(self._failed),
            ec_connector_worker_meta=meta,
            ec_connector_stats=self._connector.get_ec_connector_stats(),
        )
        return None if output.is_empty() else output


class ActiveECConnector(ECHook):
    """Drives a connector's worker half over this rank's encoder cache.

    Raises:
        RoundTripError: what the connector reports would not survive the way to the scheduler.
    """

    def __init__(self, connector: ECWorkerConnector, encoder_cache: RankEncoderCache) -> None:
        if connector.worker_metadata_type is not None:
            check_round_trip(connector.worker_metadata_type)
        self.is_encode_only = connector.is_encode_only
        self._connector = connector
        self._cache = encoder_cache
        self._open: _ActiveStep | None = None

    @contextmanager
    def step(self, scheduler_output: SchedulerOutput, loads: Mapping[str, int]) -> Iterator[ECStep]:
        metadata = scheduler_output.ec_connector_metadata
        try:
            if metadata is not None:
                self._connector.bind_connector_metadata(metadata)
                self._connector.start_load_caches(self._cache)
            self._open = _ActiveStep(self._connector, self._cache, scheduler_output, loads)
            yield self._open
        finally:
            self._open = None
            if metadata is not None:
                self._connector.clear_connector_metadata()

    def no_forward(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        begun = self._open
        with self.step(scheduler_output, {}) if begun is None else nullcontext(begun) as step:
            step.settle()
            return ModelRunnerOutput.with_ec_conn_output_only(step.collect())

    def shutdown(self) -> None:
        self._connector.shutdown()


class _NoOpStep(ECStep):
    def save(self, key: str) -> None:
        pass

    def settle(self) -> None:
        pass

    def fail(self, key: str) -> None:
        raise ContractError(f"the step needs encoder key {key}, which this rank was never told to encode")

    def is_failed(self, key: str) -> bool:  # noqa: ARG002
        return False

    def collect(self) -> None:
        return None


class _NoOpECConnector(ECHook):
    """A rank without an encoder, or an engine without a connector: no participant, nothing to report."""

    is_encode_only = False

    def step(
        self,
        scheduler_output: SchedulerOutput,  # noqa: ARG002
        loads: Mapping[str, int],  # noqa: ARG002
    ) -> AbstractContextManager[ECStep]:
        return nullcontext(_NO_OP_STEP)

    def no_forward(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:  # noqa: ARG002
        return EMPTY_MODEL_RUNNER_OUTPUT

    def shutdown(self) -> None:
        pass


_NO_OP_STEP = _NoOpStep()
NO_OP_EC_CONNECTOR: ECHook = _NoOpECConnector()
