"""The life of an entry: one table, and a page made from it."""

from __future__ import annotations

import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from ecotone.errors import IllegalTransitionError
from ecotone.node.lifecycle import TRANSITIONS, Event, State, render_markdown, transition


@pytest.mark.parametrize(("state", "event"), list(product(State, Event)))
def test_an_event_is_in_the_table_or_illegal(state: State, event: Event) -> None:
    if (state, event) in TRANSITIONS:
        assert transition(state, event) is TRANSITIONS[state, event]
    else:
        with pytest.raises(IllegalTransitionError, match=f"{state.name} cannot take {event.name}"):
            transition(state, event)


def test_every_state_is_reached_and_left() -> None:
    assert {new for (old, _), new in TRANSITIONS.items() if old is not new} == set(State)
    assert {old for (old, _), new in TRANSITIONS.items() if old is not new} == set(State)


def test_only_ready_is_evicted_and_only_its_writer_makes_it_ready() -> None:
    assert [old for old, event in TRANSITIONS if event is Event.EVICT] == [State.READY]
    made_ready = {(old, event) for (old, event), new in TRANSITIONS.items() if new is State.READY}
    assert made_ready == {(State.WRITING, Event.COMMIT), (State.PINNED, Event.LAST_UNPIN)}


def test_what_drains_is_never_found_again() -> None:
    assert {new for (old, _), new in TRANSITIONS.items() if old is State.DRAINING} == {
        State.DRAINING,
        State.ABSENT,
    }


def test_the_page_in_the_docs_is_in_step() -> None:
    page = Path(__file__).parents[3] / "docs" / "lifecycle.md"
    assert page.read_text() == render_markdown(), "run: python -m ecotone.node.lifecycle > docs/lifecycle.md"
    assert "WRITING --> READY: COMMIT" in page.read_text()
    # In a process of its own: pytest loads what belongs to its plug-ins, as ecotone does, in a way runpy cannot.
    command = [sys.executable, "-m", "ecotone.node.lifecycle"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert printed.stdout == render_markdown()
