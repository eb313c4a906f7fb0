"""The barrier: a transfer is settled by the ranks that take part in it, each known by its number, whatever else is
heard, however often and in whatever order."""

from __future__ import annotations

from collections import Counter
from itertools import count

import pytest
from connector_doubles import Bench, fact, item
from hypothesis import given
from hypothesis import strategies as st

from ecotone.connectors.messages import FailureReason, Report, ReportKind
from ecotone.connectors.shares import share_of_rows
from ecotone.connectors.transfers import Transfers
from ecotone.node.exchange import Abort, AnyOp, Commit, Forget, Release
from ecotone.protocol.aggregate import ECOutputAggregator, KVOutputAggregator
from ecotone.protocol.connector import CacheLookup
from ecotone.protocol.outputs import ECConnectorOutput, KVConnectorOutput, ModelRunnerOutput

SAVED, SAVE_FAILED = ReportKind.SAVED, ReportKind.SAVE_FAILED
LOADED, LOAD_FAILED, RELEASED = ReportKind.LOADED, ReportKind.LOAD_FAILED, ReportKind.RELEASED
STRANGERS = (90, 91)  # ranks that take no part


@st.composite
def worlds(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[str, int, dict[int, bool]]], list[Report]]:
    """Who takes part; transfers (kind, rows, rank -> whether it fails there); and everything that will ever be
    said: each true fact once or more, facts of ranks that take no part and of transfers there never were."""
    ranks = tuple(draw(st.lists(st.integers(0, 6), min_size=1, max_size=4, unique=True)))
    transfers, told = [], []
    for transfer_id in range(1, draw(st.integers(1, 4)) + 1):
        kind, rows = draw(st.sampled_from(("save", "load"))), draw(st.integers(1, 6))
        fails = {rank: draw(st.integers(0, 4)) == 0 for rank in ranks}
        transfers.append((kind, rows, fails))
        for rank in ranks:
            if kind == "save" and share_of_rows(rows, ranks, rank):
                kinds = [SAVE_FAILED if fails[rank] else SAVED]
            elif kind == "load":
                kinds = [LOAD_FAILED] if fails[rank] else [LOADED, RELEASED]
            else:
                kinds = []
            told += [fact(transfer_id, k, rank) for k in kinds]
    noise = st.builds(
        Report,
        rank=st.sampled_from((*ranks, *STRANGERS)),
        epoch=st.integers(0, 3),
        transfer_id=st.integers(50, 60),
        kind=st.sampled_from(ReportKind),
        reason=st.none(),
    )
    strangers = st.builds(
        fact, st.integers(1, len(transfers)), st.sampled_from(ReportKind), st.sampled_from(STRANGERS)
    )
    extra = draw(st.lists(st.one_of(noise, strangers, st.sampled_from(told or [fact(99, SAVED)])), max_size=25))
    return ranks, transfers, draw(st.permutations([*told, *extra]))


def due(
    ranks: tuple[int, ...], transfers: list[tuple[str, int, dict[int, bool]]], heard: set[Report]
) -> Counter[tuple[type[AnyOp], object]]:
    """What the node must have been told once exactly the facts in ``heard`` are known."""
    out: Counter[tuple[type[AnyOp], object]] = Counter()
    for transfer_id, (kind, rows, fails) in enumerate(transfers, 1):
        own = {(r.rank, r.kind) for r in heard if r.transfer_id == transfer_id and r.rank in ranks}
        if kind == "save":
            writers = {rank for rank in ranks if share_of_rows(rows, ranks, rank)}
            if writers <= {rank for rank, k in own if k in (SAVED, SAVE_FAILED)}:
                failed = any(fails[rank] for rank in writers)
                out[Abort if failed else Commit, transfer_id] += 1
        else:
            if any(k is LOAD_FAILED for _, k in own):
                out[Forget, item(str(transfer_id)).key] += 1
            if set(ranks) <= {rank for rank, k in own if k in (LOAD_FAILED, RELEASED)}:
                out[Release, transfer_id] += 1
    return out


@given(worlds())
def test_the_node_hears_what_the_facts_so_far_add_up_to_and_each_thing_once(
    world: tuple[tuple[int, ...], list[tuple[str, int, dict[int, bool]]], list[Report]],
) -> None:
    ranks, transfers, stream = world
    machine = Transfers(ranks, count(1).__next__)
    for number, (kind, rows, _) in enumerate(transfers, 1):
        if kind == "save":
            assert machine.dispatch_save(number, rows) == number
        else:
            assert machine.dispatch_load(item(str(number)).key, number) == number
    told: Counter[tuple[type[AnyOp], object]] = Counter()
    heard: set[Report] = set()
    for report in stream:
        heard.add(report)
        for op in machine.apply(report):
            what = op.key if isinstance(op, Forget) else getattr(op, "pin_id", None) or op.transfer_id
            told[type(op), what] += 1
        assert told == due(ranks, transfers, heard)
    assert not machine.unfinished
    assert machine.gauges() == {"saves_in_flight": 0, "pins_held": 0}
    # And all of it once more, as a replay would: nothing is left to say.
    assert not any(machine.apply(report) for report in stream)


