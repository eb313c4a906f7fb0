"""The disk tier: loads against a plain read of the file, writes against a plain write, digests, and warm starts.

Files are in the page cache: what is compared is the work of the processor. ``x`` is how many times the plain one
of the same bytes, measured in turns. The files lie under ``$TMPDIR`` and are removed.
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from hashlib import blake2b, sha256
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks.harness import Summary, interleave, ratio, timed
from ecotone.node import Index, Layout, Namespace, Region, make_policy
from ecotone.node.disk import DiskConfig, open_disk_tier
from ecotone.node.disk.files import write_all
from ecotone.node.disk.format import relative_path
from ecotone.node.disk.jobs import Read, Write
from ecotone.node.disk.store import DiskStore
from ecotone.node.tier import pump_until

_NS = Namespace(model="m", revision="r", dtype="bfloat16", width=4096, processor="p")
_SHAPES = ((16, 4096), (576, 4096), (4096, 4096))
_WARM, _WARM_QUICK = 100_000, 10_000
_FILES = 8  # that are written and read in turns


def run(quick: bool) -> dict[str, Any]:
    """A row for each size, each digest, and the warm start."""
    rounds = 10 if quick else 40
    with tempfile.TemporaryDirectory(prefix="ecotone-bench-") as folder:
        rows = {}
        for number, shape in enumerate(_SHAPES):
            rows.update(_file_rows(Path(folder) / str(number), Layout("bfloat16", shape), rounds))
        rows.update(_digest_rows(rounds))
        rows.update(_warm_row(Path(folder) / "warm", _WARM_QUICK if quick else _WARM))
    return rows


def _file_rows(root: Path, layout: Layout, rounds: int) -> dict[str, dict[str, Any]]:
    store = DiskStore(root)
    store.open()
    keys = [_NS.key(str(number)) for number in range(_FILES)]
    data = memoryview(bytearray(random.Random(1).randbytes(layout.nbytes)))
    for key in keys:
        store.write(Write(key, layout, [data]))

    def each(act: Callable[[str], object]) -> Callable[[], float]:
        return timed(lambda: [act(key) for key in keys])

    measured = interleave(
        {
            "load": each(partial(_load, store, layout, data)),
            "plain read": each(lambda key: _plain_read(root / "entries" / relative_path(key), data)),
            "write": each(lambda key: store.write(Write(key, layout, [data]))),
            "plain write": each(lambda _key: _plain_write(root / "plain", data)),
        },
        rounds,
    )
    store.close()
    name = "x".join(map(str, layout.shape))
    return {
        f"{what} {name}": _row(measured[what], measured[f"plain {plain}"], layout.nbytes * _FILES)
        for what, plain in (("load", "read"), ("write", "write"))
    }


def _row(measured: Summary, plain: Summary, nbytes: int) -> dict[str, Any]:
    return {
        "ms": round(measured.median / _FILES * 1e3, 3),
        "GB_per_s": round(nbytes / measured.median / 1e9, 2),
        "plain_GB_per_s": round(nbytes / plain.median / 1e9, 2),
        "x": ratio(measured, plain),
    }


def _load(store: DiskStore, layout: Layout, into: memoryview, key: str) -> None:
    if (problem := store.read(Read(0, key, layout, [into]))) is not None:
        raise RuntimeError(f"a load ended with {problem!r}")


def _plain_read(path: Path, into: memoryview) -> None:
    with path.open("rb", buffering=0) as file:
        file.seek(-len(into), os.SEEK_END)
        file.readinto(into)


def _plain_write(path: Path, data: memoryview) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        write_all(fd, data, 0)
    finally:
        os.close(fd)


def _digest_rows(rounds: int) -> dict[str, dict[str, Any]]:
    data = random.Random(2).randbytes(1 << 20)
    measured = interleave(
        {
            "sha256": timed(lambda: sha256(data).digest()),
            "blake2b": timed(lambda: blake2b(data).digest()),
        },
        rounds,
    )
    return {
        f"digest {name}": {"ms": round(took.median * 1e3, 3), "GB_per_s": round(len(data) / took.median / 1e9, 2)}
        for name, took in measured.items()
    }


def _warm_row(root: Path, entries: int) -> dict[str, dict[str, Any]]:
    """How long until all files of an earlier life are known."""
    layout = Layout("uint8", (64,))
    store = DiskStore(root)
    store.open()
    data = memoryview(bytes(64))
    began = perf_counter()
    for number in range(entries):
        store.write(Write(_NS.key(str(number)), layout, [data]))
    wrote = perf_counter() - began
    store.close()
    took = []
    for _ in range(3):
        region = Region.create(1 << 20, "bench", prefault=False)
        own = region.descriptor
        index = Index(own.size, own.region_id, own.generation, make_policy("lru"))
        began = perf_counter()
        tier = open_disk_tier(index, region, DiskConfig(root=str(root), budget=1 << 40), lambda: None)
        index.tier = tier
        if not pump_until(tier, lambda tier: tier.is_adopted, nullcontext(), time.monotonic, 600):
            raise RuntimeError("the directory was not gone through")
        took.append(perf_counter() - began)
        if tier.statistics()["disk_files"] != entries:
            raise RuntimeError("not every file was found")
        tier.close()
        region.close()
    return {
        f"warm start, {entries} entries": {
            "ms": round(sorted(took)[1] * 1e3, 1),
            "entries_per_s": round(entries / sorted(took)[1]),
            "written_per_s": round(entries / wrote),
        }
    }
