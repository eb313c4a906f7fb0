"""The demo on two ranks: the answers of one rank, and what a user sees when a rank is lost on the way."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

# Every rank is a Python with torch and transformers to start: on a busy machine that takes a while.
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

ECOTONE = [str(Path(sys.executable).parent / "ecotone")]
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
SMALL = ("--images", "4", "--cache-images", "2")


@pytest.mark.parametrize("executor", ["multiproc", "ray"])
def test_two_ranks_answer_as_one_does(executor: str) -> None:
    if executor == "ray":
        pytest.importorskip("ray")
    done = subprocess.run(
        [*ECOTONE, "demo", "--json", *SMALL, "--ranks", "2", "--executor", executor],
        capture_output=True,
        text=True,
        env=ENV,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)  # the other engine has one rank
    assert figures["identical_to_uncached"] is True
    ranks = figures["ranks"]
    assert [rank["rank"] for rank in ranks] == [0, 1]
    assert len({rank["pid"] for rank in ranks}) == 2
    assert [rank["encodes"] for rank in ranks] == [4, 4]
    assert [rank["loads"] for rank in ranks] == [figures["loads"]] * 2
    saved = [rank["bytes_saved"] for rank in ranks]
    assert saved[0] == saved[1] == figures["bytes_saved"] / 2 > 0
    assert "Traceback" not in done.stderr


def children(pid: int) -> list[int]:
    """The ranks that ``pid`` started, in order."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "stat").read_text().rpartition(")")[2].split()
            command = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue  # it ended meanwhile
        if int(words[1]) == pid and b"ecotone.executor.rank_main" in command:
            found.append(int(entry.name))
    return sorted(found)


def test_a_rank_that_is_killed_ends_the_demo_with_a_clear_message() -> None:
    demo = subprocess.Popen(
        [*ECOTONE, "demo", "--ranks", "2", "--images", "12", "--cache-images", "2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENV,
    )
    assert demo.stderr is not None
    try:
        for line in demo.stderr:
            if line.startswith("warming up"):  # the engines are built
                break
        ranks = children(demo.pid)
        assert len(ranks) == 2
        ends = [os.pidfd_open(pid) for pid in ranks]
        os.kill(ranks[1], signal.SIGKILL)
        _, errors = demo.communicate(timeout=200)
    finally:
        demo.kill()
        demo.communicate()
    assert demo.returncode == 1
    message = errors.splitlines()[-1]
    assert message.startswith("error: ")
    assert f"(pid {ranks[1]}) was killed by SIGKILL" in message
    assert "Traceback" not in errors
    for end in ends:
        gone = select.poll()
        gone.register(end, select.POLLIN)
        assert gone.poll(0)  # it was waited for
        os.close(end)
    assert not [name for name in os.listdir("/dev/shm") if "ecotone" in name]
