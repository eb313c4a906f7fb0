"""The step protocol, asked of every executor in the same words. A new executor is one more line in EXECUTORS."""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch

from ecotone.config import ECConfig, EngineConfig
from ecotone.errors import ContractError, ShutDownError
from ecotone.executor.base import Executor
from ecotone.executor.uniproc import UniprocExecutor
from ecotone.protocol.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ECConnectorStats, ModelRunnerOutput, RankStats
from ecotone.protocol.params import PoolingParams, SamplingParams
from ecotone.testing.connectors import RecordedCalls, RecordingConnectorFactory, RecordingMetadata
from ecotone.testing.executors import over_the_wire, tiny_rank
from ecotone.testing.models import PIXELS, PLACEHOLDER, TinyModel, tiny_item
from ecotone.testing.steps import OrderedRequest, Steps, whole_steps

P = PLACEHOLDER


def uniproc(config, factory):
    return UniprocExecutor(config, factory, "engine", make_rank=tiny_rank)


def uniproc_over_the_wire(config, factory):
    return UniprocExecutor(config, factory, "engine", make_rank=over_the_wire(tiny_rank))


class Kind(NamedTuple):
    """How an executor is built, and whether its ranks' very objects reach the caller (or equal ones)."""

    build: Callable[[EngineConfig, RecordingConnectorFactory], Executor]
    keeps_identity: bool


EXECUTORS = {
    "uniproc": Kind(uniproc, keeps_identity=True),
    "uniproc over the wire": Kind(uniproc_over_the_wire, keeps_identity=False),
}


class Engine(NamedTuple):
    """The lower half of an engine. ``step`` runs a step; ``params`` fit the engine's task."""

    executor: Executor
    step: Callable[..., ModelRunnerOutput]
    params: SamplingParams | PoolingParams
    factory: RecordingConnectorFactory
    kind: Kind

    def assert_delivered(self, output, calls):
        """The report is exactly the object that the worker half built, and has the calls of the step."""
        meta = output.ec_connector_output.ec_connector_worker_meta
        assert type(meta) is RecordedCalls
        hooks = meta.hooks(0)
        # What happened after the last report was built comes with this one.
        begin = hooks.index("clear_connector_metadata") + 1 if "clear_connector_metadata" in hooks else 0
        assert hooks[begin:] == calls
        if self.kind.keeps_identity:
            assert meta is self.factory.workers[0].built[-1]
        elif self.factory.workers:  # the rank is in this process
            assert meta == self.factory.workers[0].built[-1]


@pytest.fixture(params=EXECUTORS)
def make(request):
    """Build an engine's lower half: an executor, initialised as an engine initialises it."""
    built = []

    def build(role="ec_both", *, task="generate", kv_count=1, **script):
        ec = None if role is None else ECConfig(connector="Recording", role=role, options=script)
        config = EngineConfig(model="tiny", device="cpu", task=task, block_size=4, kv_blocks=64, ec=ec)
        kind, factory = EXECUTORS[request.param], RecordingConnectorFactory()
        executor = kind.build(config, factory)
        built.append(executor)
        if role is not None:
            executor.init_ec_output_aggregator()
        executor.init_kv_output_aggregator(kv_count)
        steps = Steps(whole_steps(executor))
        params = PoolingParams() if task == "embed" else SamplingParams()
        return Engine(executor, steps.step, params, factory, kind)

    yield build
    for executor in built:
        executor.shutdown()


def request_for(item_id="cat", req_id="a", **options):
    return OrderedRequest(req_id, [5, P, P, P, 6], (tiny_item(item_id, 1, 3),), **options)


def broken_request(**options):
    item = tiny_item("broken", 0, 2, pixels=torch.full((2, PIXELS), torch.nan))
    return OrderedRequest("broken", [P, P, 6], (item,), block_ids=range(40, 50), **options)


BIND = ["bind_connector_metadata", "start_load_caches"]
SAVE = "save_caches:ns:cat"
REPORT = ["wait_for_loads", "get_finished:z", "build_connector_worker_meta"]


