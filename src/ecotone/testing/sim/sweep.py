"""Many simulations, one after the other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

import msgspec

from ecotone.testing.sim.plan import Plan, make_plan
from ecotone.testing.sim.run import Outcome, simulate
from ecotone.testing.sim.shrink import shrink


class Sweep(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a range of seeds.

    Attributes:
        seeds: how many were run.
        failures: those that broke a rule, in the order of their seeds, without their timelines.
        events: how many happened, over all of them.
        counts: of what happened, by name, summed.
    """

    seeds: int
    failures: tuple[Outcome, ...]
    events: int
    counts: dict[str, int]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One failing seed: its plan, cut down, and what happens in it."""

    seed: int
    plan: Plan
    outcome: Outcome


def sweep(
    seeds: Iterable[int], *, max_failures: int | None = None, on_seed: Callable[[Outcome], object] = lambda _: None
) -> Sweep:
    """Run the plan of every seed.

    Args:
        max_failures: stop after so many.
        on_seed: called after each, for a progress bar.
    """
    failures: list[Outcome] = []
    counts: Counter[str] = Counter()
    events = done = 0
    for seed in seeds:
        outcome = simulate(make_plan(seed))
        done += 1
        events += outcome.events
        counts.update(outcome.counts)
        if outcome.failed:
            failures.append(outcome)
        on_seed(outcome)
        if len(failures) == max_failures:
            break
    return Sweep(seeds=done, failures=tuple(failures), events=events, counts=dict(sorted(counts.items())))


def replay(seed: int, *, shrinking: bool = True) -> Finding:
    """The plan of ``seed`` once more, with its timeline; with ``shrinking`` one that fails is cut down first."""
    plan = make_plan(seed)
    if shrinking:
        plan = shrink(plan)
    return Finding(seed=seed, plan=plan, outcome=simulate(plan, tracing=True))
