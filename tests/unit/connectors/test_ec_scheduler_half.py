"""The scheduler half, pass by pass, against a node that answers what the test says."""

from __future__ import annotations

import pytest
from connector_doubles import NAMESPACE, SPEC, Bench, fact, item, scheduler_context

from ecotone.connectors.messages import FailureReason, ReportKind
from ecotone.connectors.participants import check_participants
from ecotone.connectors.scheduler import EcotoneSchedulerConnector
from ecotone.errors import ConfigError, ContractError
from ecotone.node.exchange import Abort, Acquire, Commit, Forget, ForgetAll, Layout, Lookup, Release
from ecotone.protocol.connector import CacheLookup, Participant
from ecotone.protocol.outputs import ECConnectorOutput, ECConnectorStats, ECConnectorWorkerMetadata, RankStats

READY, PENDING, MISS = CacheLookup.READY, CacheLookup.PENDING, CacheLookup.MISS


def test_a_miss_is_encoded_saved_and_committed() -> None:
    bench, cat = Bench(), item("cat")
    assert bench.half.lookup("r", cat) is MISS
    bench.half.update_state_after_alloc("r", cat)
    meta = bench.half.build_connector_meta()
    assert meta is not None
    (order,) = meta.saves
    assert (meta.ranks, meta.loads) == ((0,), ())
    assert (order.key, order.layout) == (cat.key, Layout("float32", (4, SPEC.width)))
    assert bench.half.has_pending_work()
    bench.report(fact(order.transfer_id, ReportKind.SAVED))
    assert len(bench.node.said(Commit)) == 1
    assert not bench.half.has_pending_work()
    assert bench.half.statistics()["misses"] == 1


def test_a_hit_is_loaded_and_its_pin_falls_when_released() -> None:
    bench, cat = Bench(), item("cat")
    bench.node.verdicts[cat.key] = "ready"
    assert bench.half.lookup("r", cat) is READY
    bench.half.update_state_after_alloc("r", cat)
    meta = bench.half.build_connector_meta()
    assert meta is not None
    (order,) = meta.loads
    assert bench.half.has_pending_work()
    bench.report(fact(order.transfer_id, ReportKind.LOADED))
    # A view is held: nothing is released, and the engine may rest.
    assert not bench.node.said(Release)
    assert not bench.half.has_pending_work()
    bench.report(fact(order.transfer_id, ReportKind.RELEASED))
    assert len(bench.node.said(Release)) == 1
    assert bench.half.statistics()["pins_held"] == 0


@pytest.mark.parametrize(("verdict", "given_back"), [("ready", Release), ("ticket", Abort)])
def test_what_does_not_run_in_this_pass_holds_nothing(verdict: str, given_back: type) -> None:
    bench, cat = Bench(), item("cat")
    bench.node.verdicts[cat.key] = verdict
    for _ in range(3):
        bench.half.lookup("r", cat)
        assert bench.half.has_pending_work()
        assert bench.half.build_connector_meta() is None
        assert not bench.half.has_pending_work()
    assert len(bench.node.said(given_back)) == len(bench.node.said(Acquire)) == 3


def test_the_same_pass_gives_the_same_answer() -> None:
    bench, cat = Bench(), item("cat")
    bench.node.silent = True
    assert bench.half.lookup("r", cat) is PENDING
    bench.node.silent = False
    assert bench.half.lookup("r", cat) is PENDING
    assert bench.half.lookup("other", cat) is MISS
    assert len(bench.node.said(Acquire)) == 1


def test_two_requests_for_one_key_share_one_order() -> None:
    bench, cat = Bench(), item("cat")
    assert bench.half.lookup("a", cat) is bench.half.lookup("b", cat) is MISS
    bench.half.update_state_after_alloc("b", cat)
    bench.half.update_state_after_alloc("a", cat)
    meta = bench.half.build_connector_meta()
    assert meta is not None
    assert len(meta.saves) == 1
    assert len(bench.node.said(Acquire)) == 1
    assert not bench.node.said(Abort)


def test_an_answer_that_comes_late_is_used_by_whoever_asks_again() -> None:
    bench, cat = Bench(), item("cat")
    bench.node.silent = True
    assert bench.half.lookup("r", cat) is PENDING
    assert bench.half.build_connector_meta() is None
    assert bench.half.has_pending_work()
    bench.node.silent = False
    bench.report()
    assert bench.half.lookup("r", cat) is MISS
    bench.half.update_state_after_alloc("r", cat)
    meta = bench.half.build_connector_meta()
    assert meta is not None
    assert len(meta.saves) == 1
    assert len(bench.node.said(Acquire)) == 1


