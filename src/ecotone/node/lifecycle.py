"""The life of an entry, as one table.

``docs/lifecycle.md`` is made from it::

    python -m ecotone.node.lifecycle > docs/lifecycle.md
"""

from __future__ import annotations

import sys
from enum import Enum

from ecotone.errors import IllegalTransitionError


class State(Enum):
    """Where an entry stands."""

    ABSENT = "not in the index, owns no memory"
    WRITING = "in the index, its memory is being written by the holder of the ticket"
    READY = "in the index, written; the only state from which an entry is evicted"
    PINNED = "in the index, written, and somebody reads its memory"
    DRAINING = "gone from the index, but a writer or a reader may still touch its memory"

    # Members are compared by identity; the inherited hash is written in Python and three times slower.
    __hash__ = object.__hash__


class Event(Enum):
    """What happens to an entry."""

    TICKET = "a client became its writer"
    COMMIT = "the writer's copy is complete"
    ABORT = "the writer ended without an entry, or is gone"
    PIN = "a reader pinned it"
    UNPIN = "one of several pins fell"
    LAST_UNPIN = "the last pin fell"
    EVICT = "its memory is needed for another entry"
    FORGET = "it must not be found any more"

    __hash__ = object.__hash__


TRANSITIONS: dict[tuple[State, Event], State] = {
    (State.ABSENT, Event.TICKET): State.WRITING,
    (State.WRITING, Event.COMMIT): State.READY,
    (State.WRITING, Event.ABORT): State.ABSENT,
    (State.WRITING, Event.FORGET): State.DRAINING,
    (State.READY, Event.PIN): State.PINNED,
    (State.READY, Event.EVICT): State.ABSENT,
    (State.READY, Event.FORGET): State.ABSENT,
    (State.PINNED, Event.PIN): State.PINNED,
    (State.PINNED, Event.UNPIN): State.PINNED,
    (State.PINNED, Event.LAST_UNPIN): State.READY,
    (State.PINNED, Event.FORGET): State.DRAINING,
    (State.DRAINING, Event.UNPIN): State.DRAINING,
    (State.DRAINING, Event.LAST_UNPIN): State.ABSENT,
    (State.DRAINING, Event.COMMIT): State.ABSENT,
    (State.DRAINING, Event.ABORT): State.ABSENT,
}


def transition(state: State, event: Event) -> State:
    """The state after ``event``.

    Raises:
        IllegalTransitionError: the event cannot happen in this state.
    """
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise IllegalTransitionError(f"an entry that is {state.name} cannot take {event.name}") from None


def render_markdown() -> str:
    """The table as a page: a Mermaid diagram, then what states and events mean."""
    arrows = [f"    {old.name} --> {new.name}: {event.name}" for (old, event), new in TRANSITIONS.items()]
    lines = ["# The life of an entry", "", "Made from `ecotone/node/lifecycle.py`; do not edit.", ""]
    lines += ["```mermaid", "stateDiagram-v2", "    [*] --> ABSENT", *arrows, "```"]
    for title, kind in (("State", State), ("Event", Event)):
        lines += ["", f"| {title} | Meaning |", "|---|---|", *(f"| {m.name} | {m.value} |" for m in kind)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(render_markdown())
