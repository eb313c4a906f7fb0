"""The step protocol, asked of every executor in the same words; a new executor is one more line in its kinds."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
import torch
from executor_kinds import EXECUTORS, Kind, tiny_config

from ecotone.errors import ContractError, EcotoneError, RankFailedError, ShutDownError
from ecotone.executor.base import Executor
from ecotone.executor.channel import INLINE_BYTES
from ecotone.protocol.aggregate import ECOutputAggregator
from ecotone.protocol.connector import ECItem, ECSchedulerContext, EncoderSpec
from ecotone.protocol.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ECConnectorStats, ModelRunnerOutput, RankStats
from ecotone.protocol.params import PoolingParams, SamplingParams
from ecotone.protocol.step import SchedulerOutput
from ecotone.protocol.wire import encode
from ecotone.testing.connectors import RecordedCalls, RecordingConnectorFactory, RecordingMetadata
from ecotone.testing.models import PIXELS, PLACEHOLDER, TinyModel, tiny_item
from ecotone.testing.steps import OrderedRequest, Steps, whole_steps

# Where processes of ranks are started: on a busy machine that takes a while.
pytestmark = pytest.mark.timeout(300)

P = PLACEHOLDER


class Engine(NamedTuple):
    """The lower half of an engine. ``step`` runs a step; ``params`` fit the engine's task."""

    executor: Executor
    step: Callable[..., ModelRunnerOutput]
    params: SamplingParams | PoolingParams
    factory: RecordingConnectorFactory
    kind: Kind

    @property
    def ranks(self):
        return range(self.kind.num_ranks)

    def assert_delivered(self, output, calls):
        """The report is exactly the objects that the worker halves built, and has the calls of the step."""
        meta = output.ec_connector_output.ec_connector_worker_meta
        assert type(meta) is RecordedCalls
        for rank in self.ranks:
            hooks = meta.hooks(rank)
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
    kind, built = EXECUTORS[request.param], []

    def build(role="ec_both", *, task="generate", kv_count=1, folds=True, grace_s=60.0, **script):
        executor, factory = kind.build(request, tiny_config(kind.num_ranks, role, task, **script), grace_s)
        built.append(executor)
        if role is not None and folds:
            executor.init_ec_output_aggregator()
        if folds:
            executor.init_kv_output_aggregator(kv_count * kind.num_ranks)
        steps = Steps(whole_steps(executor))
        params = PoolingParams() if task == "embed" else SamplingParams()
        return Engine(executor, steps.step, params, factory, kind)

    build.kind = kind
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
        nothing = {"saves": 0, "loads": 0}
        assert ec.ec_connector_stats == ECConnectorStats(tuple(RankStats(r, 0, nothing) for r in engine.ranks))
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
    assert output.ec_connector_output.ec_connector_stats.total() == {
        "saves": engine.kind.num_ranks,
        "loads": engine.kind.num_ranks,
    }


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


def scheduler_half(engine):
    """What decides, from the folded reports, whether an item is ready: when every rank has saved it."""
    context = ECSchedulerContext(
        engine_id="engine",
        role="ec_both",
        options={},
        participants=engine.executor.participants(),
        encoder=EncoderSpec(8, 2, "float32"),
        clock=lambda: 0.0,
    )
    return RecordingConnectorFactory().scheduler_half(context)


def test_a_report_that_comes_late_is_waited_for_and_comes_once(make):
    last = make.kind.num_ranks - 1
    engine = make(late={last: 2})
    half, cat = scheduler_half(engine), ECItem("ns:cat", 3)
    request = request_for()
    output = engine.step((request, request.order(encode=(0,))), metadata=RecordingMetadata(saves=("ns:cat",)))
    found = []
    for _ in range(4):
        if output.ec_connector_output is not None:
            half.update_connector_output(output.ec_connector_output)
        found.append(half.lookup("b", cat))
        output = engine.step(metadata=RecordingMetadata())
    assert found == ["miss", "miss", "ready", "ready"]


def test_a_report_that_comes_twice_changes_nothing(make):
    def told(**script):
        engine, request = make(**script), request_for()
        outputs = [
            engine.step((request, request.order(encode=(0,))), metadata=RecordingMetadata(saves=("ns:cat",))),
            *(engine.step(metadata=RecordingMetadata()) for _ in range(2)),
        ]
        engine.executor.shutdown()
        metas = [output.ec_connector_output.ec_connector_worker_meta for output in outputs]
        return frozenset().union(*(meta.calls for meta in metas)), sum(len(meta.calls) for meta in metas)

    facts, number = told()
    facts_of_repeated, number_of_repeated = told(repeat=True)
    assert facts_of_repeated == facts
    assert number_of_repeated > number


