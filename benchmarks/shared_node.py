"""The shared node against the embedded one and against a plain copy, and how many lookups it answers.

A hit is asked for and given back, and its bytes are a view. Clients are processes of their own, each with one
batch in flight; on a machine with fewer cores than clients they share what there is.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

from benchmarks.harness import interleave, ratio, timed
from ecotone.connectors.factory import EcotoneConnectorFactory
from ecotone.node import (
    Acquire,
    AnyAnswer,
    AnyOp,
    Commit,
    EmbeddedNode,
    Layout,
    Lookup,
    NodeExchange,
    Ready,
    Region,
    Release,
    Ticket,
)
from ecotone.node.server.client import SharedNodeExchange
from ecotone.node.server.messages import Hello
from ecotone.node.server.tool import NodeTool
from ecotone.node.server.worker import WorkerNode
from ecotone.protocol.connector import CacheLookup, ECItem, ECSchedulerContext, EncoderSpec, Participant

SIZES = {"64 KiB": 2**16, "4 MiB": 2**22, "64 MiB": 2**26}
BATCHES, CLIENTS = (1, 16, 256), (1, 4, 16)
PREPARED = (1, 8, 64)
_MEMORY = 2**28


def run(quick: bool) -> dict[str, Any]:
    """Rows of hits by size, of lookups per second by clients and batch, and of questions to a hosted node."""
    with tempfile.TemporaryDirectory() as folder, running_node(Path(folder) / "node.sock", _MEMORY) as path:
        rows = {**_hits(path, 40 if quick else 200), **_lookups(path, 0.5 if quick else 2.0)}
    return {**rows, **_prepared(200 if quick else 2000)}


@contextmanager
def running_node(path: Path, memory: int) -> Iterator[Path]:
    """A node in a process of its own that serves at ``path``."""
    command = [sys.executable, "-m", "ecotone", "node", "--socket", str(path), "--memory", str(memory)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        while not path.exists():
            if process.poll() is not None:
                raise RuntimeError("the node did not start")
            time.sleep(0.01)
        try:
            yield path
        finally:
            process.terminate()


def _key(name: str) -> str:
    return f"{0:032x}:{sha256(name.encode()).hexdigest()}"


def _ask(exchange: NodeExchange, *ops: AnyOp) -> list[AnyAnswer]:
    exchange.submit(ops)
    exchange.flush()
    answers: list[AnyAnswer] = []
    while True:
        answers += exchange.poll()
        if len(answers) == len(ops):
            break
        os.sched_yield()  # an engine computes meanwhile; it does not take the node's core
    return answers


def _hits(path: Path, rounds: int) -> dict[str, dict[str, float]]:
    rows = {}
    with ExitStack() as stack:
        shared = SharedNodeExchange(path, Hello("bench", "scheduler", ranks=(0,)))
        stack.callback(shared.close)
        shared.wait_until_connected(10.0)
        worker = WorkerNode(path, Hello("bench", "worker", access="write"))
        stack.callback(worker.close)
        region = worker.attach(writable=True, prefault=True)
        node = stack.enter_context(EmbeddedNode(_MEMORY, f"bench-{os.getpid()}"))
        embedded = node.connect("bench")
        for name, size in SIZES.items():
            layout = Layout("uint8", (size,))
            source, target = bytearray(os.urandom(size)), bytearray(size)
            _write(shared, region, name, layout, source)
            _write(embedded, node.region, name, layout, source)
            tasks = {
                "shared": timed(lambda n=name, at=layout: _hit(shared, region, n, at)),  # type: ignore[misc]
                "embedded": timed(lambda n=name, at=layout: _hit(embedded, node.region, n, at)),  # type: ignore[misc]
                "memcpy": timed(lambda s=source, t=target: t.__setitem__(slice(None), s)),  # type: ignore[misc]
            }
            measured = interleave(tasks, rounds)
            rows[f"hit, {name}"] = {
                **{f"{kind}_us": round(summary.median * 1e6, 1) for kind, summary in measured.items()},
                "shared_to_embedded": ratio(measured["shared"], measured["embedded"]),
                "shared_to_memcpy": ratio(measured["shared"], measured["memcpy"]),
            }
    return rows


def _write(exchange: NodeExchange, region: Region, name: str, layout: Layout, source: bytearray) -> None:
    [ticket] = _ask(exchange, Acquire(1, _key(name), layout))
    if isinstance(ticket, Ticket):
        position = 0
        for extent in ticket.extents:
            region.view(extent, writable=True)[:] = source[position : position + extent.length]
            position += extent.length
        _ask(exchange, Commit(2, ticket.transfer_id))


def _hit(exchange: NodeExchange, region: Region, name: str, layout: Layout) -> None:
    [ready] = _ask(exchange, Acquire(1, _key(name), layout))
    if not isinstance(ready, Ready):
        raise TypeError(f"{name} is no hit: {ready}")
    views = [region.view(extent) for extent in ready.extents]
    _ask(exchange, Release(2, ready.pin_id))
    views.clear()


def _prepared(rounds: int) -> dict[str, dict[str, float]]:
    """What a scheduling pass waits for the node inside its own process, by how many items it asks about."""
    context = ECSchedulerContext(
        engine_id=f"bench-{os.getpid()}",
        role="ec_both",
        options={"memory": _MEMORY, "prefault": False},
        participants=(Participant(0, "host"),),
        encoder=EncoderSpec(hidden_size=64, levels=0, dtype="bfloat16"),
        clock=time.monotonic,
    )
    half = EcotoneConnectorFactory(hosted=True).scheduler_half(context)
    rows = {}
    for count in PREPARED:
        items = [ECItem(_key(f"prepared-{number}"), 64) for number in range(count)]
        seconds = []
        for _ in range(rounds):
            began = time.perf_counter()
            half.prepare(items, 1.0)
            seconds.append(time.perf_counter() - began)
            if any(half.lookup("r", item) is not CacheLookup.MISS for item in items):
                raise RuntimeError("a prepared answer was not there")
            half.build_connector_meta()  # nothing runs: every ticket goes back
        seconds.sort()
        rows[f"prepare, hosted node, {count} item{'s' if count > 1 else ''}"] = {
            "median_us": round(seconds[rounds // 2] * 1e6, 1),
            "p99_us": round(seconds[rounds * 99 // 100] * 1e6, 1),
        }
    half.shutdown()
    return rows


_CLIENT = """
import sys, time
from pathlib import Path
from benchmarks.shared_node import ask_for
print(ask_for(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])))
"""


def ask_for(path: Path, batch: int, seconds: float) -> int:
    """What one client process does: lookups in batches, for so long; how many were answered."""
    exchange = SharedNodeExchange(path, Hello(f"client-{os.getpid()}", "scheduler"))
    exchange.wait_until_connected(30.0)
    ops = tuple(Lookup(seq, _key(f"none-{seq}"), Layout("uint8", (64,))) for seq in range(batch))
    sys.stdin.readline()  # all begin together
    count, end = 0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        count += len(_ask(exchange, *ops))
    exchange.close()
    return count


def _lookups(path: Path, seconds: float) -> dict[str, dict[str, float]]:
    rows: dict[str, dict[str, float]] = {}
    for clients in CLIENTS:
        row: dict[str, float] = {}
        for batch in BATCHES:
            command = [sys.executable, "-c", _CLIENT, str(path), str(batch), str(seconds)]
            processes = [
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
                for _ in range(clients)
            ]
            with NodeTool(path) as tool:
                while tool.describe().node["schedulers"] < clients:
                    time.sleep(0.01)
            for process in processes:
                if process.stdin is not None:
                    process.stdin.write("\n")
                    process.stdin.flush()
            answered = sum(int(process.communicate()[0]) for process in processes)
            row[f"batch_{batch}_per_s"] = round(answered / seconds)
        rows[f"lookups, {clients} client{'s' if clients > 1 else ''}"] = row
    return rows
