"""One scheduling pass: who runs in the next step, with how many tokens and which orders.

Why nothing waits for ever. Between steps a request references only an item that its computed tokens cut in two, so
whoever holds room in the encoder cache can go on without asking for more. KV blocks are taken from those that run
last; while anyone was preempted, or waits for room in the encoder cache, nobody new is let in. Therefore the first
request that runs, or the first that waits where none runs, is held up by nothing but an encoding that is PENDING.

With steps in flight, requests that are in one are passed over, and lose nothing: who wants the blocks of one waits
for its step to end, and so does everybody behind. Once no step is in flight, all of the above holds again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Set
from dataclasses import dataclass, field

from ecotone.engine.admission import SchedulerLimits
from ecotone.engine.encoder_planner import Cut, EncoderPlan, EncoderPlanner
from ecotone.engine.request import Request
from ecotone.engine.request_pool import RequestPool
from ecotone.protocol.connector import ECSchedulerConnector
from ecotone.protocol.step import NewRequestData, ScheduledRequest


@dataclass(slots=True)
class Batch:
    """A pass under way: what is left of the token budget, how many requests it may have, and what is ordered so
    far."""

    token_budget: int
    max_requests: int
    scheduled: list[ScheduledRequest] = field(default_factory=list)
    new_requests: list[NewRequestData] = field(default_factory=list)
    preemptions: int = 0
    starved: bool = False  # somebody who runs gets nothing, for want of room

    @property
    def is_full(self) -> bool:
        """Whether nothing more fits."""
        return self.token_budget == 0 or len(self.scheduled) >= self.max_requests


class Batcher:
    """Continuous batching: requests that run come first, then waiting ones, first come first served."""

    def __init__(self, limits: SchedulerLimits, pool: RequestPool, connector: ECSchedulerConnector | None) -> None:
        self._limits = limits
        self._pool = pool
        self._planner = EncoderPlanner(
            pool.encoder_cache, connector, limits.encoder_budget_rows, atomic_items=limits.atomic_items
        )
        self._encode_only = connector is not None and connector.is_encode_only
        self._counters: Counter[str] = Counter(deferrals=0, tokens_scheduled=0)

    def build(self, keys_in_flight: Set[str] = frozenset()) -> Batch:
        """Fill a step, and take for its requests all that they need. ``keys_in_flight``: what steps in flight
        encode or load."""
        self._planner.begin_pass(keys_in_flight)
        batch = Batch(self._limits.max_num_batched_tokens, self._share())
        before = -1
        while not batch.scheduled and batch.preemptions > before:
            # Again when all that came of it were preemptions: somebody earlier may have waited for that room.
            before = batch.preemptions
            self._serve_running(batch)
        if not batch.preemptions and not batch.starved:
            self._serve_waiting(batch)
        return batch

    def statistics(self) -> dict[str, float]:
        """Counters of what was ordered, and of what was not."""
        return {**self._counters, **self._planner.counters}

    def _share(self) -> int:
        """How many requests a step may have: an even share, so that those that can be in flight together are."""
        candidates = min(len(self._pool.requests), self._limits.max_num_seqs)
        return -(-candidates // self._limits.max_concurrent_steps)

    def _serve_running(self, batch: Batch) -> None:
        batch.starved = False
        position = 0
        while position < len(self._pool.running) and not batch.is_full:
            request = self._pool.running[position]
            position += 1
            if request.in_flight:
                continue
            plan = self._plan(request, batch)
            if plan.num_tokens > 0:
                if not self._take_blocks(request, plan.num_tokens, batch):
                    return  # nobody is left whose blocks it may have
                self._order(request, plan, batch)
            elif plan.cut is Cut.NO_ROOM:
                batch.starved = True

    def _serve_waiting(self, batch: Batch) -> None:
        pool = self._pool
        position = 0
        while position < len(pool.waiting):
            request = pool.waiting[position]
            if len(pool.running) >= self._limits.max_num_seqs or batch.is_full:
                return
            if not self._encode_only and not pool.kv.can_allocate(request, self._chunk(request, batch)):
                return  # before anything is looked up: who does not run must not hold a pin
            plan = self._plan(request, batch)
            if plan.num_tokens > 0:
                self._start(request, batch)
                self._take_blocks(request, plan.num_tokens, batch)
                self._order(request, plan, batch)
            elif plan.cut is Cut.PENDING:
                position += 1  # others go on
            else:
                return

    def _chunk(self, request: Request, batch: Batch) -> int:
        """Tokens of ``request`` that this step may compute. Encoding alone computes none."""
        missing = request.num_tokens - request.num_computed_tokens
        return missing if self._encode_only else min(missing, batch.token_budget)

    def _plan(self, request: Request, batch: Batch) -> EncoderPlan:
        plan = self._planner.plan(request, self._chunk(request, batch))
        deferred = plan.num_tokens == 0 and plan.cut is Cut.PENDING
        self._counters["deferrals"] += deferred and not request.deferred
        request.deferred = deferred
        return plan

    def _take_blocks(self, request: Request, num_tokens: int, batch: Batch) -> bool:
        """KV blocks for ``num_tokens`` more, preempting who runs last for them; False when that was itself, or is
        in a step in flight."""
        if self._encode_only:
            return True
        while not self._pool.kv.allocate(request, num_tokens):
            victim = self._pool.running[-1]
            if victim.in_flight:
                batch.starved = True
                return False
            self._pool.preempt(victim)
            batch.preemptions += 1
            if victim is request:
                return False
        return True

    def _start(self, request: Request, batch: Batch) -> None:
        self._pool.start(request)
        batch.new_requests.append(
            NewRequestData(
                req_id=request.req_id,
                prompt_token_ids=request.prompt_token_ids,
                items=request.items,
                item_keys=request.item_keys,
                params=request.params,
                seed=request.seed,
            )
        )

    def _order(self, request: Request, plan: EncoderPlan, batch: Batch) -> None:
        self._planner.commit(request, plan)
        if not self._encode_only:
            batch.token_budget -= plan.num_tokens
            self._counters["tokens_scheduled"] += plan.num_tokens
        batch.scheduled.append(
            ScheduledRequest(
                req_id=request.req_id,
                num_computed_tokens=request.num_computed_tokens,
                num_tokens=plan.num_tokens,
                num_known_tokens=request.num_tokens,
                output_token_ids=tuple(request.output_token_ids),
                block_ids=self._pool.kv.get_block_ids(request),
                item_keys=request.item_keys,
                encode=tuple(plan.encode),
                load=tuple(plan.load),
            )
        )
