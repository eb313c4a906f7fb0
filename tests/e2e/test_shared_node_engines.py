"""Real engines, each a process of its own, on one node."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple

import pytest
from digit_questions import MODEL, ROWS, WORDS, Digit

from ecotone import ECConfig, EngineConfig
from ecotone.cli.engine_process import Answered, EngineProcess
from ecotone.errors import RankFailedError, ResourceError
from ecotone.node.server.tool import NodeTool

pytestmark = pytest.mark.e2e
PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def socket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where a node serves. Its books are right and empty in the end, and nothing of it stays."""
    path = tmp_path_factory.mktemp("node") / "node.sock"
    command = [sys.executable, "-m", "ecotone", "node", "--socket", str(path), "--memory", "1MiB"]
    with subprocess.Popen(command) as process:
        deadline = time.monotonic() + PATIENCE_S
        while not path.exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        yield path
        wait_until_gone(path)
        with NodeTool(path) as node:
            left = node.describe().tenants[""]
        assert {name: left[name] for name in ("pins", "transfers", "bytes_draining")} == {
            "pins": 0,
            "transfers": 0,
            "bytes_draining": 0,
        }
        process.terminate()
        assert process.wait(PATIENCE_S) == 0
    assert list(path.parent.iterdir()) == []


class Fleet(NamedTuple):
    """Engines by name, and the processes of their ranks."""

    engines: dict[str, EngineProcess]
    ranks: dict[str, dict[int, int]]

    def add(self, stack: ExitStack, socket: Path, *names: str, **options: object) -> None:
        started = {name: start(stack, socket, **options) for name in names}
        for name, engine in started.items():
            self.ranks[name] = {rank.rank: rank.pid for rank in engine.wait().ranks}
        self.engines.update(started)


# Starting engines takes most of the time of this file: all tests use the same, and the last ones use them up.


@pytest.fixture(scope="module")
def two(socket: Path) -> Iterator[Fleet]:
    """Two engines, each with an encoder cache of two images, and one rank in its own process."""
    with ExitStack() as stack:
        fleet = Fleet({}, {})
        fleet.add(stack, socket, "a", "b")
        yield fleet


@pytest.fixture(scope="module")
def four(socket: Path, two: Fleet) -> Iterator[Fleet]:
    """With two more, which have two ranks each."""
    with ExitStack() as stack:
        two.add(stack, socket, "c", "d", tensor_parallel_size=2, mm_encoder_tp_mode="data")
        yield two


def start(stack: ExitStack, socket: Path, **options: object) -> EngineProcess:
    config = EngineConfig(
        model=str(MODEL),
        encoder_cache_rows=2 * ROWS,
        kv_blocks=64,
        ec=ECConfig(options={"node": f"unix:{socket}"}),
        **options,  # type: ignore[arg-type]
    )
    engine = EngineProcess(config)
    stack.callback(engine.close)
    return engine


def wait_until_gone(socket: Path, but: int = 0) -> None:
    """Until no more than ``but`` engines are connected, and nothing is held for one that is not."""
    deadline = time.monotonic() + PATIENCE_S
    with NodeTool(socket) as node:
        while True:
            description = node.describe()
            assert node.verify().problem == ""
            gone = [engine for engine in description.engines if not engine.connected]
            held = sum(engine.counters["pins"] + engine.counters["transfers"] for engine in gone)
            if len(description.engines) - len(gone) <= but and not held:
                return
            assert time.monotonic() < deadline, description.engines
            time.sleep(0.01)


def ask_all(engines: Sequence[EngineProcess], digit: Digit) -> list[Answered]:
    """The same question to all of them at the same time."""
    for engine in engines:
        engine.ask("What digit is this?", [str(digit.path)])
    return [engine.wait() for engine in engines]


def encodes(answers: Sequence[Answered]) -> int:
    """Over all engines; every rank of an engine has all of its items."""
    return sum(max(rank.encodes for rank in answer.ranks) for answer in answers)


@pytest.mark.parametrize(("first", "kind"), [(0, "two"), (6, "four")], ids=["two", "four"])
def test_engines_encode_each_image_once_between_them(
    request: pytest.FixtureRequest, digits: list[Digit], first: int, kind: str
) -> None:
    """Asked at the same time, one encodes and the others wait; and all say the same."""
    engines = list(request.getfixturevalue(kind).engines.values())
    chosen, before = digits[first : first + 6], 0
    for turn, digit in enumerate([*chosen, *chosen]):
        answers = ask_all(engines, digit)
        assert {answer.text for answer in answers} == {f" The digit is {WORDS[digit.label]}."}
        assert len({answer.token_ids for answer in answers}) == 1
        if turn == 0:
            before = encodes(answers)
    assert encodes(answers) - before == len(chosen) - 1


# Each engine can be killed once, and the demo's test kills a fifth.
KILLS = {"c": "scheduler", "d": "rank", "b": "whole", "a": "the last one"}


@pytest.mark.parametrize("name", KILLS, ids=KILLS.get)
def test_an_engine_is_killed(socket: Path, four: Fleet, digits: list[Digit], name: str) -> None:
    """In the middle of a question about an image that nobody has seen. The others answer it, and nothing is held
    for the dead one."""
    number = list(KILLS).index(name)
    chance = random.Random(number)
    digit = digits[12 + number]
    engine, ranks = four.engines.pop(name), list(four.ranks[name].values())
    engine.ask("What digit is this?", [str(digits[0].path)])
    assert engine.wait().text == f" The digit is {WORDS[digits[0].label]}."
    engine.ask("What digit is this?", [str(digit.path)])
    time.sleep(chance.uniform(0.0, 0.1))
    os.kill(chance.choice(ranks) if KILLS[name] == "rank" else engine.pid, signal.SIGKILL)
    with suppress(RankFailedError, ResourceError):
        assert engine.wait().text == f" The digit is {WORDS[digit.label]}."  # it was done before
    engine.close()
    wait_until_gone(socket, but=len(four.engines))
    for answer in ask_all(list(four.engines.values()), digit):
        assert answer.text == f" The digit is {WORDS[digit.label]}."


def test_the_demo_of_two_engines() -> None:
    command = [sys.executable, "-m", "ecotone", "demo", "--engines", "2", "--images", "6", "--cache-images", "2"]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert (figures["images"], figures["encodes"], figures["identical_to_uncached"]) == (6, 6, True)
    assert [engine["killed"] for engine in figures["engines"]] == [True, False]
    assert sum(engine["requests"] for engine in figures["engines"]) == figures["requests"]
    assert sum(engine["encodes"] for engine in figures["engines"]) == 6
