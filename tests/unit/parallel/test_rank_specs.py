from __future__ import annotations

import pytest

from ecotone.config import ECConfig, EngineConfig
from ecotone.errors import ConfigError
from ecotone.worker.ranks import output_rank, rank_specs


def test_ranks_are_numbered_stage_by_stage() -> None:
    config = EngineConfig(model="m", tensor_parallel_size=2, pipeline_parallel_size=3)
    specs = rank_specs(config, "file:///nowhere")
    assert [(s.rank, s.pp_rank, s.tp_rank) for s in specs] == [
        (0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 1), (4, 2, 0), (5, 2, 1),
    ]  # fmt: skip
    assert {(s.world_size, s.tp_size, s.pp_size, s.init_method) for s in specs} == {(6, 2, 3, "file:///nowhere")}
    assert output_rank(config) == 4


def test_an_engine_that_only_encodes_has_one_stage() -> None:
    ec = ECConfig(role="ec_producer")
    with pytest.raises(ConfigError, match="pipeline_parallel_size=2 with role='ec_producer'"):
        rank_specs(EngineConfig(model="m", pipeline_parallel_size=2, ec=ec))
    assert len(rank_specs(EngineConfig(model="m", tensor_parallel_size=2, ec=ec))) == 2
