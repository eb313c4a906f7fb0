"""The checks that need a CUDA device: ``python tests/gpu/run.py``. At most five minutes.

Prints one JSON object. Where there is no CUDA device it says that nothing was run, and ends well.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from threading import Event
from time import monotonic, perf_counter, sleep
from typing import Any
from uuid import uuid4

import torch

from ecotone.config import ECConfig
from ecotone.connectors.copy.cuda import CudaCopyEngine
from ecotone.connectors.copy.engine import CopyDone, CopyJob, Direction
from ecotone.connectors.factory import create_factory
from ecotone.node.keys import Namespace
from ecotone.protocol.connector import (
    CacheLookup,
    ECItem,
    ECSchedulerContext,
    ECWorkerContext,
    EncoderSpec,
    Participant,
)
from ecotone.protocol.outputs import ECConnectorOutput

DEVICE = "cuda:0"
DEADLINE_S = 30.0


def _wait(engine: CudaCopyEngine, count: int) -> list[CopyDone]:
    done: list[CopyDone] = []
    end = monotonic() + DEADLINE_S
    while len(done) < count:
        if monotonic() > end:
            raise TimeoutError(f"{count - len(done)} copies did not end in {DEADLINE_S} s")
        done += engine.poll()
        sleep(0.0002)
    return done


def _random_bytes(count: int, device: str) -> torch.Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8, device=device)


def _host(size: int) -> tuple[torch.Tensor, memoryview]:
    host = torch.zeros(size, dtype=torch.uint8)
    return host, memoryview(host.numpy())


def copies_are_exact_in_pieces() -> dict[str, Any]:
    """Save and load of several pieces, both ways, bit for bit; the memory between the pieces stays untouched."""
    host, memory = _host(1 << 24)
    engine = CudaCopyEngine(DEVICE, host)
    try:
        for sizes in ([4096], [64, 1 << 20, 128], [1 << 22]):
            host.zero_()
            rows = _random_bytes(sum(sizes), DEVICE)
            pieces, offset = [], 64
            for size in sizes:
                pieces.append(memory[offset : offset + size])
                offset += size + 64
            engine.submit(CopyJob(1, Direction.SAVE, pieces, rows))
            assert [done.error for done in _wait(engine, 1)] == [None]
            assert b"".join(pieces) == rows.cpu().numpy().tobytes()
            assert host.count_nonzero() == rows.count_nonzero()
            job = CopyJob(2, Direction.LOAD, pieces, torch.zeros_like(rows))
            engine.submit(job)
            engine.fence(job)
            assert torch.equal(job.rows, rows)
            assert [done.error for done in _wait(engine, 1)] == [None]
    finally:
        engine.close()
    return {}


def completion_is_an_event() -> dict[str, Any]:
    """A copy behind busy compute is not reported before the compute and it have ended."""
    host, memory = _host(1 << 20)
    engine = CudaCopyEngine(DEVICE, host)
    try:
        matrix = torch.randn(4096, 4096, device=DEVICE)
        torch.cuda.synchronize()
        start = perf_counter()
        product = matrix
        for _ in range(200):
            product = product @ matrix
            product = product / product.abs().max()
        rows = product.reshape(-1)[: 1 << 18]
        engine.submit(CopyJob(1, Direction.SAVE, [memory], rows))
        submitted = perf_counter() - start
        early = engine.poll()
        compute = torch.cuda.Event()
        compute.record()
        was_busy = not compute.query()
        _wait(engine, 1)
        ended = perf_counter() - start
        assert compute.query()
        assert not (was_busy and early)
        assert torch.equal(host, rows.view(torch.uint8).cpu())
    finally:
        engine.close()
    return {"compute_was_busy": was_busy, "submit_returned_s": submitted, "reported_s": ended}


def a_fence_holds_the_compute_stream() -> dict[str, Any]:
    """Compute that is enqueued after a fence reads what the load brought, many times over."""
    size = 1 << 26
    host, memory = _host(size)
    engine = CudaCopyEngine(DEVICE, host)
    try:
        for value in range(1, 21):
            host.fill_(value)
            job = CopyJob(value, Direction.LOAD, [memory], torch.zeros(size, dtype=torch.uint8, device=DEVICE))
            engine.submit(job)
            engine.fence(job)
            total = job.rows.sum(dtype=torch.int64)  # on the compute stream
            assert int(total) == value * size
            _wait(engine, 1)
    finally:
        engine.close()
    return {}


def bandwidth() -> dict[str, Any]:
    """GB/s to and from page-locked region memory, by the device's own clock."""
    size = 1 << 27
    host, memory = _host(size)
    engine = CudaCopyEngine(DEVICE, host)
    rows = _random_bytes(size, DEVICE)
    figures = {}
    try:
        for direction in Direction:
            seconds = []
            for i in range(10):
                engine.submit(CopyJob(i, direction, [memory], rows))
                seconds.append(_wait(engine, 1)[0].seconds)
            figures[f"{direction.value}_GBps"] = size / sorted(seconds)[5] / 1e9
    finally:
        engine.close()
    return figures


