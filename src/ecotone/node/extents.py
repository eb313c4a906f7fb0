"""Which bytes of a region are whose: an allocator over ``[0, capacity)``. It owns numbers, not memory."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import nlargest

from sortedcontainers import SortedList

from ecotone.errors import ContractError, IntegrityError

# Pieces begin at multiples of 64 bytes, and only the last piece of an entry may end elsewhere. So no element of
# any dtype straddles two pieces, views have the alignment torch and numpy give their own memory, and copies into
# neighbouring entries never write the same cache line.
ALIGNMENT = 64

Piece = tuple[int, int]
"""Offset and length in bytes."""


def round_up(nbytes: int) -> int:
    """``nbytes``, or the next multiple of ``ALIGNMENT``: what a piece of this length takes."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class ExtentAllocator:
    """Best fit, in one piece where a hole is large enough, else in a bounded number of pieces.

    Holes are kept by offset, by end (neighbours coalesce in constant time) and sorted by length, so that
    everything is O(log n) in the number of holes.

    Args:
        capacity: bytes there are; what is beyond the last multiple of ``ALIGNMENT`` is not used.
        max_pieces: the most pieces one allocation is split into.
    """

    def __init__(self, capacity: int, max_pieces: int = 16) -> None:
        self.capacity = capacity // ALIGNMENT * ALIGNMENT
        self.max_pieces = max_pieces
        self.free_bytes = 0
        self._used: dict[int, int] = {}
        self._hole_length: dict[int, int] = {}
        self._hole_start: dict[int, int] = {}
        self._by_length = SortedList()
        if self.capacity:
            self._add_hole(0, self.capacity)

    def allocate(self, nbytes: int) -> tuple[Piece, ...] | None:
        """Pieces whose lengths add up to exactly ``nbytes`` (at least 1), in the order to use them; ``None``: no
        room."""
        need = round_up(nbytes)
        if need > self.free_bytes:
            return None
        holes = self._choose(need)
        if holes is None:
            return None
        pieces = []
        for start, length in holes:
            self._take(start, length)
            pieces.append((start, min(length, nbytes)))
            nbytes -= length
        return tuple(pieces)

    def free(self, pieces: Iterable[Piece]) -> None:
        """Give back what ``allocate`` returned.

        Raises:
            ContractError: one of them is not allocated, or not with this length; the ones before it are free.
        """
        for start, length in pieces:
            reserved = round_up(length)
            if self._used.get(start) != reserved:
                raise ContractError(f"bytes {start}..{start + length} are not an allocated piece")
            del self._used[start]
            self._give(start, reserved)

    def fits_beside(self, held: Iterable[Piece], nbytes: int) -> bool:
        """Whether ``nbytes`` could be allocated if everything but ``held`` were free."""
        gaps, end = [], 0
        for start, length in sorted(held):
            gaps.append(start - end)
            end = start + round_up(length)
        gaps.append(self.capacity - end)
        return sum(nlargest(self.max_pieces, gaps)) >= round_up(nbytes)

    def statistics(self) -> dict[str, float]:
        """Bytes free, the largest hole, holes and pieces, and fragmentation: the part of the free bytes that lies
        outside the largest hole (0 is one hole)."""
        largest = self._by_length[-1][0] if self._by_length else 0
        return {
            "bytes_free": self.free_bytes,
            "bytes_largest_free": largest,
            "holes": len(self._hole_length),
            "pieces": len(self._used),
            "fragmentation": 1 - largest / self.free_bytes if self.free_bytes else 0.0,
        }

    def check_integrity(self) -> None:
        """Every byte is in exactly one piece or hole, and no two holes touch.

        Raises:
            IntegrityError: naming the first byte where that is not so.
        """
        spans = [(start, length, "piece") for start, length in self._used.items()]
        spans += [(start, length, "hole") for start, length in self._hole_length.items()]
        end, before = 0, "piece"
        for start, length, kind in sorted(spans):
            if start != end or length <= 0 or length % ALIGNMENT:
                raise IntegrityError(f"{kind} {start}+{length} follows byte {end}")
            if kind == before == "hole":
                raise IntegrityError(f"two holes touch at byte {start}")
            end, before = start + length, kind
        holes = self._hole_length.items()
        if end != self.capacity or self.free_bytes != sum(self._hole_length.values()):
            raise IntegrityError(f"{end} of {self.capacity} bytes are accounted for, {self.free_bytes} as free")
        if self._hole_start != {start + length: start for start, length in holes}:
            raise IntegrityError("the holes by end are not the holes by offset")
        if list(self._by_length) != sorted((length, start) for start, length in holes):
            raise IntegrityError("the holes by length are not the holes by offset")

    def _choose(self, need: int) -> list[Piece] | None:
        """Parts of holes that add up to ``need``: of the smallest hole that holds it all, or else of the largest
        ones, so that there are as few as possible."""
        chosen: list[Piece] = []
        below = len(self._by_length)
        while True:
            fit = self._by_length.bisect_left((need, 0))
            if fit < below:
                chosen.append((self._by_length[fit][1], need))
                return chosen
            below -= 1
            if below < 0 or len(chosen) + 1 >= self.max_pieces:
                return None
            length, start = self._by_length[below]
            chosen.append((start, length))
            need -= length

    def _take(self, start: int, length: int) -> None:
        """Turn the first ``length`` bytes of the hole at ``start`` into a piece."""
        hole = self._hole_length[start]
        self._remove_hole(start, hole)
        if hole > length:
            self._add_hole(start + length, hole - length)
        self._used[start] = length

    def _give(self, start: int, length: int) -> None:
        """Turn a former piece into a hole, together with the holes it touches."""
        before = self._hole_start.get(start)
        if before is not None:
            self._remove_hole(before, start - before)
            start, length = before, length + start - before
        after = self._hole_length.get(start + length)
        if after is not None:
            self._remove_hole(start + length, after)
            length += after
        self._add_hole(start, length)

    def _add_hole(self, start: int, length: int) -> None:
        self._hole_length[start] = length
        self._hole_start[start + length] = start
        self._by_length.add((length, start))
        self.free_bytes += length

    def _remove_hole(self, start: int, length: int) -> None:
        del self._hole_length[start], self._hole_start[start + length]
        self._by_length.remove((length, start))
        self.free_bytes -= length
