"""Ranks and an EC connector that check what they are told, and a model whose answer depends on every position.

A simulated rank stores what it computes in paged blocks and holds encodings in a dict, as a real one does. Its
next token is a digest of all that its blocks hold for the request, so a wrong chunk, block, encoding or rollback
changes the text. ``expected_output`` gives the text in closed form.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np

from ecotone.engine.admission import SchedulerLimits
from ecotone.engine.request import Request, RequestStatus
from ecotone.engine.scheduler import Scheduler
from ecotone.engine.step_result import RequestDelta
from ecotone.protocol.arrays import Array
from ecotone.protocol.connector import (
    CacheLookup,
    ECConnectorContext,
    ECConnectorMetadata,
    ECItem,
    ECRole,
    ECSchedulerConnector,
)
from ecotone.protocol.outputs import ECConnectorOutput, ModelRunnerOutput
from ecotone.protocol.params import PoolingParams, SamplingParams
from ecotone.protocol.step import MultiModalItem, NewRequestData, SchedulerOutput

VOCAB = 50
EOS = 7
PLACEHOLDER = -1
BETWEEN = 8
Value = int | str


def limits(**changes: int | bool) -> SchedulerLimits:
    values = {
        "max_num_batched_tokens": 64,
        "max_num_seqs": 8,
        "max_model_len": 64,
        "block_size": 4,
        "kv_blocks": 64,
        "encoder_cache_rows": 32,
        "encoder_budget_rows": 32,
    }
    return SchedulerLimits(**{**values, **changes})


def make_request(
    req_id: str,
    prompt: int | Iterable[int | str],
    *,
    rows: dict[str, int | tuple[int, ...]] | None = None,
    params: SamplingParams | PoolingParams | None = None,
    epoch: int = 0,
    **sampling: object,
) -> Request:
    """``prompt``: so many text tokens; or token ids, with item ids standing for all placeholders of an item.
    ``rows``: of each item; a tuple has its groups of placeholders, with a token of text between them."""
    tokens: list[int] = []
    items: list[MultiModalItem] = []
    for part in range(10, 10 + prompt) if isinstance(prompt, int) else prompt:
        if isinstance(part, str):
            given = (rows or {})[part]
            groups = (given,) if isinstance(given, int) else given
            span = [token for group in groups for token in (BETWEEN, *[PLACEHOLDER] * group)][1:]
            items.append(
                MultiModalItem(
                    modality="image", item_id=part, offset=len(tokens), num_rows=sum(groups), length=len(span)
                )
            )
            tokens += span
        else:
            tokens.append(part)
    return Request(
        req_id,
        tuple(tokens),
        params or SamplingParams(**{"ignore_eos": True, "max_tokens": 4, **sampling}),
        items=tuple(items),
        item_keys=keys_of(items, epoch),
        arrival_time=0.0,
    )


def keys_of(items: Iterable[MultiModalItem], epoch: int = 0) -> tuple[str, ...]:
    return tuple(f"{epoch}:{item.item_id}" for item in items)


def encoding(item: MultiModalItem) -> tuple[Value, ...]:
    return tuple(f"{item.item_id}/{row}" for row in range(item.num_rows))


def placeholders(item: MultiModalItem, prompt_token_ids: Sequence[int]) -> list[int]:
    return [p for p in range(item.offset, item.end) if prompt_token_ids[p] == PLACEHOLDER]


def next_token(values: Iterable[Value | None]) -> int:
    digest = hashlib.sha256(repr(list(values)).encode()).digest()
    return int.from_bytes(digest[:4], "big") % VOCAB


def prompt_values(request: Request) -> list[Value]:
    values: list[Value] = list(request.prompt_token_ids)
    for item in request.items:
        for position, row in zip(placeholders(item, request.prompt_token_ids), encoding(item), strict=True):
            values[position] = row
    return values


def expected_output(request: Request, bounds: SchedulerLimits) -> tuple[list[int], RequestStatus]:
    """What ``request`` generates whatever happens on the way, and how it ends."""
    values, output, params = prompt_values(request), [], request.params
    while True:
        token = next_token(values)
        values.append(token)
        output.append(token)
        if (token == EOS and not params.ignore_eos) or token in params.stop_token_ids:
            return output, RequestStatus.FINISHED_STOPPED
        if len(output) == params.max_tokens or len(values) == bounds.max_request_tokens:
            return output, RequestStatus.FINISHED_LENGTH


class Orders(ECConnectorMetadata, frozen=True):
    """Keys that the ranks load, and save after they encoded them."""

    loads: tuple[str, ...] = ()
    saves: tuple[str, ...] = ()


class ScriptedConnector(ECSchedulerConnector):
    """Answers by what is ``stored`` and what is ``pending``, and holds the scheduler to the contract."""

    def __init__(self, role: ECRole = "ec_both", patience: int = 3) -> None:
        super().__init__(ECConnectorContext(engine_id="test", role=role, options={}))
        self.stored: set[str] = set()
        self.pending: set[str] = set()
        self.forgets = True
        self.patience = patience
        self.pending_work = False
        self.lookups: list[tuple[str, str]] = []
        self.finished: list[str] = []
        self.pending_answers = 0  # of the last pass
        self._waited: dict[tuple[str, str], int] = {}
        self._answers: dict[tuple[str, str], CacheLookup] = {}
        self._loads: list[str] = []
        self._saves: list[str] = []

    def lookup(self, req_id: str, item: ECItem) -> CacheLookup:
        self.lookups.append((req_id, item.key))
        asked = (req_id, item.key)
        if asked not in self._answers:
            self._answers[asked] = self._answer(asked)
        return self._answers[asked]

    def _answer(self, asked: tuple[str, str]) -> CacheLookup:
        if asked[1] in self.pending and self._waited.get(asked, 0) < self.patience:
            self._waited[asked] = self._waited.get(asked, 0) + 1
            return CacheLookup.PENDING
        return CacheLookup.READY if asked[1] in self.stored else CacheLookup.MISS

    def update_state_after_alloc(self, req_id: str, item: ECItem) -> None:
        answer = self._answers[req_id, item.key]
        assert answer is not CacheLookup.PENDING
        assert item.key not in self._loads + self._saves, "told twice of one key in one step"
        (self._loads if answer is CacheLookup.READY else self._saves).append(item.key)

    def build_connector_meta(self) -> Orders | None:
        self.pending_answers = sum(a is CacheLookup.PENDING for a in self._answers.values())
        orders = Orders(tuple(self._loads), tuple(self._saves))
        self._answers.clear()
        self._loads.clear()
        self._saves.clear()
        return orders if orders.loads or orders.saves else None

    def update_connector_output(self, output: ECConnectorOutput) -> None:
        if self.forgets:
            self.stored -= output.failed_loads

    def request_finished(self, req_id: str) -> None:
        self.finished.append(req_id)

    def has_pending_work(self) -> bool:
        return self.pending_work


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
        order = self.scheduler.schedule()
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
        order = self.schedule()
        self.update(order, self.execute(order, failing, broken))
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
