"""``check_connector``: a connector's two halves against every rule."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from ecotone.protocol.connector import ECConnectorFactory
from ecotone.protocol.outputs import ECConnectorWorkerMetadata
from ecotone.testing.kit.capabilities import Capabilities, Subject
from ecotone.testing.kit.metadata import check_worker_metadata
from ecotone.testing.kit.plan import Plan, Setup, draw_plan
from ecotone.testing.kit.report import Report, Verdict, Violation, verdicts_of
from ecotone.testing.kit.rules import CONNECTOR_RULES, METADATA_RULES
from ecotone.testing.kit.run import Outcome, run_plan
from ecotone.testing.kit.scripts import scripted
from ecotone.testing.kit.shrink import shrink
from ecotone.testing.kit.uses import MetadataUse

DEFAULT_EXAMPLES = 40


def check_connector(
    factory: ECConnectorFactory | Subject,
    *,
    capabilities: Capabilities | None = None,
    options: dict[str, Any] | None = None,
    seed: int = 0,
    examples: int = DEFAULT_EXAMPLES,
    only: str = "",
) -> Report:
    """Run a connector in many small engines, and say which rules it keeps.

    The engines are in this process: a real scheduler and real model runners, one for each rank, with the kit
    between them. First come plans written by hand, then ``examples`` random ones; the same seed is the same plans.

    Args:
        factory: the connector, or a ``Subject`` that says more about it.
        capabilities, options: of a connector that is no ``Subject``; see there.
        seed: of the random plans.
        examples: how many random plans to run.
        only: the name of the one plan to run, as a violation says it.
    """
    if isinstance(factory, Subject):
        subject = factory
    else:
        subject = Subject(factory=factory, capabilities=capabilities or Capabilities(), options=options or {})
    checks: Counter[str] = Counter()
    violations: dict[str, Violation] = {}
    kinds: set[type[ECConnectorWorkerMetadata]] = set()
    runs = 0
    with _quiet():
        for plan in _plans(subject, seed, examples):
            if only and plan.name != only:
                continue
            outcome = run_plan(subject, plan)
            runs += 1
            checks.update(outcome.checks)
            kinds |= outcome.metadata
            if outcome.rule and outcome.rule not in violations:
                violations[outcome.rule], more = _explain(subject, plan, outcome, seed)
                runs += more
            if violations and plan.name.startswith("random"):
                break  # every further one would run into the same
    report = Report(
        subject=subject.name or type(subject.factory).__name__,
        seed=seed,
        runs=runs,
        verdicts=verdicts_of(CONNECTOR_RULES, subject.missing(), checks, violations),
    )
    return (
        report if only else report + _check_metadata(kinds if subject.metadata is None else subject.metadata, seed)
    )


def _check_metadata(kinds: Collection[type[ECConnectorWorkerMetadata] | MetadataUse], seed: int) -> Report:
    """The laws of the type that the worker halves report."""
    why = "" if kinds else "its worker halves report nothing"
    for kind in kinds:
        try:
            return check_worker_metadata(kind, seed=seed)
        except TypeError as error:
            why = f"{error}; call check_worker_metadata with a function that makes values"
    skipped = tuple(Verdict(rule=rule, status="skipped", why=why) for rule in METADATA_RULES)
    return Report(subject="metadata", verdicts=skipped)


def setups_for(capabilities: Capabilities) -> list[Setup]:
    """The engines a connector runs in: each role, each task, one rank and several, one of them without encoder."""
    several = min(2, capabilities.max_ranks)
    setups = []
    for role in capabilities.roles:
        setups += [Setup(role=role, ranks=1), Setup(role=role, ranks=several, bare=1)]
    setups.append(Setup(role=capabilities.roles[0], task="embed", ranks=several))
    return setups


def _plans(subject: Subject, seed: int, examples: int) -> Iterator[Plan]:
    setups = setups_for(subject.capabilities)
    yield from scripted(subject, setups)
    for number in range(examples):
        yield draw_plan(seed, number, setups, subject.faults)


def _explain(subject: Subject, plan: Plan, outcome: Outcome, seed: int) -> tuple[Violation, int]:
    """The violation with the shortest events that were found, and how many runs that took."""
    last = outcome
    runs = 0

    def still_breaks(candidate: Plan) -> bool:
        nonlocal last, runs
        runs += 1
        found = run_plan(subject, candidate)
        if found.rule == outcome.rule:
            last = found
            return True
        return False

    shortest = shrink(plan, still_breaks)
    violation = Violation(
        rule=last.rule,
        detail=last.detail,
        setup=str(shortest.setup),
        events=tuple(map(str, shortest.events)),
        log=last.log,
        seed=seed,
        example=plan.name,
    )
    return violation, runs


@contextmanager
def _quiet() -> Iterator[None]:
    """The connector warns of the failures that the kit makes; nobody wants to read them."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
