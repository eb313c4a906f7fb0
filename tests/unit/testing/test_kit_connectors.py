"""The kit on connectors that are right."""

from __future__ import annotations

import pytest
from kit_subjects import DISK, ECOTONE, FILES, NODE

from ecotone.testing import check_connector


def test_ecotones_connector_passes():
    report = check_connector(ECOTONE, examples=10)
    assert report.ok, str(report)
    assert set(report.names("skipped")) == {"found-after-restart", "loss-is-a-failed-load"}
    assert report.names("not reached") == ()


def test_ecotones_connector_passes_with_a_disk_behind_little_memory():
    report = check_connector(DISK, examples=3)
    assert report.ok, str(report)
    assert report.names("skipped") == ()
    assert report.names("not reached") == ()


def test_ecotones_connector_passes_over_a_shared_node():
    report = check_connector(NODE, examples=5)
    assert report.ok, str(report)
    assert set(report.names("skipped")) == {
        "ready-after-every-report",  # it is the node that knows
        "awake-while-pending",
        "loss-is-a-failed-load",
    }


def test_the_example_passes():
    report = check_connector(FILES, examples=10)
    assert report.ok, str(report)
    assert set(report.names("skipped")) == {"found-after-restart", "loads-share-memory"}
    assert report.names("not reached") == ("counters-only-grow",)  # it keeps none


@pytest.mark.parametrize("seed", [1, 2])
def test_the_same_seed_is_the_same_check(seed):
    def told():
        return check_connector(FILES, seed=seed, examples=3, only="random-2")

    first, second = told(), told()
    assert first == second
    assert first.runs == 1
