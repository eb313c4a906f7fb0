"""Plans written by hand: the ways connectors were seen to go wrong, each as a few events."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from ecotone.testing.kit.capabilities import Subject
from ecotone.testing.kit.plan import (
    Abort,
    Ask,
    Delay,
    Event,
    FailLoad,
    Forget,
    Lose,
    LoseStored,
    MustFind,
    MustShare,
    Plan,
    Repeat,
    Reset,
    Rest,
    Restart,
    Setup,
    Step,
)

_A = Ask("r0", ("a",))
_STORED = (_A, Rest(), Forget())

# Name -> events. They hold in engines that store and load.
_ALWAYS: dict[str, tuple[Event, ...]] = {
    "hit": (*_STORED, Ask("r1", ("a",)), Rest()),
    "one is held while another is loaded": (
        Ask("r0", ("a", "d")),
        Rest(),
        Forget(),
        Ask("r1", ("a",)),
        Rest(),
        Ask("r2", ("d",)),
        Rest(),
    ),
    "no work": (Step(2), _A, Step(2), Rest(), Step(3)),
    "same item twice": (Ask("r0", ("a", "a")), Rest(), Forget(), Ask("r1", ("a", "b", "a")), Rest()),
    "encode fails": (Ask("r0", ("broken",)), Ask("r1", ("broken", "a")), Rest(), Ask("r2", ("broken",)), Rest()),
    "larger than the store": (Ask("r0", ("large",)), Rest(), Forget(), Ask("r1", ("large", "a")), Rest()),
    "aborted in the middle": (Ask("r0", ("a", "b", "c", "d")), Step(), Abort("r0"), Ask("r1", ("b",)), Rest()),
    "aborted before it ran": (*_STORED, Ask("r1", ("a",)), Abort("r1"), Rest()),
    "asked for while it is saved": (_A, Delay(0, 3), Step(), Forget(), Ask("r1", ("a",)), Rest()),
    "a load fails": (*_STORED, FailLoad(0), Ask("r1", ("a",)), Rest(), Forget(), Ask("r2", ("a",)), Rest()),
    "a report is repeated": (_A, Rest(), Repeat(0), Step(), Forget(), Ask("r1", ("a",)), Repeat(0, 2), Rest()),
    "a report never comes": (
        _A,
        Lose(0),
        Step(2),
        Forget(),
        Ask("r1", ("a",)),
        Rest(),
        Ask("r2", ("a", "b")),
        Rest(),
    ),
    "a report comes late": (_A, Delay(0, 4), Rest()),
    "many wait for a small cache": (
        *(Ask(f"r{n}", items) for n, items in enumerate((("a", "b"), ("b", "c", "d"), ("d", "a"), ("c", "a")))),
        Rest(),
        Ask("r9", ("a", "b", "c", "d")),
        Rest(),
    ),
    "shut down in the middle": (Ask("r0", ("a", "b")), Step(), Restart(), Ask("r1", ("a",)), Rest()),
}

_SEVERAL_RANKS: dict[str, tuple[Event, ...]] = {
    "one rank reports late": (_A, Delay(1, 5), Step(2), Forget(), Ask("r1", ("a",)), Step(2), Rest()),
    "one rank reports twice, one late": (
        _A,
        Delay(1, 6),
        Step(),
        Repeat(0),
        Step(),
        Forget(),
        Ask("r1", ("a",)),
        Step(2),
        Rest(),
    ),
    "one rank never reports": (_A, Lose(1), Step(), Forget(), Ask("r1", ("a",)), Rest()),
    "a load fails on one rank": (
        *_STORED,
        FailLoad(1),
        Ask("r1", ("a",)),
        Rest(),
        Forget(),
        Ask("r2", ("a",)),
        Rest(),
    ),
    "an old report comes again after the key was saved anew": (
        *_STORED,
        FailLoad(0),
        Ask("r1", ("a",)),
        Step(),
        Delay(1, 8),
        Step(),
        Repeat(1, 2),
        Repeat(1, 3),
        Step(),
        Forget(),
        Ask("r2", ("a",)),
        Step(3),
        Rest(),
    ),
}

_RESET: dict[str, tuple[Event, ...]] = {
    "weights change": (*_STORED, Reset(), Step(), Ask("r1", ("a",)), Rest(), Forget(), Ask("r2", ("a",)), Rest()),
    "weights change during a save": (_A, Delay(0, 3), Step(), Reset(), Step(6), Ask("r1", ("a",)), Rest()),
    "weights change and the report comes again": (_A, Rest(), Reset(), Repeat(0), Step(2), Rest()),
}


def scripted(subject: Subject, setups: list[Setup]) -> Iterator[Plan]:
    """The plans that say something about the subject, in each of ``setups``."""
    faults = subject.faults
    for number, setup in enumerate(setups):
        plans = dict(_ALWAYS)
        if setup.ranks > 1:
            plans |= _SEVERAL_RANKS
        plans |= _RESET
        plans["the store loses all"] = (
            *_STORED,
            Step(),  # until then a rank may still hold it, and need no load
            LoseStored(),
            Ask("r1", ("a",)),
            Rest(),
            Ask("r2", ("a",)),
            Rest(),
        )
        plans |= _promises(subject, setup)
        for name, events in plans.items():
            if not faults.allow(events):
                continue
            fitting = msgspec.structs.replace(setup, encoder_rows=8) if name.endswith("small cache") else setup
            fitting = msgspec.structs.replace(fitting, encoder_rows=14) if "small cache" in name else fitting
            yield Plan(name=f"{name} ({number})", setup=fitting, events=events)


def _promises(subject: Subject, setup: Setup) -> dict[str, tuple[Event, ...]]:
    can = subject.capabilities
    if not can.stores or setup.role != "ec_both":
        return {}
    plans: dict[str, tuple[Event, ...]] = {"saved is found": (_A, Rest(), MustFind("a", "saved-is-found"))}
    if can.durable:
        plans["found after a restart"] = (_A, Rest(), Restart(), MustFind("a", "found-after-restart"))
    if can.zero_copy:
        plans["loads share memory"] = (_A, Rest(), MustShare("a"))
    return plans
