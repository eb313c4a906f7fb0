"""The scheduler half hears from the node what the ranks settled, asks in advance, and knows rows of any width."""

from __future__ import annotations

import pytest
from connector_doubles import SPEC, Bench, fact, item
from hypothesis import given
from hypothesis import strategies as st

from ecotone.connectors.messages import Order, Report, ReportKind
from ecotone.node.exchange import Abort, Acquire, Commit, Layout, Release
from ecotone.protocol.connector import CacheLookup, ECItem

READY, PENDING, MISS = CacheLookup.READY, CacheLookup.PENDING, CacheLookup.MISS
RANKS = (0, 1)


def order_of(bench: Bench, name: str, verdict: str = "ticket") -> Order:
    bench.node.verdicts[item(name).key] = verdict
    assert bench.half.lookup(name, item(name)) is (READY if verdict == "ready" else MISS)
    bench.half.update_state_after_alloc(name, item(name))
    meta = bench.half.build_connector_meta()
    assert meta is not None
    (order,) = (*meta.loads, *meta.saves)
    return order


def hear(bench: Bench) -> None:
    """News come with answers, and answers with questions."""
    bench.half.has_pending_work()


def test_a_save_that_the_node_committed_is_over_and_measured() -> None:
    bench = Bench(timeout=None)  # type: ignore[arg-type]
    order = order_of(bench, "cat")
    assert bench.half.has_pending_work()
    bench.clock.now += 3.0
    bench.node.settle(order.claim, committed=True, age_s=2.5)
    assert not bench.half.has_pending_work()
    assert bench.half.statistics()["pending_budget_s"] == pytest.approx(5.0)  # ten times the half second it took
    bench.report(fact(order.transfer_id, ReportKind.SAVED))
    bench.node.settle(order.claim, committed=True)
    hear(bench)
    assert bench.half.statistics()["pending_budget_s"] == pytest.approx(5.0)
    assert not bench.node.said(Commit)


def test_a_save_that_the_node_aborted_is_over_and_not_measured() -> None:
    bench = Bench(timeout=None)  # type: ignore[arg-type]
    before = bench.half.statistics()["pending_budget_s"]
    bench.node.settle(order_of(bench, "cat").claim, committed=False)
    assert not bench.half.has_pending_work()
    assert bench.half.statistics()["pending_budget_s"] == before
    assert not bench.node.said(Abort)


def test_what_the_scheduler_settled_first_stays_settled() -> None:
    bench = Bench()
    order = order_of(bench, "cat", "ready")
    bench.report(fact(order.transfer_id, ReportKind.LOADED), fact(order.transfer_id, ReportKind.RELEASED))
    bench.node.settle(order.claim, committed=False)
    assert not bench.half.has_pending_work()
    assert len(bench.node.said(Release)) == 1


def test_an_answer_that_is_over_before_anybody_asked_again_is_worth_nothing() -> None:
    bench = Bench()
    bench.node.verdicts[item("cat").key] = "ready"
    bench.half.prepare([item("cat")], 1.0)
    bench.node.settle(101, committed=False)
    assert bench.half.lookup("r", item("cat")) is MISS
    bench.half.update_state_after_alloc("r", item("cat"))
    assert bench.half.build_connector_meta() is None
    assert bench.half.statistics()["unsaved.settled"] == 1
    assert not bench.node.said(Release)
    assert bench.half.lookup("r", item("cat")) is READY


def test_a_ticket_that_is_over_is_not_written_with() -> None:
    bench = Bench()
    assert bench.half.lookup("r", item("cat")) is MISS
    bench.node.settle(101, committed=False)
    bench.half.lookup("r", item("dog"))
    bench.half.update_state_after_alloc("r", item("cat"))
    assert bench.half.build_connector_meta() is None
    assert [op.transfer_id for op in bench.node.said(Abort)] == [102]  # the dog's, which nobody took


def test_a_promised_load_is_ordered_though_its_pin_is_over_and_awaited_from_nobody() -> None:
    bench = Bench()
    bench.node.verdicts[item("cat").key] = "ready"
    assert bench.half.lookup("r", item("cat")) is READY
    bench.node.settle(101, committed=False)
    bench.half.lookup("r", item("dog"))
    bench.half.update_state_after_alloc("r", item("cat"))
    meta = bench.half.build_connector_meta()
    assert meta is not None
    assert len(meta.loads) == 1
    assert not bench.half.has_pending_work()
    assert bench.half.statistics()["pins_held"] == 0


Event = tuple[str, str, int]  # what is heard, about which item, from which rank