@given(
    ranks=st.lists(st.integers(0, 9), min_size=1, max_size=5, unique=True),
    rows=st.integers(1, 12),
    epochs=st.lists(st.integers(0, 5), min_size=2, max_size=4),
)
def test_a_rank_counts_once_under_whatever_epoch_it_is_heard(
    ranks: list[int], rows: int, epochs: list[int]
) -> None:
    machine = Transfers(tuple(ranks), count(1).__next__)
    transfer_id = machine.dispatch_save(7, rows)
    writers = [rank for rank in ranks if share_of_rows(rows, ranks, rank)]
    for rank in writers[:-1]:
        for epoch in epochs:
            assert machine.apply(Report(rank, epoch, transfer_id, SAVED)) == []
    [op] = machine.apply(Report(writers[-1], epochs[0], transfer_id, SAVED))
    assert isinstance(op, Commit)
    assert all(machine.apply(Report(writers[-1], epoch, transfer_id, SAVED)) == [] for epoch in epochs)


def test_a_late_report_of_an_old_transfer_does_not_settle_a_newer_one_of_the_same_key() -> None:
    bench = Bench(ranks=(0, 1))
    cat = item("cat")
    assert bench.half.lookup("r", cat) is CacheLookup.MISS
    bench.half.update_state_after_alloc("r", cat)
    [old] = bench.half.build_connector_meta().saves
    failed = [fact(old.transfer_id, SAVE_FAILED, rank, FailureReason.COPY) for rank in (0, 1)]
    bench.report(*failed)
    assert len(bench.node.said(Abort)) == 1
    bench.half.lookup("r", cat)
    bench.half.update_state_after_alloc("r", cat)
    [new] = bench.half.build_connector_meta().saves
    assert new.transfer_id != old.transfer_id
    bench.report(fact(new.transfer_id, SAVED, 0), fact(old.transfer_id, SAVED, 1), *failed)
    assert not bench.node.said(Commit)
    bench.report(fact(new.transfer_id, SAVED, 1))
    assert len(bench.node.said(Commit)) == 1


@pytest.mark.parametrize("heard", [[0], [0, 0], [0, 0, 0]])
def test_neither_a_union_nor_a_count_would_do(heard: list[int]) -> None:
    """Two ranks write one entry, and rank 0 is heard ``heard`` times: a repeated message is no second rank.

    The generic aggregator's union calls a transfer finished once anybody said so. A count calls it finished once
    the number was reached, by whomever. The connector, which knows who takes part, waits for rank 1.
    """
    bench = Bench(ranks=(0, 1))
    cat = item("cat")
    bench.half.lookup("r", cat)
    bench.half.update_state_after_alloc("r", cat)
    [order] = bench.half.build_connector_meta().saves
    name = str(order.transfer_id)

    union: set[str] = set()
    counted: set[str] = set()
    counter = KVOutputAggregator(expected_finished_count=2)
    for _ in heard:
        said = ModelRunnerOutput(
            ec_connector_output=ECConnectorOutput(finished_sending=frozenset({name})),
            kv_connector_output=KVConnectorOutput(finished_sending=frozenset({name})),
        )
        ranks = [said, ModelRunnerOutput()]
        folded = ECOutputAggregator().aggregate(ranks)
        assert folded is not None
        assert folded.ec_connector_output is not None
        union |= folded.ec_connector_output.finished_sending
        kv = counter.aggregate(ranks).kv_connector_output
        counted |= kv.finished_sending if kv is not None else frozenset()
        bench.report(fact(order.transfer_id, SAVED, 0))

    assert union == {name}  # half of the rows are not there
    assert counted == ({name} if len(heard) > 1 else set())
    assert not bench.node.said(Commit)
    bench.report(fact(order.transfer_id, SAVED, 1))
    assert len(bench.node.said(Commit)) == 1


def test_a_count_of_all_ranks_would_wait_for_ever_for_those_without_an_encoder() -> None:
    """Four ranks, of which the two of the second pipeline stage have no encoder and never report."""
    counter = KVOutputAggregator(expected_finished_count=4)
    said = ModelRunnerOutput(kv_connector_output=KVConnectorOutput(finished_sending=frozenset({"1"})))
    silent = ModelRunnerOutput()
    outputs = [said, said, silent, silent]
    folded = counter.aggregate(outputs, 2)
    assert folded is not None
    assert folded.kv_connector_output is None
    for _ in range(100):
        assert counter.aggregate([silent] * 4, 2).kv_connector_output is None

    bench = Bench(ranks=(0, 1))
    cat = item("cat")
    bench.half.lookup("r", cat)
    bench.half.update_state_after_alloc("r", cat)
    [order] = bench.half.build_connector_meta().saves
    bench.report(fact(order.transfer_id, SAVED, 0), fact(order.transfer_id, SAVED, 1))
    assert len(bench.node.said(Commit)) == 1
    assert not bench.half.has_pending_work()
