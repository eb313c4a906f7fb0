"""A scheduler over simulated ranks that check what they are told.

A simulated rank stores what it computes in paged blocks and holds encodings in a dict, as a real one does. Its
next token is a digest of all that its blocks hold for the request, so a wrong chunk, block, encoding or rollback
changes the text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np
from sim_connector import ScriptedConnector
from sim_model import EOS, Value, encoding, expected_output, limits, next_token, placeholders

from ecotone.engine.admission import SchedulerLimits
from ecotone.engine.request import Request
from ecotone.engine.scheduler import Scheduler
from ecotone.engine.step_result import RequestDelta
from ecotone.protocol.arrays import Array
from ecotone.protocol.outputs import ECConnectorOutput, ModelRunnerOutput
from ecotone.protocol.params import SamplingParams
from ecotone.protocol.step import NewRequestData, SchedulerOutput


def build(role="ec_both", num_ranks: int = 1, patience: int = 3, stored: str = "", **bounds: int) -> SimEngine:
    """An engine whose connector finds the items of ``stored``."""
    connector = ScriptedConnector(role, patience)
    connector.stored = {f"0:{item}" for item in stored}
    return SimEngine(limits(**bounds), connector, num_ranks)


def shares(order: SchedulerOutput) -> dict[str, int]:
    """How many tokens each request computes in the step."""
    return {s.req_id: s.num_tokens for s in order.scheduled}


class SimRank:
    """One rank."""

    def __init__(self, bounds: SchedulerLimits) -> None:
        self.bounds = bounds
        self.cache: dict[str, tuple[Value, ...]] = {}
        self.requests: dict[str, NewRequestData] = {}
        self.store: dict[tuple[int, int], Value | None] = {}

    def rows_held(self) -> int:
        return sum(len(rows) for rows in self.cache.values())

    def prepare(self, order: SchedulerOutput, failing: set[str]) -> set[str]:
        """Everything up to the forward pass. The keys of loads that failed."""
        for req_id in order.finished_req_ids:
            self.requests.pop(req_id, None)
        for new in order.new_requests:
            assert new.req_id not in self.requests, "announced twice"
            self.requests[new.req_id] = new
        for key in order.free_encoder_keys:
            self.cache.pop(key, None)
        assert self.rows_held() <= self.bounds.encoder_cache_rows
        failed = set()
        for scheduled in order.scheduled:
            items = self.requests[scheduled.req_id].items
            for index in scheduled.encode:
                self.cache[scheduled.item_keys[index]] = encoding(items[index])
            for index in scheduled.load:
                key = scheduled.item_keys[index]
                if key in failing:
                    self.cache.pop(key, None)
                    failed.add(key)
                else:
                    self.cache[key] = encoding(items[index])
        assert self.rows_held() <= self.bounds.encoder_cache_rows
        return failed

    def compute(self, order: SchedulerOutput, may_lack: set[str], encode_only: bool) -> ModelRunnerOutput:
        """The forward pass. ``may_lack``: keys that this rank is known not to hold; their rows are ``None``."""
        blocks = [block for s in order.scheduled for block in s.block_ids]
        assert len(set(blocks)) == len(blocks), "a block is owned twice"
        sampled, pooled = [], []
        for s in order.scheduled:
            new = self.requests[s.req_id]
            known = new.prompt_token_ids + s.output_token_ids
            assert len(known) == s.num_known_tokens
            assert 1 <= s.num_tokens <= len(known) - s.num_computed_tokens
            tokens, vector = (), None
            if not encode_only:
                self._write(s, known, may_lack)
                if s.num_computed_tokens + s.num_tokens == len(known):
                    token = next_token(self.store[self._slot(s, p)] for p in range(len(known)))
                    if isinstance(new.params, SamplingParams):
                        tokens = (token,)
                    else:
                        vector = Array.from_numpy(np.array([token], dtype=np.float32))
            sampled.append(tokens)
            pooled.append(vector)
        return ModelRunnerOutput(
            req_ids=tuple(s.req_id for s in order.scheduled),
            sampled_token_ids=tuple(sampled),
            pooler_output=tuple(pooled),
        )

    def _write(self, s, known: tuple[int, ...], may_lack: set[str]) -> None:
        values: dict[int, Value | None] = {}
        for item, key in zip(self.requests[s.req_id].items, s.item_keys, strict=True):
            for row, position in enumerate(placeholders(item, known)):
                if s.num_computed_tokens <= position < s.num_computed_tokens + s.num_tokens:
                    assert key in self.cache or key in may_lack, "rows needed that nobody has"
                    values[position] = self.cache[key][row] if key in self.cache else None
        for position in range(s.num_computed_tokens, s.num_computed_tokens + s.num_tokens):
            self.store[self._slot(s, position)] = values.get(position, known[position])

    def _slot(self, s, position: int) -> tuple[int, int]:
        size = self.bounds.block_size
        return s.block_ids[position // size], position % size


class SimEngine:
    """A scheduler over simulated ranks, step by step."""

    def __init__(
        self, bounds: SchedulerLimits, connector: ScriptedConnector | None = None, num_ranks: int = 1
    ) -> None:
        self.bounds = bounds
        self.connector = connector
        self.encode_only = connector is not None and connector.is_encode_only
        self.time = 0.0
        self.scheduler = Scheduler(bounds, connector, (EOS,), lambda: self.time)
        self.ranks = [SimRank(bounds) for _ in range(num_ranks)]
        self.in_flight: deque[SchedulerOutput] = deque()
        self.executed: deque[ModelRunnerOutput] = deque()  # of the first of them
        self.outputs: dict[str, list[int]] = {}
        self.requests: dict[str, Request] = {}
        self.ended: dict[str, RequestDelta] = {}
        self.encoded: list[str] = []
        self.loaded: list[str] = []

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.scheduler.add_request(request)
            self.outputs[request.req_id] = []
            self.requests[request.req_id] = request

    def schedule(self) -> SchedulerOutput:
        return self._checked(self.scheduler.schedule())

    def submit(self) -> SchedulerOutput | None:
        """Order one more step, as the engine's core does."""
        order = self.scheduler.schedule_ahead() if self.in_flight else self.scheduler.schedule()
        if order is not None:
            self.in_flight.append(self._checked(order))
        return order

    def execute_next(self, failing: Iterable[set[str]] = (), broken: set[str] = frozenset()) -> None:
        """Run the first step in flight that has not run."""
        order = self.in_flight[len(self.executed)]
        self.executed.append(self.execute(order, failing, broken))

    def take_in(self) -> list[RequestDelta]:
        """Take in the result of the oldest step in flight."""
        if not self.executed:
            self.execute_next()
        return self.update(self.in_flight.popleft(), self.executed.popleft())

    def _checked(self, order: SchedulerOutput) -> SchedulerOutput:
        tokens = order.total_num_scheduled_tokens
        assert self.encode_only or tokens <= self.bounds.max_num_batched_tokens
        assert len(order.scheduled) <= self.bounds.max_num_seqs
        assert not (self.bounds.atomic_items and not self.encode_only and self.cut_items(order))
        return order

    def cut_items(self, order: SchedulerOutput) -> list[tuple[str, int]]:
        """Request and index of each item that a chunk of the step ends within."""
        ends = {s.req_id: s.num_computed_tokens + s.num_tokens for s in order.scheduled}
        return [
            (req_id, index)
            for req_id, end in ends.items()
            for index, item in enumerate(self.requests[req_id].items)
            if item.offset < end < item.end
        ]

    def execute(
        self,
        order: SchedulerOutput,
        failing: Iterable[set[str]] = (),
        broken: set[str] = frozenset(),
    ) -> ModelRunnerOutput:
        """Run the step. ``failing``: per rank, keys whose load fails; ``broken``: keys whose encode fails."""
        failing = list(failing) or [set()] * len(self.ranks)
        failed = set().union(*(r.prepare(order, f) for r, f in zip(self.ranks, failing, strict=True)))
        encodes = [(s, i) for s in order.scheduled for i in s.encode]
        loads = [s.item_keys[i] for s in order.scheduled for i in s.load]
        keys = [s.item_keys[i] for s, i in encodes]
        assert len(set(keys + loads)) == len(keys + loads), "one key ordered twice in one step"
        assert (
            sum(self.ranks[0].requests[s.req_id].items[i].num_rows for s, i in encodes)
            <= self.bounds.encoder_budget_rows
        )
        self.encoded += keys
        self.loaded += loads
        errors = {s.req_id: f"item {i} is broken" for s, i in encodes if s.item_keys[i] in broken}
        for rank in self.ranks:
            for key in broken & set(keys):
                del rank.cache[key]
        orders = order.ec_connector_metadata
        assert orders is None or set(orders.loads) <= set(loads)
        assert orders is None or set(orders.saves) <= set(keys)
        if self.connector is not None and orders is not None:
            self.connector.stored |= set(orders.saves) - broken
        outputs = [r.compute(order, failed | broken, self.encode_only) for r in self.ranks]
        ec = ECConnectorOutput(failed_loads=frozenset(failed)) if failed else None
        return ModelRunnerOutput(
            req_ids=outputs[0].req_ids,
            sampled_token_ids=outputs[0].sampled_token_ids,
            pooler_output=outputs[0].pooler_output,
            request_errors=errors,
            ec_connector_output=ec,
        )

    def update(self, order: SchedulerOutput, output: ModelRunnerOutput) -> list[RequestDelta]:
        deltas = self.scheduler.update_from_output(order, output)
        for delta in deltas:
            self.outputs[delta.req_id] += delta.new_token_ids
            if delta.finished is not None:
                self.ended[delta.req_id] = delta
        self.scheduler.check_integrity()
        return deltas

    def step(self, failing: Iterable[set[str]] = (), broken: set[str] = frozenset()) -> SchedulerOutput:
        """Keep as many steps in flight as may be, and take in the result of the oldest, which is returned."""
        while self.submit() is not None:
            pass
        order = self.in_flight[0]
        if not self.executed:
            self.execute_next(failing, broken)
        self.take_in()
        return order

    def run(self, max_steps: int = 200) -> int:
        """Step until no work is left; how many it took."""
        for steps in range(max_steps):
            if not self.scheduler.has_work():
                return steps
            self.step()
        raise AssertionError(f"not done after {max_steps} steps: {self.scheduler.statistics()}")

    def assert_at_rest(self) -> None:
        statistics = self.scheduler.statistics()
        assert not self.scheduler.has_work()
        assert statistics["requests_waiting"] == statistics["requests_running"] == 0
        assert statistics["kv_blocks_free"] == self.bounds.kv_blocks
        assert statistics["encoder_cache_rows_available"] == self.bounds.encoder_cache_rows
        for rank in self.ranks:
            assert not rank.requests
            assert rank.rows_held() <= statistics["encoder_cache_rows_used"]

    def check_texts(self, *requests: Request) -> None:
        """Nothing is left behind, and each text is the one that the model writes undisturbed."""
        for request in requests:
            assert (self.outputs[request.req_id], request.status) == expected_output(request, self.bounds)
        self.assert_at_rest()

    def finish(self, *requests: Request) -> None:
        """Add ``requests``, run all to the end, and check their texts."""
        self.add(*requests)
        self.run()
        self.check_texts(*requests)
