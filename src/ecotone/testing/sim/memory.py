"""A simulated region: ordinary memory, of which it is known at every moment who touches which bytes."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from ecotone.errors import ContractError, ShutDownError
from ecotone.node.exchange import Extent
from ecotone.node.region import Region, RegionDescriptor

POISON = 0xEE
NODE = "node"
"""Whose views those of a node are."""


class _Window(np.ndarray[Any, Any]):
    """Bytes of a region that somebody holds; it dies with the last view of it."""

    access: Access


class Access:
    """Somebody may touch bytes ``[start, stop)``: a view until it is dead, a copy until it ended."""

    __slots__ = ("_accesses", "_memory", "born", "owner", "start", "stop", "watch", "what", "writes")

    def __init__(
        self, memory: Memory, accesses: set[Access], owner: str, start: int, stop: int, writes: bool
    ) -> None:
        self._memory = memory
        self._accesses = accesses
        self.owner = owner
        self.born = memory.turn
        self.start = start
        self.stop = stop
        self.writes = writes
        self.what = "view"
        self.watch: object = None
        accesses.add(self)

    def read(self, start: int, stop: int) -> NDArray[np.uint8]:
        """Bytes ``[start, stop)`` of it."""
        return self._memory.data[self.start + start : self.start + stop]

    def write(self, start: int, data: NDArray[np.uint8]) -> None:
        """Write ``data`` from its byte ``start`` on."""
        first = self.start + start
        self._memory.check_write(first, first + len(data))
        self._memory.data[first : first + len(data)] = data

    def end(self) -> None:
        """It touches nothing any more."""
        self._accesses.discard(self)

    def __str__(self) -> str:
        return f"a {self.what} of {self.owner} at bytes {self.start}..{self.stop}"


class Memory:
    """The bytes of one life of a region.

    Attributes:
        data: uint8 ``[size]``.
        turn: counts what the index did so far.
        check_write: called with the bounds of what is about to be written.
    """

    def __init__(self, descriptor: RegionDescriptor) -> None:
        self.descriptor = descriptor
        self.data = np.full(descriptor.size, POISON, np.uint8)
        self.turn = 0
        self.check_write: Callable[[int, int], None] = lambda _start, _stop: None
        self._accesses: set[Access] = set()

    def touching(self, start: int, stop: int) -> Access | None:
        """Somebody who may touch these bytes, if there is anyone. Not so the node that was given them in this very
        turn, to read an entry back from its disk."""
        for access in self._accesses:
            given = access.owner == NODE and access.born == self.turn
            if access.start < stop and start < access.stop and not given:
                return access
        return None

    def accesses(self) -> list[Access]:
        """Everybody who may touch something."""
        return list(self._accesses)

    def window(self, owner: str, start: int, stop: int, *, writes: bool) -> memoryview:
        """Bytes for ``owner``; they count as touched until the last view of them is dead, or ``end``."""
        window = self.data[start:stop].view(_Window)
        access = window.access = Access(self, self._accesses, owner, start, stop, writes)
        access.watch = weakref.ref(window, lambda _dead: access.end())
        view = memoryview(cast(Any, window))
        return view if writes else view.toreadonly()

    def end_owner(self, owner: str) -> None:
        """A process is gone."""
        self._accesses -= {access for access in self._accesses if access.owner == owner}

    def poison(self, start: int, stop: int) -> None:
        """Make what was there unreadable."""
        self.data[start:stop] = POISON


def access_of(view: memoryview) -> Access:
    """Whose bytes ``view`` is of."""
    return cast(_Window, view.obj).access


class SimRegion(Region):
    """A process's mapping of simulated memory. See ``Region``."""

    def __init__(self, memory: Memory, owner: str, *, writable: bool) -> None:
        self.descriptor = memory.descriptor
        self.writable = writable
        self._memory: Memory | None = memory
        self._owner = owner

    def view(self, extent: Extent, *, writable: bool = False) -> memoryview:
        """See ``Region``."""
        memory, own = self._memory, self.descriptor
        if memory is None:
            raise ShutDownError(f"region {own.region_id!r} was closed")
        if (extent.region_id, extent.generation) != (own.region_id, own.generation):
            raise ContractError(f"{extent} is not of region {own.region_id!r}, generation {own.generation}")
        if not 0 <= extent.offset <= extent.offset + extent.length <= own.size:
            raise ContractError(f"{extent} is not inside the region's {own.size} bytes")
        if writable and not self.writable:
            raise ContractError(f"region {own.region_id!r} was attached read-only")
        return memory.window(self._owner, extent.offset, extent.offset + extent.length, writes=writable)

    def close(self) -> None:
        """See ``Region``."""
        self._memory = None
