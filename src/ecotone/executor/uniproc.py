"""One rank, in this process."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any, Protocol, cast

from ecotone.config import EngineConfig
from ecotone.errors import ShutDownError
from ecotone.executor.base import Executor
from ecotone.protocol.aggregate import ECOutputAggregator, KVOutputAggregator, OutputAggregator, fold_outputs
from ecotone.protocol.connector import ECConnectorFactory, Participant
from ecotone.protocol.outputs import ModelRunnerOutput
from ecotone.protocol.step import SchedulerOutput
from ecotone.worker.worker import Worker


class Rank(Protocol):
    """What an executor needs of a ``Worker``."""

    @property
    def takes_part(self) -> bool:
        """Whether it takes part in EC transfers."""
        ...

    def call(self, method: str, *args: Any) -> Any:
        """Call ``method`` by name."""
        ...


# config, ec_factory, engine_id, rank, epoch, wakeup; see ``Worker``.
RankFactory = Callable[[EngineConfig, ECConnectorFactory | None, str, int, int, Callable[[], None]], Rank]


class UniprocExecutor(Executor):
    """Rank 0, called directly. Its answers go through the same fold as those of any number of ranks.

    Args:
        config, ec_factory, engine_id: see ``Worker``.
        make_rank: builds the rank.

    Raises:
        ConfigError: a configuration that cannot work, the connector's included; nothing was started then.
        ModelError: the model cannot be loaded; nothing is left of the rank.
    """

    def __init__(
        self,
        config: EngineConfig,
        ec_factory: ECConnectorFactory | None,
        engine_id: str,
        *,
        make_rank: RankFactory = Worker,
    ) -> None:
        if config.ec is not None and ec_factory is not None:
            ec_factory.validate(config.ec.role, config.ec.options)
        self._progress = threading.Event()
        self._ec_aggregator: ECOutputAggregator | None = None
        self._kv_aggregator: KVOutputAggregator | None = None
        self._rank: Rank | None = make_rank(config, ec_factory, engine_id, 0, 0, self._progress.set)
        self._participants = (Participant(0, socket.gethostname()),) if self._rank.takes_part else ()

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        """See ``Executor``."""
        return self._fold(self._call("execute_model", scheduler_output))

    def sample_tokens(self) -> ModelRunnerOutput:
        """See ``Executor``."""
        return cast(ModelRunnerOutput, self._fold(self._call("sample_tokens")))

    def collective_rpc(self, method: str, *args: Any) -> list[Any]:
        """See ``Executor``."""
        return [self._call(method, *args)]

    def participants(self) -> tuple[Participant, ...]:
        """See ``Executor``. None where no EC connector is configured."""
        return self._participants

    def init_ec_output_aggregator(self) -> None:
        """See ``Executor``."""
        self._ec_aggregator = ECOutputAggregator()

    def init_kv_output_aggregator(self, expected_finished_count: int) -> None:
        """See ``Executor``."""
        self._kv_aggregator = KVOutputAggregator(expected_finished_count)

    def wait_for_progress(self, timeout_s: float) -> None:
        """See ``Executor``. What was signalled before the call counts."""
        self._progress.wait(timeout_s)
        self._progress.clear()

    def check_health(self) -> None:
        """See ``Executor``. A rank in this process cannot be lost; an executor can be shut down.

        Raises:
            ShutDownError: it was.
        """
        if self._rank is None:
            raise ShutDownError("the executor was shut down")

    def shutdown(self) -> None:
        """See ``Executor``."""
        rank, self._rank = self._rank, None
        if rank is not None:
            rank.call("shutdown")
        self._progress.set()

    def _call(self, method: str, *args: Any) -> Any:
        if self._rank is None:
            raise ShutDownError(f"{method}: the executor was shut down")
        return self._rank.call(method, *args)

    def _fold(self, output: ModelRunnerOutput | None) -> ModelRunnerOutput | None:
        aggregators: tuple[OutputAggregator | None, ...] = (self._ec_aggregator, self._kv_aggregator)
        return fold_outputs((output,), 0, [aggregator for aggregator in aggregators if aggregator is not None])
