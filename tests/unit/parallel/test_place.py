"""Ranks that are processes: they meet, and what they do together over torch.distributed is what the threads of the
other tests do."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ecotone.errors import ResourceError
from ecotone.worker.parallel.place import join
from ecotone.worker.ranks import RankSpec


def run(init_method: str, tp: int, pp: int) -> list[dict[str, Any]]:
    script = str(Path(__file__).with_name("place_rank.py"))
    ranks = [
        subprocess.Popen(
            [sys.executable, script, init_method, str(rank), str(tp), str(pp)],
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(tp * pp)
    ]
    try:
        answers = [rank.communicate(timeout=110)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0] * len(ranks)
    return [json.loads(answer) for answer in answers]


@pytest.mark.timeout(240)  # on a busy machine it takes four processes a while to import torch
def test_two_stages_of_two_meet_and_do_everything_together() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    found = run(f"tcp://127.0.0.1:{port}", 2, 2)
    for each in found:
        assert each["sum"] == [[3.0] * 3] * 2
        assert each["rows"] == [[[1.0] * 3] * 2, [[2.0] * 3] * 2]
        assert each["halves"] == [["torch.bfloat16", [[1.5], [0.0]]], ["torch.bfloat16", [[1.5], [1.0]]]]
        assert each["silence"] == ["", ""]
        assert each["said"] == ["", "xxx"]
    assert [each["hidden"] for each in found] == [0.0, 1.0, 2.0, 4.0]
    assert [each["errors"] for each in found] == [{"request": f"of rank {rank % 2}"} for rank in range(4)]


@pytest.mark.parametrize("init_method", ["env://", "tcp://127.0.0.1", "somewhere"])
def test_no_place_to_meet(init_method: str) -> None:
    with pytest.raises(ResourceError, match="rank 0: the ranks did not meet at"):
        join(RankSpec(world_size=2, tp_size=2, init_method=init_method), torch.device("cpu"))