def test_a_rank_that_raises_is_named_with_the_cause(make):
    engine = make(raise_in="save_caches", on_rank=make.kind.num_ranks - 1)
    request = request_for()
    with pytest.raises(EcotoneError, match="save_caches raises, as its script says") as raised:
        engine.step((request, request.order(encode=(0,))), metadata=RecordingMetadata())
    if engine.kind.num_ranks > 1:
        assert "rank 1 raised ScriptedError in execute_model" in str(raised.value)
        # The others may wait for it, in the middle of the step: nobody is asked anything any more.
        with pytest.raises(RankFailedError, match="rank 1 raised ScriptedError") as failed:
            engine.executor.check_health()
        assert failed.value.rank == 1
        with pytest.raises(RankFailedError, match="sample_tokens: rank 1"):
            engine.executor.sample_tokens()


def test_a_rank_that_is_killed_is_named_with_the_cause(make):
    engine = make()
    if engine.kind.kill is None:
        pytest.skip("the rank is in this process")
    prompt = request_for()
    assert engine.executor.execute_model(whole_order(prompt)) is None
    answer = engine.executor.sample_tokens(non_block=True)
    answer.result(60)
    pid = engine.executor.ranks[1].pid
    engine.kind.kill(pid)
    engine.executor.wait_for_progress(60)  # ends since a rank is lost
    with pytest.raises(
        RankFailedError, match=rf"execute_model: rank 1 \(pid {pid}\) .*{engine.kind.killed}"
    ) as failed:
        engine.step()
    assert failed.value.rank == 1
    with pytest.raises(RankFailedError, match="rank 1"):
        engine.executor.check_health()
    pids = [each.pid for each in engine.executor.ranks]
    engine.executor.shutdown()
    assert not any(map(is_running, pids))


def test_a_rank_that_is_killed_in_a_step_ends_the_step(make):
    engine = make(block_in="start_load_caches", on_rank=make.kind.num_ranks - 1)
    if engine.kind.kill is None:
        pytest.skip("the rank is in this process")
    answer = engine.executor.execute_model(
        SchedulerOutput(step=1, ec_connector_metadata=RecordingMetadata()), non_block=True
    )
    engine.executor.wait_for_progress(60)  # signalled where it blocks
    assert not answer.done()
    engine.kind.kill(engine.executor.ranks[1].pid)
    with pytest.raises(RankFailedError, match="rank 1"):
        answer.result()


def test_a_shutdown_between_the_halves_of_a_step(make):
    engine = make()
    assert engine.executor.execute_model(whole_order(request_for())) is None
    engine.executor.shutdown()
    with pytest.raises(ShutDownError):
        engine.executor.sample_tokens()


def test_a_shutdown_in_the_middle_of_a_step_ends_it(make):
    engine = make(block_in="start_load_caches", grace_s=0.1)
    if engine.kind.kill is None:
        pytest.skip("a step in this process cannot be ended from outside")
    answer = engine.executor.execute_model(
        SchedulerOutput(step=1, ec_connector_metadata=RecordingMetadata()), non_block=True
    )
    engine.executor.wait_for_progress(60)
    ended = []

    def wait():
        with pytest.raises(ShutDownError):
            answer.result()
        ended.append(True)

    waiter = threading.Thread(target=wait)
    waiter.start()
    pids = [each.pid for each in engine.executor.ranks]
    engine.executor.shutdown()
    waiter.join()
    assert ended == [True]
    assert not any(map(is_running, pids))


def test_steps_may_be_ordered_ahead(make):
    engine = make()
    executor = engine.executor
    order = [
        SchedulerOutput(step=n, finished_req_ids={f"r{n}"})
        for n in range(1, executor.delivers.steps_in_flight + 1)
    ]
    answers = [executor.execute_model(each, non_block=True) for each in order]
    finished = [answer.result().kv_connector_output.finished_sending for answer in answers]
    assert finished == [each.finished_req_ids for each in order]
    assert all(answer.done() for answer in answers)


