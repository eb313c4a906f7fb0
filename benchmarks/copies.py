"""Saves and loads of the worker half, against a plain copy of the same bytes in the same run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from threading import Semaphore
from time import perf_counter
from typing import Any

import torch

from benchmarks.harness import Summary, interleave, ratio
from ecotone.connectors.copy.thread import ThreadCopyEngine
from ecotone.connectors.messages import EcotoneStepMetadata, Order, ReportKind
from ecotone.connectors.worker import EcotoneWorkerConnector
from ecotone.node.exchange import Extent, Layout
from ecotone.node.region import Region
from ecotone.protocol.connector import ECWorkerContext, EncoderSpec

SHAPES = ((256, 1024), (576, 4096), (16384, 4096))
BATCH = {(256, 1024): 8, (576, 4096): 8, (16384, 4096): 2}
"""Items that one step saves, for the bandwidth: an encoder runs on several."""


class Rank:
    """A worker half attached to a region that holds ``count`` entries of one layout."""

    def __init__(self, region: Region, layout: Layout, count: int, *, views: bool) -> None:
        self._done = Semaphore(0)
        context = ECWorkerContext(
            engine_id="benchmark",
            role="ec_both",
            options={},
            rank=0,
            epoch=0,
            encoder=EncoderSpec(hidden_size=layout.shape[1], levels=0, dtype=layout.dtype),
            device="cpu",
            wakeup=self._done.release,
        )
        self.half = EcotoneWorkerConnector(
            context, views, False, partial(_attach, region), lambda _: ThreadCopyEngine(context.wakeup)
        )
        own = region.descriptor
        self._layout = layout
        self._places = [
            (str(i), (Extent(own.region_id, own.generation, i * layout.nbytes, layout.nbytes),))
            for i in range(count)
        ]
        self._transfer_id = 0
        self._cache: dict[str, torch.Tensor] = {}

    def _orders(self, count: int) -> tuple[Order, ...]:
        self._transfer_id += count
        numbers = range(self._transfer_id - count, self._transfer_id)
        return tuple(
            Order(key, n, self._layout, extents)
            for n, (key, extents) in zip(numbers, self._places[:count], strict=True)
        )

    def save(self, rows: list[torch.Tensor]) -> float:
        """Seconds from the first hook's call until the reports of all saves are there."""
        self._cache.update((key, tensor) for (key, _), tensor in zip(self._places, rows, strict=False))
        self.half.bind_connector_metadata(EcotoneStepMetadata((0,), (), self._orders(len(rows))))
        start = perf_counter()
        for key, _ in self._places[: len(rows)]:
            self.half.save_caches(self._cache, key)
        for _ in rows:
            self._done.acquire()
        self._expect(ReportKind.SAVED, len(rows))
        return perf_counter() - start

    def load(self) -> float:
        """Seconds until the rows of one entry are in the encoder cache."""
        self._cache.clear()
        self.half.build_connector_worker_meta()
        self.half.bind_connector_metadata(EcotoneStepMetadata((0,), self._orders(1), ()))
        start = perf_counter()
        self.half.start_load_caches(self._cache)
        self.half.wait_for_loads(self._cache)
        seconds = perf_counter() - start
        self._expect(ReportKind.LOADED, 1)
        return seconds

    def loaded(self) -> torch.Tensor:
        """The rows that ``load`` has brought."""
        return self._cache[self._places[0][0]]

    def _expect(self, kind: ReportKind, count: int) -> None:
        meta = self.half.build_connector_worker_meta()
        if meta is None or sum(report.kind is kind for report in meta.reports) != count:
            raise RuntimeError(f"expected {count} reports {kind}, got {meta}")

    def close(self) -> None:
        self._cache.clear()
        self.half.shutdown()


def _attach(region: Region, writable: bool) -> Region:
    return Region.attach(region.open_descriptor(writable=writable), region.descriptor, prefault=True)


def _memcpy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> float:
    start = perf_counter()
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)
    return perf_counter() - start


def _measure(shape: tuple[int, int], rounds: int) -> dict[str, float]:
    layout, count = Layout("bfloat16", shape), BATCH[shape]
    rows = [torch.randn(shape).to(torch.bfloat16) for _ in range(count)]
    targets = [torch.zeros_like(tensor) for tensor in rows]
    region = Region.create(count * layout.nbytes, "benchmark", prefault=True)
    copying, viewing = (Rank(region, layout, count, views=views) for views in (False, True))
    tasks: dict[str, Callable[[], float]] = {
        "memcpy": partial(_memcpy, targets[:1], rows[:1]),
        "save": partial(copying.save, rows[:1]),
        "load_copy": copying.load,
        "load_view_cold": viewing.load,
        "memcpy_batch": partial(_memcpy, targets, rows),
        "save_batch": partial(copying.save, rows),
    }
    found = interleave(tasks, rounds)
    # The copies above also empty the processor's caches, which a view's few instructions then wait for.
    found |= interleave({"load_view": viewing.load}, 50)
    for rank in (copying, viewing):
        rank.close()
    region.close()
    return _figures(layout.nbytes, count, found)


def _figures(nbytes: int, count: int, found: dict[str, Summary]) -> dict[str, float]:
    """One item's times in us, bandwidths of a step with ``count`` items in GB/s, and speeds with memcpy's as 1."""
    bandwidth = {name: count * nbytes / found[f"{name}_batch"].median / 1e9 for name in ("memcpy", "save")}
    return {
        "bytes": nbytes,
        **{f"{name}_us": round(s.median * 1e6, 1) for name, s in found.items() if not name.endswith("_batch")},
        **{f"{name}_GBps": round(value, 2) for name, value in bandwidth.items()},
        "save_bandwidth_of_memcpy": ratio(found["memcpy_batch"], found["save_batch"]),
        "one_save_of_memcpy": ratio(found["memcpy"], found["save"]),
        "load_copy_of_memcpy": ratio(found["memcpy"], found["load_copy"]),
    }


def run(quick: bool) -> dict[str, Any]:
    """By shape: medians and ratios. ``quick`` takes fewer rounds.

    The plain copy is made by one thread, as a memcpy is, and as the copier's is.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    out: dict[str, Any] = {}
    for shape in SHAPES:
        rounds = (1 << 25 if quick else 1 << 28) // (shape[0] * shape[1])
        out[str(list(shape))] = _measure(shape, min(max(5, rounds), 200))
    torch.set_num_threads(threads)
    return out
