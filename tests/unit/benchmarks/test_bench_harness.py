"""The harness measures in turns, and its tables and files say what was measured."""

import gc
import json
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.channel import run as run_channel
from benchmarks.harness import Summary, interleave, ratio, render, summarize, timed, write_json


def test_tasks_take_turns_after_an_unmeasured_run() -> None:
    calls: list[str] = []

    def task(name: str, seconds: float) -> float:
        calls.append(name)
        return seconds

    found = interleave({"a": lambda: task("a", 1.0), "b": lambda: task("b", 4.0)}, rounds=3)
    assert calls == ["a", "b"] * 4
    assert found == {"a": Summary(1.0, 1.0, 1.0), "b": Summary(4.0, 4.0, 4.0)}
    assert ratio(found["a"], found["b"]) == 0.25
    assert gc.isenabled()


def test_summaries_are_median_and_outer_deciles() -> None:
    found = summarize([float(value) for value in range(11)][::-1])
    assert found == Summary(median=5.0, p10=1.0, p90=9.0)
    assert found.as_us() == {"median_us": 5e6, "p10_us": 1e6, "p90_us": 9e6}


def test_timed_gives_the_seconds_of_one_call() -> None:
    calls: list[int] = []
    task = timed(lambda: calls.append(1), number=7)
    assert task() >= 0
    assert len(calls) == 7


def test_tables() -> None:
    assert render("", {"a": {"x": 1, "y": 2000}, "long": {"y": 0.5}}).splitlines() == [
        "      x      y",
        "a     1  2,000",
        "long       0.5",
    ]
    assert render("", {"speed": 1.5, "ok": True}).splitlines() == ["speed   1.5", "ok     True"]


def test_files_are_written_with_their_folders(tmp_path: Path) -> None:
    write_json(tmp_path / "new" / "r.json", {"a": {"b": 1}})
    assert json.loads((tmp_path / "new" / "r.json").read_text()) == {"a": {"b": 1}}


def test_the_channel_is_measured_for_every_number_of_ranks_and_items(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.channel.RANKS", (1, 2))
    monkeypatch.setattr("benchmarks.channel.ITEMS", (0, 2))
    rows = run_channel(quick=True)
    assert list(rows) == ["1 x 0", "1 x 2", "2 x 0", "2 x 2"]
    for row in rows.values():
        stages = [row[f"{stage}_us"] for stage in ("build", "encode", "decode", "fold", "apply")]
        assert row["channel_us"] == pytest.approx(sum(stages), abs=0.1)
        assert all(value > 0 for value in stages)
    assert rows["2 x 2"]["bytes_of_a_rank"] > rows["2 x 0"]["bytes_of_a_rank"]


def test_an_unknown_benchmark_is_refused_with_the_known_ones() -> None:
    root = Path(__file__).parents[3]
    found = subprocess.run(
        [sys.executable, "-m", "benchmarks", "nonesuch"], cwd=root, capture_output=True, text=True, timeout=60
    )
    assert found.returncode == 2
    assert "there is no benchmark 'nonesuch'; there are channel" in found.stderr
