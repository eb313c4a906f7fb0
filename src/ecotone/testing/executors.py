"""Ranks for tests of executors: behind the wire format in this process, and by import path in others."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ecotone.config import EngineConfig
from ecotone.executor.methods import decode_args, decode_result, encode_args, encode_result
from ecotone.executor.rank import Rank, RankFactory
from ecotone.protocol.connector import ECConnectorFactory
from ecotone.testing.connectors import KVReportingWorker
from ecotone.testing.models import load_tiny_model
from ecotone.worker.ranks import RankSpec

TINY_RANK = "ecotone.testing.executors:tiny_rank"
tiny_rank: RankFactory = partial(KVReportingWorker, load=load_tiny_model)
"""A rank with the tiny model, and a KV connector that reports what the step says is finished."""


class RankOverTheWire:
    """Passes every argument and every result of ``rank`` through the wire format: what a rank in another process
    would see, without the process."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank

    @property
    def takes_part(self) -> bool:
        """See ``Rank``."""
        return self._rank.takes_part

    def call(self, method: str, *args: Any) -> Any:
        """See ``Rank``."""
        received = decode_args(method, encode_args(args))
        return decode_result(method, encode_result(self._rank.call(method, *received)))


def over_the_wire(make_rank: RankFactory) -> RankFactory:
    """``make_rank`` with the wire format in between."""

    def make(
        config: EngineConfig,
        ec_factory: ECConnectorFactory | None,
        engine_id: str,
        spec: RankSpec,
        epoch: int,
        wakeup: Callable[[], None],
    ) -> Rank:
        return RankOverTheWire(make_rank(config, ec_factory, engine_id, spec, epoch, wakeup))

    return make