def test_an_answer_nobody_waits_for_any_more_is_given_back() -> None:
    bench, cat = Bench(), item("cat")
    bench.node.silent = True
    bench.half.lookup("r", cat)
    bench.half.build_connector_meta()
    bench.half.request_finished("r")
    bench.node.silent = False
    assert bench.half.has_pending_work()
    bench.half.build_connector_meta()
    assert not bench.node.said(Abort)  # whoever asked may come back for it in the next pass
    bench.half.build_connector_meta()
    assert len(bench.node.said(Abort)) == 1
    assert not bench.half.has_pending_work()


def test_a_ticket_that_comes_between_giving_up_and_running_is_used_once() -> None:
    bench, cat = Bench(timeout=0.0), item("cat")
    bench.node.silent = True
    assert bench.half.lookup("a", cat) is MISS
    bench.node.silent = False
    bench.half.lookup("b", item("dog"))  # fetches the answer about the cat
    bench.half.update_state_after_alloc("a", cat)
    meta = bench.half.build_connector_meta()
    assert meta is not None
    (first,) = meta.saves
    bench.half.lookup("a", cat)
    bench.half.update_state_after_alloc("a", cat)
    meta = bench.half.build_connector_meta()
    assert meta is not None
    (second,) = meta.saves
    assert first.claim != second.claim


def test_an_answer_that_always_comes_at_the_end_of_a_pass_is_found_in_the_next() -> None:
    bench, cat, dog = Bench(), item("cat"), item("dog")
    for _ in range(2):
        bench.node.silent = True
        assert bench.half.lookup("r", cat) is PENDING
        bench.node.silent = False
        bench.half.lookup("other", dog)  # the answer about the cat arrives with the one about the dog
        assert bench.half.build_connector_meta() is None
        assert bench.half.lookup("r", cat) is MISS
        bench.half.build_connector_meta()
    assert len(bench.node.said(Acquire)) == 4


def test_waiting_has_one_budget_that_retries_do_not_restart() -> None:
    bench, cat = Bench(timeout=5.0), item("cat")
    bench.node.verdicts[cat.key] = "pending"
    for _ in range(5):
        assert bench.half.lookup("r", cat) is PENDING
        bench.half.build_connector_meta()
        bench.clock.now += 1.0
    # Another request has a budget of its own.
    assert bench.half.lookup("young", cat) is PENDING
    assert bench.half.lookup("r", cat) is MISS
    bench.half.update_state_after_alloc("r", cat)
    assert bench.half.build_connector_meta() is None
    assert bench.half.statistics()["unsaved.waited"] == 1
    bench.half.request_finished("r")
    assert bench.half.lookup("r", cat) is PENDING


def test_a_silent_node_costs_the_budget_and_no_more() -> None:
    bench, cat = Bench(timeout=5.0), item("cat")
    bench.node.silent = True
    assert bench.half.lookup("r", cat) is PENDING
    bench.half.build_connector_meta()
    bench.clock.now += 5.0
    assert bench.half.lookup("r", cat) is MISS
    bench.half.update_state_after_alloc("r", cat)
    assert bench.half.build_connector_meta() is None
    assert bench.half.statistics()["unsaved.no_answer"] == 1
    bench.node.silent = False
    bench.half.build_connector_meta()
    bench.half.build_connector_meta()
    assert len(bench.node.said(Abort)) == 1


def test_waiting_that_ends_with_the_entry_ready_is_a_hit() -> None:
    bench, cat = Bench(timeout=5.0), item("cat")
    bench.node.verdicts[cat.key] = "pending"
    bench.half.lookup("r", cat)
    bench.half.build_connector_meta()
    bench.clock.now += 50.0
    bench.node.verdicts[cat.key] = "ready"
    assert bench.half.lookup("r", cat) is READY


def test_an_entry_that_turns_up_after_the_wait_was_given_up_is_given_back() -> None:
    bench, cat = Bench(timeout=0.0), item("cat")
    bench.node.verdicts[cat.key] = "ready"
    bench.node.silent = True
    assert bench.half.lookup("r", cat) is MISS
    bench.node.silent = False
    bench.half.lookup("r", item("dog"))
    bench.half.update_state_after_alloc("r", cat)
    assert bench.half.build_connector_meta() is None
    assert bench.half.build_connector_meta() is None
    assert len(bench.node.said(Release)) == 1
    assert bench.half.statistics()["unsaved.waited"] == 1


def test_no_room_is_encoded_and_not_kept() -> None:
    bench, cat = Bench(), item("cat")
    bench.node.verdicts[cat.key] = "no_room"
    assert bench.half.lookup("r", cat) is MISS
    bench.half.update_state_after_alloc("r", cat)
    assert bench.half.build_connector_meta() is None
    assert bench.half.statistics()["unsaved.no_room"] == 1
    assert not bench.half.has_pending_work()


