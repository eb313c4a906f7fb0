"""Ranks for tests of executors: behind the wire format in this process, and by import path in others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import torch

from ecotone.config import EngineConfig
from ecotone.executor.methods import decode_args, decode_result, encode_args, encode_result
from ecotone.executor.rank import Rank, RankFactory
from ecotone.protocol.connector import ECConnectorFactory
from ecotone.testing.connectors import KVReportingWorker
from ecotone.testing.models import TinyModel, load_tiny_model
from ecotone.worker.ranks import RankSpec

TINY_RANK = "ecotone.testing.executors:tiny_rank"


def tiny_rank(
    config: EngineConfig,
    ec_factory: ECConnectorFactory | None,
    engine_id: str,
    spec: RankSpec,
    epoch: int,
    wakeup: Callable[[], None],
) -> Rank:
    """A rank with the tiny model, all of it, and a KV connector that reports what the step says is finished. It
    knows of no other rank, so that each one reports for itself, whatever becomes of the others."""
    alone = msgspec.structs.replace(spec, init_method="")
    return KVReportingWorker(config, ec_factory, engine_id, alone, epoch, wakeup, load=_load_whole)


def _load_whole(
    path: str,
    *,
    device: torch.device,
    dtype: torch.dtype | None,
    max_model_len: int | None = None,
    divide: Callable[[Any], None] | None = None,  # noqa: ARG001 - nobody to divide it with
) -> TinyModel:
    return load_tiny_model(path, device=device, dtype=dtype, max_model_len=max_model_len)


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
