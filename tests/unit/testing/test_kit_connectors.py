"""The kit on connectors that are right."""

from __future__ import annotations

import msgspec
import pytest
from kit_subjects import DISK, ECOTONE, FILES, HOSTED, NODE

from ecotone.testing import Capabilities, check_connector
from ecotone.testing.kit.connector import setups_for
from ecotone.testing.kit.plan import Delay, FailLoad, Lose, LoseStored, Repeat, Reset, Restart, Setup, draw_plan
from ecotone.testing.kit.scripts import scripted


def test_ecotones_connector_passes():
    report = check_connector(ECOTONE, examples=10)
    assert report.ok, str(report)
    assert set(report.names("skipped")) == {
        "found-after-restart",
        "loss-is-a-failed-load",
        "ready-is-loaded",  # in its engine a load may fail
    }
    assert report.names("not reached") == ()


def test_ecotones_connector_passes_with_a_disk_behind_little_memory():
    report = check_connector(DISK, examples=3)
    assert report.ok, str(report)
    assert report.names("skipped") == ("ready-is-loaded",)
    assert report.names("not reached") == ()


@pytest.mark.parametrize("subject", [NODE, HOSTED], ids=lambda subject: subject.name)
def test_ecotones_connector_passes_where_ranks_tell_the_node_themselves(subject):
    report = check_connector(subject, examples=3)
    assert report.ok, str(report)
    assert set(report.names("skipped")) - {"found-after-restart"} == {
        "ready-after-every-report",  # it is the node that knows
        "awake-while-pending",
        "loss-is-a-failed-load",
        "ready-is-loaded",
    }
    assert "found-after-restart" in report.names("skipped" if subject is HOSTED else "held")


def test_the_example_passes():
    report = check_connector(FILES, examples=10)
    assert report.ok, str(report)
    assert set(report.names("skipped")) == {"found-after-restart", "loads-share-memory", "ready-is-loaded"}
    assert report.names("not reached") == ("counters-only-grow",)  # it keeps none


STRICT = msgspec.structs.replace(
    FILES, capabilities=Capabilities(hears_failed_loads=False, reports_may_be_lost=False)
)
CANNOT_LOSE = msgspec.structs.replace(STRICT, lose=None)


def test_an_engine_that_can_lose_neither_loads_nor_reports():
    report = check_connector(CANNOT_LOSE, examples=8)
    assert report.ok, str(report)
    assert set(report.names("skipped")) == {
        "failed-loads-are-forgotten",
        "awake-while-pending",
        "found-after-restart",
        "loss-is-a-failed-load",
        "loads-share-memory",
    }
    assert report.verdict("ready-is-loaded").checks


def test_there_a_load_that_comes_to_nothing_is_a_violation():
    report = check_connector(STRICT, only="the store loses all (0)")
    assert [violation.rule for violation in report.violations] == ["ready-is-loaded"]
    assert "a step orders to load 'a', and it is not there" in report.violations[0].detail


def test_there_no_load_is_made_to_fail_and_no_report_lost():
    plans = [*scripted(CANNOT_LOSE, setups_for(CANNOT_LOSE.capabilities))]
    plans += [draw_plan(0, number, [Setup()], CANNOT_LOSE.faults) for number in range(100)]
    events = {type(event) for plan in plans for event in plan.events}
    assert not events & {FailLoad, Lose, LoseStored}
    assert events >= {Delay, Repeat, Reset, Restart}


@pytest.mark.parametrize("seed", [1, 2])
def test_the_same_seed_is_the_same_check(seed):
    def told():
        return check_connector(FILES, seed=seed, examples=3, only="random-2")

    first, second = told(), told()
    assert first == second
    assert first.runs == 1
