"""What happens to an engine in one run: a setup and events, drawn from a seed or written down."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Literal

import msgspec

from ecotone.protocol.connector import ECRole

ITEMS = {"a": 3, "b": 4, "c": 2, "d": 3, "large": 48, "broken": 2}
"""Item -> encoder rows. ``broken`` fails to encode; ``large`` is meant to have no room in a small store."""
SMALL = ("a", "b", "c", "d")


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """An engine.

    Attributes:
        role, task: of it.
        ranks: that have an encoder, and take part.
        bare: further ranks, without one.
        encoder_rows: capacity of the ranks' encoder caches.
    """

    role: ECRole = "ec_both"
    task: Literal["generate", "embed"] = "generate"
    ranks: int = 1
    bare: int = 0
    encoder_rows: int = 56

    def __str__(self) -> str:
        bare = f" and {self.bare} without an encoder" if self.bare else ""
        return (
            f"role {self.role}, task {self.task}, {self.ranks} rank(s){bare}, "
            f"{self.encoder_rows} rows of encoder cache"
        )


class Ask(msgspec.Struct, frozen=True):
    """A request with these items arrives."""

    name: str
    items: tuple[str, ...]

    def __str__(self) -> str:
        return f"request {self.name} arrives, with {', '.join(self.items) or 'no item'}"


class Step(msgspec.Struct, frozen=True):
    """The engine makes steps, whether it has work or not."""

    times: int = 1

    def __str__(self) -> str:
        return "a step" if self.times == 1 else f"{self.times} steps"


class Rest(msgspec.Struct, frozen=True):
    """The engine steps until it has nothing to do."""

    def __str__(self) -> str:
        return "steps until there is no work"


class Abort(msgspec.Struct, frozen=True):
    """A request is aborted."""

    name: str

    def __str__(self) -> str:
        return f"request {self.name} is aborted"


class Delay(msgspec.Struct, frozen=True):
    """What a rank reports next comes some steps late."""

    rank: int
    steps: int

    def __str__(self) -> str:
        return f"the next report of rank {self.rank} comes {self.steps} step(s) late"


class Repeat(msgspec.Struct, frozen=True):
    """An earlier report of a rank is heard again with the next step: the last one, or one from before."""

    rank: int
    back: int = 1

    def __str__(self) -> str:
        return f"report {self.back} before now of rank {self.rank} is heard again"


class Lose(msgspec.Struct, frozen=True):
    """What a rank reports next never comes."""

    rank: int

    def __str__(self) -> str:
        return f"the next report of rank {self.rank} never comes"


class FailLoad(msgspec.Struct, frozen=True):
    """The next load on a rank comes to nothing."""

    rank: int

    def __str__(self) -> str:
        return f"the next load on rank {self.rank} fails"


class LoseStored(msgspec.Struct, frozen=True):
    """All that is stored vanishes, between the scheduling of the next step and its execution."""

    def __str__(self) -> str:
        return "the store loses everything once the next step is scheduled"


class Forget(msgspec.Struct, frozen=True):
    """The ranks' encoder caches are emptied; what is stored outside stays."""

    def __str__(self) -> str:
        return "the ranks' encoder caches are emptied"


class Reset(msgspec.Struct, frozen=True):
    """The weights change."""

    def __str__(self) -> str:
        return "the weights change: reset_cache"


class Restart(msgspec.Struct, frozen=True):
    """The engine is shut down, in the middle of whatever it does, and another one starts."""

    def __str__(self) -> str:
        return "the engine is shut down and starts again"


class MustFind(msgspec.Struct, frozen=True):
    """A request for one item arrives, with empty encoder caches, and nothing is encoded for it."""

    item: str
    rule: str

    def __str__(self) -> str:
        return f"a request for {self.item} finds it stored"


class MustShare(msgspec.Struct, frozen=True):
    """Two requests for one item load it, and the rows of the first are still held when the second's arrive."""

    item: str

    def __str__(self) -> str:
        return f"two loads of {self.item} are held at the same time"


Event = (
    MustFind
    | MustShare
    | Ask
    | Step
    | Rest
    | Abort
    | Delay
    | Repeat
    | Lose
    | FailLoad
    | LoseStored
    | Forget
    | Reset
    | Restart
)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """One run."""

    name: str
    setup: Setup
    events: tuple[Event, ...]


class Faults(msgspec.Struct, frozen=True, kw_only=True):
    """What may befall an engine, beside what always may.

    Attributes:
        reset: weights change.
        lose_stored: the store loses what it has.
        lose_reports: a report never comes.
        fail_loads: a load comes to nothing.
    """

    reset: bool
    lose_stored: bool
    lose_reports: bool
    fail_loads: bool

    def allow(self, events: Sequence[Event]) -> bool:
        """Whether all of ``events`` may happen."""
        return not any(
            (isinstance(event, Reset) and not self.reset)
            or (isinstance(event, LoseStored) and not self.lose_stored)
            or (isinstance(event, Lose) and not self.lose_reports)
            or (isinstance(event, FailLoad) and not self.fail_loads)
            for event in events
        )


def draw_plan(seed: int, number: int, setups: Sequence[Setup], faults: Faults) -> Plan:
    """The random plan ``number`` of ``seed``, in one of ``setups``."""
    draw = Random(f"{seed}/{number}")
    setup = setups[number % len(setups)]
    setup = msgspec.structs.replace(setup, encoder_rows=draw.choice((8, 56)))
    names = [*SMALL, *SMALL, "broken"] + (["large"] if setup.encoder_rows > ITEMS["large"] else [])
    events: list[Event] = []
    asked = 0
    for _ in range(draw.randint(4, 14)):
        kind = draw.choices(
            (
                "ask",
                "step",
                "rest",
                "forget",
                "late",
                "repeat",
                "fail",
                "abort",
                "lost",
                "reset",
                "vanish",
                "restart",
            ),
            (
                *(10, 8, 4, 5, 5, 4),
                *(3 * faults.fail_loads, 2, 1 * faults.lose_reports, 1 * faults.reset, 1 * faults.lose_stored, 1),
            ),
        )[0]
        rank = draw.randrange(setup.ranks)
        match kind:
            case "ask":
                events.append(Ask(f"r{asked}", tuple(draw.choices(names, k=draw.randint(1, 3)))))
                asked += 1
            case "step":
                events.append(Step(draw.randint(1, 3)))
            case "rest":
                events.append(Rest())
            case "forget":
                events.append(Forget())
            case "late":
                events.append(Delay(rank, draw.randint(1, 4)))
            case "repeat":
                events.append(Repeat(rank, draw.randint(1, 3)))
            case "fail":
                events.append(FailLoad(rank))
            case "abort" if asked:
                events.append(Abort(f"r{draw.randrange(asked)}"))
            case "lost":
                events.append(Lose(rank))
            case "reset":
                events.append(Reset())
            case "vanish":
                events.append(LoseStored())
            case "restart":
                events.append(Restart())
    return Plan(name=f"random-{number}", setup=setup, events=tuple(events))
