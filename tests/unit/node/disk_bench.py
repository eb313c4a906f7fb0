"""A region, an index and a disk tier for tests, and entries whose bytes are known from their keys."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

from ecotone.node import (
    Acquire,
    AnyAnswer,
    AnyOp,
    Commit,
    Forget,
    ForgetAll,
    Index,
    Layout,
    Namespace,
    Pending,
    Ready,
    Region,
    Release,
    Ticket,
    make_policy,
)
from ecotone.node.disk import DiskConfig, open_disk_tier
from ecotone.node.disk.format import relative_path
from ecotone.node.tier import pump_until

NS = Namespace(model="m", revision="r", dtype="bfloat16", width=64, processor="p")
LAYOUT = Layout("bfloat16", (8, 64))
MIB = 1 << 20


def content(key: str, layout: Layout = LAYOUT, version: int = 0) -> bytes:
    return random.Random(f"{key} {version}").randbytes(layout.nbytes)


class Bench:
    """One life of a node with a disk, with its thread; ``ask`` waits out PENDING."""

    def __init__(self, root: Path, memory: int = MIB, budget: int = 64 * MIB, fsync: str = "none") -> None:
        self.root = root
        self.lock = threading.Lock()
        self.region = Region.create(memory, "bench", prefault=False)
        own = self.region.descriptor
        self.index = Index(memory, own.region_id, own.generation, make_policy("lru"))
        config = DiskConfig(root=str(root), budget=budget, fsync=fsync)  # type: ignore[arg-type]
        self.tier = open_disk_tier(self.index, self.region, config, self._pump)
        self.index.tier = self.tier
        assert pump_until(self.tier, lambda tier: tier.is_adopted, self.lock, time.monotonic, 60)

    def _pump(self) -> None:
        with self.lock:
            self.tier.pump(time.monotonic())

    def apply(self, *ops: AnyOp) -> list[AnyAnswer]:
        with self.lock:
            answers = self.index.apply("client", ops, time.monotonic())
            self.tier.pump(time.monotonic())
        return answers

    def ask(self, key: str, layout: Layout = LAYOUT) -> AnyAnswer:
        deadline = time.monotonic() + 60
        while True:
            (answer,) = self.apply(Acquire(0, key, layout))
            if not isinstance(answer, Pending):
                return answer
            assert time.monotonic() < deadline
            self.tier.wait(0.05)

    def store(self, key: str, layout: Layout = LAYOUT, version: int = 0) -> None:
        ticket = self.ask(key, layout)
        assert isinstance(ticket, Ticket), ticket
        data = content(key, layout, version)
        for extent in ticket.extents:
            self.region.view(extent, writable=True)[:], data = data[: extent.length], data[extent.length :]
        self.apply(Commit(0, ticket.transfer_id))

    def load(self, key: str, layout: Layout = LAYOUT) -> bytes | None:
        """The bytes of an entry; ``None`` where there is none, and the ticket was given back."""
        answer = self.ask(key, layout)
        if isinstance(answer, Ready):
            data = b"".join(bytes(self.region.view(extent)) for extent in answer.extents)
            self.apply(Release(0, answer.pin_id))
            return data
        assert isinstance(answer, Ticket), answer
        self.index.close_client("client")
        return None

    def forget(self, key: str) -> None:
        self.apply(Forget(0, key))

    def reset(self, namespace: Namespace = NS) -> None:
        self.apply(ForgetAll(0, namespace.digest))
        assert self.tier.wait_durable(self.tier.barrier(), 60)

    def flush(self) -> None:
        assert pump_until(self.tier, lambda tier: tier.ledger.is_settled, self.lock, time.monotonic, 60)
        self.check()

    def until(self, name: str, value: float) -> None:
        """Wait until a statistic has at least a value."""
        assert pump_until(
            self.tier, lambda tier: tier.statistics()[f"disk_{name}"] >= value, self.lock, time.monotonic, 60
        ), self.tier.statistics()

    def check(self) -> None:
        with self.lock:
            self.index.check_integrity()
            self.tier.check_integrity()

    def __getitem__(self, name: str) -> float:
        with self.lock:
            return self.tier.statistics()[f"disk_{name}"]

    def path(self, key: str) -> Path:
        return self.root / "entries" / relative_path(key)

    def close(self) -> None:
        self.tier.close()
        self.tier.let_go(time.monotonic())
        self.check()
        self.region.close()
