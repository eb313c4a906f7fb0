"""Calls, answers and failures, over ranks that a script plays: no process, and every order of events."""

import threading

import pytest
from executor_kinds import tiny_config

from ecotone.config import ECConfig, EngineConfig
from ecotone.errors import (
    ConfigError,
    ContractError,
    DecodeError,
    LostReportsError,
    MissingOutputError,
    ModelError,
    RankFailedError,
    RankTimeoutError,
    ShutDownError,
)
from ecotone.executor.base import Delivers
from ecotone.executor.messages import Call, Fault, Reply, Start, Started, decode_config
from ecotone.executor.methods import decode_result, encode_result
from ecotone.executor.ranked import RankedExecutor
from ecotone.executor.transport import Answered, Died, Interrupted, Signalled, Transport
from ecotone.protocol.aggregate import ECOutputAggregator
from ecotone.protocol.connector import Participant
from ecotone.protocol.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ECConnectorOutput, ModelRunnerOutput
from ecotone.protocol.step import SchedulerOutput
from ecotone.protocol.wire import decode, encode
from ecotone.testing.connectors import RecordingConnectorFactory


class Script(Transport):
    """``events`` happen in ``wait``, one list a call. Calls are kept; ``answer`` answers the latest."""

    init_method = "file:///nowhere"

    def __init__(self, num_ranks=2):
        self.num_ranks = num_ranks
        self.starts = []
        self.calls = []
        self.events = []
        self.waits = []
        self.closed = []
        self.interrupted = threading.Event()
        self.begin = lambda rank: reply(rank, 0, encode(Started(100 + rank, f"host{rank // 8}", True)))

    def send_starts(self, messages):
        self.starts = [decode(message, Start) for message in messages]
        self.events.append([self.begin(rank) for rank in range(self.num_ranks)])

    def send(self, message, reply_rank):
        self.calls.append(decode(message, Call))
        assert self.calls[-1].reply_rank == reply_rank

    def wait(self, timeout):
        self.waits.append(timeout)
        if self.events:
            return self.events.pop(0)
        if timeout is None:
            self.interrupted.wait()
        return [Interrupted()] if self.interrupted.is_set() else []

    def interrupt(self):
        self.interrupted.set()

    def close(self, last_message, grace_s):
        self.closed.append((decode(last_message, Call).method, grace_s))

    def answer(self, rank, result, back=1):
        """An answer of ``rank`` to the call before ``back - 1`` others."""
        return reply(rank, self.calls[-back].seq, encode_result(result))


def reply(rank, seq, result):
    return Answered(rank, encode(Reply(seq, result)))


def fault(rank, seq, kind, method="execute_model"):
    return Answered(rank, encode(Reply(seq, None, Fault(kind, "it broke", "Traceback: ...", method))))


class Scripted(RankedExecutor):
    delivers = Delivers(all_ranks=True, steps_in_flight=2)
    script = None

    def _open_transport(self):
        return self.script


class Single(Scripted):
    delivers = Delivers(all_ranks=False, steps_in_flight=2)


def make(script=None, config=None, kind=Scripted, **options):
    bound = type("Bound", (kind,), {"script": script or Script()})
    executor = bound(config or tiny_config(2, "ec_both"), RecordingConnectorFactory(), "engine-3", **options)
    return executor, bound.script


def test_each_rank_is_told_which_it_is():
    config = EngineConfig(model="tiny", tensor_parallel_size=2, pipeline_parallel_size=2)
    executor, script = make(Script(4), config, make_rank="a.module:thing")
    assert [start.engine_id for start in script.starts] == ["engine-3"] * 4
    assert {start.make_rank for start in script.starts} == {"a.module:thing"}
    assert [decode_config(start.config) for start in script.starts] == [config] * 4
    specs = [start.spec for start in script.starts]
    assert [(s.rank, s.pp_rank, s.tp_rank) for s in specs] == [(0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 1)]
    assert {(s.world_size, s.pp_size, s.tp_size, s.init_method) for s in specs} == {(4, 2, 2, "file:///nowhere")}
    assert executor.output_rank == 2


def test_participants_are_those_that_said_so():
    script = Script(3)
    script.begin = lambda rank: reply(rank, 0, encode(Started(rank, "here", rank != 1)))
    executor, _ = make(script, tiny_config(3, "ec_both"))
    assert executor.participants() == (Participant(0, "here"), Participant(2, "here"))


def test_answers_are_put_in_order_whenever_they_come():
    executor, script = make()
    first = executor.collective_rpc("statistics", non_block=True)
    second = executor.collective_rpc("statistics", non_block=True)
    script.events = [
        [script.answer(1, {"n": 21.0}), script.answer(0, {"n": 10.0}, back=2)],
        [script.answer(0, {"n": 20.0})],
        [script.answer(1, {"n": 11.0}, back=2)],
    ]
    assert not first.done()
    assert first.result() == [{"n": 10.0}, {"n": 11.0}]
    assert second.done()
    assert second.result() == [{"n": 20.0}, {"n": 21.0}]


