"""Which rank is which.

Ranks are numbered stage by stage: ``rank = pp_rank * tp_size + tp_rank``. The tokens and vectors of a step are
those of the output rank, the first of the last stage.
"""

from __future__ import annotations

import msgspec

from ecotone.config import EngineConfig
from ecotone.errors import ConfigError


class RankSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one rank is told about itself and the others.

    Attributes:
        rank: its number among all ranks, from 0.
        world_size: how many ranks there are.
        tp_rank, tp_size: its place among the ranks that divide its layers' tensors.
        pp_rank, pp_size: its place among the stages that divide the layers.
        init_method: where ``torch.distributed`` finds the other ranks; empty where there are none.
    """

    rank: int = 0
    world_size: int = 1
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    init_method: str = ""


def rank_specs(config: EngineConfig, init_method: str = "") -> tuple[RankSpec, ...]:
    """Every rank of an engine, in order.

    Raises:
        ConfigError: stages of an engine that only encodes: it has no layers to put on them.
    """
    if config.pipeline_parallel_size > 1 and config.ec is not None and config.ec.role == "ec_producer":
        raise ConfigError(
            f"pipeline_parallel_size={config.pipeline_parallel_size} with role='ec_producer': an engine that only "
            "encodes runs no decoder layers; use 1"
        )
    tp_size, pp_size = config.tensor_parallel_size, config.pipeline_parallel_size
    return tuple(
        RankSpec(
            rank=pp_rank * tp_size + tp_rank,
            world_size=tp_size * pp_size,
            tp_rank=tp_rank,
            tp_size=tp_size,
            pp_rank=pp_rank,
            pp_size=pp_size,
            init_method=init_method,
        )
        for pp_rank in range(pp_size)
        for tp_rank in range(tp_size)
    )


def output_rank(config: EngineConfig) -> int:
    """The rank whose tokens and vectors count."""
    return (config.pipeline_parallel_size - 1) * config.tensor_parallel_size
