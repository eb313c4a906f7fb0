"""Which encodings there are, who writes them, and who reads them.

The index is pure: it takes operations with the name of a client and the time, and returns answers. It does not
touch the memory it gives out, read a clock or take a lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Any, cast

from ecotone.node.audit import audit
from ecotone.node.entry import Entry, Holder
from ecotone.node.eviction import EvictionPolicy
from ecotone.node.exchange import (
    Abort,
    Absent,
    Acquire,
    AnyAnswer,
    AnyOp,
    Commit,
    Done,
    Extent,
    Forget,
    ForgetAll,
    Layout,
    Lookup,
    NoRoom,
    Pending,
    Ready,
    Release,
    Ticket,
)
from ecotone.node.extents import ExtentAllocator, Piece, round_up
from ecotone.node.lifecycle import Event, State, transition
from ecotone.node.tier import Tier

COUNTERS = (
    "hits", "pending", "misses", "tickets", "commits", "aborts", "releases", "forgotten", "condemned",
    "evictions", "bytes_evicted", "late_reports", "leases_expired", "clients_closed", "clients_lost",
    "no_room_larger_than_region", "no_room_held", "no_room_fragmented", "promotions",
)  # fmt: skip


# The name of the tier among those who hold something. No client can have it: theirs are checked to be printable.
_TIER = "\0tier"


class Index:
    """The entries of one region, their life cycle, and who holds them.

    Args:
        capacity: bytes of the region.
        region_id, generation: name the region in the extents handed out.
        policy: chooses what is evicted; the index becomes its only user.
        max_pieces: the most extents an entry is split into.
        first_id: the first number of a pin or transfer. A node that may be restarted under its clients chooses
            it so that no number of an earlier life comes again.

    Attributes:
        tier: what lies behind the region; set by the owner, before the first operation.
    """

    def __init__(
        self,
        capacity: int,
        region_id: str,
        generation: int,
        policy: EvictionPolicy,
        max_pieces: int = 16,
        first_id: int = 1,
    ) -> None:
        self.allocator = ExtentAllocator(capacity, max_pieces)
        self.entries: dict[str, Entry] = {}
        self.pins: dict[int, tuple[Entry, Holder]] = {}
        self.transfers: dict[int, tuple[Entry, Holder]] = {}
        self.holders: dict[str, Holder] = {}
        self.lost: dict[str, list[Holder]] = {}
        self.tier: Tier | None = None
        self.tier_holder = Holder(_TIER)
        self.policy = policy
        self.bytes_by_state = dict.fromkeys(State, 0)
        self._region = (region_id, generation)
        self._leases: list[tuple[float, int]] = []
        self._ids = count(first_id)
        self._count = dict.fromkeys(COUNTERS, 0)
        self._handlers: dict[type, Callable[[Holder, Any, float], AnyAnswer]] = {
            Acquire: self._acquire,
            Lookup: self._lookup,
            Commit: self._commit,
            Abort: self._abort,
            Release: self._release,
            Forget: self._forget,
            ForgetAll: self._forget_all,
        }

    def apply(self, client: str, ops: Sequence[AnyOp], now: float) -> list[AnyAnswer]:
        """Carry out ``ops`` in order, after letting the leases fall that end at ``now`` (seconds) or before.

        Nothing in an operation makes it raise: what cannot be done is an answer.
        """
        self.expire(now)
        holder = self.holders.get(client)
        if holder is None:
            holder = self.holders[client] = Holder(client)
        handlers = self._handlers
        return [handlers[type(op)](holder, op, now) for op in ops]

    def report(self, client: str, ops: Sequence[AnyOp], now: float) -> list[AnyAnswer]:
        """As ``apply``, for what ``client``, which may have left, is known to have done."""
        holder = self.holders.get(client) or Holder(client)
        return [self._handlers[type(op)](holder, op, now) for op in ops]

    def expire(self, now: float) -> None:
        """Let every pin fall whose lease ended at ``now`` or before: each has its own deadline."""
        while self._leases and self._leases[0][0] <= now:
            pin_id = heappop(self._leases)[1]
            if pin_id in self.pins:
                self._count["leases_expired"] += 1
                self._unpin(pin_id)

    def close_client(self, client: str, *, may_still_touch: bool = False) -> None:
        """``client`` left or died: its tickets end and its pins fall.

        With ``may_still_touch`` its processes may go on writing and reading for a while. What it was writing is
        forgotten, and its memory and its pins are kept until its reports arrive or ``client_gone`` is called.
        """
        holder = self.holders.pop(client, None)
        if holder is None:
            return
        self._count["clients_lost" if may_still_touch else "clients_closed"] += 1
        if not may_still_touch:
            self._end(holder)
            return
        for transfer_id in holder.transfers:
            entry = self.transfers[transfer_id][0]
            if entry.state is State.WRITING:
                self._move(entry, Event.FORGET)
        if holder.transfers or holder.pins:
            self.lost.setdefault(client, []).append(holder)

    def client_gone(self, client: str) -> None:
        """No process of ``client``, closed earlier with ``may_still_touch``, runs any more."""
        for holder in self.lost.pop(client, ()):
            self._end(holder)

    def reclaim(self, client: str, kept: frozenset[int]) -> None:
        """``client``, closed earlier with ``may_still_touch``, is back, and knows of the pins and transfers in
        ``kept`` alone: what else was given to it never arrived, so that nobody uses it."""
        for holder in self.lost.get(client, ()):
            for transfer_id in sorted(holder.transfers - kept):
                self._finish(transfer_id, Event.ABORT)
            for pin_id in sorted(holder.pins - kept):
                self._unpin(pin_id)

    def pin_for_tier(self, key: str) -> tuple[int, Entry] | None:
        """Pin an entry for the tier to write it out, if it is written; no hit, and no use. ``unpin_for_tier`` ends
        it."""
        entry = self.entries.get(key)
        if entry is None or entry.state is State.WRITING:
            return None
        return self._hold(self.tier_holder, entry), entry

    def unpin_for_tier(self, pin_id: int) -> None:
        """The tier does not read the entry any more."""
        self._unpin(pin_id)

    def end_promotion(self, transfer_id: int, *, verified: bool) -> None:
        """The tier does not touch the memory of this transfer any more; ``verified``: it holds the entry."""
        self._finish(transfer_id, Event.COMMIT if verified else Event.ABORT)

    def held_by(self, client: str) -> tuple[list[int], list[int]]:
        """The numbers of the transfers and of the pins that ``client`` holds, or held when it was closed."""
        holders = [*self.lost.get(client, ())]
        if client in self.holders:
            holders.append(self.holders[client])
        return sorted(i for h in holders for i in h.transfers), sorted(i for h in holders for i in h.pins)

    def evict(self, nbytes: int) -> int:
        """Evict what the policy chooses until ``nbytes`` are free or nothing may go; the bytes evicted."""
        before = self._count["bytes_evicted"]
        while self.allocator.free_bytes < nbytes and self.bytes_by_state[State.READY]:
            self._evict()
        return self._count["bytes_evicted"] - before

    def statistics(self) -> dict[str, float]:
        """Counters since the start, and gauges. ``bytes_free + bytes_writing + bytes_ready + bytes_draining`` is
        ``bytes_total``; ``bytes_pinned`` is a part of ``bytes_ready``."""
        held = self.bytes_by_state
        return {
            **self._count,
            **self.allocator.statistics(),
            "bytes_total": self.allocator.capacity,
            "bytes_writing": held[State.WRITING],
            "bytes_ready": held[State.READY] + held[State.PINNED],
            "bytes_pinned": held[State.PINNED],
            "bytes_draining": held[State.DRAINING],
            "entries": len(self.entries),
            "pins": len(self.pins),
            "transfers": len(self.transfers),
            "clients": len(self.holders),
        }

    def check_integrity(self) -> None:
        """Recompute everything that is kept as a sum or a second view.

        Raises:
            IntegrityError: the first thing that does not add up.
        """
        audit(self)

    # Operations.

    def _acquire(self, holder: Holder, op: Acquire, now: float) -> AnyAnswer:
        entry = self._find(op.key, op.layout)
        if entry is None:
            if self.tier is not None and self.tier.holds(op.key, op.layout):
                return self._promote(op, now) or NoRoom(op.seq)
            self._count["misses"] += 1
            return self._begin(holder, op, now)
        if entry.state is State.WRITING:
            self._count["pending"] += 1
            return Pending(op.seq)
        return self._pin(holder, entry, op, now)

    def _lookup(self, holder: Holder, op: Lookup, now: float) -> AnyAnswer:
        entry = self._find(op.key, op.layout)
        if entry is None:
            if (
                self.tier is not None
                and self.tier.holds(op.key, op.layout)
                and (answer := self._promote(Acquire(op.seq, op.key, op.layout), now))
            ):
                return answer
            self._count["misses"] += 1
            return Absent(op.seq)
        if entry.state is State.WRITING:
            self._count["pending"] += 1
            return Pending(op.seq)
        return self._pin(holder, entry, op, now)

    def _commit(self, holder: Holder, op: Commit, _now: float) -> Done:
        return self._settle(holder, op, Event.COMMIT, "commits")

    def _abort(self, holder: Holder, op: Abort, _now: float) -> Done:
        return self._settle(holder, op, Event.ABORT, "aborts")

    def _release(self, holder: Holder, op: Release, _now: float) -> Done:
        pin = self.pins.get(op.pin_id)
        if pin is None or pin[1].client != holder.client:
            self._count["late_reports"] += 1
            return Done(op.seq, effect=False)
        self._count["releases"] += 1
        self._unpin(op.pin_id)
        return Done(op.seq, effect=True)

    def _forget(self, _holder: Holder, op: Forget, _now: float) -> Done:
        entry = self.entries.get(op.key)
        if entry is not None:
            self._drop([entry])
        behind = self.tier is not None and self.tier.forget(op.key)
        return Done(op.seq, effect=entry is not None or behind)

    def _forget_all(self, _holder: Holder, op: ForgetAll, _now: float) -> Done:
        doomed = [entry for key, entry in self.entries.items() if key.startswith(op.namespace)]
        self._drop(doomed)
        behind = self.tier is not None and self.tier.forget_all(op.namespace)
        return Done(op.seq, effect=bool(doomed) or behind)

    # Their parts.

    def _find(self, key: str, layout: Layout) -> Entry | None:
        entry = self.entries.get(key)
        if entry is None or entry.layout == layout:
            return entry
        self._count["condemned"] += 1
        self._move(entry, Event.FORGET)
        if self.tier is not None:
            self.tier.forget(key)
        return None

    def _promote(self, op: Acquire, now: float) -> Pending | None:
        """Let the tier write the entry; ``None`` where there is no memory for it."""
        ticket = self._begin(self.tier_holder, op, now)
        if isinstance(ticket, NoRoom) or self.tier is None:
            self._count["misses"] += 1
            return None
        self._count["promotions"] += 1
        self._count["pending"] += 1
        self.tier.promote(op.key, op.layout, ticket.transfer_id, ticket.extents)
        return Pending(op.seq)

    def _begin(self, holder: Holder, op: Acquire, now: float) -> Ticket | NoRoom:
        pieces = self._make_room(op.layout.nbytes)
        if pieces is None:
            return NoRoom(op.seq)
        region_id, generation = self._region
        extents = tuple([Extent(region_id, generation, start, length) for start, length in pieces])
        entry = self.entries[op.key] = Entry(op, pieces, extents, now)
        transfer_id = next(self._ids)
        self.transfers[transfer_id] = entry, holder
        holder.transfers.add(transfer_id)
        self._count["tickets"] += 1
        self._move(entry, Event.TICKET)
        return Ticket(op.seq, transfer_id, extents)

    def _pin(self, holder: Holder, entry: Entry, op: Acquire | Lookup, now: float) -> Ready:
        self._count["hits"] += 1
        entry.uses += 1
        pin_id = self._hold(holder, entry)
        if op.lease_s is not None:
            self._lease(pin_id, now + op.lease_s)
        return Ready(op.seq, pin_id, entry.extents)

    def _hold(self, holder: Holder, entry: Entry) -> int:
        pin_id = next(self._ids)
        self.pins[pin_id] = entry, holder
        holder.pins.add(pin_id)
        entry.pins += 1
        self._move(entry, Event.PIN)
        return pin_id

    def _lease(self, pin_id: int, deadline: float) -> None:
        heappush(self._leases, (deadline, pin_id))
        if len(self._leases) > 2 * len(self.pins) + 64:  # most of them were released before their time
            self._leases = [lease for lease in self._leases if lease[1] in self.pins]
            heapify(self._leases)

    def _unpin(self, pin_id: int) -> None:
        entry, holder = self.pins.pop(pin_id)
        holder.pins.discard(pin_id)
        entry.pins -= 1
        self._move(entry, Event.UNPIN if entry.pins else Event.LAST_UNPIN)

    def _settle(self, holder: Holder, op: Commit | Abort, event: Event, counter: str) -> Done:
        transfer = self.transfers.get(op.transfer_id)
        if transfer is None or transfer[1].client != holder.client:
            self._count["late_reports"] += 1
            return Done(op.seq, effect=False)
        self._count[counter] += 1
        self._finish(op.transfer_id, event)
        return Done(op.seq, effect=True)

    def _finish(self, transfer_id: int, event: Event) -> None:
        entry, holder = self.transfers.pop(transfer_id)
        holder.transfers.discard(transfer_id)
        self._move(entry, event)

    def _drop(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            self._count["forgotten"] += 1
            self._move(entry, Event.FORGET)

    def _end(self, holder: Holder) -> None:
        for transfer_id in sorted(holder.transfers):
            self._finish(transfer_id, Event.ABORT)
        for pin_id in sorted(holder.pins):
            self._unpin(pin_id)

    # Memory.

    def _make_room(self, nbytes: int) -> tuple[Piece, ...] | None:
        """Allocate, evicting what must go; evict nothing where there are not enough bytes anyhow."""
        need, checked = round_up(nbytes), False
        if need > self.allocator.capacity:
            self._count["no_room_larger_than_region"] += 1
            return None
        if need > self.allocator.free_bytes + self.bytes_by_state[State.READY]:
            self._count["no_room_held"] += 1
            return None
        while (pieces := self.allocator.allocate(nbytes)) is None:
            if not checked and need <= self.allocator.free_bytes:
                # Bytes enough, in too many holes. What is held decides whether evicting on can help; asked only
                # now, since the answer takes a pass over all of it.
                if not self.allocator.fits_beside(self._held_pieces(), nbytes):
                    self._count["no_room_fragmented"] += 1
                    return None
                checked = True
            self._evict()
        return pieces

    def _evict(self) -> None:
        victim = cast(Entry, self.policy.victim())
        self._count["evictions"] += 1
        self._count["bytes_evicted"] += victim.nbytes
        self._move(victim, Event.EVICT)

    def _held_pieces(self) -> list[Piece]:
        """The memory of every entry that cannot be evicted: each has a pin or a transfer."""
        held = {entry: None for entry, _ in (*self.pins.values(), *self.transfers.values())}
        return [piece for entry in held for piece in entry.pieces]

    def _move(self, entry: Entry, event: Event) -> None:
        """The only place where an entry changes its state, and everything that follows from it."""
        old = entry.state
        new = transition(old, event)
        if new is old:
            return
        entry.state = new
        self.bytes_by_state[old] -= entry.nbytes
        self.bytes_by_state[new] += entry.nbytes
        if old is State.READY:
            self.policy.remove(entry)
        elif new is State.READY:
            self.policy.add(entry)
        if self.tier is not None:
            if event is Event.COMMIT and new is State.READY:
                self.tier.committed(entry)
            elif event is Event.EVICT:
                self.tier.evicted(entry)
        if new is State.ABSENT or new is State.DRAINING:
            if old is not State.DRAINING:
                del self.entries[entry.key]
            if new is State.ABSENT:
                self.allocator.free(entry.pieces)