def test_an_answer_that_comes_twice_or_to_nothing_changes_nothing():
    executor, script = make()
    call = executor.collective_rpc("statistics", non_block=True)
    script.events = [
        [script.answer(0, {"n": 1.0}), script.answer(0, {"n": 9.0}), reply(1, 77, b"\xc0")],
        [script.answer(1, {"n": 2.0}), script.answer(1, {"n": 9.0})],
    ]
    assert call.result() == call.result() == [{"n": 1.0}, {"n": 2.0}]


def test_a_timeout_names_the_ranks_and_the_answer_may_still_come():
    executor, script = make()
    call = executor.collective_rpc("statistics", non_block=True)
    script.events = [[script.answer(0, {})]]
    with pytest.raises(RankTimeoutError, match="statistics: no answer of ranks 1 in 0") as late:
        call.result(timeout=0)
    assert late.value.ranks == (1,)
    assert isinstance(late.value, TimeoutError)
    script.events = [[script.answer(1, {})]]
    assert call.result() == [{}, {}]
    with pytest.raises(RankTimeoutError, match="no answer of ranks 0, 1 in 0 s"):
        executor.collective_rpc("statistics", timeout=0)


def test_a_fold_is_made_once():
    """A fold may count: asking for a result again must not count again."""
    executor, script = make()
    executor.init_kv_output_aggregator(2)
    call = executor.execute_model(SchedulerOutput(step=1), non_block=True)
    script.events = [[script.answer(rank, ModelRunnerOutput(req_ids=(f"r{rank}",))) for rank in (0, 1)]]
    assert call.result() is call.result()
    assert call.result().req_ids == ("r0",)


def test_a_fold_that_is_refused_is_refused_again():
    executor, script = make()
    executor.init_ec_output_aggregator()
    call = executor.execute_model(SchedulerOutput(step=1), non_block=True)
    report = ModelRunnerOutput(ec_connector_output=ECConnectorOutput(failed_loads={"k"}))
    script.events = [[script.answer(0, None), script.answer(1, report)]]
    for _ in range(2):
        with pytest.raises(MissingOutputError):
            call.result()


def test_with_an_aggregator_every_rank_is_asked_and_without_the_output_rank_alone():
    executor, script = make()
    script.events = []
    executor.execute_model(SchedulerOutput(step=1), non_block=True)
    executor.init_ec_output_aggregator()
    executor.execute_model(SchedulerOutput(step=2), non_block=True)
    executor.collective_rpc("statistics", unique_reply_rank=1, non_block=True)
    executor.collective_rpc(
        "sample_tokens", unique_reply_rank=1, ec_output_aggregator=ECOutputAggregator(), non_block=True
    )
    assert [call.reply_rank for call in script.calls] == [0, None, 1, None]


@pytest.mark.parametrize(
    "kind", ["RuntimeError", "Exception", "MissingOutputError", "EngineConfig", "annotations"]
)
def test_an_error_of_somebody_elses_is_the_ranks(kind):
    executor, script = make()
    call = executor.collective_rpc("statistics", non_block=True)
    script.events = [[fault(1, script.calls[-1].seq, kind, "statistics")]]
    with pytest.raises(RankFailedError, match=f"rank 1 raised {kind} in statistics: it broke") as raised:
        call.result()
    assert raised.value.rank == 1
    assert "Traceback: ..." in raised.value.__notes__[0]


def test_an_error_outside_a_step_ends_that_call_alone():
    executor, script = make()
    call = executor.collective_rpc("reset_encoder_cache", non_block=True)
    script.events = [[fault(1, script.calls[-1].seq, "ContractError", "reset_encoder_cache")]]
    with pytest.raises(ContractError, match="rank 1: it broke"):
        call.result()
    script.events = [[script.answer(0, None)]]
    executor.check_health()


@pytest.mark.parametrize("asked", [True, False])
def test_an_error_in_a_step_ends_everything_whoever_was_asked(asked):
    executor, script = make()
    step = executor.execute_model(SchedulerOutput(step=1), non_block=True)
    other = executor.collective_rpc("statistics", non_block=True)
    rank = 0 if asked else 1
    script.events = [[fault(rank, script.calls[0].seq, "ContractError")]]
    for call in (step, other):
        with pytest.raises(ContractError, match=f"rank {rank}: it broke"):
            call.result()
    for use in (executor.check_health, executor.sample_tokens):
        with pytest.raises(RankFailedError, match=f"rank {rank}: it broke") as failed:
            use()
        assert failed.value.rank == rank


def test_an_error_of_a_rank_that_nobody_waits_for_any_more_counts():
    """The output rank answered; then another one raises in the same step."""
    executor, script = make()
    step = executor.execute_model(SchedulerOutput(step=1), non_block=True)
    script.events = [[script.answer(0, ModelRunnerOutput())], [fault(1, script.calls[0].seq, "RuntimeError")]]
    assert step.result() == ModelRunnerOutput()
    with pytest.raises(RankFailedError, match="rank 1 raised RuntimeError"):
        executor.check_health()