def test_a_consumer_never_becomes_a_writer() -> None:
    bench, cat = Bench("ec_consumer"), item("cat")
    assert bench.half.lookup("r", cat) is MISS
    bench.half.update_state_after_alloc("r", cat)
    assert bench.half.build_connector_meta() is None
    assert len(bench.node.said(Lookup)) == 1
    assert not bench.node.said(Acquire)
    assert bench.half.statistics()["unsaved.consumer"] == 1


def test_a_producer_that_hits_has_nothing_to_do() -> None:
    bench, cat = Bench("ec_producer"), item("cat")
    bench.node.verdicts[cat.key] = "ready"
    assert bench.half.lookup("r", cat) is READY
    bench.half.update_state_after_alloc("r", cat)
    assert bench.half.build_connector_meta() is None
    assert len(bench.node.said(Release)) == 1
    assert bench.half.statistics()["hits"] == 1
    assert not bench.half.has_pending_work()


def test_allocating_what_was_not_answered_is_a_broken_contract() -> None:
    bench, cat = Bench(), item("cat")
    with pytest.raises(ContractError, match="answered None"):
        bench.half.update_state_after_alloc("r", cat)
    bench.node.verdicts[cat.key] = "pending"
    bench.half.lookup("r", cat)
    with pytest.raises(ContractError, match="answered pending"):
        bench.half.update_state_after_alloc("r", cat)
    bench.half.build_connector_meta()
    bench.node.verdicts[cat.key] = "ready"
    bench.half.lookup("r", cat)
    bench.half.build_connector_meta()
    with pytest.raises(ContractError, match="answered None"):
        bench.half.update_state_after_alloc("r", cat)


def _save(bench: Bench, num_rows: int = 4) -> int:
    bench.half.lookup("r", item("cat", num_rows))
    bench.half.update_state_after_alloc("r", item("cat", num_rows))
    meta = bench.half.build_connector_meta()
    assert meta is not None
    return meta.saves[0].transfer_id


def _load(bench: Bench) -> int:
    bench.node.verdicts[item("cat").key] = "ready"
    bench.half.lookup("r", item("cat"))
    bench.half.update_state_after_alloc("r", item("cat"))
    meta = bench.half.build_connector_meta()
    assert meta is not None
    return meta.loads[0].transfer_id


def test_a_save_is_committed_when_every_rank_has_written_its_rows() -> None:
    bench = Bench(ranks=(0, 2, 5))
    save = _save(bench)
    for rank in (0, 5, 0, 0, 7):
        bench.report(fact(save, ReportKind.SAVED, rank))
        assert not bench.node.said(Commit)
    bench.report(fact(save, ReportKind.SAVED, 2))
    assert len(bench.node.said(Commit)) == 1


def test_what_one_step_reports_reaches_the_node_in_the_order_of_its_dispatch() -> None:
    bench = Bench()
    for number in range(20):
        bench.half.lookup("r", item(str(number)))
        bench.half.update_state_after_alloc("r", item(str(number)))
    meta = bench.half.build_connector_meta()
    assert meta is not None
    bench.report(*(fact(order.transfer_id, ReportKind.SAVED) for order in meta.saves))
    assert [op.transfer_id for op in bench.node.said(Commit)] == [order.claim for order in meta.saves]


def test_a_rank_without_rows_is_not_waited_for() -> None:
    bench = Bench(ranks=(0, 1, 2))
    save = _save(bench, num_rows=1)
    bench.report(fact(save, ReportKind.SAVED, 2))
    assert len(bench.node.said(Commit)) == 1


def test_a_failed_save_is_aborted_only_when_nobody_writes_any_more() -> None:
    bench = Bench(ranks=(0, 1))
    save = _save(bench)
    bench.report(fact(save, ReportKind.SAVE_FAILED, 0, FailureReason.COPY))
    assert not bench.node.said(Abort)
    assert bench.half.has_pending_work()
    bench.report(fact(save, ReportKind.SAVED, 1))
    assert len(bench.node.said(Abort)) == 1
    assert not bench.node.said(Commit)
    assert not bench.half.has_pending_work()


def test_a_pin_falls_when_every_rank_has_released_it() -> None:
    bench = Bench(ranks=(0, 1))
    load = _load(bench)
    bench.report(fact(load, ReportKind.LOADED, 0), fact(load, ReportKind.RELEASED, 0))
    bench.report(fact(load, ReportKind.RELEASED, 0))
    assert not bench.node.said(Release)
    assert bench.half.has_pending_work()
    bench.report(fact(load, ReportKind.LOADED, 1))
    assert not bench.half.has_pending_work()
    bench.report(fact(load, ReportKind.RELEASED, 1))
    assert len(bench.node.said(Release)) == 1


