"""A shared node with a disk: what outlives it, and what must not."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from server_helpers import NAMESPACE, PATIENCE_S, Running, ask, key, wait_for

from ecotone.node import Acquire, Commit, Done, ForgetAll, Layout, Lookup, Pending, Ready, Ticket
from ecotone.node.disk import DiskConfig
from ecotone.node.disk.store import DiskStore
from ecotone.node.server.client import SharedNodeExchange
from ecotone.node.server.messages import Hello
from ecotone.node.server.tool import NodeTool
from ecotone.node.server.worker import WorkerNode

LAYOUT = Layout("uint8", (5000,))
OTHER, THIRD = "1" * 32, "2" * 32
NAMES = ("a", "b", "c", "d")


def contents(name: str) -> bytes:
    return (name.encode() * 5000)[:5000]


class Client:
    """An engine's two ends: its scheduler asks, its worker touches the memory."""

    def __init__(self, path: Path) -> None:
        hello = Hello("engine", "scheduler", ranks=(0,))
        self.exchange = SharedNodeExchange(path, hello, answer_timeout_s=PATIENCE_S)
        self.exchange.wait_until_connected(PATIENCE_S)
        self.worker = WorkerNode(path, Hello("engine", "worker", access="write", rank=0), PATIENCE_S)

    def ask(self, name: str, namespace: str = NAMESPACE) -> Ready | Ticket:
        """The answer that is neither Pending nor, between two nodes, Unreachable."""

        def answer() -> object:
            [found] = ask(self.exchange, Acquire(1, key(name, namespace), LAYOUT))
            return found if isinstance(found, Ready | Ticket) else None

        return wait_for(answer)  # type: ignore[return-value]

    def store(self, name: str, namespace: str = NAMESPACE) -> None:
        ticket = self.ask(name, namespace)
        assert isinstance(ticket, Ticket)
        region = self.worker.attach(writable=True, prefault=False)
        region.view(ticket.extents[0], writable=True)[:] = contents(name)
        assert ask(self.exchange, Commit(2, ticket.transfer_id)) == [Done(2, effect=True)]

    def load(self, name: str, namespace: str = NAMESPACE) -> bytes | None:
        """The bytes of a hit; ``None`` for a miss."""
        found = self.ask(name, namespace)
        if isinstance(found, Ticket):
            return None
        return bytes(self.worker.attach(writable=True, prefault=False).view(found.extents[0]))

    def close(self) -> None:
        self.worker.close()
        self.exchange.close()