def whole_prompt(engine):
    request = request_for(params=engine.params)
    output = engine.step((request, request.order(encode=(0,))), metadata=RecordingMetadata(), finished=["z"])
    assert output.req_ids == ("a",)
    hidden = TinyModel().reference(request.data.prompt_token_ids, request.data.items)[-1:]
    return output, hidden, [*BIND, SAVE, *REPORT]


def after_sampling(engine):
    output, hidden, calls = whole_prompt(engine)
    assert output.sampled_token_ids == ((int(TinyModel().logits(hidden).argmax()),),)
    return output, calls


def after_pooling(engine):
    output, hidden, calls = whole_prompt(engine)
    assert output.pooler_output[0].to_numpy().tolist() == pytest.approx((hidden[0] / hidden.norm()).tolist())
    return output, calls


def after_encoding_only(engine):
    output, _, calls = whole_prompt(engine)
    assert (output.sampled_token_ids, output.logprobs, output.pooler_output) == (((),), ((),), (None,))
    return output, calls


def after_a_prefill_chunk(engine):
    request = request_for(params=engine.params)
    output = engine.step((request, request.order(2, (0,))), metadata=RecordingMetadata(), finished=["z"])
    assert (output.req_ids, output.sampled_token_ids) == (("a",), ((),))
    return output, [*BIND, SAVE, *REPORT]


def after_nothing_scheduled(engine):
    output = engine.step(metadata=RecordingMetadata(), finished=["z"])
    assert output.req_ids == ()
    return output, [*BIND, *REPORT]


def after_nothing_left(engine):
    request = broken_request(params=engine.params)
    output = engine.step((request, request.order(encode=(0,))), metadata=RecordingMetadata(), finished=["z"])
    assert output.req_ids == ()
    assert output.request_errors == {"broken": "item 0: its pixels are not finite"}
    return output, [*BIND, *REPORT]


def after_a_request_fails(engine):
    good, bad = request_for(params=engine.params), broken_request(params=engine.params)
    output = engine.step(
        (bad, bad.order(encode=(0,))),
        (good, good.order(encode=(0,))),
        metadata=RecordingMetadata(),
        finished=["z"],
    )
    assert output.req_ids == ("a",)
    assert output.request_errors.keys() == {"broken"}
    return output, [*BIND, SAVE, *REPORT]


WORK = {
    ("ec_both", "generate"): [after_sampling, after_a_prefill_chunk],
    ("ec_both", "embed"): [after_pooling, after_a_prefill_chunk],
    ("ec_producer", "generate"): [after_encoding_only],
    ("ec_producer", "embed"): [after_encoding_only],
}
ALWAYS = [after_nothing_scheduled, after_nothing_left, after_a_request_fails]
EXITS = [(*kind, leave) for kind, work in WORK.items() for leave in (*work, *ALWAYS)]


@pytest.mark.parametrize(("role", "task", "leave"), EXITS, ids=lambda value: getattr(value, "__name__", value))
def test_every_way_out_delivers_exactly_the_ranks_reports(make, role, task, leave):
    engine = make(role, task=task, report_finished=True)
    for _ in range(2):
        output, calls = leave(engine)
        engine.assert_delivered(output, calls)
        ec = output.ec_connector_output
        assert (ec.finished_sending, ec.finished_recving, ec.failed_loads) == ({"z"}, {"z"}, frozenset())
        assert ec.ec_connector_stats == ECConnectorStats((RankStats(0, 0, {"saves": 0, "loads": 0}),))
        assert output.kv_connector_output.finished_sending == {"z"}
    assert ModelRunnerOutput() == EMPTY_MODEL_RUNNER_OUTPUT


@pytest.mark.parametrize("role", ["ec_both", "ec_producer"])
def test_a_silent_connector_adds_nothing(make, role):
    engine = make(role, silent=True)
    request = request_for()
    output = engine.step((request, request.order(encode=(0,))), metadata=RecordingMetadata())
    assert output.ec_connector_output is None
    assert engine.step(metadata=RecordingMetadata()).ec_connector_output is None


