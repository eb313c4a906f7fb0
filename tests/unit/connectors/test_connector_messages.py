"""Orders and reports: the wire, the join law, and who writes which rows."""

from __future__ import annotations

from functools import reduce
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from ecotone.connectors.messages import (
    EcotoneStepMetadata,
    EcotoneWorkerMetadata,
    FailureReason,
    Order,
    Report,
    ReportKind,
)
from ecotone.connectors.shares import cut, joined, share_of_rows
from ecotone.node.exchange import Extent, Layout
from ecotone.protocol.outputs import ECConnectorOutput
from ecotone.protocol.step import SchedulerOutput
from ecotone.protocol.wire import decode, encode

numbers = st.integers(0, 2**63 - 1)
extents = st.builds(Extent, st.text(max_size=8), numbers, numbers, numbers)
layouts = st.builds(
    Layout, st.sampled_from(["bfloat16", "float32"]), st.tuples(st.integers(1, 9), st.integers(1, 9))
)
orders = st.builds(Order, st.text(max_size=8), numbers, layouts, st.lists(extents, max_size=3).map(tuple))
order_lists = st.lists(orders, max_size=4).map(tuple)
reports = st.builds(
    Report,
    rank=st.integers(0, 3),
    epoch=st.integers(0, 2),
    transfer_id=st.integers(0, 5),
    kind=st.sampled_from(ReportKind),
    reason=st.none() | st.sampled_from(FailureReason),
)
metas = st.builds(EcotoneWorkerMetadata, st.frozensets(reports, max_size=6))


@given(st.lists(st.integers(0, 99), max_size=4).map(tuple), order_lists, order_lists)
def test_orders_survive_the_wire(
    ranks: tuple[int, ...], loads: tuple[Order, ...], saves: tuple[Order, ...]
) -> None:
    output = SchedulerOutput(step=1, ec_connector_metadata=EcotoneStepMetadata(ranks, loads, saves))
    assert decode(encode(output), SchedulerOutput) == output


@given(metas)
def test_reports_survive_the_wire(meta: EcotoneWorkerMetadata) -> None:
    output = ECConnectorOutput(ec_connector_worker_meta=meta)
    assert decode(encode(output), ECConnectorOutput) == output


@given(metas, metas, metas)
def test_reports_are_a_join(a: EcotoneWorkerMetadata, b: EcotoneWorkerMetadata, c: EcotoneWorkerMetadata) -> None:
    before = a.reports
    assert a.aggregate(b) == b.aggregate(a)
    assert a.aggregate(b).aggregate(c) == a.aggregate(b.aggregate(c))
    assert a.aggregate(a) == a
    assert a.aggregate(b).aggregate(b) == a.aggregate(b)
    assert a.reports is before


@given(st.lists(metas, min_size=1, max_size=6))
def test_folding_many_at_once_is_folding_one_by_one(parts: list[EcotoneWorkerMetadata]) -> None:
    assert EcotoneWorkerMetadata.aggregate_all(parts) == reduce(lambda a, b: a.aggregate(b), parts)


@given(st.integers(1, 300), st.lists(st.integers(0, 500), unique=True, min_size=1, max_size=9))
def test_shares_divide_the_rows_evenly_and_completely(num_rows: int, ranks: list[int]) -> None:
    shares = [share_of_rows(num_rows, ranks, rank) for rank in ranks]
    assert [row for share in shares for row in share] == list(range(num_rows))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert not share_of_rows(num_rows, ranks, 999)


pieces = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 40)), min_size=1, max_size=6).map(
    lambda places: [Extent("r", 1, offset, length) for offset, length in places]
)


def _bytes_of(extents: list[Extent]) -> list[int]:
    return [byte for extent in extents for byte in range(extent.offset, extent.offset + extent.length)]


@given(pieces, st.data())
def test_a_cut_holds_exactly_its_bytes(whole: list[Extent], data: st.DataObject) -> None:
    total = len(_bytes_of(whole))
    start = data.draw(st.integers(0, total))
    stop = data.draw(st.integers(start, total))
    assert _bytes_of(cut(whole, start, stop)) == _bytes_of(whole)[start:stop]
    assert all(extent.length for extent in cut(whole, start, stop))


@given(pieces)
def test_joining_changes_no_byte_and_leaves_no_neighbours(whole: list[Extent]) -> None:
    out = joined(whole)
    assert _bytes_of(out) == _bytes_of(whole)
    assert all(a.offset + a.length != b.offset for a, b in pairwise(out))


def test_neighbours_of_different_regions_stay_apart() -> None:
    whole = [Extent("a", 1, 0, 8), Extent("b", 1, 8, 8), Extent("b", 2, 16, 8)]
    assert joined(whole) == whole
