"""Cutting a plan that breaks a rule down to the events it needs for that."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from ecotone.testing.kit.plan import Ask, Plan, Step

_replace = msgspec.structs.replace


def shrink(plan: Plan, still_breaks: Callable[[Plan], bool], max_runs: int = 120) -> Plan:
    """A smaller plan for which ``still_breaks`` holds, found by leaving things out for as long as that helps."""
    runs = 0
    progress = True
    while progress:
        progress = False
        for candidate in _smaller(plan):
            if runs == max_runs:
                return plan
            runs += 1
            if still_breaks(candidate):
                plan, progress = candidate, True
                break
    return plan


def _smaller(plan: Plan) -> Iterator[Plan]:
    """Plans with a little less in them: the later half first, then single events, then what is in an event."""
    events, setup = plan.events, plan.setup
    if len(events) > 3:
        yield _replace(plan, events=events[: len(events) // 2])
    for i in reversed(range(len(events))):
        yield _replace(plan, events=events[:i] + events[i + 1 :])
    if setup.bare:
        yield _replace(plan, setup=_replace(setup, bare=0))
    if setup.ranks > 1 and all(getattr(event, "rank", 0) == 0 for event in events):
        yield _replace(plan, setup=_replace(setup, ranks=1))
    for i, event in enumerate(events):
        if isinstance(event, Ask) and len(event.items) > 1:
            for j in range(len(event.items)):
                less = _replace(event, items=event.items[:j] + event.items[j + 1 :])
                yield _replace(plan, events=(*events[:i], less, *events[i + 1 :]))
        elif isinstance(event, Step) and event.times > 1:
            yield _replace(plan, events=(*events[:i], Step(event.times - 1), *events[i + 1 :]))