def test_a_death_ends_every_call_and_is_remembered():
    executor, script = make()
    calls = [executor.collective_rpc("statistics", non_block=True) for _ in range(2)]
    script.events = [[script.answer(0, {}), Died(1, "(pid 7) was killed by SIGBUS")]]
    for call in calls:
        with pytest.raises(RankFailedError, match=r"^rank 1 \(pid 7\) was killed by SIGBUS$"):
            call.result()
    with pytest.raises(RankFailedError, match=r"statistics: rank 1 \(pid 7\)"):
        executor.collective_rpc("statistics")
    assert len(script.calls) == 2  # nobody was asked again
    executor.wait_for_progress(3600)


@pytest.mark.parametrize("message", [b"", b"\x00", b"\x93\x01\xc0\xc0\xc0", encode(Reply(1, b"\xc1"))])
def test_what_is_no_answer_is_the_ranks_fault(message):
    executor, script = make()
    call = executor.collective_rpc("statistics", non_block=True)
    script.events = [[Answered(1, message), script.answer(0, {})]]
    with pytest.raises((RankFailedError, DecodeError), match="rank 1"):
        call.result()


@pytest.mark.parametrize(
    ("event", "kind", "says"),
    [
        (lambda rank: fault(rank, 0, "ModelError", "start"), ModelError, "rank 0: it broke"),
        (
            lambda rank: fault(rank, 0, "OutOfMemoryError", "start"),
            RankFailedError,
            "rank 0 raised OutOfMemoryError",
        ),
        (lambda rank: Died(rank, "ended with exit code 3"), RankFailedError, "rank 0 ended with exit code 3"),
    ],
)
def test_a_rank_that_cannot_start_ends_the_others(event, kind, says):
    script = Script()
    script.begin = event
    with pytest.raises(kind, match=says):
        make(script)
    assert [method for method, _ in script.closed] == ["shutdown"]


def test_a_signal_counts_once_and_also_from_before():
    executor, script = make()
    script.events = [[Signalled()], []]
    executor.check_health()
    waits = len(script.waits)
    executor.wait_for_progress(3600)
    assert len(script.waits) == waits  # it was there
    executor.wait_for_progress(0)
    assert script.waits[waits:] == [0]
    script.events = [[], [Signalled()]]
    executor.wait_for_progress(3600)
    assert script.events == []


def test_a_shutdown_from_another_thread_ends_a_call():
    executor, script = make()
    call = executor.collective_rpc("statistics", non_block=True)
    waiting = threading.Event()
    script.waits = type("Waits", (list,), {"append": lambda self, timeout: waiting.set()})()
    raised = []

    def wait():
        try:
            call.result()
        except ShutDownError as error:
            raised.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    assert waiting.wait(60)
    executor.shutdown()
    waiter.join()
    assert len(raised) == 1


def test_a_shutdown_ends_what_is_pending_and_happens_once():
    executor, script = make(shutdown_grace_s=1.5)
    call = executor.collective_rpc("statistics", non_block=True)
    executor.shutdown()
    executor.shutdown()
    assert script.closed == [("shutdown", 1.5)]
    with pytest.raises(ShutDownError):
        call.result()
    for use in (executor.check_health, executor.sample_tokens):
        with pytest.raises(ShutDownError, match="was shut down"):
            use()
    executor.wait_for_progress(3600)


def test_reports_that_would_be_lost_are_refused_before_anything_starts():
    script = Script()
    with pytest.raises(LostReportsError, match=r"with 2 ranks the EC .*multiproc.*RayExecutorV2") as refused:
        make(script, kind=Single)
    assert isinstance(refused.value, NotImplementedError)
    assert isinstance(refused.value, ConfigError)
    assert script.starts == []
    executor, _ = make(config=tiny_config(2, None), kind=Single)
    for init in (executor.init_ec_output_aggregator, lambda: executor.init_kv_output_aggregator(2)):
        with pytest.raises(LostReportsError):
            init()
    alone, _ = make(Script(1), tiny_config(1, "ec_both"), kind=Single)
    alone.init_ec_output_aggregator()


@pytest.mark.parametrize("option", [object(), {1, 2}, 2**80, (1, 2)])
def test_a_configuration_that_would_arrive_as_another_one_is_refused(option):
    script = Script()
    config = EngineConfig(model="tiny", tensor_parallel_size=2, ec=ECConfig(options={"x": option}))
    bound = type("Bound", (Scripted,), {"script": script})
    with pytest.raises(ConfigError, match="ranks"):
        bound(config, None, "engine")
    assert script.starts == []


def test_nothing_to_say_is_the_shared_empty_output_and_only_in_a_step():
    data = encode_result(EMPTY_MODEL_RUNNER_OUTPUT)
    assert decode_result("execute_model", data) is EMPTY_MODEL_RUNNER_OUTPUT
    assert decode_result("statistics", encode_result({})) == {}
    assert encode_result(ModelRunnerOutput()) == data
