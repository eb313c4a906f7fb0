"""The scheduler under everything at once, in pools far too small: no step breaks a rule, every request ends, every
text is the one that the model would have written undisturbed, and nothing is left behind."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import hypothesis.strategies as st
from hypothesis import given, settings
from sim_connector import ScriptedConnector
from sim_engine import SimEngine
from sim_model import expected_output, keys_of, limits, make_request, next_token, prompt_values

from ecotone.engine.admission import SchedulerLimits
from ecotone.engine.request import Request, RequestStatus
from ecotone.errors import RequestError
from ecotone.protocol.params import PoolingParams
from ecotone.protocol.step import SchedulerOutput

ROWS = {"u": 1, "v": (1, 1), "w": 3, "x": (2, 1, 1), "y": 5, "z": 6}
CHANCE = st.sampled_from([0.0, 0.05, 0.3, 0.6])


@dataclass(frozen=True)
class Weather:
    """How likely each disturbance is: per step, or per step and item."""

    arrive: float
    abort: float
    reset: float
    pending: float
    failing: float
    lost: float
    broken: float


WEATHER = st.builds(
    Weather,
    arrive=st.sampled_from([0.2, 0.5, 1.0]),
    abort=st.sampled_from([0.0, 0.05, 0.3]),
    reset=st.sampled_from([0.0, 0.0, 0.1]),
    pending=CHANCE,
    failing=CHANCE,
    lost=st.sampled_from([0.0, 0.05, 0.2]),
    broken=st.sampled_from([0.0, 0.0, 0.02]),
)

BOUNDS = st.builds(
    limits,
    kv_blocks=st.integers(3, 16),
    block_size=st.integers(1, 5),
    max_num_batched_tokens=st.integers(1, 24),
    max_num_seqs=st.integers(1, 5),
    encoder_cache_rows=st.integers(3, 12),
    encoder_budget_rows=st.integers(3, 14),
    max_model_len=st.integers(8, 40),
    atomic_items=st.booleans(),
    max_concurrent_steps=st.sampled_from([1, 1, 2, 3]),
)


class Storm:
    """One engine in bad weather, with every rule checked at every step."""

    def __init__(
        self, bounds: SchedulerLimits, connector: ScriptedConnector | None, weather: Weather, random: Random
    ) -> None:
        self.engine = SimEngine(bounds, connector, num_ranks=2)
        self.connector = connector
        self.weather = weather
        self.random = random
        self.requests: dict[str, Request] = {}
        self.aborted: set[str] = set()
        self.epoch = 0

    def happens(self, chance: float) -> bool:
        return self.random.random() < chance

    def some_keys(self, chance: float) -> set[str]:
        return {f"{self.epoch}:{item}" for item in ROWS if self.happens(chance)}

    def live(self) -> list[Request]:
        return [request for request in self.requests.values() if not request.is_finished]

    def arrive(self) -> None:
        random, name = self.random, f"r{len(self.requests)}"
        parts = [random.choice([*ROWS, *range(10, 16)]) for _ in range(random.randint(1, 7))]
        sampling = {
            "max_tokens": random.randint(1, 8),
            "ignore_eos": self.happens(0.5),
            "stop_token_ids": random.choice([(), (3, 11), (20,)]),
        }
        params = PoolingParams() if self.happens(0.2) else None
        request = make_request(name, parts, rows=ROWS, params=params, epoch=self.epoch, **sampling)
        try:
            self.engine.add(request)
        except RequestError:
            return
        self.requests[name] = request

    def disturb(self) -> None:
        if self.happens(self.weather.abort) and self.live():
            request = self.random.choice(self.live())
            assert self.engine.scheduler.finish_request(request.req_id, RequestStatus.FINISHED_ABORTED)
            self.aborted.add(request.req_id)
        if self.happens(self.weather.reset):
            self.epoch += 1
            self.engine.scheduler.reset_encoder_cache(lambda request: keys_of(request.items, self.epoch))
        self.engine.scheduler.check_integrity()

    def step(self) -> None:
        weather = self.weather
        if self.happens(weather.arrive):
            self.arrive()
        if self.connector is not None:
            self.connector.pending = self.some_keys(weather.pending)
            self.connector.stored -= self.some_keys(weather.lost)
        self.disturb()
        engine, most = self.engine, self.engine.bounds.max_concurrent_steps
        before = list(engine.in_flight)
        if (order := engine.submit()) is not None:
            self.check_order(order)
            self.check_apart(order, before)
        if len(engine.executed) < len(engine.in_flight) and self.happens(0.7):
            failing = [self.some_keys(weather.failing) for _ in engine.ranks]
            engine.execute_next(failing, self.some_keys(weather.broken))
        self.disturb()
        if len(engine.in_flight) == most or self.happens(0.4):
            engine.take_in()
        if not engine.in_flight:
            self.check_references()

    def check_apart(self, order: SchedulerOutput, before: list[SchedulerOutput]) -> None:
        """Steps in flight have nothing to do with each other."""
        assert order.scheduled or not before, "a step without tokens while others are in flight"
        for other in before:
            assert not {s.req_id for s in order.scheduled} & {s.req_id for s in other.scheduled}
            assert not self.live_blocks(order) & self.live_blocks(other)
            ordered = {s.item_keys[i] for s in other.scheduled for i in (*s.encode, *s.load)}
            for s in order.scheduled:
                chunk = s.num_computed_tokens, s.num_computed_tokens + s.num_tokens
                needed = {s.item_keys[i] for i in self.requests[s.req_id].items_in(*chunk)}
                assert self.engine.encode_only or not needed & ordered, "built on what may yet fail"
                assert not ordered & {s.item_keys[i] for i in (*s.encode, *s.load)}

    def live_blocks(self, order: SchedulerOutput) -> set[int]:
        live = {request.req_id for request in self.live()}
        return {block for s in order.scheduled if s.req_id in live for block in s.block_ids}

    def check_order(self, order: SchedulerOutput) -> None:
        if not order.scheduled and self.live():
            assert self.connector is not None, "stuck"
            assert self.connector.pending_answers, "stuck"
        alone = self.engine.bounds.max_concurrent_steps == 1
        if alone and order.finished_req_ids & {request.req_id for request in self.live()}:
            assert not order.new_requests, "somebody was preempted, and somebody let in"
        for scheduled in order.scheduled:
            chunk = scheduled.num_computed_tokens, scheduled.num_computed_tokens + scheduled.num_tokens
            orders = (*scheduled.encode, *scheduled.load)
            needed = orders if self.engine.encode_only else self.requests[scheduled.req_id].items_in(*chunk)
            assert not set(order.free_encoder_keys) & {scheduled.item_keys[i] for i in needed}

    def check_references(self) -> None:
        """Between steps, only what is cut in two is referenced."""
        cut = {
            key: item.num_rows
            for request in self.live()
            for item, key in zip(request.items, request.item_keys, strict=True)
            if item.offset < request.num_computed_tokens < item.end
        }
        available = self.engine.scheduler.statistics()["encoder_cache_rows_available"]
        assert self.engine.bounds.encoder_cache_rows - available <= sum(cut.values())

    def end(self) -> None:
        """The weather clears; what is in flight ends."""
        if self.connector is not None:
            self.connector.pending = set()
        work = sum(request.num_prompt_tokens + 8 for request in self.live())
        self.engine.run(max_steps=20 + 10 * work * self.engine.bounds.max_concurrent_steps)
        self.engine.assert_at_rest()
        for request in self.requests.values():
            self.check_result(request)
        if self.connector is not None:
            assert sorted(self.connector.finished) == sorted(self.requests)

    def check_result(self, request: Request) -> None:
        output = self.engine.outputs[request.req_id]
        delta = self.engine.ended.get(request.req_id)
        assert output == request.output_token_ids
        if self.engine.encode_only or isinstance(request.params, PoolingParams):
            assert output == []
        elif request.status in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH):
            assert (output, request.status) == expected_output(request, self.engine.bounds)
        else:
            assert expected_output(request, self.engine.bounds)[0][: len(output)] == output
        if request.req_id in self.aborted:
            assert request.status is RequestStatus.FINISHED_ABORTED
            assert delta is None
            return
        assert delta.finished is request.status
        if request.status is RequestStatus.FINISHED_ERROR:
            assert self.weather.broken
            assert delta.error == request.error
            assert request.error.endswith("is broken")
        elif isinstance(request.params, PoolingParams) and not self.engine.encode_only:
            assert delta.pooled.to_numpy() == next_token(prompt_values(request))


@settings(max_examples=300, deadline=None)
@given(
    bounds=BOUNDS,
    role=st.sampled_from([None, "ec_both", "ec_both", "ec_consumer", "ec_producer"]),
    forgets=st.booleans(),
    weather=WEATHER,
    steps=st.sampled_from([5, 20, 60]),
    seed=st.integers(0, 2**32),
)
def test_in_any_weather(bounds, role, forgets, weather, steps, seed):
    connector = None if role is None else ScriptedConnector(role)
    if connector is not None:
        connector.forgets = forgets
    storm = Storm(bounds, connector, weather, Random(seed))
    for _ in range(steps):
        storm.step()
    storm.end()
