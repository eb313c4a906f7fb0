"""What a node is asked and what it answers: one batched exchange that never blocks.

The caller numbers its operations; the answer carries the number. An embedded node has the answers at once, a
shared one later; the caller does not know which.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Protocol

import msgspec

from ecotone.protocol.arrays import ITEM_SIZES


class Layout(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What the bytes of an entry are: C-contiguous, of ``dtype`` (a key of ``ITEM_SIZES``) and ``shape``."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return prod(self.shape) * ITEM_SIZES[self.dtype]


class Extent(msgspec.Struct, frozen=True, array_like=True, order=True, forbid_unknown_fields=True):
    """A piece of a region: ``length`` bytes from byte ``offset``. ``generation`` tells one life of a region from
    the next, so that an extent of a region that is gone is recognised."""

    region_id: str
    generation: int
    offset: int
    length: int


class Op(msgspec.Struct, frozen=True, tag_field="op", forbid_unknown_fields=True):
    """An operation. ``seq`` is the caller's number, unique among its own outstanding operations."""

    seq: int


class Acquire(Op, frozen=True, tag="acquire"):
    """Pin the entry if it is ready; else become its writer. Answers: Ready, Ticket, Pending, NoRoom.

    An entry of another layout than the one asked for is condemned, and counts as absent.
    ``lease_s``: seconds after which the pin falls by itself; ``None`` holds until Release. Only who stops
    reading by itself, in time, may ask for a lease.
    """

    key: str
    layout: Layout
    lease_s: float | None = None


class Lookup(Op, frozen=True, tag="lookup"):
    """Pin the entry if it is ready, and never become its writer. Answers: Ready, Pending, Absent."""

    key: str
    layout: Layout
    lease_s: float | None = None


class Commit(Op, frozen=True, tag="commit"):
    """The copy of this transfer is complete: WRITING becomes READY. Answer: Done."""

    transfer_id: int


class Abort(Op, frozen=True, tag="abort"):
    """The transfer ended without an entry, and nothing touches its memory any more. Answer: Done."""

    transfer_id: int


class Release(Op, frozen=True, tag="release"):
    """The pin's reader is through with the memory. Answer: Done."""

    pin_id: int


class Forget(Op, frozen=True, tag="forget"):
    """Take the entry out of the index now; its memory follows when nobody can touch it. Answer: Done."""

    key: str


class ForgetAll(Op, frozen=True, tag="forget_all"):
    """Forget every entry whose key is in this namespace (its digest). Answer: Done."""

    namespace: str


class Answer(msgspec.Struct, frozen=True, tag_field="answer", forbid_unknown_fields=True):
    """An answer to the operation of the same ``seq``."""

    seq: int


class Ready(Answer, frozen=True, tag="ready"):
    """The entry is written and pinned; ``extents`` in order hold its bytes."""

    pin_id: int
    extents: tuple[Extent, ...]


class Ticket(Answer, frozen=True, tag="ticket"):
    """The caller writes the entry, into ``extents`` in order; it ends the ticket by Commit or Abort."""

    transfer_id: int
    extents: tuple[Extent, ...]


class Pending(Answer, frozen=True, tag="pending"):
    """Somebody is writing it: ask again later."""


class Absent(Answer, frozen=True, tag="absent"):
    """It is not there and nobody is writing it."""


class NoRoom(Answer, frozen=True, tag="no_room"):
    """It is not there and there is no memory for it now."""


class Done(Answer, frozen=True, tag="done"):
    """Taken in. ``effect`` is False where it changed nothing (late, unknown or repeated)."""

    effect: bool


AnyOp = Acquire | Lookup | Commit | Abort | Release | Forget | ForgetAll
AnyAnswer = Ready | Ticket | Pending | Absent | NoRoom | Done


class NodeExchange(Protocol):
    """A client's end of a node."""

    def submit(self, ops: Sequence[AnyOp]) -> None:
        """Hand over operations, to be carried out in order. Never blocks."""
        ...

    def poll(self) -> Sequence[AnyAnswer]:
        """The answers that have arrived since the last call, in the order of their operations. Never blocks."""
        ...

    def statistics(self) -> dict[str, float]:
        """The node's counters and gauges."""
        ...

    def close(self) -> None:
        """Leave: the client's tickets end, its pins fall. Idempotent."""
        ...