def test_whole_steps_may_be_submitted_ahead(make):
    """Who submits cannot know which of them go on in ``sample_tokens``: not the second, and not the third."""
    engine = make()
    good, bad = request_for(), broken_request()
    orders = [
        SchedulerOutput(step=1, new_requests=(good.data,), scheduled=(good.order(encode=(0,)),)),
        SchedulerOutput(step=2, new_requests=(bad.data,), scheduled=(bad.order(encode=(0,)),)),
        SchedulerOutput(step=3, finished_req_ids={"a"}),
    ]
    orders = [msgspec.structs.replace(each, ec_connector_metadata=RecordingMetadata()) for each in orders]
    first, second, third = [engine.executor.submit_step(each) for each in orders]
    output = first.result()
    assert (output.req_ids, len(output.sampled_token_ids[0])) == (("a",), 1)
    reported = output.ec_connector_output.ec_connector_worker_meta
    expected = [*BIND, SAVE, "wait_for_loads", "get_finished", "build_connector_worker_meta"]
    assert [reported.hooks(rank) for rank in engine.ranks] == [expected] * len(engine.ranks)
    assert second.result().request_errors == {"broken": "item 0: its pixels are not finite"}
    output = third.result()
    engine.assert_delivered(output, [*BIND, "wait_for_loads", "get_finished:a", "build_connector_worker_meta"])
    assert output.kv_connector_output.finished_sending == {"a"}


def test_large_orders_and_large_answers(make):
    engine = make(task="embed")
    rows = 40
    pixels = torch.arange(rows * PIXELS, dtype=torch.float32).reshape(rows, PIXELS) / 100
    item = tiny_item("large", 1, rows, pixels=pixels)
    many = [tiny_item(f"not-encoded-{n}", 0, 1, pixels=torch.zeros(4000, PIXELS)) for n in range(5)]
    request = OrderedRequest("a", [5, *[P] * rows, 6], (item,), params=PoolingParams(), block_ids=range(20))
    ballast = [OrderedRequest(f"b{n}", [P], (each,), params=PoolingParams()) for n, each in enumerate(many)]
    order = SchedulerOutput(
        step=1,
        new_requests=(request.data, *(each.data for each in ballast)),
        scheduled=(request.order(encode=(0,)),),
    )
    assert len(encode(order)) > 4 * INLINE_BYTES
    output = engine.executor.execute_model(order)
    hidden = TinyModel().reference(request.data.prompt_token_ids, request.data.items)[-1]
    assert output.pooler_output[0].to_numpy().tolist() == pytest.approx(
        (hidden / hidden.norm()).tolist(), abs=1e-5
    )


def test_arguments_go_by_name_or_by_position_and_no_others(make):
    executor = make(role=None).executor
    [*answers] = executor.collective_rpc("execute_model", kwargs={"scheduler_output": SchedulerOutput(step=1)})
    assert answers == [EMPTY_MODEL_RUNNER_OUTPUT] * len(answers) or answers[0].ec_connector_output is None
    for args, kwargs in (
        ((), None),
        ((1, 2), None),
        ((SchedulerOutput(step=2),), {"scheduler_output": 1}),
        ((), {"x": 1}),
    ):
        with pytest.raises(ContractError, match=r"execute_model takes \(scheduler_output\)"):
            executor.collective_rpc("execute_model", args, kwargs)


def test_one_rank_may_be_asked_alone(make):
    engine = make()
    last = max(engine.ranks)
    assert engine.executor.collective_rpc("statistics", unique_reply_rank=last)["rank"] == last
    with pytest.raises(ContractError, match="unique_reply_rank=9"):
        engine.executor.collective_rpc("statistics", unique_reply_rank=9)


def test_an_aggregator_folds_onto_the_rank_that_is_named(make):
    engine = make()
    last = max(engine.ranks)
    order = SchedulerOutput(step=1, finished_req_ids={"z"}, ec_connector_metadata=RecordingMetadata())
    output = engine.executor.collective_rpc(
        "execute_model", (order,), unique_reply_rank=last, ec_output_aggregator=ECOutputAggregator()
    )
    assert {call.rank for call in output.ec_connector_output.ec_connector_worker_meta.calls} == set(engine.ranks)
    assert output.kv_connector_output.finished_sending == {"z"}  # of that rank alone: nobody folded it


def test_without_an_aggregator_only_the_output_ranks_answer_comes(make):
    executor = make(folds=False).executor
    output = executor.execute_model(SchedulerOutput(step=1, ec_connector_metadata=RecordingMetadata()))
    assert {call.rank for call in output.ec_connector_output.ec_connector_worker_meta.calls} == {0}


def whole_order(request):
    return SchedulerOutput(step=1, new_requests=(request.data,), scheduled=(request.order(encode=(0,)),))


def is_running(pid):
    return (
        Path(f"/proc/{pid}").exists()
        and "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    )
