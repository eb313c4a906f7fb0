"""The engine and its EC connector: built in order, settled when idle, reset together, closed ranks first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from echo_executor import EchoExecutor, Executors
from pending_connector import PendingConnector, PendingFactory
from PIL import Image
from tiny_processor import build_folder

from ecotone.config import ECConfig
from ecotone.engine.engine import Engine
from ecotone.engine.inputs import Prompt
from ecotone.errors import ConfigError, IntegrityError, RequestFailedError, ShutDownError
from ecotone.node.keys import namespace_of
from ecotone.protocol.params import SamplingParams

PENDING = "pending_connector:PendingFactory"
Bench = tuple[Engine, EchoExecutor, PendingConnector]


def raising(error: Exception) -> Callable[..., Any]:
    def call(*_: object) -> None:
        raise error

    return call


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def bench(folder: Path) -> Iterator[Bench]:
    executors = Executors()
    with Engine(folder, executor_factory=executors, ec=ECConfig(connector=PENDING)) as engine:
        yield engine, executors.made[0], PendingFactory.latest


def test_the_scheduler_half_hears_who_takes_part_and_what_an_encoding_is(bench: Bench) -> None:
    engine, executor, connector = bench
    assert connector.context.participants == executor.participants()
    assert connector.context.encoder == engine.model_info.encoder
    assert executor.calls == ["model_info", "init_ec_output_aggregator"]


def test_steps_go_on_while_work_is_pending_and_then_rest(bench: Bench) -> None:
    engine, executor, connector = bench
    connector.pending = 12
    connector.settled.clear()
    assert engine.generate(":ab")[0].text == "ab"
    assert connector.settled.wait(timeout=30)
    assert connector.pending == 0
    assert sum(not step.scheduled for step in executor.steps) >= 12 - 3
    steps = len(executor.steps)
    assert engine.settle()
    assert engine.step() == []
    assert len(executor.steps) == steps


def test_settle_steps_until_nothing_is_pending(bench: Bench) -> None:
    engine, executor, connector = bench
    connector.pending = 5
    assert engine.settle()
    assert connector.pending == 0
    assert executor.waits >= 1  # steps without effect are paced by the ranks' news


def test_settle_gives_up_in_time(bench: Bench) -> None:
    engine, _, connector = bench
    connector.pending = 10**9
    assert not engine.settle(timeout_s=0.01)
    connector.pending = 0


def test_a_connector_that_fails_while_nobody_waits_ends_the_engine(bench: Bench) -> None:
    engine, _, connector = bench
    connector.fault = RuntimeError("lost the node")
    assert engine.settle()
    with pytest.raises(ShutDownError, match="RuntimeError: lost the node"):
        engine.generate(":ab")


def test_a_reset_that_fails_is_not_gone_on_with(bench: Bench) -> None:
    engine, executor, _ = bench
    executor.collective_rpc = raising(RuntimeError("the rank is gone"))  # type: ignore[method-assign]
    with engine.stream(":hello", SamplingParams(max_tokens=99, ignore_eos=True)) as stream:
        next(stream)
        with pytest.raises(RuntimeError, match="the rank is gone"):
            engine.reset_encoder_cache()
        with pytest.raises(RequestFailedError, match="a reset failed"):
            list(stream)
    with pytest.raises(ShutDownError, match="a reset failed"):
        engine.generate(":ab")


def test_reset_forgets_everywhere_and_keys_are_new(bench: Bench) -> None:
    engine, executor, connector = bench
    before = engine.statistics()["engine"]["namespace"]
    stream = engine.stream(Prompt("<image>:ab", [Image.new("RGB", (8, 8))]), SamplingParams(max_tokens=9))
    next(stream)
    engine.reset_encoder_cache()
    after = engine.statistics()["engine"]
    assert after["namespace"] != before
    assert after["epoch"] == 1
    assert connector.log == [f"reset {before}"]
    assert executor.calls.count("reset_encoder_cache") == 1
    next(stream)
    [scheduled] = executor.steps[-1].scheduled
    assert [namespace_of(key) for key in scheduled.item_keys] == [after["namespace"]]
    stream.close()


def test_statistics_are_one_nested_dictionary(bench: Bench) -> None:
    engine, _, _ = bench
    engine.generate(":ab")
    statistics = engine.statistics()
    assert set(statistics) == {"engine", "scheduler", "connector", "node", "ranks"}
    assert statistics["connector"] == {"hits": 1}
    assert statistics["node"] == {"entries": 2}
    assert statistics["ranks"] == [{"rank": 0, "pid": 1, "connector": {"saves": 3}}]
    assert statistics["engine"]["requests_in_flight"] == 0
    assert statistics["scheduler"]["requests_finished_stopped"] == 1


def test_integrity_asks_the_connector(bench: Bench) -> None:
    engine, _, connector = bench
    engine.check_integrity()
    connector.broken = True
    with pytest.raises(IntegrityError, match="broken"):
        engine.check_integrity()


def test_ranks_are_closed_before_the_half_that_owns_their_memory(bench: Bench) -> None:
    engine, executor, connector = bench
    executor.on_shutdown = lambda: connector.log.append("ranks")
    engine.close()
    assert connector.log == ["ranks", "shutdown"]


def test_a_refused_connector_starts_nothing(folder: Path) -> None:
    executors = Executors()
    with pytest.raises(ConfigError, match="refused by validate"):
        Engine(folder, executor_factory=executors, ec=ECConfig(connector=PENDING, options={"refuse": 1}))
    assert executors.made == []


def test_a_scheduler_half_that_fails_leaves_no_rank(folder: Path) -> None:
    executors = Executors()
    with pytest.raises(ConfigError, match="refused by the scheduler half"):
        Engine(folder, executor_factory=executors, ec=ECConfig(connector=PENDING, options={"fail": 1}))
    assert executors.made[0].shutdowns == 1


@pytest.mark.parametrize("n", [1, 3])
def test_an_abort_that_the_connector_refuses_stops_the_engine_and_answers_who_waits(bench: Bench, n: int) -> None:
    engine, _, connector = bench
    stream = engine.stream(":abc", SamplingParams(max_tokens=100, n=n))
    other = engine.add_request(":abc", SamplingParams(max_tokens=100))
    connector.request_finished = raising(RuntimeError("no"))  # type: ignore[method-assign]
    assert engine.abort(stream.request_id)
    outputs = [delta.output for delta in stream if delta.output is not None]
    assert [output.finish_reason for output in outputs] == ["abort"] * n
    [delta] = engine.step()
    assert delta.request_id == other
    assert isinstance(delta.output and delta.output.error, RequestFailedError)
    with pytest.raises(ShutDownError, match="RuntimeError: no"):
        engine.generate(":x")
    engine.check_integrity()
