"""One rank of ``test_place``: ``python place_rank.py INIT_METHOD RANK TP PP``. Prints what it found as JSON."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import torch

from ecotone.protocol.connector import EncoderSpec
from ecotone.worker.parallel.group import Group
from ecotone.worker.parallel.pipeline import Stage
from ecotone.worker.parallel.place import join
from ecotone.worker.ranks import RankSpec

CPU = torch.device("cpu")


def in_group(group: Group) -> dict[str, object]:
    """Everything a group does, with values that depend on the rank."""
    mine = torch.full((2, 3), float(group.rank + 1))
    half = torch.tensor([[1.5], [group.rank]], dtype=torch.bfloat16)
    return {
        "sum": group.all_reduce(mine.clone()).tolist(),
        "rows": [rows.tolist() for rows in group.all_gather(mine)],
        "halves": [(str(rows.dtype), rows.tolist()) for rows in group.all_gather(half)],
        "silence": [data.decode() for data in group.exchange(b"")],
        "said": [data.decode() for data in group.exchange(b"x" * 3 * group.rank)],
    }


def in_stage(stage: Stage, rank: int) -> dict[str, object]:
    """A step's way through the stages: each adds its number."""
    errors = stage.relay_errors({"request": f"of rank {rank}"} if stage.is_first else {})
    hidden = torch.zeros(3, 4) if stage.is_first else stage.receive(3)
    hidden = hidden + rank
    if not stage.is_last:
        stage.send(hidden.T.contiguous().T)
    return {"errors": errors, "hidden": hidden[0, 0].item()}


def main(init_method: str, rank: int, tp: int, pp: int) -> None:
    spec = RankSpec(
        rank=rank,
        world_size=tp * pp,
        tp_rank=rank % tp,
        tp_size=tp,
        pp_rank=rank // tp,
        pp_size=pp,
        init_method=init_method,
    )
    place = join(spec, CPU)
    info = SimpleNamespace(encoder=EncoderSpec(4, 0, "float32"))
    stage = place.stage(SimpleNamespace(info=info, hidden_size=4, device=CPU))
    found = {**in_group(place.group), **in_stage(stage, rank)}
    place.leave()
    place.leave()
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], *(int(argument) for argument in sys.argv[2:5]))
