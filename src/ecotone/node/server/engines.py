"""One engine as the node sees it: its processes, what each of them still has a part in, and what it did.

Each process of an engine holds a connection of its own. The kernel closes it when the process is gone, however it
went; so a part in a transfer ends with a fact that the process tells, or with its connection.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from ecotone.node.exchange import Abort, Commit, Release, Settled
from ecotone.node.server.messages import MAX_SETTLED, Fact

Settlement = Commit | Abort | Release
# No caller waits for the answer to what the node itself settles.
_NO_SEQ = 0


class _Claim:
    """A ticket or pin that facts were heard about: which ranks are through with it, and whether one failed."""

    __slots__ = ("failed", "of", "through")

    def __init__(self) -> None:
        self.of: frozenset[int] | None = None
        self.through: set[int] = set()
        self.failed = False


class Engine:
    """The processes of one engine, and the join of what they report.

    Attributes:
        engine_id, tenant: as it said.
        scheduler: the number of its scheduler's connection, ``None`` when there is none.
        left: whether its scheduler said that it orders nothing more.
        lingering: names the outage, while a scheduler that did not leave is not connected and may live on.
        workers: connection -> rank, of those that are connected.
        attached: connections whose process maps the region.
        counters: what it did, by name.
    """

    def __init__(self, engine_id: str, tenant: str) -> None:
        self.engine_id = engine_id
        self.tenant = tenant
        self.scheduler: int | None = None
        self.left = False
        self.lingering: object | None = None
        self.workers: dict[int, int] = {}
        self.attached: set[int] = set()
        self.counters: Counter[str] = Counter()
        self._ranks: frozenset[int] = frozenset()
        self._gone: set[int] = set()
        self._claims: dict[int, _Claim] = {}
        self._settled: dict[int, tuple[bool, float]] = {}  # claim -> committed, when

    @property
    def is_gone(self) -> bool:
        """Whether none of its processes is connected, or may come back."""
        return self.scheduler is None and self.lingering is None and not self.workers

    @property
    def may_touch(self) -> bool:
        """Whether some process of it may write or read what it was given: one that maps the region, or a rank that
        has yet to map it for an order under way from a scheduler that lives."""
        return bool(self.attached) or self.scheduler is not None or self.lingering is not None

    def scheduler_came(self, connection: int, ranks: Iterable[int]) -> None:
        """Its scheduler is connected; ``ranks`` take part in what it asks for."""
        self.scheduler = connection
        self.lingering = None
        self._ranks = frozenset(ranks)

    def worker_came(self, connection: int, rank: int) -> None:
        """A rank is connected."""
        self.workers[connection] = rank
        self._gone.discard(rank)

    def worker_went(self, connection: int, transfers: Iterable[int], pins: Iterable[int]) -> list[Settlement]:
        """A rank's process is gone, and with it its part in the engine's ``transfers`` and ``pins``; what that
        settles. A rank with a newer connection is not gone."""
        rank = self.workers.pop(connection)
        self.attached.discard(connection)
        if rank in self.workers.values():
            return []
        self._gone.add(rank)
        ended: list[Settlement] = []
        for claim_id in transfers:
            claim = self._claim(claim_id)
            claim.failed |= rank in (claim.of or self._ranks) and rank not in claim.through
            ended += self._settle(claim_id, claim, is_pin=False)
        for claim_id in pins:
            ended += self._settle(claim_id, self._claim(claim_id), is_pin=True)
        return ended

    def hear(self, fact: Fact) -> list[Settlement]:
        """Take in a fact about a claim that the engine holds; what it settles. A rank without a part in it has
        nothing to say."""
        if fact.rank not in fact.of:
            return []
        claim = self._claim(fact.claim)
        claim.of = frozenset(fact.of)
        claim.through.add(fact.rank)
        # A part that nobody is left to do has failed, even where nobody lived to say so.
        claim.failed |= fact.kind == "failed" or not (claim.of & self._gone <= claim.through)
        return self._settle(fact.claim, claim, is_pin=fact.kind == "released")

    def note_settled(self, claim_id: int, now: float, *, committed: bool) -> None:
        """The scheduler is to hear that it holds this claim no more. Bounded by the claims it was given: each one
        is settled once, and each of its messages takes some of this along."""
        self._settled[claim_id] = committed, now

    def take_settled(self, now: float) -> tuple[Settled, ...]:
        """What the scheduler is told next, the oldest first; only once."""
        taken = list(self._settled.items())[:MAX_SETTLED]
        for claim_id, _ in taken:
            del self._settled[claim_id]
        return tuple(Settled(_NO_SEQ, claim_id, committed, now - at) for claim_id, (committed, at) in taken)

    def forget_claim(self, claim_id: int) -> None:
        """The scheduler settled it."""
        self._claims.pop(claim_id, None)

    def _claim(self, claim_id: int) -> _Claim:
        claim = self._claims.get(claim_id)
        if claim is None:
            claim = self._claims[claim_id] = _Claim()
        return claim

    def _settle(self, claim_id: int, claim: _Claim, *, is_pin: bool) -> list[Settlement]:
        if not (claim.of or self._ranks) <= claim.through | self._gone:
            return []
        del self._claims[claim_id]
        if is_pin:
            return [Release(_NO_SEQ, claim_id)]
        return [(Abort if claim.failed else Commit)(_NO_SEQ, claim_id)]
