"""Cutting a failing plan down to what it needs to fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from ecotone.testing.sim.plan import Plan, Weather
from ecotone.testing.sim.run import simulate

_replace = msgspec.structs.replace


def shrink(plan: Plan, max_runs: int = 400) -> Plan:
    """A smaller plan that breaks the same rule, found by leaving things out one by one for as long as that helps.

    Args:
        max_runs: simulations to run at most.
    """
    rule = simulate(plan).rule
    runs = 0

    def still_fails(candidate: Plan) -> bool:
        nonlocal runs
        runs += 1
        return simulate(candidate).rule == rule

    progress = bool(rule)
    while progress and runs < max_runs:
        progress = False
        for candidate in _smaller(plan):
            if runs >= max_runs:
                break
            if still_fails(candidate):
                plan, progress = candidate, True
                break
    return plan


def _smaller(plan: Plan) -> Iterator[Plan]:
    """Plans with a little less in them, the largest cuts first."""
    for cut in (_without_engine, _without_faults, _without_requests, _with_calm, _with_less):
        yield from cut(plan)


def _without_engine(plan: Plan) -> Iterator[Plan]:
    """The last engine goes, with all that happens to it."""
    last = len(plan.engines) - 1
    if last > 0:
        yield _replace(
            plan,
            engines=plan.engines[:last],
            requests=tuple(r for r in plan.requests if r.engine != last),
            faults=tuple(f for f in plan.faults if f.engine != last),
        )


def _without_faults(plan: Plan) -> Iterator[Plan]:
    for i in range(len(plan.faults)):
        yield _replace(plan, faults=plan.faults[:i] + plan.faults[i + 1 :])


def _without_requests(plan: Plan) -> Iterator[Plan]:
    half = len(plan.requests) // 2
    if half > 1:
        yield _replace(plan, requests=plan.requests[:half])
        yield _replace(plan, requests=plan.requests[half:])
    for i in range(len(plan.requests)):
        yield _replace(plan, requests=plan.requests[:i] + plan.requests[i + 1 :])


def _with_calm(plan: Plan) -> Iterator[Plan]:
    calm = Weather()
    if plan.disk:
        yield _replace(plan, disk=0)
    worse = ("copies_lost", "reports_late", "reports_repeated", "disk_lost", "copy_s", "net_s", "step_s", "disk_s")
    for name in worse:
        if getattr(plan.weather, name) > getattr(calm, name):
            yield _replace(plan, weather=_replace(plan.weather, **{name: getattr(calm, name)}))
    if plan.broken:
        yield _replace(plan, broken=())


def _with_less(plan: Plan) -> Iterator[Plan]:
    """Fewer ranks and steps in flight; shorter prompts and answers."""
    for number, engine in enumerate(plan.engines):
        changes: list[Callable[[], dict[str, object]]] = []
        if engine.bystander:
            changes.append(lambda: {"bystander": False})
        if engine.ranks > 1 and not any(f.engine == number and f.rank == engine.ranks - 1 for f in plan.faults):
            changes.append(lambda ranks=engine.ranks: {"ranks": ranks - 1})  # type: ignore[misc]
        if engine.limits.max_concurrent_steps > 1:
            fewer = _replace(engine.limits, max_concurrent_steps=engine.limits.max_concurrent_steps - 1)
            changes.append(lambda limits=fewer: {"limits": limits})  # type: ignore[misc]
        for change in changes:
            engines = list(plan.engines)
            engines[number] = _replace(engine, **change())
            yield _replace(plan, engines=tuple(engines))
    for number, request in enumerate(plan.requests):
        shorter = [_replace(request, max_tokens=1)] if request.max_tokens > 1 else []
        if len(request.parts) > 1:
            cuts = range(len(request.parts))
            shorter += [_replace(request, parts=request.parts[:i] + request.parts[i + 1 :]) for i in cuts]
        for smaller in shorter:
            yield _replace(plan, requests=(*plan.requests[:number], smaller, *plan.requests[number + 1 :]))
