"""The index against a plain model that knows every byte's owner, driven by Hypothesis.

No byte is owned twice, nothing leaks, nothing unready or pinned is evicted, and late or repeated reports change
nothing. The model says what each answer must be, except for where the bytes lie.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

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

A, UNITS = 64, 12
OLD = Namespace(model="m", revision="r", dtype="uint8", width=A, processor="p")
NAMESPACES = (OLD, OLD.next_epoch("life"))
KEYS = [OLD.key(item) for item in "stuvwxyz"] + [OLD.next_epoch("life").key(item) for item in "xy"]
T = TypeVar("T", bound=AnyAnswer)

clients = st.sampled_from(["a", "b", "c"])
keys = st.sampled_from(KEYS)
# What is stored has one size per key, so that there are hits; what is asked for may have another, or never fit.
SIZES = {key: 1 + i % 4 for i, key in enumerate(KEYS)}
layouts = st.sampled_from([1, 2, 2, 3, 3, 4, 6, UNITS + 1]).map(lambda n: Layout("uint8", (n, A)))
leases = st.sampled_from([None, None, None, 0.0, 1.0, 2.0, 10.0])
costs = st.none() | st.floats(0, 1)
# Ids from before the first to beyond the latest: live ones, ended ones, and ones that never were.
ids = st.integers(0, 30)
picks = st.integers(0, 9)
others = st.sampled_from([None, None, None, "a", "b"])


@dataclass(eq=False)
class Known:
    """An entry as the model knows it; ``writer`` and ``pins`` (id -> client, deadline) say who may touch it."""

    key: str
    layout: Layout
    units: set[int]
    extents: tuple[Any, ...]
    writer: tuple[int, str] | None
    pins: dict[int, tuple[str, float | None]] = field(default_factory=dict)
    last_use: int = 0

    @property
    def held(self) -> bool:
        return self.writer is not None or bool(self.pins)


class IndexMachine(RuleBasedStateMachine):
    @initialize(policy=st.sampled_from(["lru", "gdsf"]), max_pieces=st.integers(1, 4))
    def start(self, policy: str, max_pieces: int) -> None:
        self.policy, self.max_pieces = policy, max_pieces
        self.index = Index(UNITS * A, "region", 7, make_policy(policy), max_pieces)
        self.now, self.tick, self.seq = 0.0, 0, 0
        self.found: dict[str, Known] = {}
        self.draining: set[Known] = set()
        self.lost: dict[str, list[tuple[Known, int]]] = {}
        self.issued: set[int] = set()

    # What is asked, and what the answer must be.

    @rule(client=clients, key=keys, layout=layouts, lease=leases, cost=costs)
    def acquire_anything(
        self, client: str, key: str, layout: Layout, lease: float | None, cost: float | None
    ) -> None:
        self.acquire(client, key, layout, lease, cost)

    @rule(client=clients, key=keys, cost=costs)
    def store(self, client: str, key: str, cost: float | None) -> None:
        answer = self.acquire(client, key, Layout("uint8", (SIZES[key], A)), None, cost)
        if isinstance(answer, Ticket):
            self.report_transfer(client, answer.transfer_id, Commit)
        elif isinstance(answer, Ready):
            self.release(client, answer.pin_id)

    @rule(client=clients, pick=picks, lease=leases, lookup=st.booleans())
    def hit(self, client: str, pick: int, lease: float | None, lookup: bool) -> None:
        if self.found:
            known = list(self.found.values())[pick % len(self.found)]
            if lookup:
                self.lookup(client, known.key, known.layout, lease)
            else:
                self.acquire(client, known.key, known.layout, lease, None)

    @rule(client=clients, key=keys, layout=layouts, lease=leases)
    def lookup(self, client: str, key: str, layout: Layout, lease: float | None) -> None:
        known = self.condemn_other_layout(key, layout)
        answer = self.ask(client, Lookup(self.seq, key, layout, lease))
        if known is None:
            assert isinstance(answer, Absent)
        else:
            self.check_found(known, answer, client, lease)

    @rule(pick=picks, report=st.sampled_from([Commit, Commit, Abort]), other=others)
    def settle(self, pick: int, report: type[Commit | Abort], other: str | None) -> None:
        live = [known.writer for known in self.everything() if known.writer is not None]
        if live:
            number, client = live[pick % len(live)]
            self.report_transfer(other or client, number, report)

    @rule(pick=picks, other=others)
    def read(self, pick: int, other: str | None) -> None:
        live = [(number, pin[0]) for known in self.everything() for number, pin in known.pins.items()]
        if live:
            number, client = live[pick % len(live)]
            self.release(other or client, number)

    @rule(client=clients, number=ids, report=st.sampled_from([Commit, Abort, Release]))
    def report_anything(self, client: str, number: int, report: type[Commit | Abort | Release]) -> None:
        if report is Release:
            self.release(client, number)
        else:
            self.report_transfer(client, number, report)

    @rule(client=clients, what=st.sampled_from([*KEYS, *NAMESPACES]))
    def forget(self, client: str, what: str | Namespace) -> None:
        if isinstance(what, str):
            doomed = [what] if what in self.found else []
            answer = self.ask(client, Forget(self.seq, what))
        else:
            doomed = [key for key in self.found if key.startswith(what.digest)]
            answer = self.ask(client, ForgetAll(self.seq, what.digest))
        assert answer == Done(answer.seq, bool(doomed))
        for key in doomed:
            self.drop(key)

    @rule(seconds=st.sampled_from([0.5, 1.0, 5.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.expire()
        self.index.expire(self.now)

    @rule(client=clients, event=st.sampled_from(["close", "lose", "gone", "gone"]))
    def client_event(self, client: str, event: str) -> None:
        if event == "gone":
            self.index.client_gone(client)
            for known, number in self.lost.pop(client, ()):
                self.end(known, number)
            return
        self.index.close_client(client, may_still_touch=event == "lose")
        for known, number in self.holdings(client):
            if event == "close":
                self.end(known, number)
                continue
            self.lost.setdefault(client, []).append((known, number))
            if known.writer == (number, client):
                self.drop_entry(known)

    # What must always hold.

    @invariant()
    def books_add_up(self) -> None:
        self.index.check_integrity()
        sizes = {"writing": 0, "ready": 0, "pinned": 0, "draining": 0}
        owned: set[int] = set()
        for known in self.everything():
            assert not owned & known.units, "a byte is owned twice"
            owned |= known.units
            sizes[self.gauge_of(known)] += len(known.units) * A
        stats = self.index.statistics()
        assert stats["bytes_free"] == (UNITS - len(owned)) * A
        assert stats["bytes_writing"] == sizes["writing"]
        assert stats["bytes_ready"] == sizes["ready"] + sizes["pinned"]
        assert stats["bytes_pinned"] == sizes["pinned"]
        assert stats["bytes_draining"] == sizes["draining"]
        assert stats["pins"] == sum(len(known.pins) for known in self.everything())
        assert set(self.index.entries) == set(self.found)

    def teardown(self) -> None:
        """When everybody has left, everything can be forgotten and nothing is missing."""
        if not hasattr(self, "index"):
            return
        for client in ("a", "b", "c"):
            self.index.close_client(client)
            self.index.client_gone(client)
        self.index.apply("a", [ForgetAll(1, namespace.digest) for namespace in NAMESPACES], self.now)
        self.index.check_integrity()
        assert self.index.allocator.free_bytes == UNITS * A

    # The model.

    def acquire(self, client: str, key: str, layout: Layout, lease: float | None, cost: float | None) -> AnyAnswer:
        known = self.condemn_other_layout(key, layout)
        answer = self.ask(client, Acquire(self.seq, key, layout, lease, cost))
        if known is not None:
            self.check_found(known, answer, client, lease)
            return answer
        units = layout.nbytes // A
        gaps = sorted(self.gaps_beside_held(), reverse=True)
        if sum(gaps[: self.max_pieces]) < units:
            assert isinstance(answer, NoRoom)
            self.take_in_evictions(units)
            return answer
        assert isinstance(answer, Ticket)
        self.take_in_evictions(units)
        self.take_in_ticket(answer, client, key, layout)
        return answer

    def report_transfer(self, client: str, number: int, report: type[Commit | Abort]) -> None:
        known = next((k for k in self.everything() if k.writer == (number, client)), None)
        before = self.gauges()
        answer = self.ask(client, report(self.seq, number))
        assert answer == Done(answer.seq, known is not None)
        if known is None:
            assert self.gauges() == before
            return
        known.writer = None
        if known in self.draining or report is Abort:
            self.remove(known)
        self.use(known)

    def release(self, client: str, number: int) -> None:
        self.expire()
        known = next((k for k in self.everything() if k.pins.get(number, ("", 0))[0] == client), None)
        before = self.gauges()
        answer = self.ask(client, Release(self.seq, number))
        assert answer == Done(answer.seq, known is not None)
        if known is None:
            assert self.gauges() == before
        else:
            self.unpin(known, number)

    def ask(self, client: str, op: AnyOp) -> AnyAnswer:
        self.expire()
        (answer,) = self.index.apply(client, [op], self.now)
        assert answer.seq == op.seq
        self.seq += 1
        return answer

    def everything(self) -> list[Known]:
        return [*self.found.values(), *self.draining]

    def gauge_of(self, known: Known) -> str:
        if known in self.draining:
            return "draining"
        return "writing" if known.writer else "pinned" if known.pins else "ready"

    def gauges(self) -> dict[str, float]:
        self.index.expire(self.now)  # it does so by itself with the next operation
        stats = self.index.statistics()
        return {name: stats[name] for name in stats if name not in ("late_reports", "clients")}

    def check_found(self, known: Known, answer: AnyAnswer, client: str, lease: float | None) -> None:
        if known.writer is not None:
            assert isinstance(answer, Pending)
            return
        assert isinstance(answer, Ready)
        assert answer.extents == known.extents
        self.check_new_id(answer.pin_id)
        known.pins[answer.pin_id] = client, None if lease is None else self.now + lease
        self.use(known)

    def check_new_id(self, number: int) -> None:
        assert number not in self.issued, "an id was used again"
        self.issued.add(number)

    def take_in_evictions(self, units: int) -> None:
        """What is gone was READY and unpinned, in the policy's order, and not more than was needed.

        Where the holes are too many and too small, bytes are freed until there would be enough, and no more.
        """
        gone = [known for key, known in self.found.items() if key not in self.index.entries]
        assert not any(known.held for known in gone), "evicted while in use"
        evictable = [known for known in self.found.values() if not known.held]
        kept = {unit for known in self.everything() if known not in gone for unit in known.units}
        if gone and UNITS - sum(len(k.units) for k in self.everything() if k.held) < units:
            raise AssertionError("evicted although all of it would not have been enough")
        if self.policy == "lru" and gone:
            order = sorted(evictable, key=lambda known: known.last_use)
            assert set(gone) == set(order[: len(gone)])
            before_the_last = gaps(kept | order[len(gone) - 1].units)
            enough_pieces = sum(sorted(before_the_last, reverse=True)[: self.max_pieces]) >= units
            assert not enough_pieces, "evicted more than needed"
            if sum(sorted(self.gaps_beside_held(), reverse=True)[: self.max_pieces]) < units:
                assert sum(before_the_last) < units, "evicted on although it could not help"
        for known in gone:
            self.remove(known)

    def take_in_ticket(self, ticket: Ticket, client: str, key: str, layout: Layout) -> None:
        self.check_new_id(ticket.transfer_id)
        assert len(ticket.extents) <= self.max_pieces
        assert sum(extent.length for extent in ticket.extents) == layout.nbytes
        units = [u for e in ticket.extents for u in range(e.offset // A, (e.offset + e.length) // A)]
        assert len(set(units)) == len(units) == layout.nbytes // A
        assert set(units) <= set(range(UNITS))
        writer = (ticket.transfer_id, client)
        self.found[key] = Known(key, layout, set(units), ticket.extents, writer)

    def condemn_other_layout(self, key: str, layout: Layout) -> Known | None:
        self.expire()
        known = self.found.get(key)
        if known is not None and known.layout != layout:
            self.drop(key)
            return None
        return known

    def gaps_beside_held(self) -> list[int]:
        return gaps({unit for known in self.everything() if known.held for unit in known.units})

    def holdings(self, client: str) -> list[tuple[Known, int]]:
        lost = [pair for pairs in self.lost.values() for pair in pairs]
        held = [(k, k.writer[0]) for k in self.everything() if k.writer and k.writer[1] == client]
        pins = [(k, number) for k in self.everything() for number, pin in k.pins.items() if pin[0] == client]
        held += sorted(pins, key=lambda pair: pair[1])
        return [pair for pair in held if pair not in lost]

    def expire(self) -> None:
        pins = [(pin[1], number, known) for known in self.everything() for number, pin in known.pins.items()]
        ended = [(deadline, number, known) for deadline, number, known in pins if deadline is not None]
        for deadline, number, known in sorted(ended, key=lambda pin: pin[:2]):
            if deadline <= self.now:
                self.unpin(known, number)

    def end(self, known: Known, number: int) -> None:
        if known.writer is not None and known.writer[0] == number:
            known.writer = None
            self.remove(known)
        elif number in known.pins:
            self.unpin(known, number)

    def unpin(self, known: Known, number: int) -> None:
        del known.pins[number]
        self.use(known)
        if not known.pins and known in self.draining:
            self.remove(known)

    def drop(self, key: str) -> None:
        if key in self.found:
            self.drop_entry(self.found[key])

    def drop_entry(self, known: Known) -> None:
        if known in self.draining:
            return
        self.remove(known)
        if known.held:
            self.draining.add(known)

    def remove(self, known: Known) -> None:
        self.draining.discard(known)
        if self.found.get(known.key) is known:
            del self.found[known.key]

    def use(self, known: Known) -> None:
        self.tick += 1
        known.last_use = self.tick


def gaps(taken: set[int]) -> list[int]:
    """Lengths of the runs of units that are not taken."""
    text = "".join("x" if unit in taken else "." for unit in range(UNITS))
    return [len(run) for run in text.split("x") if run]


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(max_examples=120, stateful_step_count=50, deadline=None)
