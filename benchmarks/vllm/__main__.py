"""Run the benchmark, print its tables as Markdown and write its figures. Progress goes to stderr."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from threading import Event, Thread
from typing import Any

from vllm import __version__

from benchmarks.harness import machine, write_json
from benchmarks.vllm.answers import Sizes, figures, measure
from benchmarks.vllm.engines import Engine, make_model, say
from benchmarks.vllm.names import ENGINES
from benchmarks.vllm.report import goals, markdown

_FULL, _QUICK = Sizes(rounds=6, first_tokens=12, mixed=40), Sizes(rounds=2, first_tokens=6, mixed=12)
_ALONE_ROUNDS, _ALONE_ROUNDS_QUICK = 25, 7
_LOAD_EVERY_S = 5.0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.vllm", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer questions: rough figures, sooner")
    parser.add_argument(
        "--rounds", type=int, metavar="N",
        help=f"how often everything is asked: {_FULL.rounds}, or {_QUICK.rounds} with --quick",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, default=Path("build/bench/vllm.json"), metavar="PATH")
    parser.add_argument("--markdown", type=Path, default=Path("build/bench/vllm.md"), metavar="PATH")
    arguments = parser.parse_args()
    if arguments.rounds is not None and arguments.rounds < 1:
        parser.error(f"--rounds {arguments.rounds}: at least one")
    return arguments


def main() -> None:
    """The command line."""
    arguments = _arguments()
    sizes = _QUICK if arguments.quick else _FULL
    if arguments.rounds is not None:
        sizes = Sizes(arguments.rounds, sizes.first_tokens, sizes.mixed)
    loads: list[float] = []
    with _watching_load(loads):
        alone = _alone(_ALONE_ROUNDS_QUICK if arguments.quick else _ALONE_ROUNDS)
        engines = _engines(sizes)
    results = {
        "machine": machine(),
        "vllm": __version__,
        "quick": arguments.quick,
        "sizes": {"rounds": sizes.rounds, "first_tokens": sizes.first_tokens, "mixed": sizes.mixed},
        "load": {"min": min(loads), "median": round(median(loads), 2), "max": max(loads)},
        "engines": engines,
        "alone": alone,
        "goals": goals(engines, alone),
    }
    write_json(arguments.json, results)
    arguments.markdown.write_text(markdown(results))
    print(markdown(results))
    say(f"figures: {arguments.json}; tables: {arguments.markdown}")


@contextmanager
def _watching_load(loads: list[float]) -> Iterator[None]:
    """Note the machine's load average of the last minute now and then."""
    ended = Event()

    def watch() -> None:
        loads.append(round(os.getloadavg()[0], 2))
        while not ended.wait(_LOAD_EVERY_S):
            loads.append(round(os.getloadavg()[0], 2))

    thread = Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _alone(rounds: int) -> dict[str, Any]:
    say("saves and loads alone")
    command = [sys.executable, "-m", "benchmarks.vllm.alone", str(rounds)]
    output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    return dict(json.loads(output.splitlines()[-1]))


def _engines(sizes: Sizes) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="ecotone-bench-") as name, ExitStack() as stack:
        folder = Path(name)
        model = make_model(folder)
        engines = []
        for number, connector in enumerate(ENGINES):
            engines.append(Engine(connector, model, folder / str(number)))
            stack.callback(engines[-1].close)
            say(f"started vLLM with {connector} in {engines[-1].start_s:.0f} s")
        found = measure(engines, sizes)
        return {
            engine.name: {
                **figures(found[engine.name]),
                "memory": engine.memory(),
                "start_s": round(engine.start_s, 1),
            }
            for engine in engines
        }


if __name__ == "__main__":
    main()
