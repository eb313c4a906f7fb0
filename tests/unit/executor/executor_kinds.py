"""The executors that the protocol's tests go through, and how each is built."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from ecotone.config import ECConfig, EngineConfig
from ecotone.executor.base import Executor
from ecotone.executor.multiproc import MultiprocExecutor, ProcessTransport
from ecotone.executor.uniproc import UniprocExecutor
from ecotone.testing.connectors import RecordingConnectorFactory
from ecotone.testing.executors import TINY_RANK, over_the_wire, tiny_rank
from ecotone.testing.rank_pool import RankPool, pooled

RECORDING = "ecotone.testing.connectors:RecordingConnectorFactory"


def tiny_config(num_ranks: int, role: str | None, task: str = "generate", **script: Any) -> EngineConfig:
    """The tiny model on ``num_ranks`` ranks, with the recording connector unless ``role`` is ``None``."""
    ec = None if role is None else ECConfig(connector=RECORDING, role=role, options=script)
    return EngineConfig(
        model="tiny",
        device="cpu",
        task=task,
        block_size=4,
        kv_blocks=64,
        tensor_parallel_size=num_ranks,
        ec=ec,
    )


Build = Callable[[pytest.FixtureRequest, EngineConfig, float], tuple[Executor, RecordingConnectorFactory]]


class Kind(NamedTuple):
    """How an executor is built, and what is particular about it.

    Attributes:
        build: given the test, the configuration and the seconds a shutdown may take.
        num_ranks: how many it has.
        keeps_identity: whether the ranks' very objects reach the caller, or equal ones.
        kill: ends the process of a rank, where that is another one.
        killed: how a rank's end is described then.
    """

    build: Build
    num_ranks: int = 1
    keeps_identity: bool = False
    kill: Callable[[int], None] | None = None
    killed: str = ""


def _uniproc(make_rank: Any) -> Build:
    def build(request, config, grace_s):
        factory = RecordingConnectorFactory()
        return UniprocExecutor(config, factory, "engine", make_rank=make_rank), factory

    return build


def _in_processes(pool_fixture: str) -> Build:
    def build(request, config, grace_s):
        kind = request.getfixturevalue(pool_fixture)
        factory = RecordingConnectorFactory()
        return kind(config, factory, "engine", make_rank=TINY_RANK, shutdown_grace_s=grace_s), factory

    return build


def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


EXECUTORS = {
    "uniproc": Kind(_uniproc(tiny_rank), keeps_identity=True),
    "uniproc over the wire": Kind(_uniproc(over_the_wire(tiny_rank))),
    "multiproc": Kind(_in_processes("multiproc"), num_ranks=2, kill=_kill, killed="was killed by SIGKILL"),
    "ray": Kind(_in_processes("ray_v2"), num_ranks=2, kill=_kill, killed="died: The actor"),
}


def multiproc_pool() -> tuple[type[Any], RankPool]:
    pool = RankPool(lambda: ProcessTransport(2))
    return pooled(MultiprocExecutor, pool), pool
