"""The public engine over a rank that echoes: what callers get, in every way a request can end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from echo_executor import COLON, EOS, EchoExecutor, Executors, PoolingExecutor
from PIL import Image
from tiny_processor import build_folder

from ecotone.config import ECConfig, EngineConfig
from ecotone.engine.engine import Engine
from ecotone.engine.fair_lock import FairLock
from ecotone.engine.inputs import InputProcessor, ProcessedPrompt, Prompt
from ecotone.errors import (
    ConfigError,
    IntegrityError,
    ItemTooLargeError,
    ModelError,
    PlaceholderError,
    PromptTooLongError,
    RequestError,
    RequestFailedError,
    ShutDownError,
)
from ecotone.protocol.params import PoolingParams, SamplingParams
from ecotone.protocol.step import SchedulerOutput

LONG = SamplingParams(max_tokens=150, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_folder(tmp_path_factory.mktemp("model"))


Make = Callable[..., tuple[Engine, EchoExecutor]]


@pytest.fixture
def make(folder: Path) -> Iterator[Make]:
    engines: list[Engine] = []

    def make_engine(kind: type[EchoExecutor] = EchoExecutor, **options: Any) -> tuple[Engine, EchoExecutor]:
        executors = Executors(kind)
        engines.append(Engine(folder, executor_factory=executors, **options))
        return engines[-1], executors.made[0]

    yield make_engine
    for engine in engines:
        engine.close()


@pytest.fixture
def engine(make: Make) -> Iterator[Engine]:
    engine, _ = make()
    yield engine
    engine.check_integrity()


def on_step(executor: EchoExecutor, number: int, act: Callable[[], object]) -> None:
    """Call ``act`` at the beginning of step ``number``, from 1."""

    def before_step(scheduler_output: SchedulerOutput) -> None:
        if scheduler_output.step == number:
            act()

    executor.before_step = before_step


def start_and_queue(lock: FairLock, thread: threading.Thread) -> None:
    """Start ``thread`` and wait until it asks for ``lock``, which this thread holds."""
    thread.start()
    while not lock.num_waiting:
        time.sleep(0.001)


def raise_(error: BaseException) -> None:
    raise error


# -- answers ------------------------------------------------------------------------------------------------------


def test_one_prompt(engine: Engine) -> None:
    [output] = engine.generate("say:hello")
    assert output.text == "hello"
    assert output.finish_reason == "stop"
    assert output.token_ids[-1] == EOS
    assert output.error is None
    assert output.metrics is not None
    assert output.metrics.num_prompt_tokens == len("say:hello")
    assert output.metrics.ttft_s is not None
    assert 0 <= output.metrics.ttft_s <= output.metrics.total_s


def test_many_prompts_come_back_in_their_order(engine: Engine) -> None:
    texts = [f"number {i}" for i in range(20)]
    outputs = engine.generate([f":{text}" for text in texts])
    assert [output.text for output in outputs] == texts
    assert len({output.request_id for output in outputs}) == len(texts)


def test_params_for_each_prompt(engine: Engine) -> None:
    params = [SamplingParams(max_tokens=2), SamplingParams(max_tokens=3)]
    assert [o.text for o in engine.generate([":abcdef", ":abcdef"], params)] == ["ab", "abc"]
    with pytest.raises(RequestError, match="2 prompts with 1 params"):
        engine.generate([":a", ":b"], params[:1])


def test_no_prompts(engine: Engine) -> None:
    assert engine.generate([]) == []


def test_the_length_ends_a_text(engine: Engine) -> None:
    [output] = engine.generate(":hello", SamplingParams(max_tokens=3))
    assert (output.text, output.finish_reason) == ("hel", "length")


def test_a_stop_string_over_tokens_ends_the_text_and_frees_the_rank(make: Make) -> None:
    engine, executor = make()
    [output] = engine.generate(":hello world", SamplingParams(stop=("lo w", "zz")))
    assert (output.text, output.finish_reason, output.stop_reason) == ("hel", "stop", "lo w")
    assert len(output.token_ids) == len("hello w")
    assert engine.settle()
    assert executor.steps[-1].finished_req_ids == {output.request_id}


def test_a_stop_string_with_the_last_token_is_a_stop(engine: Engine) -> None:
    [output] = engine.generate(":hello", SamplingParams(max_tokens=5, stop=("lo",)))
    assert (output.text, output.finish_reason, output.stop_reason) == ("hel", "stop", "lo")


def test_a_stop_token_is_no_text(engine: Engine) -> None:
    [output] = engine.generate(":a:b", SamplingParams(stop_token_ids=(COLON,)))
    assert (output.text, output.finish_reason, output.stop_reason) == ("a", "stop", COLON)
    assert output.token_ids[-1] == COLON


def test_text_that_looked_like_a_stop_string_comes_out_at_the_end(engine: Engine) -> None:
    [output] = engine.generate(":abc<e", SamplingParams(stop=("<end>",)))
    assert (output.text, output.stop_reason) == ("abc<e", None)


def test_embeddings(make: Make) -> None:
    engine, _ = make(PoolingExecutor, task="embed")
    outputs = engine.embed(["a", "abc"])
    assert [output.embedding.tolist() for output in outputs if output.embedding is not None] == [[1.0], [3.0]]
    assert [output.finish_reason for output in outputs] == ["stop", "stop"]
    assert engine.embed("ab", PoolingParams(pooling="mean"))[0].metrics is not None


def test_the_task_decides_which_params_there_are(make: Make) -> None:
    with pytest.raises(RequestError, match="takes SamplingParams, not PoolingParams"):
        make()[0].embed("a")
    with pytest.raises(RequestError, match="takes PoolingParams, not SamplingParams"):
        make(PoolingExecutor, task="embed")[0].generate("a")


def test_seeds_follow_from_the_configuration_unless_given(make: Make) -> None:
    def seeds(**options: Any) -> list[int]:
        engine, executor = make(**options)
        engine.generate([":a", ":b"])
        engine.generate(":c", SamplingParams(seed=5))
        return [data.seed for step in executor.steps for data in step.new_requests]

    first = seeds(seed=3)
    assert first == seeds(seed=3) != seeds(seed=4)
    assert len(set(first)) == 3
    assert first[2] == 5


# -- bad requests -------------------------------------------------------------------------------------------------


def test_one_bad_prompt_of_a_list_does_not_spoil_the_others(engine: Engine) -> None:
    outputs = engine.generate([":a", "", Prompt(":b", [Image.new("RGB", (8, 8))]), ":c", ":" + "x" * 300])
    assert [output.text for output in outputs] == ["a", "", "", "c", ""]
    assert [output.finish_reason for output in outputs] == ["stop", "error", "error", "stop", "error"]
    kinds = [RequestError, PlaceholderError, PromptTooLongError]
    assert [type(outputs[i].error) for i in (1, 2, 4)] == kinds


def test_what_is_no_prompt_does_not_spoil_the_others(engine: Engine) -> None:
    outputs = engine.generate([":a", None, {"text": ":b"}, 7, ":c"])  # type: ignore[list-item]
    assert [output.text for output in outputs] == ["a", "", "", "", "c"]
    assert [type(output.error) for output in outputs[1:4]] == [RequestError] * 3


def test_a_dictionary_is_not_a_sequence_of_prompts(engine: Engine) -> None:
    with pytest.raises(RequestError, match="sequence of them, not dict"):
        engine.generate({"text": ":a"})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("prompt", "kind"),
    [
        ("", RequestError),
        (Prompt("<image>"), PlaceholderError),
        (":" + "x" * 300, PromptTooLongError),
        (Prompt("<image>:a", [Image.new("RGB", (8, 8))]), ItemTooLargeError),
    ],
)
def test_a_single_bad_prompt_raises(make: Make, prompt: Prompt | str, kind: type[RequestError]) -> None:
    engine, executor = make(encoder_cache_rows=3)
    with pytest.raises(kind):
        engine.generate(prompt)
    with pytest.raises(kind):
        engine.stream(prompt)
    with pytest.raises(kind):
        engine.add_request(prompt)
    assert executor.steps == []
    assert engine.generate(":ok")[0].text == "ok"
    engine.check_integrity()


def test_a_request_that_fails_in_the_rank_fails_alone(make: Make) -> None:
    engine, executor = make()
    executor.request_errors = {"request-2": "its logits are not finite"}
    good, bad, also_good = engine.generate([":a", ":b", ":c"])
    assert (good.text, also_good.text) == ("a", "c")
    assert bad.finish_reason == "error"
    assert isinstance(bad.error, RequestFailedError)
    assert "logits are not finite" in str(bad.error)
    executor.request_errors = {"request-4": "again"}
    with pytest.raises(RequestFailedError, match="again"):
        engine.generate(":d")
    engine.check_integrity()


# -- streaming, step by step, abort -------------------------------------------------------------------------------


def test_a_stream_adds_up_to_the_output(engine: Engine) -> None:
    deltas = list(engine.stream(":a€b"))
    output = deltas[-1].output
    assert output is not None
    assert [delta.text for delta in deltas] == ["a", "", "", "€", "b", ""]
    assert "".join(delta.text for delta in deltas) == output.text == "a€b"
    assert sum((delta.token_ids for delta in deltas), ()) == output.token_ids
    assert all(delta.output is None for delta in deltas[:-1])


def test_a_stream_ends_with_what_was_held_back(engine: Engine) -> None:
    deltas = list(engine.stream(":ab<e", SamplingParams(stop=("<end>",))))
    assert [delta.text for delta in deltas] == ["a", "b", "", "", "<e"]


def test_a_stream_never_shows_part_of_a_stop_string(engine: Engine) -> None:
    texts = [delta.text for delta in engine.stream(":one STOP two", SamplingParams(stop=("STOP",)))]
    assert "".join(texts) == "one "
    assert not any("S" in text for text in texts)


def test_ending_a_stream_early_aborts_the_request(engine: Engine) -> None:
    with engine.stream(":hello", LONG) as stream:
        next(stream)
        assert engine.has_unfinished_requests()
    assert not engine.has_unfinished_requests()
    assert list(stream) == []
    stream.close()


def test_a_stream_that_is_dropped_is_aborted_at_the_next_call(engine: Engine) -> None:
    next(engine.stream(":hello", LONG))
    assert not engine.has_unfinished_requests()


def test_a_stream_raises_what_went_wrong(make: Make) -> None:
    engine, executor = make()
    executor.request_errors = {"request-1": "broken"}
    with pytest.raises(RequestFailedError, match="broken"):
        list(engine.stream(":hello"))


def test_several_streams_share_the_steps(make: Make) -> None:
    engine, executor = make()
    streams = [engine.stream(f":text {i}") for i in range(3)]
    texts = ["".join(delta.text for delta in stream) for stream in streams]
    assert texts == ["text 0", "text 1", "text 2"]
    assert len(executor.steps) == len("text 0") + 1


def test_step_by_step(engine: Engine) -> None:
    first, second = engine.add_request(":ab"), engine.add_request(":c", request_id="mine")
    assert second == "mine"
    with pytest.raises(RequestError, match="'mine' is in flight"):
        engine.add_request(":d", request_id="mine")
    seen: dict[str, str] = {first: "", second: ""}
    done = {}
    while engine.has_unfinished_requests():
        for delta in engine.step():
            seen[delta.request_id] += delta.text
            if delta.output is not None:
                done[delta.request_id] = delta.output.text
    assert seen == done == {first: "ab", "mine": "c"}
    assert engine.step() == []
    assert engine.add_request(":again", request_id="mine") == "mine"
    assert engine.abort("mine")


def test_nobody_steps_for_those_who_step_themselves(make: Make) -> None:
    engine, executor = make()
    engine.add_request(":hello", LONG)
    assert not engine._settle_once()
    assert executor.steps == []
    assert len(engine.step()) == 1


def test_abort(engine: Engine) -> None:
    req_id = engine.add_request(":hello", LONG)
    assert "".join(delta.text for _ in range(3) for delta in engine.step()) == "hel"
    assert engine.abort(req_id)
    assert not engine.abort(req_id)
    assert not engine.abort("nobody")
    [delta] = engine.step()
    assert delta.output is not None
    assert (delta.output.finish_reason, delta.output.text) == ("abort", "hel")
    assert not engine.has_unfinished_requests()


def test_another_thread_can_abort_what_one_waits_for(make: Make) -> None:
    engine, executor = make()
    aborts: list[bool] = []
    aborter = threading.Thread(target=lambda: aborts.append(engine.abort("request-1")))
    on_step(executor, 3, lambda: start_and_queue(engine._lock, aborter))
    [output] = engine.generate(":hello", LONG)
    aborter.join()
    assert aborts == [True]
    assert output.finish_reason == "abort"


def test_an_interrupt_while_submitting_leaves_nothing_in_flight(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = InputProcessor.process

    def interrupted(inputs: InputProcessor, prompt: Prompt | str) -> ProcessedPrompt:
        if prompt == ":b":
            raise KeyboardInterrupt
        return process(inputs, prompt)

    monkeypatch.setattr(InputProcessor, "process", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.generate([":a", ":b"])
    assert not engine.has_unfinished_requests()


# -- threads ------------------------------------------------------------------------------------------------------


def test_threads_get_their_own_answers(engine: Engine) -> None:
    answers: dict[int, list[str]] = {}

    def work(number: int) -> None:
        outputs = engine.generate([f":{number}.{i}" for i in range(10)])
        answers[number] = [output.text for output in outputs]
        answers[number].append("".join(delta.text for delta in engine.stream(f":stream {number}")))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {n: [*(f"{n}.{i}" for i in range(10)), f"stream {n}"] for n in range(6)}


def test_who_comes_second_is_served_in_the_steps_of_the_first(make: Make) -> None:
    engine, executor = make()
    second: list[str] = []
    thread = threading.Thread(target=lambda: second.append(engine.generate(":second")[0].text))
    on_step(executor, 5, lambda: start_and_queue(engine._lock, thread))
    [first] = engine.generate(":first", LONG)
    thread.join()
    assert second == ["second"]
    assert len(first.token_ids) == LONG.max_tokens
    assert any(len(step.scheduled) == 2 for step in executor.steps)


# -- failures and the end -----------------------------------------------------------------------------------------


def test_a_step_that_fails_ends_everything_in_flight_with_the_cause(make: Make) -> None:
    engine, executor = make()
    cause = RuntimeError("the device fell off")
    on_step(executor, 2, lambda: raise_(cause))
    outputs = engine.generate([":abc", ":def"])
    for output in outputs:
        assert isinstance(output.error, RequestFailedError)
        assert output.error.__cause__ is cause
        assert "RuntimeError: the device fell off" in str(output.error)
    assert [output.text for output in outputs] == ["a", "d"]
    for call in (lambda: engine.generate(":x"), lambda: engine.stream(":x"), engine.reset_encoder_cache):
        with pytest.raises(ShutDownError, match="the device fell off"):
            call()
    assert engine.step() == []
    assert not engine.has_unfinished_requests()
    assert engine.settle()
    engine.close()
    with pytest.raises(ShutDownError, match="the device fell off"):  # the first reason stays
        engine.generate(":x")


def test_an_interrupted_step_is_not_gone_on_with(make: Make) -> None:
    engine, executor = make()
    other = engine.stream(":other", LONG)
    on_step(executor, 2, lambda: raise_(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        engine.generate(":abc")
    with pytest.raises(RequestFailedError, match="KeyboardInterrupt interrupted a step"):
        list(other)
    with pytest.raises(ShutDownError):
        engine.generate(":abc")


def test_close_is_idempotent_and_final(make: Make) -> None:
    before = set(threading.enumerate())
    engine, executor = make()
    stream = engine.stream(":hello", LONG)
    next(stream)
    engine.close()
    engine.close()
    assert executor.shutdowns == 1
    with pytest.raises(RequestFailedError, match="the engine was closed"):
        list(stream)
    with pytest.raises(ShutDownError, match="the engine was closed"):
        engine.generate(":x")
    assert set(threading.enumerate()) <= before


def test_close_from_another_thread_ends_those_who_wait(make: Make) -> None:
    engine, executor = make()
    closer = threading.Thread(target=engine.close)
    on_step(executor, 4, lambda: start_and_queue(engine._lock, closer))
    [output] = engine.generate([":hello"], LONG)
    closer.join()
    assert isinstance(output.error, RequestFailedError)


def test_close_ends_a_step_that_does_not_come_back(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ecotone.engine.engine.CLOSE_GRACE_S", 0.01)
    engine, executor = make()
    interrupted = threading.Event()
    monkeypatch.setattr(executor, "interrupt", interrupted.set)
    closer = threading.Thread(target=engine.close)

    def stuck() -> None:
        closer.start()
        assert interrupted.wait(60)
        raise ShutDownError("the executor was shut down")

    on_step(executor, 4, stuck)
    [output] = engine.generate([":hello"], LONG)
    closer.join()
    assert isinstance(output.error, RequestFailedError)
    assert executor.shutdowns == 1


def test_integrity_sees_a_request_nobody_listens_to(make: Make) -> None:
    engine, _ = make()
    engine.add_request(":hello", LONG)
    engine.check_integrity()
    engine._parts.core._records.clear()
    with pytest.raises(IntegrityError, match="0 requests are listened to, while some are scheduled"):
        engine.check_integrity()


# -- construction -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_num_sequences": 3}, "unknown option 'max_num_sequences'; known are .*max_num_seqs"),
        ({"kv_blocks": 0}, "kv_blocks"),
        ({"task": "sing"}, "task"),
        ({"max_model_len": 500}, "max_model_len=500"),
        ({"ec": {"connector": "Nothing"}}, "connector='Nothing' is not one of EcotoneConnector"),
        ({"ec": {"options": {"memory": "0"}}}, "above 0 bytes"),
        ({"ec": {"options": {"memroy": "1GiB"}}}, "unknown option 'memroy'"),
        ({"ec": ECConfig(role="ec_booth")}, "ec: role='ec_booth' is not one of ec_producer, ec_consumer, ec_both"),
        ({"ec": {"memory": "1GiB"}}, "ec: unknown option 'memory'; known are connector, options, role"),
    ],
)
def test_configurations_that_cannot_work(folder: Path, options: dict[str, Any], says: str) -> None:
    executors = Executors()
    with pytest.raises(ConfigError, match=says):
        Engine(folder, executor_factory=executors, **options)
    assert all(executor.shutdowns == 1 for executor in executors.made)


def test_nothing_is_started_for_a_configuration_that_is_known_to_be_wrong(folder: Path) -> None:
    executors = Executors()
    with pytest.raises(ConfigError):
        Engine(folder, executor_factory=executors, ec={"options": {"memory": "nothing"}})
    with pytest.raises(ModelError, match="is not a folder"):
        Engine("no/such/model", executor_factory=executors)
    assert executors.made == []


def test_a_configuration_can_be_overridden(folder: Path) -> None:
    config = EngineConfig(model=str(folder), max_num_seqs=2)
    with Engine(config, executor_factory=Executors(), seed=9) as engine:
        assert (engine.config.max_num_seqs, engine.config.seed) == (2, 9)
        assert engine.model_info.architecture == "Echo"


def test_the_namespace_holds_what_changes_an_encoding(folder: Path, make: Make) -> None:
    def namespace(**options: Any) -> str:
        return str(make(**options)[0].statistics()["engine"]["namespace"])

    digests = [namespace(), namespace(revision="v1"), namespace(tenant="a"), namespace(tenant="b")]
    assert len(set(digests)) == 4
    assert namespace() == digests[0]
