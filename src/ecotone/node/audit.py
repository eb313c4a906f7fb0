"""The index's books, recomputed from scratch and compared with what it keeps."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from ecotone.errors import IntegrityError
from ecotone.node.lifecycle import State

if TYPE_CHECKING:
    from ecotone.node.entry import Entry
    from ecotone.node.index import Index

_FOUND = (State.WRITING, State.READY, State.PINNED)


def audit(index: Index) -> None:
    """Check every invariant of ``index``.

    Raises:
        IntegrityError: the first one that does not hold.
    """
    index.allocator.check_integrity()
    _check_ids(index)
    everything = _all_entries(index)
    _check_states(index, everything)
    _check_bytes(index, everything)


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise IntegrityError(what)


def _all_entries(index: Index) -> set[Entry]:
    held = [entry for entry, _ in (*index.pins.values(), *index.transfers.values())]
    return {*index.entries.values(), *held}


def _check_ids(index: Index) -> None:
    holders = [
        index.tier_holder,
        *index.holders.values(),
        *(holder for lost in index.lost.values() for holder in lost),
    ]
    for table, held in (
        (index.pins, [(i, holder) for holder in holders for i in holder.pins]),
        (index.transfers, [(i, holder) for holder in holders for i in holder.transfers]),
    ):
        _require(len(held) == len(table), "a pin or transfer has no holder, or two")
        for number, holder in held:
            _require(number in table and table[number][1] is holder, f"{number} is not held by {holder.client}")


def _check_states(index: Index, everything: set[Entry]) -> None:
    pins = Counter(entry for entry, _ in index.pins.values())
    writers = Counter(entry for entry, _ in index.transfers.values())
    for entry in everything:
        state, found = entry.state, index.entries.get(entry.key) is entry
        _require(found == (state in _FOUND), f"{entry.key} is {state.name}, in the index: {found}")
        _require(entry.pins == pins[entry], f"{entry.key} counts {entry.pins} pins of {pins[entry]}")
        expected = {State.WRITING: (0, 1), State.READY: (0, 0)}.get(state)
        if expected is not None:
            _require((pins[entry], writers[entry]) == expected, f"{entry.key} is {state.name}, but held")
        elif state is State.PINNED:
            _require(pins[entry] > 0 and not writers[entry], f"{entry.key} is PINNED without a pin")
        else:
            _require(bool(pins[entry]) != (writers[entry] == 1), f"{entry.key} drains and nobody holds it")
    ready = {entry for entry in everything if entry.state is State.READY}
    _require(set(index.policy.candidates()) == ready, "what may be evicted is not what is READY")


def _check_bytes(index: Index, everything: set[Entry]) -> None:
    sums = dict.fromkeys(State, 0)
    for entry in everything:
        sums[entry.state] += entry.nbytes
        length = sum(length for _, length in entry.pieces)
        _require(length == entry.layout.nbytes, f"{entry.key} owns {length} bytes of {entry.layout.nbytes}")
    # ABSENT entries own nothing; the running sum of that state only says what passed through it.
    held = [state for state in State if state is not State.ABSENT]
    for state in held:
        _require(index.bytes_by_state[state] == sums[state], f"bytes {state.name} are {sums[state]}")
    total = index.allocator.free_bytes + sum(sums[state] for state in held)
    _require(total == index.allocator.capacity, f"{total} of {index.allocator.capacity} bytes are accounted for")
    starts = [start for entry in everything for start, _ in entry.pieces]
    _require(len(starts) == len(set(starts)), "two entries own the same bytes")