def test_kv_reports_are_counted_and_leave_the_ec_report_alone(make):
    engine = make(kv_count=2)
    for finished, counted in ((["z"], None), (["z"], {"z"}), ([], None)):
        output = engine.step(metadata=RecordingMetadata(), finished=finished)
        kv = output.kv_connector_output
        assert (None if kv is None else kv.finished_sending) == counted
        engine.assert_delivered(output, [*BIND, REPORT[0], ":".join(["get_finished", *finished]), REPORT[2]])


def test_what_was_saved_can_be_loaded(make):
    engine = make()
    first = request_for()
    engine.step((first, first.order(encode=(0,))), metadata=RecordingMetadata(saves=("ns:cat",)))
    again = request_for(req_id="b")
    order = again.order(load=(0,))
    output = engine.step((again, order), metadata=RecordingMetadata(loads=("ns:cat",)), free=["ns:cat"])
    assert again.output_token_ids == first.output_token_ids
    assert output.ec_connector_output.ec_connector_stats.total() == {"saves": 1, "loads": 1}


@pytest.mark.parametrize("fate", ["missing", "short", "wrong_dtype"])
def test_a_failed_load_is_named_and_the_next_step_encodes(make, fate):
    engine = make(load_fates={"ns:cat": fate})
    first = request_for()
    engine.step((first, first.order(encode=(0,))), metadata=RecordingMetadata(saves=("ns:cat",)))
    again = request_for(req_id="b")
    metadata = RecordingMetadata(loads=("ns:cat",))
    output = engine.step((again, again.order(load=(0,))), metadata=metadata, free=["ns:cat"], discard=True)
    assert output.ec_connector_output.failed_loads == {"ns:cat"}
    engine.step((again, again.order(encode=(0,))), metadata=RecordingMetadata())
    assert again.output_token_ids == first.output_token_ids


def test_a_step_that_is_ordered_twice_gives_the_same_tokens(make):
    engine = make()
    request = request_for(params=SamplingParams(temperature=1.2), seed=3)
    engine.step((request, request.order(encode=(0,))))
    for _ in range(3):
        discarded = engine.step((request, request.order()), discard=True)
        counted = engine.step((request, request.order()))
        assert discarded.sampled_token_ids == counted.sampled_token_ids


def test_without_a_connector_nobody_takes_part(make):
    engine = make(role=None)
    assert engine.executor.participants() == ()
    request = request_for()
    output = engine.step((request, request.order(encode=(0,))), finished=["z"])
    assert output.ec_connector_output is None
    assert output.kv_connector_output.finished_sending == {"z"}
    assert len(request.output_token_ids) == 1


def test_with_a_connector_every_rank_takes_part_by_name(make):
    executor = make().executor
    ranks = [participant.rank for participant in executor.participants()]
    assert ranks == list(range(len(executor.collective_rpc("model_info"))))
    assert len({participant.host for participant in executor.participants()}) == 1


def test_every_rank_answers_a_collective_call(make):
    engine = make()
    request = request_for()
    engine.step((request, request.order(encode=(0,))))
    executor = engine.executor
    assert set(executor.collective_rpc("model_info")) == {TinyModel().info}
    assert {s["encoder_cache_rows"] for s in executor.collective_rpc("statistics")} == {3}
    assert set(executor.collective_rpc("reset_encoder_cache")) == {None}
    statistics = executor.collective_rpc("statistics")
    assert {s["encoder_cache_rows"] for s in statistics} == {0}
    assert [s["rank"] for s in statistics] == list(range(len(statistics)))


def test_what_no_rank_can_do_is_refused(make):
    executor = make().executor
    with pytest.raises(ContractError, match="no method 'format_disk'"):
        executor.collective_rpc("format_disk")
    with pytest.raises(ContractError, match="no step to finish"):
        executor.sample_tokens()


def test_after_a_shutdown_nothing_runs(make):
    executor = make().executor
    executor.check_health()
    executor.shutdown()
    executor.shutdown()
    with pytest.raises(ShutDownError):
        executor.check_health()
    with pytest.raises(ShutDownError, match="sample_tokens"):
        executor.sample_tokens()
    with pytest.raises(ShutDownError, match="statistics"):
        executor.collective_rpc("statistics")