def test_reports_of_an_older_load_leave_the_newer_pin_alone() -> None:
    bench = Bench()
    old = _load(bench)
    bench.report(fact(old, ReportKind.RELEASED))
    new = _load(bench)
    bench.report(fact(old, ReportKind.RELEASED), fact(old, ReportKind.LOADED), fact(999, ReportKind.RELEASED))
    assert len(bench.node.said(Release)) == 1
    assert bench.half.statistics()["pins_held"] == 1
    bench.report(fact(new, ReportKind.RELEASED))
    assert len(bench.node.said(Release)) == 2


def test_a_report_of_the_other_kind_of_transfer_changes_nothing() -> None:
    bench = Bench()
    save = _save(bench)
    bench.report(fact(save, ReportKind.RELEASED), fact(save, ReportKind.LOAD_FAILED))
    load = _load(bench)
    bench.report(fact(load, ReportKind.SAVED), fact(load, ReportKind.SAVE_FAILED))
    assert (
        not bench.node.said(Commit) + bench.node.said(Abort) + bench.node.said(Release) + bench.node.said(Forget)
    )


def test_a_load_that_failed_is_forgotten_so_that_it_is_encoded_next() -> None:
    bench = Bench(ranks=(0, 1))
    load = _load(bench)
    bench.report(fact(load, ReportKind.LOAD_FAILED, 0), fact(load, ReportKind.LOAD_FAILED, 1))
    assert [op.key for op in bench.node.said(Forget)] == [item("cat").key]
    assert len(bench.node.said(Release)) == 1


def test_a_load_that_the_ranks_found_wrong_is_forgotten_too() -> None:
    bench = Bench()
    load = _load(bench)
    bench.report(fact(load, ReportKind.LOADED), failed_loads=[item("cat").key])
    assert [op.key for op in bench.node.said(Forget)] == [item("cat").key]
    assert not bench.node.said(Release)


def test_reset_forgets_the_namespace_and_whatever_was_on_its_way_from_it() -> None:
    bench, cat = Bench(), item("cat")
    bench.node.verdicts[cat.key] = "ready"
    bench.node.silent = True
    bench.half.lookup("r", cat)
    bench.half.reset_cache(NAMESPACE.digest)
    assert [op.namespace for op in bench.node.said(ForgetAll)] == [NAMESPACE.digest]
    bench.node.silent = False
    bench.node.verdicts[cat.key] = "ticket"
    # The answer READY to the question from before the reset arrives now and must not be believed.
    assert bench.half.lookup("r", cat) is MISS
    bench.half.build_connector_meta()
    assert len(bench.node.said(Release)) == 1
    assert not bench.half.has_pending_work()


def test_reset_leaves_other_namespaces_alone() -> None:
    bench, other = Bench(), item("cat", namespace=NAMESPACE.next_epoch("life"))
    bench.node.verdicts[other.key] = "ready"
    assert bench.half.lookup("r", other) is READY
    bench.half.reset_cache(NAMESPACE.digest)
    bench.half.update_state_after_alloc("r", other)
    meta = bench.half.build_connector_meta()
    assert meta is not None
    assert len(meta.loads) == 1


def test_a_save_under_way_during_a_reset_still_settles() -> None:
    bench = Bench()
    save = _save(bench)
    bench.half.reset_cache(NAMESPACE.digest)
    assert bench.half.has_pending_work()
    bench.report(fact(save, ReportKind.SAVED))
    assert not bench.half.has_pending_work()


def test_statistics_add_up_the_ranks_however_often_they_are_heard() -> None:
    bench = Bench(ranks=(0, 1))
    for rank, saves in ((0, 1), (1, 5), (0, 3), (0, 2)):
        stats = ECConnectorStats((RankStats(rank, 1, {"saves": saves}),))
        bench.half.update_connector_output(ECConnectorOutput(ec_connector_stats=stats))
    assert bench.half.statistics()["ranks.saves"] == 8
    assert bench.half.statistics()["node.entries"] == 3


def test_metadata_of_another_connector_is_refused() -> None:
    class Other(ECConnectorWorkerMetadata, frozen=True):
        def aggregate(self, other: Other) -> Other:
            return self

    with pytest.raises(ContractError, match="Other"):
        Bench().half.update_connector_output(ECConnectorOutput(ec_connector_worker_meta=Other()))


def test_shutdown_leaves_the_node_once() -> None:
    bench = Bench()
    _save(bench)
    bench.half.shutdown()
    bench.half.shutdown()
    assert bench.node.closed == 1
    assert bench.ended == [True]
    assert not bench.half.has_pending_work()


def test_participants_must_share_a_host() -> None:
    with pytest.raises(ConfigError, match=r"2 hosts \(a, b\)"):
        check_participants((Participant(0, "a"), Participant(1, "b")))
    with pytest.raises(ConfigError, match="no rank"):
        EcotoneSchedulerConnector(scheduler_context(ranks=()), Bench().node, 1.0)
    with pytest.raises(ConfigError, match="once"):
        check_participants((Participant(0, "a"), Participant(0, "a")))
