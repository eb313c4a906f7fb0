"""Two ranks against one: a save that is shared, and an encoder step whose images are divided.

Both ranks are processes on this machine, one thread each, that meet at a barrier before and after each measured
task, in turns with the same task on rank 0 alone (the other waits at the barrier). So a barrier's time is in all
figures, and is given beside them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Semaphore
from time import perf_counter
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

from benchmarks.harness import interleave, ratio
from ecotone.connectors.copy.thread import ThreadCopyEngine
from ecotone.connectors.messages import EcotoneStepMetadata, Order
from ecotone.connectors.worker import EcotoneWorkerConnector
from ecotone.node.exchange import Extent, Layout
from ecotone.node.region import Region, RegionDescriptor
from ecotone.protocol.arrays import Array
from ecotone.protocol.connector import ECWorkerContext, EncoderSpec
from ecotone.protocol.step import MultiModalItem
from ecotone.worker.models import ModelAdapter
from ecotone.worker.parallel.place import Place, join
from ecotone.worker.ranks import RankSpec

RANKS = 2
SHAPES = ((576, 4096), (16384, 4096))
IMAGES = 8  # of 224 x 224 pixels, 256 rows each, through a tower of 11 million parameters
CPU = torch.device("cpu")


def run(quick: bool) -> dict[str, Any]:
    """By task: medians in ms, and how many times faster two ranks are. ``quick`` takes fewer rounds."""
    nbytes = max(rows * width * 2 for rows, width in SHAPES)
    region = Region.create(nbytes, "benchmark", prefault=True)
    descriptor = region.open_descriptor(writable=True)
    with tempfile.TemporaryDirectory(prefix="ecotone-bench-") as folder:
        told = {
            "init_method": f"file://{Path(folder) / 'meet'}",
            "descriptor": msgspec.to_builtins(region.descriptor),
            "fd": descriptor,
            "quick": quick,
        }
        ranks = [_start(rank, told, descriptor) for rank in range(RANKS)]
        answers = [rank.communicate()[0] for rank in ranks]
    os.close(descriptor)
    region.close()
    failed = [number for number, rank in enumerate(ranks) if rank.returncode]
    if failed:
        raise RuntimeError(f"ranks {failed} failed")
    found: dict[str, Any] = json.loads(answers[0])
    return found


def _start(rank: int, told: dict[str, Any], descriptor: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "benchmarks.parallel", json.dumps({**told, "rank": rank})]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, pass_fds=(descriptor,))


class _Saver:
    """A rank's worker half over the shared region, and rows to save."""

    def __init__(self, rank: int, region: Region, shape: tuple[int, int]) -> None:
        self._done = Semaphore(0)
        context = ECWorkerContext(
            engine_id="benchmark",
            role="ec_producer",
            options={},
            rank=rank,
            epoch=0,
            encoder=EncoderSpec(hidden_size=shape[1], levels=0, dtype="bfloat16"),
            device="cpu",
            wakeup=self._done.release,
        )
        self._rank = rank
        self._layout = Layout("bfloat16", shape)
        own = region.descriptor
        self._extents = (Extent(own.region_id, own.generation, 0, self._layout.nbytes),)
        self._cache = {"item": torch.randn(shape).to(torch.bfloat16)}
        self._half = EcotoneWorkerConnector(
            context, False, False, lambda _: region, lambda _: ThreadCopyEngine(context.wakeup)
        )
        self._transfer_id = 0

    def save(self, ranks: tuple[int, ...]) -> None:
        """This rank's share of one item among ``ranks``."""
        self._transfer_id += 1
        order = Order("item", self._transfer_id, self._layout, self._extents)
        self._half.bind_connector_metadata(EcotoneStepMetadata(ranks, (), (order,)))
        self._half.save_caches(self._cache, "item")
        if self._rank in ranks:
            self._done.acquire()
        self._half.build_connector_worker_meta()


def _together(act: Callable[[], object]) -> float:
    dist.barrier()
    start = perf_counter()
    act()
    dist.barrier()
    return perf_counter() - start


def _saves(rank: int, region: Region, rounds: int) -> dict[str, Any]:
    out = {}
    for shape in SHAPES:
        saver = _Saver(rank, region, shape)
        tasks = {
            "one": partial(_together, partial(saver.save, (0,))),
            "two": partial(_together, partial(saver.save, (0, 1))),
            "barrier": partial(_together, lambda: None),
        }
        out[f"save {list(shape)} bf16"] = _row(interleave(tasks, rounds))
    return out


def _encodes(rank: int, place: Place, rounds: int) -> dict[str, Any]:
    adapter = _adapter()
    spec = adapter.info.encoder
    draw = np.random.default_rng(0)
    items = [
        MultiModalItem(
            modality="image",
            item_id=f"{number:064x}",
            offset=0,
            num_rows=256,
            inputs={"pixel_values": Array.from_numpy(draw.standard_normal((1, 3, 224, 224)).astype(np.float32))},
        )
        for number in range(IMAGES)
    ]
    divided = place.encoder(adapter.encode, adapter, "data")
    with torch.no_grad():
        tasks = {
            "one": partial(_together, lambda: adapter.encode(items) if rank == 0 else None),
            "two": partial(_together, lambda: divided(items)),
            "barrier": partial(_together, lambda: None),
        }
        found = interleave(tasks, rounds)
    return {f"encode {IMAGES} images x 256 x {spec.width} f32": _row(found)}


def _adapter() -> ModelAdapter:
    torch.manual_seed(0)
    tower = CLIPVisionConfig(
        hidden_size=384,
        intermediate_size=1536,
        num_hidden_layers=6,
        num_attention_heads=6,
        image_size=224,
        patch_size=14,
    )
    text = LlamaConfig(
        vocab_size=300, hidden_size=512, intermediate_size=512, num_hidden_layers=1, num_attention_heads=8
    )
    config = LlavaConfig(vision_config=tower, text_config=text, image_token_index=290)
    return ModelAdapter(LlavaForConditionalGeneration(config), max_model_len=4096)


def _row(found: dict[str, Any]) -> dict[str, float]:
    medians = {f"{name}_ms": round(summary.median * 1e3, 3) for name, summary in found.items()}
    return {**medians, "times_faster": ratio(found["one"], found["two"])}


def _rank(told: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    rank = told["rank"]
    spec = RankSpec(rank=rank, world_size=RANKS, tp_rank=rank, tp_size=RANKS, init_method=told["init_method"])
    place = join(spec, CPU)
    descriptor = msgspec.convert(told["descriptor"], RegionDescriptor)
    region = Region.attach(told["fd"], descriptor, prefault=True)
    out = _saves(rank, region, 10 if told["quick"] else 40)
    out |= _encodes(rank, place, 3 if told["quick"] else 12)
    place.leave()
    if rank == 0:
        print(json.dumps(out))


if __name__ == "__main__":
    _rank(json.loads(sys.argv[1]))
