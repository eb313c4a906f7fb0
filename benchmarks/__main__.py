"""Run the benchmarks, print their tables and write their figures."""

from __future__ import annotations

import argparse
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks.harness import machine, render, write_json

# name -> what it measures. The module benchmarks.NAME has run(quick: bool) -> dict of rows, or of values.
BENCHMARKS = {
    "channel": "the worker -> scheduler channel, per step, by ranks x items",
    "copies": "saves and loads of one rank, against a plain copy of the same bytes",
    "executors": "a step through each executor, and codec and fold up to 1,024 ranks x 256 items",
    "disk": "the disk tier against plain reads and writes, and a warm start",
    "fleet": "four engines on one node against four with a quarter of its memory each: hits, encodes, first token",
    "shared_node": "hits through the shared node, the embedded one and memcpy; lookups per second; a hosted node",
    "index": "the node's index: operations per second, with few entries and with many",
    "parallel": "a save shared by two ranks, and an encoder step divided between them, against one rank",
    "ttft": "time to first token of an image seen before: with a load, and with an encode",
    "pipeline": "two pipeline stages with two steps in flight, against one",
}


def _arguments() -> argparse.Namespace:
    listed = "\n".join(f"  {name:10} {what}" for name, what in BENCHMARKS.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=f"{__doc__}\n\nbenchmarks:\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="benchmarks to run; all of them by default")
    parser.add_argument("--json", type=Path, default=Path("build/bench/results.json"), metavar="PATH")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions: rough figures, sooner")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.names if name not in BENCHMARKS]
    if unknown:
        parser.error(f"there is no benchmark {unknown[0]!r}; there are {', '.join(BENCHMARKS)}")
    return arguments


def main() -> None:
    """The command line."""
    arguments = _arguments()
    results: dict[str, Any] = {"machine": machine(), "quick": arguments.quick}
    for name in arguments.names or BENCHMARKS:
        print(f"{name}: {BENCHMARKS[name]}", flush=True)
        start = perf_counter()
        results[name] = import_module(f"benchmarks.{name}").run(arguments.quick)
        print(f"{render('', results[name])}\n({perf_counter() - start:.1f} s)\n", flush=True)
    write_json(arguments.json, results)
    print(f"figures: {arguments.json}")


if __name__ == "__main__":
    main()
