"""The demo on two ranks, as a user runs it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

ENV = {**os.environ, "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}
DEMO = [
    str(Path(sys.executable).parent / "ecotone"),
    "demo",
    "--ranks",
    "2",
    "--images",
    "4",
    "--cache-images",
    "2",
]


def test_two_ranks_answer_as_one_does() -> None:
    command = [*DEMO, "--json", "--encoder", "data"]
    done = subprocess.run(command, capture_output=True, text=True, env=ENV, timeout=280)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["identical_to_uncached"] is True
    assert figures["images"] == figures["encodes"] == figures["saves"] == 4
    first, second = figures["ranks"]
    assert first["pid"] != second["pid"]
    assert first["encodes"] == second["encodes"] == 4
    assert first["tower_items"] + second["tower_items"] == 4
    assert first["bytes_saved"] == second["bytes_saved"] == figures["bytes_saved"] / 2
    assert first["loads"] == second["loads"] == figures["loads"]


def test_a_rank_that_is_killed_ends_the_demo_with_one_line() -> None:
    demo = subprocess.Popen(DEMO, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENV)
    try:
        assert demo.stderr is not None
        for line in demo.stderr:
            if "warming up" in line:
                break
        ranks = children(demo.pid)
        assert len(ranks) == 2
        os.kill(ranks[1], signal.SIGKILL)
        _, err = demo.communicate(timeout=120)
    finally:
        demo.kill()
        demo.wait()
    assert demo.returncode == 1
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, err
    assert f"rank 1 (pid {ranks[1]}) was killed by SIGKILL" in errors[0]
    assert "Traceback" not in err
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)


def children(pid: int) -> list[int]:
    """In the order in which they were started: that of their ranks."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