def _endings() -> st.SearchStrategy[list[Event]]:
    """Everything that may be heard about three transfers, in any order, parts of it again or never: but of each
    transfer either all reports or the node's news."""
    reports = {
        "save": [("saved", rank) for rank in RANKS],
        "load": [(kind, rank) for rank in RANKS for kind in ("loaded", "released")],
        "failed": [("load_failed", 0), ("loaded", 1), ("released", 1)],
    }

    def of(name: str) -> st.SearchStrategy[list[Event]]:
        all_reports = [(kind, name, rank) for kind, rank in reports[name]]
        news = [("news", name, 0)]
        some = st.lists(st.sampled_from([*all_reports, *news]), max_size=6)
        return st.tuples(st.sampled_from([all_reports, news]), some).map(lambda parts: [*parts[0], *parts[1]])

    return st.tuples(*map(of, reports)).flatmap(lambda lists: st.permutations([e for part in lists for e in part]))


@given(_endings())
def test_whoever_is_heard_first_and_how_often_the_end_is_the_same(events: list[Event]) -> None:
    bench = Bench(ranks=RANKS, timeout=None)  # type: ignore[arg-type]
    orders = {
        name: order_of(bench, name, "ticket" if name == "save" else "ready") for name in ("save", "load", "failed")
    }
    for kind, name, rank in events:
        if kind == "news":
            bench.node.settle(orders[name].claim, committed=name == "save")
            hear(bench)
        else:
            bench.report(Report(rank, 1, orders[name].transfer_id, ReportKind(kind)))
    stats = bench.half.statistics()
    assert stats["saves_in_flight"] == stats["pins_held"] == stats["answers_awaited"] == 0
    assert not bench.half.has_pending_work()
    assert stats["pending_budget_s"] == 1.0  # measured, once and only once the save was over
    for told in (Commit, Release):  # at most once per claim
        claims = [getattr(op, "transfer_id", getattr(op, "pin_id", None)) for op in bench.node.said(told)]
        assert len(claims) == len(set(claims))
    assert not bench.node.said(Abort)


# -- asking in advance ----------------------------------------------------------------------------------------


def test_prepared_answers_are_there_in_the_same_pass() -> None:
    bench = Bench()
    bench.node.verdicts[item("cat").key] = "ready"
    bench.node.silent = True  # until somebody waits
    bench.half.prepare([item("cat"), item("dog"), item("cat")], 0.25)
    assert [op.key for op in bench.node.said(Acquire)] == [item("cat").key, item("dog").key]
    assert (bench.node.flushes, bench.node.waited) == (1, [0.25])
    assert bench.half.lookup("r", item("cat")) is READY
    assert bench.half.lookup("r", item("dog")) is MISS
    assert len(bench.node.said(Acquire)) == 2


def test_who_knows_does_not_wait() -> None:
    bench = Bench()
    bench.half.prepare([item("cat")], 0.25)
    bench.half.prepare([], 0.25)
    bench.half.prepare([item("cat")], 0.25)
    assert bench.node.waited == [0.25]
    assert bench.node.flushes == 1


def test_an_answer_that_is_not_there_in_time_is_for_the_next_pass() -> None:
    bench = Bench()
    bench.node.verdicts[item("cat").key] = "ready"
    bench.node.silent = bench.node.patient = True
    bench.half.prepare([item("cat")], 0.25)
    assert bench.half.lookup("r", item("cat")) is PENDING
    assert bench.half.build_connector_meta() is None
    bench.node.silent = False
    bench.half.prepare([item("cat")], 0.25)
    assert bench.half.lookup("r", item("cat")) is READY
    assert len(bench.node.said(Acquire)) == 1


def test_what_was_prepared_and_not_used_is_given_back_with_the_pass() -> None:
    bench = Bench()
    bench.node.verdicts[item("cat").key] = "ready"
    bench.half.prepare([item("cat"), item("dog")], 0.25)
    assert bench.half.build_connector_meta() is None
    assert [op.pin_id for op in bench.node.said(Release)] == [101]
    assert [op.transfer_id for op in bench.node.said(Abort)] == [102]
    assert not bench.half.has_pending_work()


def test_rows_of_another_width_than_the_encoders() -> None:
    bench = Bench()
    wide = ECItem(item("cat").key, 4, width=3 * SPEC.width)
    assert bench.half.lookup("r", wide) is MISS
    bench.half.update_state_after_alloc("r", wide)
    meta = bench.half.build_connector_meta()
    assert meta is not None
    expected = Layout(SPEC.dtype, (4, 3 * SPEC.width))
    assert meta.saves[0].layout == bench.node.said(Acquire)[0].layout == expected
