"""An engine that is restarted loads from its disk what it encoded before, and says the same."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from digit_questions import MODEL, ROWS, Digit, tokens, total, which

from ecotone import ECConfig, Engine
from ecotone.errors import ConfigError

pytestmark = pytest.mark.e2e

Make = Callable[..., Engine]


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    return {"memory": "1MiB", "disk": str(tmp_path / "cache"), "disk_size": "64MiB"}


@pytest.fixture
def start(options: dict[str, Any]) -> Iterator[Make]:
    """Engines, one after the other, on one directory; each one's books are checked before it is closed."""
    engines: list[Engine] = []

    def make(**changed: Any) -> Engine:
        while engines:
            end(engines.pop())
        ec = ECConfig(options={**options, **changed})
        engines.append(Engine(MODEL, kv_blocks=128, encoder_cache_rows=2 * ROWS, ec=ec))
        return engines[-1]

    yield make
    while engines:
        end(engines.pop())


def since_its_start(engine: Engine) -> dict[str, float]:
    assert engine.settle()
    statistics = engine.statistics()
    [rank] = statistics["ranks"]
    return {
        "encodes": rank["encodes"],
        "loads": rank["connector"].get("loads", 0) + rank["connector"].get("views", 0),
        **{name: value for name, value in statistics["node"].items() if name.startswith("disk_")},
    }


def wait_until_written(engine: Engine, entries: int) -> None:
    deadline = time.monotonic() + 60
    while since_its_start(engine)["disk_writes"] < entries:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def end(engine: Engine) -> None:
    try:
        assert engine.settle()
        engine.check_integrity()
    finally:
        engine.close()


def test_a_restart_loads_and_does_not_encode(start: Make, plain: Engine, digits: list[Digit]) -> None:
    questions = [*(which(d) for d in digits[:6]), *(total(digits[i], digits[i + 1]) for i in range(5))]
    expected = tokens(plain.generate(questions))
    first = start()
    assert tokens(first.generate(questions)) == expected
    assert since_its_start(first)["encodes"] == 6
    second = start()
    assert tokens(second.generate(questions)) == expected
    counts = since_its_start(second)
    assert counts["encodes"] == 0
    assert counts["loads"] >= 6
    assert (counts["disk_adopted"], counts["disk_reads"], counts["disk_writes"]) == (6, 6, 0)


def test_memory_for_four_images_and_a_disk_for_all(start: Make, plain: Engine, digits: list[Digit]) -> None:
    chosen = digits[:8]
    engine = start(memory="32KiB")  # of which a rank may hold two as views
    for _ in range(2):
        for number, digit in enumerate(chosen, 1):
            assert tokens(engine.generate([which(digit)])) == tokens(plain.generate([which(digit)]))
            wait_until_written(engine, number)  # what is evicted before is lost, and that is right
            assert engine.settle()
    counts = since_its_start(engine)
    assert counts["disk_reads"] > 0
    assert counts["encodes"] == 8


def test_after_a_reset_nothing_comes_back(start: Make, digits: list[Digit]) -> None:
    first = start()
    first.generate([which(digits[0]), which(digits[1])])
    assert first.settle()
    first.reset_encoder_cache()
    first.generate([which(digits[0])])
    second = start()  # counts its epochs from 0, as the first one did
    second.generate([which(digits[0]), which(digits[1])])
    assert since_its_start(second)["encodes"] == 2
    second.reset_encoder_cache()
    second.generate([which(digits[0])])
    assert since_its_start(second)["encodes"] == 3


def test_two_engines_on_one_directory(start: Make, options: dict[str, Any]) -> None:
    start()
    with pytest.raises(ConfigError, match=f"in use by another node \\(process {os.getpid()}\\)"):
        Engine(MODEL, kv_blocks=128, ec=ECConfig(options=options))


_CHILD = """
import sys, time, torch
from ecotone import ECConfig, Engine, Prompt
torch.set_num_threads(1)
engine = Engine(sys.argv[1], kv_blocks=128, ec=ECConfig(options={"memory": "1MiB", "disk": sys.argv[2]}))
for image in sys.argv[3:]:
    engine.generate([Prompt("USER: <image> What digit is this? ASSISTANT:", [image])])
engine.settle()
while engine.statistics()["node"]["disk_writes"] < len(sys.argv[3:]):
    time.sleep(0.01)
print("written", flush=True)
sys.stdin.read()
"""


def test_what_was_written_survives_a_kill(
    start: Make, plain: Engine, options: dict[str, Any], digits: list[Digit]
) -> None:
    chosen = digits[:3]
    command = [sys.executable, "-c", _CHILD, str(MODEL), options["disk"], *(str(d.path) for d in chosen)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"}
    ) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == b"written\n"
        finally:
            child.send_signal(signal.SIGKILL)
    engine = start()
    questions = [which(digit) for digit in chosen]
    assert tokens(engine.generate(questions)) == tokens(plain.generate(questions))
    assert since_its_start(engine)["encodes"] == 0
