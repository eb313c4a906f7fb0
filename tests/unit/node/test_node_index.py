"""The index, one rule at a time. ``test_node_index_machine.py`` looks for what these do not think of."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import TypeVar

import msgspec
import pytest

from ecotone.errors import IntegrityError
from ecotone.node import (
    Abort,
    Absent,
    Acquire,
    AnyAnswer,
    AnyOp,
    Commit,
    Done,
    Forget,
    ForgetAll,
    Index,
    Layout,
    Lookup,
    Namespace,
    NoRoom,
    Pending,
    Ready,
    Release,
    Ticket,
    make_policy,
)
from ecotone.node.lifecycle import State

A = 64
NS = Namespace(model="m", revision="r", dtype="uint8", width=A, processor="p")
UNIT = Layout("uint8", (1, A))
T = TypeVar("T", bound=AnyAnswer)


def units(n: int) -> Layout:
    return Layout("uint8", (n, A))


class Driver:
    """An index with a clock, numbering operations, and checking its integrity after each."""

    def __init__(self, capacity_units: int, policy: str = "lru", max_pieces: int = 16) -> None:
        self.index = Index(capacity_units * A, "region", 1, make_policy(policy), max_pieces)
        self.now = 0.0
        self._seq = count(1)

    def do(self, client: str, kind: Callable[..., AnyOp], *args: object, **fields: object) -> AnyAnswer:
        seq = next(self._seq)
        (answer,) = self.index.apply(client, [kind(seq, *args, **fields)], self.now)
        assert answer.seq == seq
        self.index.check_integrity()
        return answer

    def expect(
        self, answer: type[T], client: str, kind: Callable[..., AnyOp], *args: object, **fields: object
    ) -> T:
        got = self.do(client, kind, *args, **fields)
        assert isinstance(got, answer), got
        return got

    def effect(self, client: str, kind: Callable[..., AnyOp], *args: object) -> bool:
        return self.expect(Done, client, kind, *args).effect

    def ticket(self, name: str, layout: Layout = UNIT, client: str = "a", **fields: object) -> Ticket:
        return self.expect(Ticket, client, Acquire, NS.key(name), layout, **fields)

    def ready(self, name: str, layout: Layout = UNIT, client: str = "a", **fields: object) -> Ready:
        return self.expect(Ready, client, Acquire, NS.key(name), layout, **fields)

    def fill(self, *names: str, layout: Layout = UNIT, **fields: object) -> None:
        for name in names:
            assert self.effect("a", Commit, self.ticket(name, layout, **fields).transfer_id)

    def found(self, *names: str) -> list[str]:
        return [name for name in names if NS.key(name) in self.index.entries]

    def stat(self, name: str) -> float:
        return self.index.statistics()[name]


def test_write_commit_hit_release() -> None:
    d = Driver(4)
    ticket = d.ticket("x", units(2))
    assert d.stat("bytes_writing") == 2 * A
    assert d.effect("a", Commit, ticket.transfer_id)
    one, two = d.ready("x", units(2)), d.ready("x", units(2), client="b")
    assert one.extents == two.extents == ticket.extents
    assert one.pin_id != two.pin_id
    assert (d.stat("bytes_pinned"), d.stat("bytes_ready"), d.stat("pins")) == (2 * A, 2 * A, 2)
    assert d.effect("a", Release, one.pin_id)
    assert d.effect("b", Release, two.pin_id)
    assert (d.stat("bytes_pinned"), d.stat("bytes_ready"), d.stat("pins")) == (0, 2 * A, 0)


def test_extents_name_the_region_and_hold_exactly_the_layout() -> None:
    d = Driver(4)
    (extent,) = d.ticket("x", Layout("bfloat16", (3, 5))).extents
    assert (extent.region_id, extent.generation, extent.length) == ("region", 1, 30)


def test_not_yet_and_not_at_all_are_different_answers() -> None:
    d = Driver(4)
    d.expect(Absent, "b", Lookup, NS.key("x"), UNIT)
    ticket = d.ticket("x")
    d.expect(Pending, "b", Lookup, NS.key("x"), UNIT)
    d.expect(Pending, "b", Acquire, NS.key("x"), UNIT)
    d.expect(Pending, "a", Acquire, NS.key("x"), UNIT)  # the writer itself gets no second ticket
    d.effect("a", Commit, ticket.transfer_id)
    d.expect(Ready, "b", Lookup, NS.key("x"), UNIT)
    assert (d.stat("misses"), d.stat("pending"), d.stat("hits"), d.stat("tickets")) == (2, 3, 1, 1)


def test_an_aborted_ticket_leaves_nothing_and_the_next_one_writes() -> None:
    d = Driver(1)
    ticket = d.ticket("x")
    assert d.effect("a", Abort, ticket.transfer_id)
    assert (d.stat("bytes_free"), d.stat("entries")) == (A, 0)
    assert d.ticket("x", client="b").transfer_id != ticket.transfer_id


@pytest.mark.parametrize("first", [Commit, Abort])
@pytest.mark.parametrize("second", [Commit, Abort])
def test_the_second_report_of_a_transfer_changes_nothing(
    first: Callable[[int, int], AnyOp], second: Callable[[int, int], AnyOp]
) -> None:
    d = Driver(4)
    ticket = d.ticket("x")
    assert d.effect("a", first, ticket.transfer_id)
    before = gauges(d)
    assert not d.effect("a", second, ticket.transfer_id)
    assert gauges(d) == before
    assert d.stat("late_reports") == 1


def gauges(d: Driver) -> dict[str, float]:
    return {name: value for name, value in d.index.statistics().items() if name != "late_reports"}


def test_a_late_report_of_an_old_transfer_does_not_touch_the_new_one() -> None:  # hazard 14
    d = Driver(4)
    old = d.ticket("x")
    d.effect("a", Forget, NS.key("x"))
    new = d.ticket("x")
    assert d.effect("a", Commit, old.transfer_id)  # gives its memory back
    d.expect(Pending, "b", Acquire, NS.key("x"), UNIT)
    assert not d.effect("a", Abort, old.transfer_id)
    assert d.effect("a", Commit, new.transfer_id)
    assert d.ready("x").extents == new.extents


def test_a_late_release_does_not_touch_a_newer_pin_of_the_same_key() -> None:  # hazards 12, 14
    d = Driver(1)
    d.fill("x")
    old = d.ready("x")
    assert d.effect("a", Release, old.pin_id)
    d.ready("x")
    assert not d.effect("a", Release, old.pin_id)
    d.expect(NoRoom, "b", Acquire, NS.key("y"), UNIT)  # still pinned
    assert d.found("x") == ["x"]


def test_reports_of_what_another_client_holds_change_nothing() -> None:
    d = Driver(4)
    ticket = d.ticket("x")
    assert not d.effect("b", Commit, ticket.transfer_id)
    assert not d.effect("b", Abort, ticket.transfer_id)
    assert d.effect("a", Commit, ticket.transfer_id)
    assert not d.effect("b", Release, d.ready("x").pin_id)
    assert not d.effect("b", Release, 10_000)


def test_forgetting_what_is_pinned_keeps_its_memory_until_the_last_pin_falls() -> None:  # hazards 6, 27
    d = Driver(1)
    d.fill("x")
    pins = [d.ready("x"), d.ready("x", client="b")]
    assert d.effect("c", Forget, NS.key("x"))
    assert not d.effect("c", Forget, NS.key("x"))
    assert (d.stat("bytes_draining"), d.found("x")) == (A, [])
    d.expect(NoRoom, "a", Acquire, NS.key("x"), UNIT)
    d.effect("a", Release, pins[0].pin_id)
    assert d.stat("bytes_draining") == A
    d.effect("b", Release, pins[1].pin_id)
    assert (d.stat("bytes_draining"), d.stat("bytes_free")) == (0, A)


@pytest.mark.parametrize("report", [Commit, Abort])
def test_forgetting_what_is_being_written_keeps_its_memory_until_the_writer_reports(
    report: Callable[[int, int], AnyOp],
) -> None:  # hazard 33: the bytes of the old weights never become a hit
    d = Driver(1)
    ticket = d.ticket("x")
    assert d.effect("b", ForgetAll, NS.digest)
    assert d.stat("bytes_draining") == A
    assert d.effect("a", report, ticket.transfer_id)
    assert (d.stat("bytes_free"), d.stat("entries")) == (A, 0)


def test_forget_all_takes_one_namespace() -> None:
    d = Driver(4)
    d.fill("x", "y")
    other = NS.next_epoch("life")
    answer = d.expect(Ticket, "a", Acquire, other.key("x"), UNIT)
    assert d.effect("a", Commit, answer.transfer_id)
    assert d.effect("a", ForgetAll, NS.digest)
    assert not d.effect("a", ForgetAll, NS.digest)
    assert d.found("x", "y") == []
    d.expect(Ready, "a", Acquire, other.key("x"), UNIT)
    assert d.stat("forgotten") == 2


OTHER_LAYOUTS = [units(2), Layout("uint8", (A, 1)), Layout("int8", (1, A)), Layout("uint8", (A,))]


@pytest.mark.parametrize("layout", OTHER_LAYOUTS)
def test_an_entry_of_another_layout_is_condemned_not_served(layout: Layout) -> None:  # hazards 9, 35
    d = Driver(4)
    d.fill("x")
    pin = d.ready("x")
    ticket = d.ticket("x", layout, client="b")
    assert ticket.extents[0].offset != pin.extents[0].offset  # somebody still reads the old bytes
    assert (d.stat("condemned"), d.stat("bytes_draining")) == (1, A)
    d.effect("b", Commit, ticket.transfer_id)
    assert d.ready("x", layout).extents == ticket.extents
    d.expect(Absent, "a", Lookup, NS.key("x"), UNIT)
    assert (d.stat("condemned"), d.stat("entries")) == (2, 0)


def test_a_ticket_of_another_layout_is_condemned_too() -> None:
    d = Driver(4)
    old = d.ticket("x")
    new = d.ticket("x", units(2), client="b")
    assert d.effect("a", Commit, old.transfer_id)
    assert d.effect("b", Commit, new.transfer_id)
    assert d.ready("x", units(2)).extents == new.extents


def test_each_lease_ends_at_its_own_deadline() -> None:  # hazard 10
    d = Driver(4)
    d.fill("x", "y", "z")
    d.ready("x", lease_s=30.0)
    d.ready("y", lease_s=10.0)
    d.ready("z")
    for now, pins in ((9.9, 3), (10.0, 2), (29.9, 2), (30.0, 1), (1e9, 1)):
        d.now = now
        d.index.expire(now)
        d.index.check_integrity()
        assert d.stat("pins") == pins
    assert d.stat("leases_expired") == 2


def test_a_released_lease_does_not_expire_and_an_expired_one_is_released_late() -> None:
    d = Driver(1)
    d.fill("x")
    released = d.ready("x", lease_s=1.0)
    d.effect("a", Release, released.pin_id)
    expired = d.ready("x", lease_s=2.0)
    d.now = 1.5
    d.expect(NoRoom, "b", Acquire, NS.key("y"), UNIT)
    d.now = 2.0
    assert not d.effect("a", Release, expired.pin_id)
    assert d.stat("leases_expired") == 1
    d.expect(Ticket, "b", Acquire, NS.key("y"), UNIT)


def test_a_lease_ending_gives_the_memory_of_a_forgotten_entry_back() -> None:
    d = Driver(1)
    d.fill("x")
    d.ready("x", lease_s=1.0)
    d.effect("a", Forget, NS.key("x"))
    assert d.stat("bytes_draining") == A
    d.now = 1.0
    assert isinstance(d.do("a", Acquire, NS.key("y"), UNIT), Ticket)


def test_leases_released_in_time_do_not_pile_up() -> None:
    d = Driver(1)
    d.fill("x")
    for _ in range(1000):
        pin = d.ready("x", lease_s=1e6)
        d.effect("a", Release, pin.pin_id)
    assert len(d.index._leases) <= 66


def test_an_item_larger_than_the_region_is_an_answer_and_evicts_nothing() -> None:  # hazard 24
    d = Driver(2)
    d.fill("x", "y")
    d.expect(NoRoom, "a", Acquire, NS.key("z"), units(3))
    d.expect(NoRoom, "a", Acquire, NS.key("z"), Layout("float64", (2**62, 2**62)))
    assert (d.found("x", "y"), d.stat("no_room_larger_than_region")) == (["x", "y"], 2)


def test_nothing_is_evicted_where_it_would_not_be_enough() -> None:
    d = Driver(3)
    d.fill("x", "y", "z")
    d.ready("x")
    d.expect(NoRoom, "a", Acquire, NS.key("w"), units(3))
    assert (d.found("x", "y", "z"), d.stat("no_room_held"), d.stat("evictions")) == (["x", "y", "z"], 1, 0)


def test_nothing_is_evicted_where_what_is_held_leaves_too_small_holes() -> None:
    d = Driver(7, max_pieces=2)
    d.fill(*"abcdefg")
    for name in "bdf":
        d.ready(name)
    for name in "aceg":
        if name != "g":
            d.effect("a", Forget, NS.key(name))
    d.expect(NoRoom, "a", Acquire, NS.key("x"), units(3))
    assert (d.found("g"), d.stat("no_room_fragmented"), d.stat("evictions")) == (["g"], 1, 0)
    assert len(d.ticket("y", units(2)).extents) == 2


def test_eviction_goes_on_past_fragments_that_can_be_joined() -> None:
    d = Driver(6, max_pieces=1)
    d.fill(*"abcdef")
    for name in "bcdef":  # order of eviction: a, b, c, ...
        d.effect("a", Release, d.ready(name).pin_id)
    d.ready("b")
    assert d.ticket("x", units(2)).extents[0].offset == 2 * A
    assert d.found(*"abcdef") == ["b", "e", "f"]


def test_eviction_takes_no_more_than_it_needs_in_the_order_of_use() -> None:
    d = Driver(3)
    d.fill("x", "y", "z")
    d.effect("a", Release, d.ready("x").pin_id)
    d.ticket("w")
    assert d.found("x", "y", "z") == ["x", "z"]
    assert (d.stat("evictions"), d.stat("bytes_evicted")) == (1, A)


def test_what_is_written_or_pinned_is_never_evicted() -> None:
    d = Driver(3)
    d.fill("x", "y")
    d.ready("x")
    d.ticket("z")
    d.ticket("v")
    assert d.found("x", "y", "z", "v") == ["x", "z", "v"]
    d.expect(NoRoom, "a", Acquire, NS.key("w"), UNIT)


def test_the_cost_of_an_entry_reaches_the_policy() -> None:
    d = Driver(2, policy="gdsf")
    d.fill("dear", cost_s=5.0)
    d.fill("cheap", cost_s=0.001)
    d.ticket("x")
    assert d.found("dear", "cheap") == ["dear"]


def test_hits_of_an_entry_reach_the_policy() -> None:
    d = Driver(2, policy="gdsf")
    d.fill("often", "seldom", cost_s=1.0)
    d.effect("a", Release, d.ready("often").pin_id)
    d.effect("b", Release, d.expect(Ready, "b", Lookup, NS.key("often"), UNIT).pin_id)
    d.ticket("x")
    assert d.found("often", "seldom") == ["often"]


def test_a_client_that_left_holds_nothing() -> None:  # hazards 26, 27
    d = Driver(4)
    d.fill("x", "y")
    pin, ticket = d.ready("x"), d.ticket("z")
    d.ready("x", client="b")
    d.ready("y")
    d.effect("b", Forget, NS.key("y"))
    d.index.close_client("a")
    d.index.close_client("a")
    d.index.check_integrity()
    assert (d.stat("bytes_writing"), d.stat("bytes_draining"), d.stat("pins")) == (0, 0, 1)
    assert (d.stat("clients_closed"), d.stat("clients")) == (1, 1)
    assert not d.effect("a", Commit, ticket.transfer_id)
    assert not d.effect("a", Release, pin.pin_id)
    assert d.ticket("z", client="b").transfer_id != ticket.transfer_id


def test_memory_that_a_dead_clients_processes_may_still_touch_is_kept_until_they_are_gone() -> None:  # 27
    d = Driver(3)
    d.fill("x")
    d.ready("x")
    d.ticket("y")
    d.index.close_client("a", may_still_touch=True)
    d.index.check_integrity()
    assert (d.stat("bytes_draining"), d.stat("bytes_pinned"), d.found("x", "y")) == (A, A, ["x"])
    d.effect("b", Release, d.ready("x", client="b").pin_id)  # it is good for others
    d.ticket("y", client="b")  # and they need not wait for the dead one
    d.expect(NoRoom, "b", Acquire, NS.key("z"), UNIT)
    d.index.client_gone("a")
    d.index.client_gone("a")
    d.index.check_integrity()
    assert (d.stat("bytes_draining"), d.stat("bytes_pinned"), d.stat("clients_lost")) == (0, 0, 1)
    d.ticket("z", client="b")


def test_reports_of_a_lost_client_still_count_and_its_successor_keeps_its_own() -> None:
    d = Driver(4)
    old = d.ticket("x")
    d.effect("a", Forget, NS.key("x"))
    d.index.close_client("a", may_still_touch=True)
    new = d.ticket("x")
    assert d.effect("a", Abort, old.transfer_id)
    assert d.stat("bytes_draining") == 0
    d.index.client_gone("a")
    assert d.effect("a", Commit, new.transfer_id)


def test_a_lost_client_that_held_nothing_is_not_remembered() -> None:
    d = Driver(1)
    d.expect(Absent, "a", Lookup, NS.key("x"), UNIT)
    d.index.close_client("a", may_still_touch=True)
    assert not d.index.lost


def test_a_batch_is_carried_out_in_order() -> None:
    d = Driver(1)
    key = NS.key("x")
    first = d.index.apply("a", [Acquire(1, key, UNIT), Acquire(2, key, UNIT), Lookup(3, key, UNIT)], 0.0)
    assert [type(answer) for answer in first] == [Ticket, Pending, Pending]
    ticket = first[0]
    assert isinstance(ticket, Ticket)
    second = d.index.apply("a", [Commit(4, ticket.transfer_id), Acquire(5, key, UNIT), Forget(6, key)], 0.0)
    assert [type(answer) for answer in second] == [Done, Ready, Done]
    assert [answer.seq for answer in (*first, *second)] == [1, 2, 3, 4, 5, 6]


def test_the_bytes_add_up_in_the_statistics() -> None:
    d = Driver(9)
    d.fill("x", "y")
    d.ready("x")
    d.ticket("z", units(2))
    d.effect("a", Forget, NS.key("x"))
    stats = d.index.statistics()
    parts = [stats[f"bytes_{name}"] for name in ("free", "writing", "ready", "draining")]
    assert parts == [5 * A, 2 * A, A, A]
    assert sum(parts) == stats["bytes_total"]


def wrong_bytes(index: Index) -> None:
    index.bytes_by_state[State.READY] += A


def wrong_pins(index: Index) -> None:
    index.entries[NS.key("pinned")].pins += 1


def wrong_state(index: Index) -> None:
    index.entries[NS.key("ready")].state = State.WRITING


def pinned_without_pin(index: Index) -> None:
    index.entries[NS.key("ready")].state = State.PINNED


def ready_but_pinned(index: Index) -> None:
    index.entries[NS.key("pinned")].state = State.READY


def lost_from_the_index(index: Index) -> None:
    del index.entries[NS.key("writing")]


def leaked(index: Index) -> None:
    entry = index.entries.pop(NS.key("ready"))
    index.policy.remove(entry)
    index.bytes_by_state[State.READY] -= entry.nbytes


def not_evictable(index: Index) -> None:
    index.policy.remove(index.entries[NS.key("ready")])


def no_holder(index: Index) -> None:
    index.holders["a"].pins.clear()


def other_holder(index: Index) -> None:
    holder = index.holders["a"]
    holder.pins = {number + 100 for number in holder.pins}


def shared_bytes(index: Index) -> None:
    ready, writing = (index.entries[NS.key(name)] for name in ("ready", "writing"))
    ready.pieces = writing.pieces


def drains_without_holder(index: Index) -> None:
    (number,) = index.transfers
    entry, holder = index.transfers.pop(number)
    holder.transfers.clear()
    entry.state = State.DRAINING


def too_few_bytes(index: Index) -> None:
    entry = index.entries[NS.key("ready")]
    entry.layout = msgspec.structs.replace(entry.layout, shape=(1, A - 1))


CORRUPTIONS = [
    wrong_bytes, wrong_pins, wrong_state, pinned_without_pin, ready_but_pinned, lost_from_the_index, leaked,
    not_evictable, no_holder, other_holder, shared_bytes, drains_without_holder, too_few_bytes,
]  # fmt: skip


@pytest.mark.parametrize("corrupt", CORRUPTIONS)
def test_integrity_check_finds(corrupt: Callable[[Index], None]) -> None:
    d = Driver(8)
    d.fill("ready", "pinned")
    d.ready("pinned")
    d.ticket("writing")
    corrupt(d.index)
    with pytest.raises(IntegrityError):
        d.index.check_integrity()
