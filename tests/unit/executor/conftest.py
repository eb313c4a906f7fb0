"""Ranks in other processes, started once for all tests."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import pytest
from executor_kinds import multiproc_pool

from ecotone.testing.rank_pool import RankPool, pooled


@pytest.fixture(scope="session")
def multiproc() -> Iterator[type[Any]]:
    """``MultiprocExecutor``, over two processes that serve one test after another."""
    kind, pool = multiproc_pool()
    yield kind
    pool.close()


@pytest.fixture(scope="session")
def ray_pool() -> Iterator[RankPool]:
    """Two actors that serve one test after another. Nothing is left of Ray when they end."""
    ray = pytest.importorskip("ecotone.executor.ray_cluster", exc_type=ImportError).ray
    module = import_module("ecotone.executor.ray")
    folders = set(Path(gettempdir()).glob("ecotone-ray-*"))
    pool = RankPool(lambda: module.RayTransport(2, "cpu"))
    yield pool
    pool.close()
    assert not ray.is_initialized()
    assert set(Path(gettempdir()).glob("ecotone-ray-*")) <= folders


@pytest.fixture(scope="session")
def ray_v2(ray_pool: RankPool) -> type[Any]:
    """``RayExecutorV2``, over ``ray_pool``."""
    return pooled(import_module("ecotone.executor.ray").RayExecutorV2, ray_pool)
