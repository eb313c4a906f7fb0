"""The allocator: no byte has two owners, none is lost, and an allocation is split only where it must be."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ecotone.errors import ContractError, IntegrityError
from ecotone.node.extents import ALIGNMENT, ExtentAllocator, Piece, round_up

A = ALIGNMENT


def test_one_piece_from_the_smallest_hole_that_fits() -> None:
    allocator = ExtentAllocator(20 * A)
    pieces = [allocator.allocate(n * A) for n in (5, 1, 3, 1, 8, 1)]
    assert all(p is not None and len(p) == 1 for p in pieces)
    for i in (0, 2, 4):
        allocator.free(pieces[i] or ())
    assert allocator.allocate(3 * A) == ((6 * A, 3 * A),)
    assert allocator.allocate(4 * A) == ((0, 4 * A),)
    assert allocator.allocate(8 * A) == ((10 * A, 8 * A),)


def fragmented(holes: int, max_pieces: int = 16) -> ExtentAllocator:
    """A full allocator but for ``holes`` single units, no two of which touch."""
    allocator = ExtentAllocator(2 * holes * A, max_pieces)
    units = [allocator.allocate(A) for _ in range(2 * holes)]
    for unit in units[::2]:
        allocator.free(unit or ())
    return allocator


def test_split_where_fragmented_with_lengths_that_add_up_exactly() -> None:
    allocator = fragmented(4)
    assert allocator.allocate(4 * A + 1) is None
    assert allocator.allocate(3 * A - 7) == ((6 * A, A), (4 * A, A), (0, A - 7))
    allocator.check_integrity()
    assert allocator.free_bytes == A


def test_never_more_pieces_than_allowed() -> None:
    allocator = fragmented(4, max_pieces=3)
    assert allocator.allocate(4 * A) is None
    assert len(allocator.allocate(3 * A) or ()) == 3


def test_as_few_pieces_as_possible() -> None:
    allocator = ExtentAllocator(12 * A)
    blocks = [allocator.allocate(n * A) for n in (1, 1, 3, 1, 5, 1)]
    for i in (0, 2, 4):
        allocator.free(blocks[i] or ())
    # 5 + the smallest hole that holds the other 1, and not 3 + ...
    assert allocator.allocate(6 * A) == ((6 * A, 5 * A), (0, A))


def test_holes_coalesce_on_both_sides() -> None:
    allocator = ExtentAllocator(3 * A)
    a, b, c = (allocator.allocate(A) or () for _ in range(3))
    allocator.free(a)
    allocator.free(c)
    assert allocator.statistics()["holes"] == 2
    assert allocator.statistics()["fragmentation"] == 0.5
    allocator.free(b)
    assert allocator.statistics() == {
        "bytes_free": 3 * A, "bytes_largest_free": 3 * A, "holes": 1, "pieces": 0, "fragmentation": 0.0,
    }  # fmt: skip


def test_pieces_are_aligned_and_the_tail_beyond_the_last_unit_is_not_used() -> None:
    allocator = ExtentAllocator(3 * A - 1)
    assert allocator.capacity == 2 * A
    assert [allocator.allocate(1), allocator.allocate(A), allocator.allocate(1)] == [((0, 1),), ((A, A),), None]


def test_without_capacity_nothing_fits() -> None:
    allocator = ExtentAllocator(A - 1)
    assert allocator.allocate(1) is None
    assert allocator.statistics()["fragmentation"] == 0.0
    allocator.check_integrity()


@pytest.mark.parametrize("piece", [(0, A + 1), (A, A), (1, A), (0, 0)])
def test_what_is_not_allocated_is_not_freed(piece: Piece) -> None:
    allocator = ExtentAllocator(4 * A)
    allocator.allocate(A)
    with pytest.raises(ContractError, match="not an allocated piece"):
        allocator.free([piece])
    allocator.check_integrity()
    assert allocator.free_bytes == 3 * A


def test_freeing_twice_is_refused() -> None:
    allocator = ExtentAllocator(4 * A)
    pieces = allocator.allocate(2 * A) or ()
    allocator.free(pieces)
    with pytest.raises(ContractError, match="not an allocated piece"):
        allocator.free(pieces)


requests = st.lists(st.tuples(st.booleans(), st.integers(1, 9 * A), st.integers(0, 99)), max_size=60)


@settings(max_examples=150)
@given(requests, st.integers(1, 4))
def test_against_a_plain_map_of_units(steps: list[tuple[bool, int, int]], max_pieces: int) -> None:
    units = 24
    allocator = ExtentAllocator(units * A, max_pieces)
    owner: dict[int, int] = {}  # unit -> allocation
    live: dict[int, tuple[Piece, ...]] = {}
    for number, (give_back, nbytes, pick) in enumerate(steps):
        if give_back and live:
            chosen = sorted(live)[pick % len(live)]
            allocator.free(live.pop(chosen))
            owner = {unit: who for unit, who in owner.items() if who != chosen}
        else:
            holes = sorted(hole_lengths(units, owner), reverse=True)
            fits = sum(holes[:max_pieces]) * A >= nbytes
            assert allocator.fits_beside([p for pieces in live.values() for p in pieces], nbytes) == fits
            pieces = allocator.allocate(nbytes)
            assert (pieces is not None) == fits
            if pieces is None:
                continue
            assert len(pieces) <= max_pieces
            assert (len(pieces) == 1) == (holes[0] * A >= nbytes)
            assert sum(length for _, length in pieces) == nbytes
            for start, length in pieces:
                for unit in range(start // A, (start + round_up(length)) // A):
                    assert start % A == 0
                    assert unit not in owner
                    owner[unit] = number
            live[number] = pieces
        allocator.check_integrity()
        assert allocator.free_bytes == (units - len(owner)) * A


def hole_lengths(units: int, owner: dict[int, int]) -> list[int]:
    lengths, run = [], 0
    for unit in range(units + 1):
        if unit < units and unit not in owner:
            run += 1
        elif run:
            lengths.append(run)
            run = 0
    return lengths or [0]


def corrupt_overlap(allocator: ExtentAllocator) -> None:
    allocator._used[A // 2] = A


def corrupt_lost(allocator: ExtentAllocator) -> None:
    del allocator._used[max(allocator._used)]


def corrupt_free_sum(allocator: ExtentAllocator) -> None:
    allocator.free_bytes += A


def corrupt_ends(allocator: ExtentAllocator) -> None:
    allocator._hole_start[A] = A


def corrupt_lengths(allocator: ExtentAllocator) -> None:
    allocator._by_length.add((A, 99 * A))


def corrupt_touching(allocator: ExtentAllocator) -> None:
    del allocator._used[A]
    allocator._add_hole(A, A)


@pytest.mark.parametrize(
    "corrupt",
    [corrupt_overlap, corrupt_lost, corrupt_free_sum, corrupt_ends, corrupt_lengths, corrupt_touching],
)
def test_integrity_check_finds(corrupt: object) -> None:
    allocator = fragmented(3)
    allocator.check_integrity()
    assert callable(corrupt)
    corrupt(allocator)
    with pytest.raises(IntegrityError):
        allocator.check_integrity()
