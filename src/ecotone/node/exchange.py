"""What a node is asked and what it answers: one batched exchange that never blocks.

The caller numbers its operations; the answer carries the number. An embedded node has the answers at once, a
shared one later; the caller does not know which.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, prod
from typing import Protocol

import msgspec

from ecotone.errors import DecodeError
from ecotone.node.keys import check_key, check_namespace
from ecotone.protocol.arrays import ITEM_SIZES

MAX_DIMENSIONS = 16


class Layout(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """What the bytes of an entry are: C-contiguous, of ``dtype`` (a key of ``ITEM_SIZES``) and ``shape``.

    Raises:
        DecodeError: unknown dtype, more than ``MAX_DIMENSIONS`` lengths, or a length below 1: what has no bytes
            has no place either.
    """

    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_SIZES:
            raise DecodeError(f"layout dtype {self.dtype!r} is not one of {', '.join(ITEM_SIZES)}")
        if len(self.shape) > MAX_DIMENSIONS:  # multiplying them out takes time
            raise DecodeError(f"layout has {len(self.shape)} dimensions; at most {MAX_DIMENSIONS} are accepted")
        if any(n < 1 for n in self.shape):
            raise DecodeError(f"layout shape {self.shape} has a length below 1")

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return prod(self.shape) * ITEM_SIZES[self.dtype]


class Extent(msgspec.Struct, frozen=True, array_like=True, order=True, forbid_unknown_fields=True, gc=False):
    """A piece of a region: ``length`` bytes from byte ``offset``. ``generation`` tells one life of a region from
    the next, so that an extent of a region that is gone is recognised.

    The extents of an entry, in order, hold exactly ``layout.nbytes`` bytes; no element straddles two of them.
    """

    region_id: str
    generation: int
    offset: int
    length: int


class Op(msgspec.Struct, frozen=True, tag_field="op", forbid_unknown_fields=True, gc=False):
    """An operation. ``seq`` is the caller's number, unique among its own outstanding operations."""

    seq: int


class Acquire(Op, frozen=True, tag="acquire", gc=False):
    """Pin the entry if it is ready; else become its writer. Answers: Ready, Ticket, Pending, NoRoom.

    An entry of another layout than the one asked for is condemned, and counts as absent.

    Attributes:
        key: made by ``Namespace.key``.
        layout: what the entry is, or will be.
        lease_s: seconds after which the pin falls by itself; ``None`` holds until Release. Only who stops
            reading by itself, in time, may ask for a lease.
        cost_s: seconds it takes to compute the entry, as far as known; ``None`` lets the node guess from its size.

    Raises:
        DecodeError: not a key, or a lease or cost that is not a finite number of seconds, 0 or more.
    """

    key: str
    layout: Layout
    lease_s: float | None = None
    cost_s: float | None = None

    def __post_init__(self) -> None:
        check_key(self.key)
        _check_seconds(self.lease_s, "lease_s")
        _check_seconds(self.cost_s, "cost_s")


class Lookup(Op, frozen=True, tag="lookup", gc=False):
    """Pin the entry if it is ready, and never become its writer. Answers: Ready, Pending, Absent.

    As with Acquire, an entry of another layout is condemned, and counts as absent.
    """

    key: str
    layout: Layout
    lease_s: float | None = None

    def __post_init__(self) -> None:
        check_key(self.key)
        _check_seconds(self.lease_s, "lease_s")


class Commit(Op, frozen=True, tag="commit", gc=False):
    """The copy of this transfer is complete: WRITING becomes READY. Answer: Done.

    If the entry was forgotten meanwhile, its memory returns instead.
    """

    transfer_id: int


class Abort(Op, frozen=True, tag="abort", gc=False):
    """The transfer ended without an entry, and nothing touches its memory any more. Answer: Done."""

    transfer_id: int


class Release(Op, frozen=True, tag="release", gc=False):
    """The pin's reader is through with the memory. Answer: Done."""

    pin_id: int


