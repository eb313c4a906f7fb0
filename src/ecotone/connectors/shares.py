"""Who writes which part of an entry, and where these bytes lie."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ecotone.node.exchange import Extent


def share_of_rows(num_rows: int, ranks: Sequence[int], rank: int) -> range:
    """The rows that ``rank`` writes: the ranks, in the order given, divide ``num_rows`` as evenly as possible.

    A rank that is not among them, or one of more ranks than there are rows, may get none.
    """
    if rank not in ranks:
        return range(0)
    position, count = ranks.index(rank), len(ranks)
    return range(num_rows * position // count, num_rows * (position + 1) // count)


def joined(extents: Iterable[Extent]) -> list[Extent]:
    """The same bytes in as few pieces as possible: neighbours in order and in memory become one."""
    out: list[Extent] = []
    for extent in extents:
        last = out[-1] if out else None
        if (
            last is not None
            and (last.region_id, last.generation) == (extent.region_id, extent.generation)
            and last.offset + last.length == extent.offset
        ):
            out[-1] = Extent(last.region_id, last.generation, last.offset, last.length + extent.length)
        else:
            out.append(extent)
    return out


def cut(extents: Iterable[Extent], start: int, stop: int) -> list[Extent]:
    """The pieces that hold bytes ``[start, stop)`` of what ``extents`` hold in order."""
    out, position = [], 0
    for extent in extents:
        first, last = max(start, position), min(stop, position + extent.length)
        if first < last:
            offset = extent.offset + first - position
            out.append(Extent(extent.region_id, extent.generation, offset, last - first))
        position += extent.length
    return out
