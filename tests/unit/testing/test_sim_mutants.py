"""The simulator bites: each deliberate defect is found within the seeds that the test suite runs anyhow."""

from __future__ import annotations

import pytest
from sim_mutants import MUTANTS, restore

from ecotone.testing.sim import sweep

BUDGET = 2400  # as many seeds as test_sim.py runs


@pytest.mark.parametrize("name", MUTANTS)
def test_a_defect_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS[name](monkeypatch)
    try:
        result = sweep(range(BUDGET), max_failures=1)
    finally:
        restore()
    assert result.failures, f"{BUDGET} seeds found nothing"