class Forget(Op, frozen=True, tag="forget", gc=False):
    """Take the entry out of the index now; its memory follows when nobody can touch it. Answer: Done."""

    key: str

    def __post_init__(self) -> None:
        check_key(self.key)


class ForgetAll(Op, frozen=True, tag="forget_all", gc=False):
    """Forget every entry whose key is in this namespace (its digest). Answer: Done."""

    namespace: str

    def __post_init__(self) -> None:
        check_namespace(self.namespace)


def _check_seconds(value: float | None, name: str) -> None:
    if value is not None and not 0 <= value < inf:  # written so that it refuses NaN
        raise DecodeError(f"{name}={value} is not a finite number of seconds, 0 or more")


class Answer(msgspec.Struct, frozen=True, tag_field="answer", forbid_unknown_fields=True, gc=False):
    """An answer to the operation of the same ``seq``."""

    seq: int


class Ready(Answer, frozen=True, tag="ready", gc=False):
    """The entry is written and pinned; ``extents`` in order hold its bytes."""

    pin_id: int
    extents: tuple[Extent, ...]


class Ticket(Answer, frozen=True, tag="ticket", gc=False):
    """The caller writes the entry, into ``extents`` in order; it ends the ticket by Commit or Abort."""

    transfer_id: int
    extents: tuple[Extent, ...]


class Pending(Answer, frozen=True, tag="pending", gc=False):
    """Somebody is writing it: ask again later."""


class Absent(Answer, frozen=True, tag="absent", gc=False):
    """It is not there and nobody is writing it."""


class NoRoom(Answer, frozen=True, tag="no_room", gc=False):
    """It is not there and there is no memory for it now."""


class Unreachable(Answer, frozen=True, tag="unreachable", gc=False):
    """The node cannot be asked now, or was lost before it answered. Whatever it gave belongs to nobody."""


class Done(Answer, frozen=True, tag="done", gc=False):
    """Taken in. ``effect`` is False where it changed nothing: late, unknown, repeated, or another client's."""

    effect: bool


class Settled(Answer, frozen=True, tag="settled", gc=False):
    """No answer to an operation (``seq`` is 0), but news that came along with some: a ticket or pin of the caller
    is over though the caller did not end it. Its workers' words or deaths settled it, or its node is gone.

    Attributes:
        claim: the number of the ticket or pin.
        committed: whether the entry became ready; of a pin, or where the node cannot tell any more, False.
        age_s: seconds since it happened, when this was said.
    """

    claim: int
    committed: bool
    age_s: float = 0.0


AnyOp = Acquire | Lookup | Commit | Abort | Release | Forget | ForgetAll
AnyAnswer = Ready | Ticket | Pending | Absent | NoRoom | Unreachable | Done | Settled


class NodeExchange(Protocol):
    """A client's end of a node. Used by one thread at a time."""

    def submit(self, ops: Sequence[AnyOp]) -> None:
        """Hand over operations, to be carried out in order. Never blocks.

        Raises:
            ShutDownError: this end, or the node, was closed.
        """
        ...

    def flush(self) -> None:
        """The caller's step has no more operations: what was handed over and kept back goes out now, in one
        message. Never blocks; without a message where there is nothing.

        Raises:
            ShutDownError: this end, or the node, was closed.
        """
        ...

    def poll(self) -> Sequence[AnyAnswer]:
        """The answers that have arrived since the last call, in the order of their operations; among them news of
        what was settled elsewhere (``Settled``). Never blocks.

        Raises:
            ShutDownError: this end, or the node, was closed.
        """
        ...

    def wait(self, timeout_s: float) -> None:
        """Block until every operation that was flushed has its answer, which the next ``poll`` returns, or for
        ``timeout_s``. Returns at once where nothing is to be waited for.

        Raises:
            ShutDownError: this end, or the node, was closed.
        """
        ...

    def statistics(self) -> dict[str, float]:
        """The node's counters and gauges. Safe from any thread."""
        ...

    def close(self) -> None:
        """Leave: the client's tickets end, its pins fall. Idempotent.

        By calling it the client says that none of its copies touches the region any more.
        """
        ...
