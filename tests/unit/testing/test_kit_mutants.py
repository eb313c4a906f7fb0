"""Each defect breaks its rule, and the kit says how in a few events."""

from __future__ import annotations

import pytest
from kit_mutants import CONNECTORS, METADATA
from kit_subjects import FILES

from ecotone.testing import check_connector, check_worker_metadata
from ecotone.testing.kit.connector import setups_for
from ecotone.testing.kit.run import run_plan
from ecotone.testing.kit.scripts import scripted


@pytest.mark.parametrize("name", CONNECTORS)
def test_a_broken_connector_breaks_its_rule(name):
    subject, rule, example = CONNECTORS[name]
    report = check_connector(subject, only=example)
    assert [violation.rule for violation in report.violations] == [rule], str(report)
    assert len(report.violations[0].events) <= 12
    assert report.violations[0].example == example


def test_where_a_right_connector_breaks_nothing():
    """The examples in which the defects show are not broken in themselves."""
    examples = {example for _, _, example in CONNECTORS.values()}
    plans = [plan for plan in scripted(FILES, setups_for(FILES.capabilities)) if plan.name in examples]
    assert {plan.name for plan in plans} == examples - {"loads share memory (0)", "found after a restart (0)"}
    assert [run_plan(FILES, plan).rule for plan in plans] == [""] * len(plans)


@pytest.mark.parametrize("kind", METADATA, ids=lambda kind: kind.__name__)
def test_metadata_that_is_no_join_breaks_its_law(kind):
    report = check_worker_metadata(kind)
    assert METADATA[kind] in [violation.rule for violation in report.violations], str(report)
