"""Ranks in other processes, started once for all tests."""

from __future__ import annotations

from collections.abc import Iterator
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
def ray_v2() -> Iterator[type[Any]]:
    """``RayExecutorV2``, over two actors that serve one test after another."""
    ray_module = pytest.importorskip("ecotone.executor.ray", reason="Ray is not installed", exc_type=ImportError)
    pool = RankPool(lambda: ray_module.RayTransport(2, "cpu"))
    yield pooled(ray_module.RayExecutorV2, pool)
    pool.close()
