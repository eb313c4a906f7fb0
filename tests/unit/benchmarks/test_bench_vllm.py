"""What the vLLM benchmark counts and asks, without vLLM."""

from __future__ import annotations

from collections import Counter
from enum import Enum
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from benchmarks.vllm.hooks import FILE_VARIABLE, HOOKS, HookTimes, timed
from benchmarks.vllm.questions import fresh, image, mix


class _Role(Enum):
    SCHEDULER = 0
    WORKER = 1


class _Connector:
    def __init__(self, vllm_config: Any, role: _Role) -> None:
        self.seen: list[Any] = []

    def has_cache_item(self, identifier: str) -> bool:
        self.seen.append(identifier)
        return True

    def update_state_after_alloc(self, request: str, index: int) -> None:
        self.has_cache_item(request)  # a hook within a hook

    def start_load_caches(self, encoder_cache: dict[str, Any], **options: Any) -> None:
        raise OSError("broken")


for _name in HOOKS:
    if not hasattr(_Connector, _name):
        setattr(_Connector, _name, lambda self, *args, **options: None)


@pytest.fixture
def times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HookTimes:
    monkeypatch.setenv(FILE_VARIABLE, str(tmp_path / "hooks"))
    return HookTimes(tmp_path / "hooks")


def test_each_side_counts_its_calls_and_steps(times: HookTimes) -> None:
    both = timed(_Connector)
    scheduler, worker = both(None, _Role.SCHEDULER), both(None, _Role.WORKER)

    assert scheduler.has_cache_item("a") is True
    scheduler.update_state_after_alloc("b", 0)
    scheduler.build_connector_meta(None)
    scheduler.update_connector_output(None)
    worker.bind_connector_metadata(None)
    for _ in range(2):
        worker.clear_connector_metadata()

    assert scheduler.seen == ["a", "b"]
    once = ("has_cache_item", "update_state_after_alloc", "build_connector_meta", "update_connector_output",
            "bind_connector_metadata")  # fmt: skip
    called = {name: calls for name, calls in times.calls().items() if calls}
    assert called == {**dict.fromkeys(once, 1), "clear_connector_metadata": 2}
    assert (times.steps("scheduler"), times.steps("worker")) == (1, 2)


def test_steps_hold_what_their_hooks_took(times: HookTimes) -> None:
    scheduler = timed(_Connector)(None, _Role.SCHEDULER)
    for count in (1, 3):
        for _ in range(count):
            scheduler.has_cache_item("a")
        scheduler.build_connector_meta(None)

    taken = times.seconds()
    assert {name for name, seconds in taken.items() if seconds} == {"has_cache_item", "build_connector_meta"}
    assert sum(times.latest("scheduler", 2)) == pytest.approx(sum(taken.values()))
    assert times.latest("scheduler", 1) == times.latest("scheduler", 2)[1:]
    assert times.latest("worker", 1) == []
    with pytest.raises(ValueError, match="kept"):
        times.latest("scheduler", 1_000_000)


def test_a_hook_that_raises_is_counted_and_the_next_one_too(times: HookTimes) -> None:
    worker = timed(_Connector)(None, _Role.WORKER)

    with pytest.raises(OSError, match="broken"):
        worker.start_load_caches({})
    worker.get_finished(set())

    assert (times.calls()["start_load_caches"], times.calls()["get_finished"]) == (1, 1)


def test_a_mix_has_its_share_of_repeats_and_none_beside_itself() -> None:
    unseen = fresh()
    for seed in range(20):
        for repeated in (0.5, 0.9):
            numbers = mix([1, 2, 3, 4], unseen, 40, repeated, seed)
            counts = Counter(numbers)
            again = sum(counts[number] for number in (1, 2, 3, 4))
            assert again == 40 * repeated
            assert max(counts[n] for n in (1, 2, 3, 4)) - min(counts[n] for n in (1, 2, 3, 4)) <= 1
            assert all(a != b for a, b in pairwise(numbers))
    assert mix([1, 2], fresh(), 10, 0.5, 3) == mix([1, 2], fresh(), 10, 0.5, 3)


def test_an_image_is_the_same_every_time_and_unlike_the_next() -> None:
    assert image(5).tobytes() == image(5).tobytes()
    assert image(5).tobytes() != image(6).tobytes()
