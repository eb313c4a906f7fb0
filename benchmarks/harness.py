"""Measuring on a machine that does other things too: everything that is compared is measured in turns."""

from __future__ import annotations

import gc
import json
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter
from typing import Any, NamedTuple


class Summary(NamedTuple):
    """Of the repetitions of one task, in seconds."""

    median: float
    p10: float
    p90: float

    def as_us(self) -> dict[str, float]:
        """In microseconds, as a row of a table."""
        return {f"{name}_us": round(value * 1e6, 2) for name, value in self._asdict().items()}


def summarize(seconds: Sequence[float]) -> Summary:
    """Median and outer deciles of two or more repetitions."""
    deciles = quantiles(seconds, n=10, method="inclusive")
    return Summary(median(seconds), deciles[0], deciles[-1])


def timed(function: Callable[[], object], number: int = 1) -> Callable[[], float]:
    """A task that calls ``function`` ``number`` times and gives the seconds of one call.

    ``number`` is right when the task takes 10 to 1000 us: many times the clock's resolution, and so little that
    on a busy machine most repetitions are not interrupted. Then the median is one that was not.
    """

    def task() -> float:
        start = perf_counter()
        for _ in range(number):
            function()
        return (perf_counter() - start) / number

    return task


def interleave(tasks: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, Summary]:
    """Run every task ``rounds`` times, in turns, so that whatever else the machine does meets all of them.

    Each task gives the seconds it took (``timed`` makes one of a function); one unmeasured run comes before.
    """
    seconds: dict[str, list[float]] = {name: [] for name in tasks}
    for task in tasks.values():
        task()
    with _no_collection():
        for _ in range(rounds):
            for name, task in tasks.items():
                seconds[name].append(task())
    return {name: summarize(values) for name, values in seconds.items()}


def ratio(of: Summary, to: Summary) -> float:
    """How many times the median of ``to`` the median of ``of`` is."""
    return round(of.median / to.median, 3)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Without the garbage collector, which would charge one task for what another left behind."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def machine() -> dict[str, object]:
    """Where the figures are from."""
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpus": os.cpu_count(),
    }


def render(title: str, rows: Mapping[str, Any]) -> str:
    """``rows`` as text: of mappings, a table with their keys as columns; of values, one a line."""
    table = {name: row if isinstance(row, Mapping) else {"": row} for name, row in rows.items()}
    columns = list(dict.fromkeys(column for row in table.values() for column in row))
    lines = [[title, *columns]]
    lines += [[name, *(_cell(row.get(column, "")) for column in columns)] for name, row in table.items()]
    widths = [max(len(line[index]) for line in lines) for index in range(len(columns) + 1)]
    first, *others = widths
    aligned = [
        "  ".join(
            [line[0].ljust(first), *(cell.rjust(width) for cell, width in zip(line[1:], others, strict=True))]
        )
        for line in lines
    ]
    return "\n".join(line.rstrip() for line in aligned if line.strip())


def _cell(value: object) -> str:
    return f"{value:,}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


def write_json(path: Path, results: Mapping[str, Any]) -> None:
    """Write ``results``, making the folders on the way."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=2) + "\n")