def the_whole_connector() -> dict[str, Any]:
    """Both halves over an embedded node, the encoder cache on the device: saved once, loaded bit for bit."""
    spec = EncoderSpec(hidden_size=4096, levels=0, dtype="bfloat16")
    namespace = Namespace(model="gpu", revision="", dtype=spec.dtype, width=spec.width, processor="")
    config = ECConfig(options={"memory": "64MiB"})
    factory, engine_id, woken = create_factory(config), uuid4().hex, Event()
    common: dict[str, Any] = {
        "engine_id": engine_id,
        "role": config.role,
        "options": config.options,
        "encoder": spec,
    }
    scheduler = factory.scheduler_half(
        ECSchedulerContext(participants=(Participant(0, "here"),), clock=monotonic, **common)
    )
    worker = factory.worker_half(ECWorkerContext(rank=0, epoch=1, device=DEVICE, wakeup=woken.set, **common))
    item = ECItem(namespace.key("item"), 576)
    rows = torch.randn(576, 4096, device=DEVICE).to(torch.bfloat16)
    cache: dict[str, torch.Tensor] = {}

    def step(ask: bool, encode: bool = False) -> CacheLookup | None:
        said = scheduler.lookup("r", item) if ask else None
        if ask:
            scheduler.update_state_after_alloc("r", item)
        meta = scheduler.build_connector_meta()
        if meta is not None:
            worker.bind_connector_metadata(meta)
            worker.start_load_caches(cache)
            worker.wait_for_loads(cache)
            if encode:
                cache[item.key] = rows
                worker.save_caches(cache, item.key)
        report = worker.build_connector_worker_meta()
        worker.clear_connector_metadata()
        scheduler.update_connector_output(ECConnectorOutput(ec_connector_worker_meta=report))
        return said

    try:
        assert step(True, encode=True) is CacheLookup.MISS
        end = monotonic() + DEADLINE_S
        while scheduler.has_pending_work() and monotonic() < end:
            step(False)
        assert not scheduler.has_pending_work()
        cache.clear()
        assert step(True) is CacheLookup.READY
        assert torch.equal(cache[item.key].view(torch.int16), rows.view(torch.int16))
        while scheduler.has_pending_work() and monotonic() < end:
            step(False)
        assert scheduler.statistics()["node.pins"] == 0
    finally:
        worker.shutdown()
        scheduler.shutdown()
    return {}


CHECKS: tuple[Callable[[], dict[str, Any]], ...] = (
    copies_are_exact_in_pieces,
    completion_is_an_event,
    a_fence_holds_the_compute_stream,
    bandwidth,
    the_whole_connector,
)


def main() -> int:
    """0 when every check passed or none could be run, 1 otherwise."""
    if not torch.cuda.is_available():
        print("NOT RUN: there is no CUDA device here; nothing about one was checked.")
        return 0
    results: dict[str, Any] = {"device": torch.cuda.get_device_name(DEVICE), "torch": torch.__version__}
    failed = 0
    for check in CHECKS:
        start = perf_counter()
        try:
            figures = check()
            results[check.__name__] = {"passed": True, "seconds": perf_counter() - start, **figures}
        except Exception as error:  # the rim: whatever a check raises is its result
            failed += 1
            results[check.__name__] = {"passed": False, "error": f"{type(error).__name__}: {error}"}
    print(json.dumps(results, indent=2))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
