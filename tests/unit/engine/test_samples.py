"""Several outputs for one prompt: each has its own seed, id and end, and they end together where they must."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path

import pytest
from echo_executor import EchoExecutor, Executors
from PIL import Image
from tiny_processor import build_folder

from ecotone.engine.engine import Engine
from ecotone.engine.inputs import Prompt
from ecotone.engine.samples import make_samples, sample_seed
from ecotone.errors import RequestError, RequestFailedError
from ecotone.protocol.params import SamplingParams

LONG = SamplingParams(n=3, max_tokens=100, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def made(folder: Path) -> Iterator[tuple[Engine, EchoExecutor]]:
    executors = Executors()
    with Engine(folder, executor_factory=executors) as engine:
        yield engine, executors.made[0]
        engine.check_integrity()


def seeds(executor: EchoExecutor) -> list[int]:
    return [data.seed for step in executor.steps for data in step.new_requests]


def test_all_outputs_come_back_beside_the_first(made: tuple[Engine, EchoExecutor]) -> None:
    engine, executor = made
    one, two = engine.generate([":ab", ":cd"], [SamplingParams(n=3), SamplingParams()])
    assert [sample.text for sample in one.samples] == ["ab"] * 3
    assert [sample.index for sample in one.samples] == [0, 1, 2]
    assert {sample.request_id for sample in one.samples} == {one.request_id}
    assert (one.text, one.index) == ("ab", 0)
    assert (two.text, two.samples) == ("cd", ())
    assert len(set(seeds(executor))) == 4


def test_seeds_are_derived_and_the_first_is_the_requests_own(made: tuple[Engine, EchoExecutor]) -> None:
    engine, executor = made
    for n in (1, 3, 2):
        engine.generate(":a", SamplingParams(n=n, seed=77))
    second, third = sample_seed(77, 1), sample_seed(77, 2)
    assert seeds(executor) == [77, 77, second, third, 77, second]
    assert all(0 <= seed < 2**63 for seed in seeds(executor))
    assert len({sample_seed(seed, index) for seed in range(50) for index in range(20)}) == 1000


def test_the_media_are_encoded_once(made: tuple[Engine, EchoExecutor]) -> None:
    engine, executor = made
    image = Image.new("RGB", (8, 8))
    engine.generate(Prompt("<image>:x", [image]), SamplingParams(n=4))
    assert [len(s.encode) for step in executor.steps for s in step.scheduled].count(1) == 1


def test_a_stream_goes_on_until_the_last_output_ends(made: tuple[Engine, EchoExecutor]) -> None:
    engine, _ = made
    with engine.stream(":abc", SamplingParams(n=2)) as stream:
        deltas = list(stream)
    assert [sum(d.output is not None for d in deltas if d.index == i) for i in (0, 1)] == [1, 1]
    assert ["".join(d.text for d in deltas if d.index == i) for i in (0, 1)] == ["abc", "abc"]
    assert deltas[-1].output is not None
    assert engine.settle()


def test_an_abort_ends_all_outputs(made: tuple[Engine, EchoExecutor]) -> None:
    engine, _ = made
    engine.add_request(":abc", LONG, "mine")
    engine.step()
    assert engine.abort("mine")
    assert not engine.abort("mine")
    ends = [delta.output for delta in engine.step() if delta.output is not None]
    assert [(end.request_id, end.index, end.finish_reason) for end in ends] == [
        ("mine", i, "abort") for i in range(3)
    ]
    assert not engine.has_unfinished_requests()


def test_closing_a_stream_ends_all_outputs(made: tuple[Engine, EchoExecutor]) -> None:
    engine, _ = made
    with engine.stream(":abc", LONG) as stream:
        next(stream)
    assert not engine.has_unfinished_requests()


@pytest.mark.parametrize("failing", [0, 2])
def test_one_output_fails(made: tuple[Engine, EchoExecutor], failing: int) -> None:
    engine, executor = made
    executor.request_errors = {f"request-1/{failing}": "broken"}
    with pytest.raises(RequestFailedError, match="'request-1': broken"):
        engine.generate(":ab", SamplingParams(n=3))
    executor.request_errors = {f"request-2/{failing}": "broken"}
    [output] = engine.generate([":ab"], SamplingParams(n=3))
    reasons = ["error" if index == failing else "stop" for index in range(3)]
    assert [sample.finish_reason for sample in output.samples] == reasons
    executor.request_errors = {f"request-3/{failing}": "broken"}
    with pytest.raises(RequestFailedError), engine.stream(":ab", SamplingParams(n=3, ignore_eos=True)) as stream:
        deque(stream, maxlen=0)
    assert not engine.has_unfinished_requests()


def test_ids_in_flight_are_refused_whole(made: tuple[Engine, EchoExecutor]) -> None:
    engine, executor = made
    engine.add_request(":a", LONG, "a")
    with pytest.raises(RequestError, match="'a' is in flight"):
        engine.add_request(":a", None, "a")
    engine.add_request(":b", SamplingParams(), "b/1")
    with pytest.raises(RequestError, match="'b/1' is in flight"):
        engine.add_request(":b", LONG, "b")
    while engine.has_unfinished_requests():
        engine.step()
    announced = {data.req_id for step in executor.steps for data in step.new_requests}
    assert announced == {"a/0", "a/1", "a/2", "b/1"}


def test_one_output_is_an_ordinary_request() -> None:
    made = make_samples("a", 5, 1, lambda req_id, seed: (req_id, seed))  # type: ignore[arg-type,return-value]
    assert made == [("a", 5)]


def test_a_stop_string_is_not_looked_for_too_early(made: tuple[Engine, EchoExecutor]) -> None:
    engine, _ = made
    [output] = engine.generate(":ababab", SamplingParams(stop=("b",), min_tokens=3))
    assert (output.text, output.stop_reason) == ("aba", "b")