class Process:
    """``ecotone node --disk`` in a process of its own."""

    def __init__(self, path: Path) -> None:
        self.path = path
        command = [sys.executable, "-m", "ecotone", "node", "--socket", str(path), "--memory", "64KiB"]
        command += ["--no-prefault", "--disk", str(path.parent / "disk"), "--disk-size", "1MiB"]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        assert self.process.stderr.readline().startswith("serving 65,536 bytes at")

    def end(self, number: signal.Signals) -> None:
        if self.process.poll() is None:
            self.process.send_signal(number)
        self.process.communicate(timeout=PATIENCE_S)
        assert self.process.returncode == (0 if number == signal.SIGTERM else -number)

    def counts(self, name: str) -> float:
        with NodeTool(self.path) as tool:
            return tool.describe().tenants[""][name]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "node.sock"


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL], ids=["ended", "killed"])
def test_a_restarted_node_serves_from_its_disk_what_was_not_reset(path: Path, end: signal.Signals) -> None:
    """The client stays: it finds the next node by itself. One of the files is damaged between the two lives."""
    node = Process(path)
    client = Client(path)
    try:
        for name in NAMES:
            client.store(name)
        client.store("a", OTHER)
        if end == signal.SIGKILL:  # an orderly end writes out what is left
            wait_for(lambda: node.counts("disk_writes") == len(NAMES) + 1)
        assert ask(client.exchange, ForgetAll(5, OTHER)) == [Done(5, effect=True)]
        node.end(end)  # at once: the answer said that it is durable
        [damaged] = (path.parent / "disk").rglob(f"{key('d')[33:]}.safetensors")
        damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
        node = Process(path)
        assert [client.load(name) for name in NAMES] == [*map(contents, "abc"), None]
        assert client.load("a", OTHER) is None
        assert (node.counts("disk_adopted"), node.counts("disk_reads"), node.counts("promotions")) == (4, 3, 4)
        assert node.counts("disk_quarantined") == 1
        node.end(signal.SIGTERM)
    finally:
        client.close()
        if node.process.poll() is None:
            node.end(signal.SIGKILL)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Slow:
    """A disk that keeps every reset until it is let go."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        self.done: list[str] = []
        drop = DiskStore.drop

        def late(store: DiskStore, namespace: str) -> None:
            assert self.go.wait(PATIENCE_S)
            drop(store, namespace)
            self.done.append(namespace)

        patch.setattr(DiskStore, "drop", late)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    made = Slow(monkeypatch)
    yield made
    made.go.set()


@pytest.fixture
def node(path: Path, clock: Clock, slow: Slow) -> Iterator[Running]:
    disk = DiskConfig(root=str(path.parent / "disk"), budget=2**20)
    running = Running(path, 2**16, disk=disk, clock=clock)
    yield running
    slow.go.set()
    running.stop()


@pytest.fixture
def client(node: Running) -> Iterator[Client]:
    made = Client(node.path)
    yield made
    made.close()


def test_a_reset_is_answered_when_it_is_durable_and_nobody_else_waits(
    node: Running, client: Client, slow: Slow
) -> None:
    other = node.scheduler("other")
    client.store("a")
    wait_for(lambda: node.statistics()["disk_writes"])
    client.exchange.submit([ForgetAll(5, NAMESPACE), Lookup(6, key("a"), LAYOUT)])
    client.exchange.flush()
    client.exchange.submit([Acquire(7, key("b"), LAYOUT)])
    client.exchange.flush()
    wait_for(lambda: node.statistics()["tickets"] == 2)  # all of it was carried out ...
    for _ in range(3):
        [ticket] = ask(other, Acquire(1, key("b"), LAYOUT))
        assert isinstance(ticket, Pending)
        assert client.exchange.poll() == []  # ... and is answered in its order, later
    slow.go.set()
    answers: list[object] = []
    wait_for(lambda: len(answers) == 3, lambda: answers.extend(client.exchange.poll()))
    assert slow.done == [NAMESPACE]
    assert [getattr(answer, "seq", None) for answer in answers] == [5, 6, 7]
    assert answers[0] == Done(5, effect=True)
    other.close()


def test_a_reset_is_answered_in_the_end_though_the_disk_hangs(
    node: Running, client: Client, slow: Slow, clock: Clock
) -> None:
    client.exchange.submit([ForgetAll(5, NAMESPACE)])
    client.exchange.flush()
    wait_for(lambda: node.statistics()["disk_drops_pending"])
    assert client.exchange.poll() == []
    clock.now += 2.5
    node.statistics()  # the node looks at its clock when somebody speaks
    assert wait_for(client.exchange.poll) == [Done(5, effect=False)]
    assert slow.done == []


def test_clearing_reaches_what_is_on_the_disk_alone_and_is_durable(
    node: Running, client: Client, slow: Slow
) -> None:
    slow.go.set()
    for name in NAMES:
        client.store(name)
    client.store("x", OTHER)
    client.store("x", THIRD)
    wait_for(lambda: node.statistics()["disk_writes"] == 6)
    with NodeTool(node.path) as tool:
        assert tool.evict(2**16).entries == 6
        one = tool.evict(key=key("a"))
        assert (one.entries, one.files) == (0, 1)
        only = tool.clear(NAMESPACE)
        assert (only.entries, only.nbytes, only.files) == (0, 0, 3)
        assert only.file_bytes > 3 * 5000
        assert slow.done == [NAMESPACE]
        assert client.load("x", OTHER) == contents("x")
        both = tool.clear()
        # Memory is given in units of 64 bytes.
        assert (both.entries, both.nbytes, both.files, both.problem) == (1, 5056, 2, "")
        assert slow.done == [NAMESPACE, OTHER, THIRD]
    assert [client.load("x", namespace) for namespace in (OTHER, THIRD)] == [None, None]
    assert [client.load(name) for name in NAMES] == [None] * 4


def test_clearing_waits_for_the_disk(node: Running, client: Client, slow: Slow) -> None:
    client.store("a")
    wait_for(lambda: node.statistics()["disk_writes"])
    outcomes: list[object] = []
    with NodeTool(node.path, timeout_s=PATIENCE_S) as tool:
        asking = threading.Thread(target=lambda: outcomes.append(tool.clear()))
        asking.start()
        wait_for(lambda: node.statistics()["disk_drops_pending"])
        assert outcomes == []
        slow.go.set()
        asking.join()
    assert slow.done == [NAMESPACE]
