"""Where the encoder rows of a chunk come from: held already, loaded, or encoded; and where the chunk must end
because one of them cannot be had in this pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Set
from dataclasses import dataclass, field
from enum import Enum, auto

from ecotone.engine.encoder_cache_manager import EncoderCacheManager
from ecotone.engine.request import Request
from ecotone.protocol.connector import CacheLookup, ECItem, ECSchedulerConnector

MAX_LOAD_FAILURES = 2
"""After so many failed loads of a key a request encodes it without asking: a store that goes on promising what it
does not deliver must not keep a request from ever finishing."""


class Cut(Enum):
    """Why a chunk ends before an item."""

    PENDING = auto()  # its encoding is being written: ask again in a later pass
    NO_ROOM = auto()  # the encoder cache is full of what others still need
    NO_BUDGET = auto()  # the step encodes enough already


@dataclass(slots=True)
class EncoderPlan:
    """A chunk of one request, and what it needs. Nothing is taken until it is committed.

    Attributes:
        num_tokens: length of the chunk; 0 when its first token is of an item that cannot be had.
        hits: items whose key is held, or ordered by another request in this pass.
        encode, load: items to order.
        shared: items whose key an earlier item of this plan orders.
        stored: items of an engine that only encodes that are known to be stored: nothing to do for them.
        cut: why the chunk is shorter than wanted, if an item is the reason.
        claimed, ordered: keys that the plan references, and those of them that it orders.
        claimed_rows: rows that the plan takes from what is available in the encoder cache.
        encode_rows: rows that the plan takes from the step's encoder budget.
    """

    num_tokens: int
    hits: list[int] = field(default_factory=list)
    encode: list[int] = field(default_factory=list)
    load: list[int] = field(default_factory=list)
    shared: list[int] = field(default_factory=list)
    stored: list[int] = field(default_factory=list)
    cut: Cut | None = None
    claimed: set[str] = field(default_factory=set)
    ordered: set[str] = field(default_factory=set)
    claimed_rows: int = 0
    encode_rows: int = 0


class EncoderPlanner:
    """Plans chunks against the encoder cache, the connector and the step's encoder budget (encoder rows).

    An item that a step in flight encodes or loads is PENDING until its result is taken in: nobody is to build on
    what may yet fail.

    One pass is ``begin_pass``, then for each request ``plan`` and, if it is scheduled, ``commit``.
    """

    def __init__(
        self,
        manager: EncoderCacheManager,
        connector: ECSchedulerConnector | None,
        budget_rows: int,
        *,
        atomic_items: bool = False,
    ) -> None:
        self._manager = manager
        self._atomic_items = atomic_items
        self._connector = connector
        self._encode_only = connector is not None and connector.is_encode_only
        self._budget_rows = budget_rows
        self._budget = budget_rows
        self._pending: set[str] = set()
        self._ordered: set[str] = set()
        self._in_flight: Set[str] = frozenset()
        self.counters: Counter[str] = Counter(
            encodes_ordered=0,
            loads_ordered=0,
            encoder_cache_hits=0,
            items_known_stored=0,
            fallbacks_load_given_up=0,
        )

    def begin_pass(self, in_flight: Set[str]) -> None:
        """A new step: the whole budget, nothing asked and nothing ordered yet. ``in_flight``: keys that steps in
        flight encode or load."""
        self._in_flight = in_flight
        self._budget = self._budget_rows
        self._pending.clear()
        self._ordered.clear()

    def plan(self, request: Request, num_tokens: int) -> EncoderPlan:
        """What the next ``num_tokens`` tokens of ``request`` need; fewer where an item of them cannot be had, or
        would be cut and must not be."""
        start = request.num_computed_tokens
        if self._atomic_items:
            num_tokens = _whole_items(request, start + num_tokens) - start
        plan = EncoderPlan(num_tokens)
        for index in request.items_in(start, start + num_tokens):
            plan.cut = self._place(request, index, plan)
            if plan.cut is not None:
                plan.num_tokens = max(request.items[index].offset - start, 0)
                break
        return plan

    def commit(self, request: Request, plan: EncoderPlan) -> None:
        """The planned chunk is scheduled: take what it needs, and tell the connector what this step orders."""
        num_hits = len(plan.shared) + len(set(plan.hits) - self._manager.get_cached_input_ids(request))
        for index in plan.hits:  # first, so that making room for the orders does not evict them
            self._manager.check_and_update_cache(request, index)
        for index in (*plan.encode, *plan.load):
            key = request.item_keys[index]
            self._manager.allocate(request, index)
            self._ordered.add(key)
            if not _may_load(request, key):
                self.counters["fallbacks_load_given_up"] += 1
            elif self._connector is not None:
                self._connector.update_state_after_alloc(request.req_id, _ec_item(request, index))
        for index in plan.shared:
            self._manager.check_and_update_cache(request, index)
        self._budget -= plan.encode_rows
        self._count(request, plan, num_hits)

    def _place(self, request: Request, index: int, plan: EncoderPlan) -> Cut | None:
        """Put item ``index`` into ``plan``, or say why it cannot be had."""
        key, num_rows = request.item_keys[index], request.items[index].num_rows
        if key in self._in_flight:
            return Cut.PENDING
        rows = 0 if key in plan.claimed else self._manager.rows_to_claim(key, num_rows)
        if plan.claimed_rows + rows > self._manager.num_available_rows:
            return Cut.NO_ROOM
        if key in plan.ordered:
            plan.shared.append(index)
        elif self._is_held(key):
            plan.hits.append(index)
        else:
            answer = self._lookup(request, index)
            if answer is CacheLookup.PENDING:
                return Cut.PENDING
            if answer is CacheLookup.READY and self._encode_only:
                plan.stored.append(index)
                return None
            if answer is CacheLookup.READY:
                plan.load.append(index)
            elif plan.encode_rows + num_rows > self._budget:
                return Cut.NO_BUDGET
            else:
                plan.encode.append(index)
                plan.encode_rows += num_rows
            plan.ordered.add(key)
        plan.claimed.add(key)
        plan.claimed_rows += rows
        return None

    def _is_held(self, key: str) -> bool:
        """Whether the ranks' copy of ``key`` serves. It does not in an engine that only encodes: what counts
        there is what is stored outside, and only encoding it again in a step can store it."""
        return key in self._ordered or (not self._encode_only and self._manager.is_cached(key))

    def _lookup(self, request: Request, index: int) -> CacheLookup:
        key = request.item_keys[index]
        if self._connector is None or not _may_load(request, key):
            return CacheLookup.MISS
        if key in self._pending:  # once per pass is enough for a popular image that is being written
            return CacheLookup.PENDING
        answer = self._connector.lookup(request.req_id, _ec_item(request, index))
        if answer is CacheLookup.PENDING:
            self._pending.add(key)
        return answer

    def _count(self, request: Request, plan: EncoderPlan, num_hits: int) -> None:
        request.num_encoded_items += len(plan.encode)
        request.num_loaded_items += len(plan.load)
        request.num_cached_items += num_hits + len(plan.stored)
        self.counters["encodes_ordered"] += len(plan.encode)
        self.counters["loads_ordered"] += len(plan.load)
        self.counters["encoder_cache_hits"] += num_hits
        self.counters["items_known_stored"] += len(plan.stored)


def _whole_items(request: Request, end: int) -> int:
    """``end``, or the start of the item that a chunk up to there would cut in two."""
    for index in request.items_in(end - 1, end):
        if request.items[index].end > end:
            return request.items[index].offset
    return end


def _may_load(request: Request, key: str) -> bool:
    return request.load_failures.get(key, 0) < MAX_LOAD_FAILURES


def _ec_item(request: Request, index: int) -> ECItem:
    return ECItem(request.item_keys[index], request.items[index].num_rows)
