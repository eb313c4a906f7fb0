"""The scheduler half over a real node, with simulated ranks whose reports come late, twice and in any order: to
the scheduler, to the node, or to both.

The region is a byte array and each key's encoding one byte, repeated. So a load of an entry that is not written
in full, or memory that is given to another entry while somebody reads it, shows as a wrong byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from zlib import crc32

import pytest
from connector_doubles import SPEC, FakeClock, fact, scheduler_context
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ecotone.connectors.messages import EcotoneStepMetadata, EcotoneWorkerMetadata, Order, Report, ReportKind
from ecotone.connectors.scheduler import EcotoneSchedulerConnector
from ecotone.connectors.shares import cut, share_of_rows
from ecotone.node.exchange import AnyAnswer, AnyOp
from ecotone.node.keys import Namespace
from ecotone.node.region import RegionDescriptor
from ecotone.node.server.messages import Fact
from ecotone.node.server.tenants import Tenant
from ecotone.protocol.connector import CacheLookup, ECItem
from ecotone.protocol.outputs import ECConnectorOutput
from ecotone.testing.exchange import DelayedExchange

RANKS = (0, 1, 2)
ROW_BYTES = SPEC.width * 4
CAPACITY = 14 * ROW_BYTES
ITEMS = tuple(range(6))
REQUESTS = ("a", "b", "c")


class TenantExchange:
    """One scheduler's end of a shared node's tenant, at once. News come with answers alone."""

    def __init__(self, clock: FakeClock) -> None:
        region = SimpleNamespace(descriptor=RegionDescriptor("region", 1, CAPACITY))
        self.tenant = Tenant("", region, "lru", 1)  # type: ignore[arg-type]
        self.tenant.scheduler_came("engine", 1, RANKS)
        self.clock = clock
        self.answers: list[AnyAnswer] = []

    def submit(self, ops: Sequence[AnyOp]) -> None:
        now = self.clock()
        if ops:
            self.answers += self.tenant.take_settled("engine", now)
            self.answers += self.tenant.apply("engine", tuple(ops), now)

    def flush(self) -> None:
        pass

    def poll(self) -> Sequence[AnyAnswer]:
        answers, self.answers = self.answers, []
        return answers

    def wait(self, timeout_s: float) -> None:
        pass

    def statistics(self) -> dict[str, float]:
        return self.tenant.index.statistics()

    def close(self) -> None:
        pass


def stamp(key: str) -> int:
    return crc32(key.encode()) % 255 + 1


FACTS = {ReportKind.SAVED: "saved", ReportKind.SAVE_FAILED: "failed"}


def told_to_the_node(report: Report, order: Order) -> list[Fact]:
    """What a rank says to the node itself when it reports this."""
    if report.kind is ReportKind.LOADED:
        return []
    of = RANKS
    if report.kind in FACTS:
        of = tuple(rank for rank in RANKS if share_of_rows(order.layout.shape[0], RANKS, rank))
    return [Fact(order.claim, report.rank, of, FACTS.get(report.kind, "released"))]  # type: ignore[arg-type]


class Rank:
    """What one rank was ordered to do and has not done, and what it reads in place."""

    def __init__(self, rank: int, region: bytearray) -> None:
        self.rank = rank
        self.region = region
        self.todo: list[tuple[str, Order, tuple[int, ...]]] = []
        self.views: list[Order] = []

    def take(self, meta: EcotoneStepMetadata) -> None:
        self.todo += [("load", order, meta.ranks) for order in meta.loads]
        self.todo += [("save", order, meta.ranks) for order in meta.saves]

    def work(self, which: int, fails: bool) -> list[Report]:
        what, order, ranks = self.todo.pop(which)
        if what == "load":
            return self._load(order, fails)
        share = share_of_rows(order.layout.shape[0], ranks, self.rank)
        pieces = cut(order.extents, share.start * ROW_BYTES, share.stop * ROW_BYTES)
        for piece in pieces[: len(pieces) // 2] if fails else pieces:
            self.region[piece.offset : piece.offset + piece.length] = bytes([stamp(order.key)]) * piece.length
        kind = ReportKind.SAVE_FAILED if fails else ReportKind.SAVED
        return [fact(order.transfer_id, kind, self.rank)] if share else []

    def _load(self, order: Order, fails: bool) -> list[Report]:
        if fails:
            return [fact(order.transfer_id, ReportKind.LOAD_FAILED, self.rank)]
        self.views.append(order)
        self.check_views()
        return [fact(order.transfer_id, ReportKind.LOADED, self.rank)]

    def drop_view(self, which: int) -> Report:
        return fact(self.views.pop(which).transfer_id, ReportKind.RELEASED, self.rank)

    def check_views(self) -> None:
        for order in self.views:
            for extent in order.extents:
                data = self.region[extent.offset : extent.offset + extent.length]
                assert set(data) == {stamp(order.key)}, f"rank {self.rank} reads wrong bytes of {order.key}"


class ConnectorMachine(RuleBasedStateMachine):
    @initialize(
        delays=st.lists(st.integers(0, 4), min_size=1, max_size=5),
        producer=st.booleans(),
        heard_by=st.sampled_from(["scheduler", "node", "both"]),
    )
    def start(self, delays: list[int], producer: bool, heard_by: str) -> None:
        self.clock = FakeClock()
        node = TenantExchange(self.clock)
        self.tenant, self.index = node.tenant, node.tenant.index
        self.delays = delays
        self.delayed = 0
        self.heard_by = heard_by
        self.orders: dict[int, Order] = {}
        self.untold: list[Fact] = []
        self.told: list[Fact] = []
        exchange = DelayedExchange(node, self._delay)
        role = "ec_producer" if producer else "ec_both"
        self.half = EcotoneSchedulerConnector(scheduler_context(role, RANKS, self.clock), exchange, 3.0)
        self.region = bytearray(CAPACITY)
        self.ranks = [Rank(rank, self.region) for rank in RANKS]
        self.undelivered: list[Report] = []
        self.delivered: list[Report] = []
        self.namespace = Namespace(model="m", revision="r", dtype=SPEC.dtype, width=SPEC.width, processor="p")

    def _delay(self, answer: AnyAnswer) -> int:
        self.delayed += 1
        return self.delays[self.delayed % len(self.delays)]

    def _item(self, name: int) -> ECItem:
        return ECItem(self.namespace.key(str(name)), num_rows=1 + name)

    @rule(asked=st.lists(st.tuples(st.sampled_from(REQUESTS), st.sampled_from(ITEMS), st.booleans()), max_size=5))
    def schedule(self, asked: list[tuple[str, int, bool]]) -> None:
        """A pass: some items are asked for, some of those run."""
        allocated = set()
        for req_id, name, runs in asked:
            item = self._item(name)
            said = self.half.lookup(req_id, item)
            if runs and said is not CacheLookup.PENDING and item.key not in allocated:
                allocated.add(item.key)
                self.half.update_state_after_alloc(req_id, item)
        meta = self.half.build_connector_meta()
        if meta is not None:
            assert {order.key for order in (*meta.loads, *meta.saves)} <= allocated
            self.orders |= {order.transfer_id: order for order in (*meta.loads, *meta.saves)}
            for rank in self.ranks:
                rank.take(meta)

    def _happened(self, reports: list[Report]) -> None:
        if self.heard_by != "node":
            self.undelivered += reports
        if self.heard_by != "scheduler":
            self.untold += [f for r in reports for f in told_to_the_node(r, self.orders[r.transfer_id])]

    @precondition(lambda self: self.untold)
    @rule(data=st.data())
    def tell_the_node(self, data: st.DataObject) -> None:
        """Some facts reach the node, not in their order, and some of them again."""
        count = data.draw(st.integers(1, len(self.untold)))
        chosen = data.draw(st.permutations(self.untold))[:count]
        self.untold = [fact for fact in self.untold if fact not in chosen]
        self.told += chosen
        again = data.draw(st.lists(st.sampled_from(self.told), max_size=2))
        self.tenant.hear("engine", [*chosen, *again], self.clock())

    @precondition(lambda self: any(rank.todo for rank in self.ranks))
    @rule(data=st.data(), fails=st.integers(0, 5).map(lambda n: n == 0))
    def work(self, data: st.DataObject, fails: bool) -> None:
        rank = data.draw(st.sampled_from([rank for rank in self.ranks if rank.todo]))
        self._happened(rank.work(data.draw(st.integers(0, len(rank.todo) - 1)), fails))

    @precondition(lambda self: any(rank.views for rank in self.ranks))
    @rule(data=st.data())
    def drop_view(self, data: st.DataObject) -> None:
        rank = data.draw(st.sampled_from([rank for rank in self.ranks if rank.views]))
        self._happened([rank.drop_view(data.draw(st.integers(0, len(rank.views) - 1)))])

    @precondition(lambda self: self.undelivered)
    @rule(data=st.data())
    def deliver(self, data: st.DataObject) -> None:
        """Some reports arrive, not in the order they were made, and some of them are heard again later."""
        count = data.draw(st.integers(1, len(self.undelivered)))
        chosen = data.draw(st.permutations(self.undelivered))[:count]
        self.undelivered = [report for report in self.undelivered if report not in chosen]
        self.delivered += chosen
        self._tell(chosen)

    @precondition(lambda self: self.delivered)
    @rule(data=st.data())
    def deliver_again(self, data: st.DataObject) -> None:
        before = self.index.statistics()
        self._tell(data.draw(st.lists(st.sampled_from(self.delivered), min_size=1)))
        assert self.index.statistics() == before

    def _tell(self, reports: Sequence[Report]) -> None:
        meta = EcotoneWorkerMetadata(frozenset(reports))
        self.half.update_connector_output(ECConnectorOutput(ec_connector_worker_meta=meta))

    @rule(name=st.sampled_from(ITEMS))
    def find_rows_wrong(self, name: int) -> None:
        self.half.update_connector_output(ECConnectorOutput(failed_loads=frozenset({self._item(name).key})))

    @rule(req_id=st.sampled_from(REQUESTS))
    def finish_request(self, req_id: str) -> None:
        self.half.request_finished(req_id)

    @rule(seconds=st.floats(0.0, 4.0))
    def let_time_pass(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule(advance=st.booleans())
    def reset(self, advance: bool) -> None:
        self.half.reset_cache(self.namespace.digest)
        if advance:
            self.namespace = self.namespace.next_epoch("life")

    @invariant()
    def books_add_up(self) -> None:
        if hasattr(self, "index"):
            self.index.check_integrity()

    @invariant()
    def nobody_reads_what_is_being_written(self) -> None:
        for rank in getattr(self, "ranks", ()):
            rank.check_views()

    def teardown(self) -> None:
        if not hasattr(self, "half"):
            return
        for rank in self.ranks:
            while rank.todo:
                self._happened(rank.work(0, fails=False))
        self._let_everybody_hear()
        if self.heard_by != "node":  # what a node hears does not say that a load has arrived
            self._rest()  # with views still held
        assert self.index.statistics()["transfers"] == 0
        for rank in self.ranks:
            while rank.views:
                self._happened([rank.drop_view(0)])
        self._let_everybody_hear()
        self._rest()
        stats = self.half.statistics()
        assert stats["saves_in_flight"] == stats["pins_held"] == stats["answers_awaited"] == 0
        assert stats["node.transfers"] == stats["node.pins"] == stats["node.bytes_draining"] == 0
        self.index.check_integrity()

    def _let_everybody_hear(self) -> None:
        self.tenant.hear("engine", self.untold, self.clock())
        self._tell(self.undelivered)
        self.untold, self.undelivered = [], []
        self.half.build_connector_meta()
        self.half.lookup("last", ECItem(self.namespace.key(f"at {self.clock.now}"), CAPACITY))  # brings the news
        self.clock.now += 1.0
        for _ in range(20):
            self.half.build_connector_meta()

    def _rest(self) -> None:
        """Empty steps for as long as there is work: it must end."""
        for _ in range(200):
            if not self.half.has_pending_work():
                return
            assert self.half.build_connector_meta() is None
        raise AssertionError("the connector never rests")


ConnectorMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestConnectorMachine = ConnectorMachine.TestCase


def _story(delay: int) -> tuple[list[tuple[int, CacheLookup, int, int]], dict[str, float]]:
    """What becomes of a fixed sequence of items, each asked for until there is an answer."""
    clock = FakeClock()
    node = TenantExchange(clock)
    index = node.tenant.index
    exchange = DelayedExchange(node, delay)
    half = EcotoneSchedulerConnector(scheduler_context(ranks=RANKS, clock=clock), exchange, 1e9)
    ranks = [Rank(rank, bytearray(CAPACITY)) for rank in RANKS]
    for rank in ranks[1:]:
        rank.region = ranks[0].region
    story = []
    for name in (3, 5, 3, 1, 4, 5, 5, 2, 0, 3, 5, 1):
        item = ECItem(
            Namespace(model="m", revision="", dtype="float32", width=8, processor="").key(str(name)), 1 + name
        )
        for _ in range(100):
            said = half.lookup("r", item)
            if said is not CacheLookup.PENDING:
                break
            assert half.build_connector_meta() is None
        half.update_state_after_alloc("r", item)
        meta = half.build_connector_meta()
        assert meta is not None
        story.append((name, said, len(meta.loads), len(meta.saves)))
        for rank in ranks:
            rank.take(meta)
            reports = [report for _ in range(len(rank.todo)) for report in rank.work(0, fails=False)]
            reports += [rank.drop_view(0) for _ in range(len(rank.views))]
            half.update_connector_output(
                ECConnectorOutput(ec_connector_worker_meta=EcotoneWorkerMetadata(frozenset(reports)))
            )
    for _ in range(100):
        if not half.has_pending_work():
            break
        half.build_connector_meta()
    kept = ("entries", "bytes_ready", "evictions", "commits", "tickets", "aborts")
    return story, {name: index.statistics()[name] for name in kept}


@pytest.mark.parametrize("delay", [1, 2, 5, 13])
def test_late_answers_change_nothing_but_time(delay: int) -> None:
    story, figures = _story(0)
    assert {said for _, said, _, _ in story} == {CacheLookup.READY, CacheLookup.MISS}
    assert figures["evictions"] > 0
    assert _story(delay) == (story, figures)
