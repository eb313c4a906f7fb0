"""What the index keeps: its entries, and who holds them."""

from __future__ import annotations

from ecotone.node.eviction import Candidate
from ecotone.node.exchange import Acquire, Extent
from ecotone.node.extents import Piece, round_up
from ecotone.node.lifecycle import State


class Entry(Candidate):
    """One encoding and the memory it owns. ``pins`` counts its readers; ``since`` is when its writer began (s)."""

    __slots__ = ("extents", "key", "layout", "pieces", "pins", "since", "state")

    def __init__(self, op: Acquire, pieces: tuple[Piece, ...], extents: tuple[Extent, ...], since: float) -> None:
        super().__init__(round_up(op.layout.nbytes), op.cost_s)
        self.key = op.key
        self.layout = op.layout
        self.pieces = pieces
        self.extents = extents
        self.pins = 0
        self.since = since
        self.state = State.ABSENT


class Holder:
    """What one client holds: the ids of its pins and of its transfers."""

    __slots__ = ("client", "pins", "transfers")

    def __init__(self, client: str) -> None:
        self.client = client
        self.pins: set[int] = set()
        self.transfers: set[int] = set()
