"""One rank, in this process."""

from __future__ import annotations

import socket
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from ecotone.config import EngineConfig
from ecotone.errors import ConfigError, ContractError, ShutDownError
from ecotone.executor.base import Delivers, Executor, Ready
from ecotone.executor.methods import bind
from ecotone.executor.rank import Rank, RankFactory
from ecotone.protocol.aggregate import OutputAggregator, fold_outputs
from ecotone.protocol.connector import ECConnectorFactory, Participant
from ecotone.worker.ranks import RankSpec
from ecotone.worker.worker import Worker


class UniprocExecutor(Executor):
    """Rank 0, called directly. Its answers go through the same fold as those of any number of ranks.

    Args:
        config, ec_factory, engine_id: see ``Worker``.
        make_rank: builds the rank.

    Raises:
        ConfigError: a configuration that cannot work, the connector's included; nothing was started then.
        ModelError: the model cannot be loaded; nothing is left of the rank.
    """

    delivers: ClassVar[Delivers] = Delivers(all_ranks=True, steps_in_flight=1)

    def __init__(
        self,
        config: EngineConfig,
        ec_factory: ECConnectorFactory | None,
        engine_id: str,
        *,
        make_rank: RankFactory = Worker,
    ) -> None:
        super().__init__(config)
        if config.world_size > 1:
            raise ConfigError(
                f"executor='uniproc' has one rank, not {config.world_size}: use 'multiproc' or 'ray'"
            )
        if config.ec is not None and ec_factory is not None:
            ec_factory.validate(config.ec.role, config.ec.options)
        self._progress = threading.Event()
        self._rank: Rank | None = make_rank(config, ec_factory, engine_id, RankSpec(), 0, self._progress.set)
        self._participants = (Participant(0, socket.gethostname()),) if self._rank.takes_part else ()

    @property
    def output_rank(self) -> int:
        """See ``Executor``."""
        return 0

    def collective_rpc(
        self,
        method: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        timeout: float | None = None,  # noqa: ARG002 - a call in this process cannot be given up
        non_block: bool = False,
        unique_reply_rank: int | None = None,
        kv_output_aggregator: OutputAggregator | None = None,
        ec_output_aggregator: OutputAggregator | None = None,
    ) -> Any:
        """See ``Executor``. ``timeout`` has no effect; with ``non_block`` the call is over when this returns."""
        bound = bind(method, args, kwargs)
        if unique_reply_rank not in (None, 0):
            raise ContractError(f"unique_reply_rank={unique_reply_rank} is none of the 1 ranks")
        if self._rank is None:
            raise ShutDownError(f"{method}: the executor was shut down")
        aggregators = [each for each in (ec_output_aggregator, kv_output_aggregator) if each is not None]
        call = partial(_call, self._rank, method, bound, aggregators, alone=unique_reply_rank is not None)
        return Ready(call) if non_block else call()

    def participants(self) -> tuple[Participant, ...]:
        """See ``Executor``."""
        return self._participants

    def wait_for_progress(self, timeout_s: float) -> None:
        """See ``Executor``."""
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
        """See ``Executor``. For the one caller: a step in this process cannot be ended from outside."""
        rank, self._rank = self._rank, None
        if rank is not None:
            rank.call("shutdown")
        self._progress.set()


def _call(
    rank: Rank, method: str, args: tuple[Any, ...], aggregators: list[OutputAggregator], *, alone: bool
) -> Any:
    result = rank.call(method, *args)
    if aggregators:
        return fold_outputs((result,), 0, aggregators)
    return result if alone else [result]
