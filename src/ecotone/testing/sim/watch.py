"""The rules about a node's memory, checked after everything that may change it.

The index says whose bytes are whose; the memory knows who touches them and what is in them. Neither knows of the
other, so that each is a witness against the other.
"""

from __future__ import annotations

from collections.abc import Iterable

from ecotone.errors import IntegrityError
from ecotone.node.entry import Entry
from ecotone.node.exchange import AnyAnswer, AnyOp, Ready
from ecotone.node.index import Index
from ecotone.node.lifecycle import State
from ecotone.testing.sim.memory import Memory
from ecotone.testing.sim.model import Library, describe
from ecotone.testing.sim.world import ViolationError

_WRITTEN = (State.READY, State.PINNED)


class Watch:
    """Compares ``index`` with ``memory``, and both with what encodings must be."""

    def __init__(self, index: Index, memory: Memory, library: Library) -> None:
        self.index = index
        self.memory = memory
        self._library = library
        self._states: dict[Entry, State] = {}
        memory.check_write = self._check_write

    def after(self, ops: Iterable[AnyOp] = (), answers: Iterable[AnyAnswer] = ()) -> None:
        """The index has just done something.

        Raises:
            ViolationError: naming the rule that does not hold.
        """
        index, before = self.index, self._states
        held = [entry for entry, _ in (*index.pins.values(), *index.transfers.values())]
        now = {entry: entry.state for entry in (*index.entries.values(), *held)}
        self._states = now
        for entry in before:
            if entry not in now:
                self._check_free(entry, "given back")
        for entry, state in now.items():
            if entry not in before:
                self._check_free(entry, "given out")
            if state in _WRITTEN and before.get(entry) not in _WRITTEN:
                self._check_written(entry)
        for op, answer in zip(ops, answers, strict=True):
            if isinstance(answer, Ready):
                self._check_answer(op, answer)
        self.memory.turn += 1
        try:
            index.check_integrity()
        except IntegrityError as error:
            raise ViolationError("books", str(error)) from error

    def check_rest(self) -> None:
        """Nothing is written, read or draining.

        Raises:
            ViolationError: something is.
        """
        index = self.index
        left = {name: n for name, n in index.statistics().items() if n and name in _NOTHING_AT_REST}
        if left:
            raise ViolationError("rest", f"the node still has {left}")
        accesses = self.memory.accesses()
        if accesses:
            raise ViolationError("rest", f"there is still {accesses[0]}")

    def _check_free(self, entry: Entry, what: str) -> None:
        for start, length in entry.pieces:
            access = self.memory.touching(start, start + length)
            if access is not None:
                name = self._library.of_key(entry.key)
                raise ViolationError("reuse", f"memory of {name} was {what} while there is {access}")
            self.memory.poison(start, start + length)

    def _check_written(self, entry: Entry) -> None:
        encoding = self._library.of_key(entry.key)
        data = b"".join(self.memory.data[start : start + length].tobytes() for start, length in entry.pieces)
        if data != encoding.data:
            raise ViolationError("ready", f"{encoding} became ready, and its memory has {describe(data)}")

    def _check_answer(self, op: AnyOp, answer: Ready) -> None:
        encoding = self._library.of_key(getattr(op, "key", ""))
        data = b"".join(self.memory.data[e.offset : e.offset + e.length].tobytes() for e in answer.extents)
        if data != encoding.data:
            raise ViolationError("ready", f"{encoding} was answered READY, and its memory has {describe(data)}")

    def _check_write(self, start: int, stop: int) -> None:
        for entry in self._states:
            for at, length in entry.pieces:
                if at < stop and start < at + length and entry.state in _WRITTEN:
                    name = self._library.of_key(entry.key)
                    raise ViolationError("write", f"bytes {start}..{stop} are written while {name} is ready there")


_NOTHING_AT_REST = ("transfers", "pins", "bytes_writing", "bytes_draining", "bytes_pinned")
