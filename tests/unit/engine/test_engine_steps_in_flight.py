"""The public engine with two steps in flight: every way a request or the engine can end while they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from echo_executor import EchoExecutor, Executors
from tiny_processor import build_folder

from ecotone.engine.engine import Engine
from ecotone.errors import RankFailedError, RequestFailedError, ShutDownError
from ecotone.executor.base import Future
from ecotone.protocol.outputs import ModelRunnerOutput
from ecotone.protocol.params import SamplingParams
from ecotone.protocol.step import SchedulerOutput

LONG = SamplingParams(max_tokens=150, ignore_eos=True)


class _Later:
    """Runs when its result is asked for: at the last moment, so that whoever orders ahead has done so."""

    def __init__(self, act: Callable[[], ModelRunnerOutput]) -> None:
        self._act = act

    def done(self) -> bool:
        return False

    def result(self, timeout: float | None = None) -> ModelRunnerOutput:
        return self._act()


class TwoStages(EchoExecutor):
    """``events``: steps ordered and taken in, with their numbers, and calls between them."""

    max_concurrent_steps = 2

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[str, int]] = []

    def submit_step(self, scheduler_output: SchedulerOutput) -> Future[ModelRunnerOutput]:
        number = scheduler_output.step
        self.events.append(("order", number))

        def act() -> ModelRunnerOutput:
            self.events.append(("take in", number))
            return self.run_step(scheduler_output)

        return _Later(act)

    def collective_rpc(self, method: str, *args: Any, **kwargs: Any) -> Any:
        self.events.append((method, 0))
        return super().collective_rpc(method, *args, **kwargs)

    @property
    def in_flight(self) -> int:
        kinds = [kind for kind, _ in self.events]
        return kinds.count("order") - kinds.count("take in")


Made = tuple[Engine, TwoStages]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def made(folder: Path) -> Iterator[Made]:
    executors = Executors(TwoStages)
    with Engine(folder, executor_factory=executors) as engine:
        [executor] = executors.made
        assert isinstance(executor, TwoStages)
        executor.events.clear()
        yield engine, executor


def start_two(engine: Engine, executor: TwoStages) -> None:
    """Requests ``a`` and ``b``, in different steps; the first result is taken in, ``b``'s step is in flight."""
    engine.add_request(":aaaa", LONG, request_id="a")
    engine.add_request(":bbbb", LONG, request_id="b")
    assert [delta.request_id for delta in engine.step()] == ["a"]
    assert executor.events == [("order", 1), ("order", 2), ("take in", 1)]


def fail_in(executor: TwoStages, number: int, error: BaseException) -> None:
    def before_step(scheduler_output: SchedulerOutput) -> None:
        if scheduler_output.step == number:
            raise error

    executor.before_step = before_step


def test_the_next_step_is_ordered_before_the_last_one_is_taken_in(made: Made) -> None:
    engine, executor = made
    outputs = engine.generate([":hello", ":world", ":again"])
    assert [output.text for output in outputs] == ["hello", "world", "again"]
    steps = [event for event in executor.events if event[1] <= 3]
    assert steps == [("order", 1), ("order", 2), ("take in", 1), ("order", 3), ("take in", 2), ("take in", 3)]
    assert engine.settle()
    assert executor.in_flight == 0
    engine.check_integrity()


def test_one_request_alone_has_one_step_in_flight(made: Made) -> None:
    engine, executor = made
    [output] = engine.generate(":hello")
    assert output.text == "hello"
    assert [kind for kind, _ in executor.events] == ["order", "take in"] * (len(executor.events) // 2)
    assert all(order.scheduled for order in executor.steps[:6])


def test_a_stop_string_ends_one_while_the_other_is_in_flight(made: Made) -> None:
    engine, _ = made
    outputs = engine.generate([":one STOP two", ":undisturbed"], SamplingParams(stop=("STOP",)))
    assert [output.text for output in outputs] == ["one ", "undisturbed"]
    assert engine.settle()
    engine.check_integrity()


def test_aborted_with_its_step_in_flight_and_its_id_used_again(made: Made) -> None:
    engine, executor = made
    start_two(engine, executor)
    assert engine.abort("b")
    engine.add_request(":new", request_id="b")
    deltas = [delta for _ in range(20) for delta in engine.step() if delta.request_id == "b"]
    assert "".join(delta.text for delta in deltas) == "new"
    assert [delta.output.finish_reason for delta in deltas if delta.output is not None] == ["abort", "stop"]
    assert engine.abort("a")
    assert engine.settle()
    engine.check_integrity()


def test_all_are_aborted_with_steps_in_flight(made: Made) -> None:
    engine, executor = made
    start_two(engine, executor)
    assert engine.abort("a")
    assert engine.abort("b")
    assert engine.settle()
    assert executor.in_flight == 0
    engine.check_integrity()
    assert frozenset[str]().union(*(order.finished_req_ids for order in executor.steps)) == {"a", "b"}


def test_one_that_fails_in_the_rank_fails_alone(made: Made) -> None:
    engine, executor = made
    executor.request_errors = {"a": "its image is broken"}
    start = [engine.add_request(f":{name * 3}", request_id=name) for name in "ab"]
    assert start == ["a", "b"]
    ends = {}
    while engine.has_unfinished_requests():
        ends.update({d.request_id: d.output.finish_reason for d in engine.step() if d.output is not None})
    assert ends == {"a": "error", "b": "stop"}


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), RankFailedError("rank 1 died", 1)])
def test_a_step_that_fails_ends_all_that_are_in_flight(made: Made, error: Exception) -> None:
    engine, executor = made
    fail_in(executor, 2, error)
    outputs = engine.generate([":aaaa", ":bbbb"])
    assert [type(output.error) for output in outputs] == [RequestFailedError] * 2
    assert all(str(error) in str(output.error) for output in outputs)
    assert executor.events[-2:] == [("order", 3), ("take in", 2)]  # nobody asks for what comes of the third
    with pytest.raises(ShutDownError, match=str(error)):
        engine.generate(":more")
    assert executor.events[-1] == ("take in", 2)


def test_an_interrupt_ends_all_that_are_in_flight(made: Made) -> None:
    engine, executor = made
    fail_in(executor, 2, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        engine.generate([":aaaa", ":bbbb"])
    with pytest.raises(ShutDownError, match="KeyboardInterrupt"):
        engine.generate(":more")


def test_a_reset_takes_in_what_is_in_flight_first(made: Made) -> None:
    engine, executor = made
    start_two(engine, executor)
    engine.reset_encoder_cache()
    assert executor.events[-2:] == [("take in", 2), ("reset_encoder_cache", 0)]
    assert [delta.request_id for delta in engine.step()] == ["b"]  # what was taken in is not lost


def test_a_step_that_fails_before_a_reset_ends_the_engine(made: Made) -> None:
    engine, executor = made
    start_two(engine, executor)
    fail_in(executor, 2, RuntimeError("out of memory"))
    with pytest.raises(ShutDownError, match="out of memory"):
        engine.reset_encoder_cache()
    assert ("reset_encoder_cache", 0) not in executor.events


def test_closed_with_steps_in_flight(made: Made) -> None:
    engine, executor = made
    start_two(engine, executor)
    engine.close()
    assert executor.shutdowns == 1
    assert executor.in_flight == 1  # nobody waits for it
