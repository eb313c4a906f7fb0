"""Saves and loads without an engine: worker halves of connectors against a plain copy of the same bytes.

A process of its own (``python -m benchmarks.vllm.alone ROUNDS``, figures on stdout): what stands in for a GPU's
streams is changed in torch for the whole process. A load ends when the rows are in the encoder cache; a connector
may leave the reading of them to whoever comes next, so that reading all of them once is measured as well.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import ECTransferConfig
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole
from vllm.distributed.ec_transfer.ec_connector.example_connector import (
    ECExampleConnector,
    ECExampleConnectorMetadata,
    MMMeta,
)

from benchmarks.copies import Rank
from benchmarks.harness import Summary, interleave, ratio
from benchmarks.vllm.eccpu import EccpuRank
from benchmarks.vllm.names import COPY, COPYING, ECCPU, ECOTONE, EXAMPLE, EXAMPLE_IN_MEMORY
from ecotone.node.exchange import Layout
from ecotone.node.region import Region

SHAPES = ((576, 4096), (16384, 4096))
# Where the example's files lie: in the folder for temporary files, as for the engines, or in memory.
EXAMPLES = {EXAMPLE: None, EXAMPLE_IN_MEMORY: Path("/dev/shm")}


class _Example:
    """vLLM's ``ECExampleConnector`` as a worker has it, with one entry."""

    def __init__(self, folder: str) -> None:
        extra = {"shared_storage_path": folder}
        transfer = ECTransferConfig(
            ec_connector="ECExampleConnector", ec_role="ec_both", ec_connector_extra_config=extra
        )
        config: Any = SimpleNamespace(ec_transfer_config=transfer, model_config=None)
        self._connector = ECExampleConnector(config, ECConnectorRole.WORKER)
        self._file = Path(folder) / "entry" / "encoder_cache.safetensors"

    def save(self, rows: torch.Tensor) -> float:
        self._file.unlink(missing_ok=True)
        self._connector.bind_connector_metadata(ECExampleConnectorMetadata())
        start = perf_counter()
        self._connector.save_caches({"entry": rows}, "entry")
        return perf_counter() - start

    def load(self) -> torch.Tensor:
        meta = ECExampleConnectorMetadata()
        meta.add_mm_data(MMMeta.make_meta("entry", 0))
        self._connector.bind_connector_metadata(meta)
        cache: dict[str, torch.Tensor] = {}
        self._connector.start_load_caches(cache)
        return cache["entry"]


def _loads(name: str, load: Callable[[], torch.Tensor], sink: torch.Tensor) -> dict[str, Callable[[], float]]:
    def alone() -> float:
        start = perf_counter()
        rows = load()
        seconds = perf_counter() - start
        del rows
        return seconds

    def and_read() -> float:
        start = perf_counter()
        sink.copy_(load())
        return perf_counter() - start

    return {f"{name}|load": alone, f"{name}|load and read": and_read}


def _seconds(call: Callable[[], object]) -> float:
    start = perf_counter()
    call()
    return perf_counter() - start


def _rank_load(rank: Rank) -> torch.Tensor:
    rank.load()
    return rank.loaded()


def measure(shape: tuple[int, int], rounds: int) -> dict[str, dict[str, float]]:
    """By connector: median ms of a save, of a load, and of a load whose rows are then read once."""
    rows = torch.randn(shape).to(torch.bfloat16)
    target, sink = torch.zeros_like(rows), torch.zeros_like(rows)
    layout = Layout("bfloat16", shape)
    tasks: dict[str, Callable[[], float]] = {f"{COPY}|save": partial(_seconds, lambda: target.copy_(rows))}
    with ExitStack() as stack:
        region = Region.create(layout.nbytes, "benchmark", prefault=True)
        stack.callback(region.close)
        for name, views in ((ECOTONE, True), (COPYING, False)):
            rank = Rank(region, layout, 1, views=views)
            stack.callback(rank.close)
            tasks[f"{name}|save"] = partial(rank.save, [rows])
            tasks |= _loads(name, partial(_rank_load, rank), sink)
        for name, folder in EXAMPLES.items():
            if folder is None or folder.is_dir():
                example = _Example(stack.enter_context(tempfile.TemporaryDirectory(dir=folder)))
                tasks[f"{name}|save"] = partial(example.save, rows)
                tasks |= _loads(name, example.load, sink)
        eccpu = EccpuRank(shape)
        stack.callback(eccpu.close)
        tasks[f"{ECCPU}|save"] = partial(_seconds, partial(eccpu.save, rows))
        tasks |= _loads(ECCPU, eccpu.load, sink)
        found = interleave(tasks, rounds)
        if not torch.equal(sink, rows):
            raise RuntimeError("what was loaded is not what was saved")
        return _table(found)


def _table(found: dict[str, Summary]) -> dict[str, dict[str, float]]:
    table: dict[str, dict[str, float]] = {}
    for task, summary in found.items():
        name, _, what = task.partition("|")
        what = what.replace(" ", "_")
        row = table.setdefault(name, {})
        row[f"{what}_ms"] = round(summary.median * 1e3, 4)
        row[f"{what}_of_copy"] = ratio(summary, found[f"{COPY}|save"])
    return table


if __name__ == "__main__":
    torch.set_num_threads(1)  # as a memcpy is, and as the copier's is
    print(json.dumps({str(list(shape)): measure(shape, int(sys.argv[1])) for shape in SHAPES}))
