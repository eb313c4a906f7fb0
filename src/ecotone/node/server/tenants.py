"""A tenant: a region, the index over it, and the engines that use it."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from heapq import nsmallest

import msgspec

from ecotone.node.disk import DiskConfig, DiskTier, open_disk_tier
from ecotone.node.embedded import ADOPT_TIMEOUT_S, FLUSH_TIMEOUT_S
from ecotone.node.eviction import make_policy
from ecotone.node.exchange import (
    Abort,
    Acquire,
    AnyAnswer,
    AnyOp,
    Commit,
    Forget,
    ForgetAll,
    Lookup,
    Release,
    Settled,
)
from ecotone.node.index import Index
from ecotone.node.keys import NAMESPACE_HEX
from ecotone.node.region import Region
from ecotone.node.server.engines import Engine, Settlement
from ecotone.node.server.messages import EngineReport, EntryReport, Fact, Outcome
from ecotone.node.tier import pump_until

# Engines that are gone and still named in the statistics.
_REMEMBERED = 64
_MAX_REPORTED = 1000

# How an answer counts for the engine that got it.
_ASKED = {
    "Ready": "hits",
    "Ticket": "misses",
    "Pending": "pending",
    "Absent": "misses",
    "NoRoom": "no_room",
}
_TOLD: dict[type, str] = {
    Commit: "commits",
    Abort: "aborts",
    Release: "releases",
    Forget: "forgotten",
    ForgetAll: "resets",
}


class Tenant:
    """See the module. Pure but for the region it holds.

    Args:
        name: what engines call it.
        region: its memory; the tenant's from now on.
        policy: a name from ``EVICTION_POLICIES``.
        first_id: see ``Index``.
    """

    def __init__(self, name: str, region: Region, policy: str, first_id: int) -> None:
        self.name = name
        self.region = region
        own = region.descriptor
        self.index = Index(own.size, own.region_id, own.generation, make_policy(policy), first_id=first_id)
        self.tier: DiskTier | None = None
        self.engines: dict[str, Engine] = {}
        self._past: deque[EngineReport] = deque(maxlen=_REMEMBERED)

    def open_tier(self, config: DiskConfig, notify: Callable[[], None], clock: Callable[[], float]) -> None:
        """Put a disk behind the region, and wait (for a bounded time) until what is in it can be found.

        Raises:
            ConfigError: another node uses the directory, or it is none.
        """
        tier = open_disk_tier(self.index, self.region, config, notify, clock)
        self.index.tier = self.tier = tier
        pump_until(tier, lambda tier: tier.is_adopted, nullcontext(), clock, ADOPT_TIMEOUT_S)

    def close_tier(self, clock: Callable[[], float], lock: AbstractContextManager[object]) -> None:
        """Write out what is on no disk yet, for a bounded time. ``lock`` guards the books meanwhile."""
        if self.tier is not None:
            pump_until(self.tier, lambda tier: tier.is_flushed, lock, clock, FLUSH_TIMEOUT_S)
            self.tier.close()
            with lock:
                self.tier.let_go(clock())

    def statistics(self) -> dict[str, float]:
        """Of the index, and of the disk behind it."""
        return {**self.index.statistics(), **(self.tier.statistics() if self.tier is not None else {})}

    def check_integrity(self) -> None:
        """Check the books of the index and of the disk behind it.

        Raises:
            IntegrityError: the first thing that does not add up.
        """
        self.index.check_integrity()
        if self.tier is not None:
            self.tier.check_integrity()

    # -- processes come and go --------------------------------------------------------------------------------

    def scheduler_came(self, engine_id: str, connection: int, ranks: Iterable[int]) -> int | None:
        """An engine's scheduler is connected. The connection it replaces, if any: that one is void."""
        engine = self.engines.get(engine_id)
        if engine is None:
            engine = self.engines[engine_id] = Engine(engine_id, self.name)
        replaced = engine.scheduler
        if replaced is not None:
            self.scheduler_went(engine_id, replaced)
        self.engines[engine_id] = engine
        engine.scheduler_came(connection, ranks)
        return replaced

    def scheduler_left(self, engine_id: str) -> None:
        """An engine's scheduler orders nothing more; its connection ends next."""
        self.engines[engine_id].left = True

    def scheduler_went(self, engine_id: str, connection: int) -> Callable[[], None] | None:
        """An engine's scheduler is not connected any more. What its workers may still touch is kept until they are
        gone, too.

        Unless it left, it may be alive behind a broken connection, with orders under way to ranks that have not
        mapped the region yet: then all it was given is kept, and the result is to be called once its process is
        gone.
        """
        engine = self.engines[engine_id]
        if engine.scheduler != connection:
            return None
        engine.scheduler = None
        if engine.left:
            self.index.close_client(engine_id, may_still_touch=engine.may_touch)
            self._end_if_gone(engine)
            return None
        outage = engine.lingering = object()
        self.index.close_client(engine_id, may_still_touch=True)

        def process_gone() -> None:
            if engine.lingering is outage:  # it did not come back
                engine.lingering = None
                self._end_if_gone(engine)

        return process_gone

    def worker_came(self, engine_id: str, connection: int, rank: int) -> bool:
        """A worker is connected; False where its engine's scheduler is not: what it was ordered to do may be void,
        and its memory somebody else's by now."""
        engine = self.engines.get(engine_id)
        if engine is None or engine.scheduler is None:
            return False
        engine.worker_came(connection, rank)
        return True

    def worker_attaches(self, engine_id: str, connection: int) -> bool:
        """A connected worker is about to map the region; False where it must not, as with ``worker_came``."""
        engine = self.engines[engine_id]
        if engine.scheduler is None and connection not in engine.attached:
            return False
        engine.attached.add(connection)
        return True

    def worker_went(self, engine_id: str, connection: int, now: float) -> None:
        """A worker's process is gone."""
        engine = self.engines[engine_id]
        self._settle(engine, engine.worker_went(connection, *self.index.held_by(engine_id)), now)
        self._end_if_gone(engine)

    def _end_if_gone(self, engine: Engine) -> None:
        if not engine.may_touch:
            self.index.client_gone(engine.engine_id)
        if engine.is_gone:
            del self.engines[engine.engine_id]
            self._past.append(self._report(engine))

    # -- what they ask and tell -------------------------------------------------------------------------------

    def apply(self, engine_id: str, ops: tuple[AnyOp, ...], now: float) -> list[AnyAnswer]:
        """Carry out a scheduler's operations."""
        engine = self.engines[engine_id]
        answers = self.index.apply(engine_id, ops, now)
        counters = engine.counters
        for op, answer in zip(ops, answers, strict=True):
            if isinstance(op, Acquire | Lookup):
                counters[_ASKED[type(answer).__name__]] += 1
                continue
            counters[_TOLD[type(op)]] += 1
            if isinstance(op, Commit | Abort):
                engine.forget_claim(op.transfer_id)
            elif isinstance(op, Release):
                engine.forget_claim(op.pin_id)
        return answers

    def take_settled(self, engine_id: str, now: float) -> tuple[Settled, ...]:
        """What the engine's scheduler is to hear along with its answers."""
        return self.engines[engine_id].take_settled(now)

    def keep(self, engine_id: str, ids: frozenset[int], now: float) -> None:
        """A scheduler is back, and says what it knows of. What is over by now may have been said on the connection
        that broke: it is said again."""
        self.index.reclaim(engine_id, ids)
        transfers, pins = self.index.held_by(engine_id)
        for claim in sorted(ids.difference(transfers, pins)):
            self.engines[engine_id].note_settled(claim, now, committed=False)

    def hear(self, engine_id: str, facts: Iterable[Fact], now: float) -> None:
        """Take in a worker's facts. Those about what the engine does not hold (any more) change nothing."""
        engine = self.engines[engine_id]
        for fact in facts:
            engine.counters["facts"] += 1
            table = self.index.pins if fact.kind == "released" else self.index.transfers
            held = table.get(fact.claim)
            if held is not None and held[1].client == engine_id:
                self._settle(engine, engine.hear(fact), now)

    def _settle(self, engine: Engine, ended: list[Settlement], now: float) -> None:
        for op, answer in zip(ended, self.index.report(engine.engine_id, ended, now), strict=True):
            if not getattr(answer, "effect", False):
                continue
            engine.counters["settled_by_workers"] += 1
            claim = op.pin_id if isinstance(op, Release) else op.transfer_id
            engine.note_settled(claim, now, committed=isinstance(op, Commit))

    # -- for tools --------------------------------------------------------------------------------------------

    def reports(self) -> list[EngineReport]:
        """Every engine that is connected (a thousand at most), and the latest ones that were."""
        present = [self._report(engine) for engine in list(self.engines.values())[:_MAX_REPORTED]]
        return [*present, *self._past]

    def _report(self, engine: Engine) -> EngineReport:
        transfers, pins = self.index.held_by(engine.engine_id)
        return EngineReport(
            engine_id=engine.engine_id,
            tenant=self.name,
            connected=engine.scheduler is not None or bool(engine.workers),
            workers=tuple(sorted(engine.workers.values())),
            counters={**Counter(engine.counters), "transfers": len(transfers), "pins": len(pins)},
        )

    def entries(self, namespace: str | None, after: str, limit: int, now: float) -> tuple[list[EntryReport], bool]:
        """Entries whose key is in ``namespace`` and greater than ``after``; whether there are more."""
        wanted = (k for k in self.index.entries if k > after and (namespace is None or k.startswith(namespace)))
        keys = nsmallest(limit + 1, wanted)
        found = []
        for key in keys[:limit]:
            entry = self.index.entries[key]
            found.append(
                EntryReport(
                    key=key,
                    dtype=entry.layout.dtype,
                    shape=entry.layout.shape,
                    nbytes=entry.nbytes,
                    state=entry.state.name.lower(),
                    hits=entry.uses - 1,
                    pins=entry.pins,
                    age_s=max(0.0, now - entry.since),
                )
            )
        return found, len(keys) > limit

    def forget(self, key: str, now: float) -> Outcome:
        """Forget one entry, in memory and on the disk."""
        return self._forget([Forget(0, key)], now)

    def clear(self, namespace: str | None, now: float) -> Outcome:
        """Forget a namespace, or everything, in memory and on the disk."""
        doomed = {namespace} if namespace is not None else {key[:NAMESPACE_HEX] for key in self.index.entries}
        if namespace is None and self.tier is not None:
            doomed |= {key[:NAMESPACE_HEX] for key in self.tier.files()}
        outcome = self._forget([ForgetAll(0, name) for name in sorted(doomed)], now)
        if namespace is None and self.tier is not None and not self.tier.ledger.gone_through:
            return msgspec.structs.replace(outcome, problem="not every file on the disk is known yet: try again")
        return outcome

    def _forget(self, ops: Sequence[Forget | ForgetAll], now: float) -> Outcome:
        before = self._stored()
        self.index.report("", ops, now)
        entries, nbytes, files, file_bytes = (was - left for was, left in zip(before, self._stored(), strict=True))
        return Outcome(entries, nbytes, files, file_bytes)

    def _stored(self) -> tuple[int, int, int, int]:
        """Entries that can be found in memory, and their bytes; files, and theirs."""
        entries = self.index.entries.values()
        files = self.tier.files() if self.tier is not None else {}
        return len(entries), sum(entry.nbytes for entry in entries), len(files), sum(files.values())

    def close(self) -> None:
        """Give the memory back; who maps it keeps it as long as that."""
        self.region.close()
