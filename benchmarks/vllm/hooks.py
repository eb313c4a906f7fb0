"""How long the hooks of an EC connector take, measured where vLLM calls them.

vLLM builds a connector once in its scheduler's process and once in each worker. Both write to one file that the
benchmark maps as well, so that reading the figures asks nothing of the engine. Per side: a counter of steps, calls
and nanoseconds of each hook, and a ring of the nanoseconds of each of the latest steps. There may be one worker.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from pathlib import Path
from time import perf_counter_ns
from typing import Any

FILE_VARIABLE = "ECOTONE_BENCH_HOOKS"
HOOKS = (
    # of the scheduler's side
    "has_cache_item", "ensure_cache_available", "update_state_after_alloc", "update_state_after_free",
    "build_connector_meta", "update_connector_output", "take_unavailable_requests", "request_finished",
    "has_pending_push_work",
    # of a worker's
    "bind_connector_metadata", "start_save_caches", "start_load_caches", "save_caches", "get_finished",
    "build_connector_worker_meta", "clear_connector_metadata",
    # of both
    "get_ec_connector_stats",
)  # fmt: skip
SIDES = ("scheduler", "worker")
# The hook that ends a step, by side. What the scheduler's side does after it counts for the next step.
_LAST = {"scheduler": "build_connector_meta", "worker": "clear_connector_metadata"}
_RING = 4096
_SIDE_WORDS = 1 + 2 * len(HOOKS) + _RING


class HookTimes:
    """The file, as the benchmark reads it."""

    def __init__(self, file: Path) -> None:
        file.write_bytes(bytes(8 * _SIDE_WORDS * len(SIDES)))
        self._words = _map(file)

    def steps(self, side: str) -> int:
        """Steps of one of ``SIDES`` since the engine started."""
        return self._words[SIDES.index(side) * _SIDE_WORDS]

    def calls(self) -> dict[str, int]:
        """Of each hook, both sides together."""
        return dict(zip(HOOKS, map(sum, zip(*(words[::2] for words in self._totals()), strict=True)), strict=True))

    def seconds(self) -> dict[str, float]:
        """In each hook, both sides together."""
        both = zip(*(words[1::2] for words in self._totals()), strict=True)
        return {name: sum(nanoseconds) / 1e9 for name, nanoseconds in zip(HOOKS, both, strict=True)}

    def latest(self, side: str, count: int) -> list[float]:
        """Seconds in hooks of each of the latest ``count`` steps.

        Raises:
            ValueError: the ring holds no more than ``_RING``.
        """
        if count > _RING:
            raise ValueError(f"{count} steps were asked for, {_RING} are kept")
        start = SIDES.index(side) * _SIDE_WORDS
        ring = start + 1 + 2 * len(HOOKS)
        last = self._words[start]
        return [self._words[ring + step % _RING] / 1e9 for step in range(max(0, last - count), last)]

    def _totals(self) -> list[list[int]]:
        """Of each side: calls and nanoseconds of each hook, one after the other."""
        starts = [number * _SIDE_WORDS + 1 for number in range(len(SIDES))]
        return [self._words[start : start + 2 * len(HOOKS)].tolist() for start in starts]


class _Clock:
    """What one side writes. vLLM calls all hooks of a side from one thread."""

    def __init__(self, words: memoryview, side: str) -> None:
        start = SIDES.index(side) * _SIDE_WORDS
        self._words = words[start : start + _SIDE_WORDS]
        self._last = 1 + 2 * HOOKS.index(_LAST[side])
        self._step_ns = 0
        self.inside = False

    def add(self, place: int, nanoseconds: int) -> None:
        words = self._words
        words[place] += 1
        words[place + 1] += nanoseconds
        self._step_ns += nanoseconds
        if place == self._last:
            words[1 + 2 * len(HOOKS) + words[0] % _RING] = self._step_ns
            words[0] += 1
            self._step_ns = 0


def timed(connector: type[Any]) -> type[Any]:
    """``connector`` with every hook under the clock, writing to the file that the environment names."""

    def start(self: Any, vllm_config: Any, role: Any) -> None:
        connector.__init__(self, vllm_config, role)
        self.hook_clock = _Clock(_map(Path(os.environ[FILE_VARIABLE])), role.name.lower())

    hooks = {name: _under_clock(getattr(connector, name), 1 + 2 * i) for i, name in enumerate(HOOKS)}
    return type(f"Timed{connector.__name__}", (connector,), {"__init__": start, **hooks})


def _under_clock(hook: Callable[..., Any], place: int) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **options: Any) -> Any:
        clock = self.hook_clock
        if clock.inside:  # a hook that calls another: its time is the outer one's
            return hook(self, *args, **options)
        clock.inside = True
        start = perf_counter_ns()
        try:
            return hook(self, *args, **options)
        finally:
            clock.add(place, perf_counter_ns() - start)
            clock.inside = False

    return call


def _map(file: Path) -> memoryview:
    with file.open("r+b") as opened:
        return memoryview(mmap.mmap(opened.fileno(), 0)).cast("q")
