"""A rank in this process behind the wire format: what a rank in another process would see, without the process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ecotone.config import EngineConfig
from ecotone.executor.uniproc import Rank, RankFactory
from ecotone.protocol.connector import ECConnectorFactory
from ecotone.protocol.model import ModelInfo
from ecotone.protocol.outputs import ModelRunnerOutput
from ecotone.protocol.step import SchedulerOutput
from ecotone.protocol.wire import decode, encode

# method -> the types of its arguments, and that of its result
SIGNATURES: dict[str, tuple[tuple[Any, ...], Any]] = {
    "model_info": ((), ModelInfo),
    "execute_model": ((SchedulerOutput,), ModelRunnerOutput | None),
    "sample_tokens": ((), ModelRunnerOutput),
    "reset_encoder_cache": ((), None),
    "statistics": ((), dict[str, float]),
    "shutdown": ((), None),
}


class RankOverTheWire:
    """Passes every argument and every result of ``rank`` through the wire format."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank

    @property
    def takes_part(self) -> bool:
        """See ``Rank``."""
        return self._rank.takes_part

    def call(self, method: str, *args: Any) -> Any:
        """See ``Rank``."""
        kinds, result_kind = SIGNATURES.get(method, ((), None))
        received = [decode(encode(arg), kind) for arg, kind in zip(args, kinds, strict=True)]
        result = self._rank.call(method, *received)
        return None if result is None else decode(encode(result), result_kind)


def over_the_wire(make_rank: RankFactory) -> RankFactory:
    """``make_rank`` with the wire format in between."""

    def make(
        config: EngineConfig,
        ec_factory: ECConnectorFactory | None,
        engine_id: str,
        rank: int,
        epoch: int,
        wakeup: Callable[[], None],
    ) -> Rank:
        return RankOverTheWire(make_rank(config, ec_factory, engine_id, rank, epoch, wakeup))

    return make
