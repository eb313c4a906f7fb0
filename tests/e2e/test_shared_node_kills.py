"""Whoever is killed, whenever: no wrong bytes, nothing left, and the others go on."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from node_zoo import KEYS, SIZES, Worker, ask, contents, layout

from ecotone.errors import ResourceError
from ecotone.node import Abort, Acquire, Commit, Ready, Release, Ticket
from ecotone.node.server.client import SharedNodeExchange
from ecotone.node.server.messages import Hello
from ecotone.node.server.tool import NodeTool

PATIENCE_S = 60.0
CAPACITY = sum(SIZES) * 2 // 3  # so that entries are evicted, too


class Zoo:
    """The stable, and what became of its animals."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("node_zoo.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.alive: set[int] = set()
        self.killed: set[int] = set()

    def bear(self, *words: object) -> list[int]:
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()
        while True:
            pids = self.hear()
            if pids:
                return pids

    def hear(self) -> list[int]:
        """Take in one line; the processes that were born with it."""
        assert self.process.stdout is not None
        kind, *numbers = self.process.stdout.readline().split()
        if kind == "born":
            self.alive.update(map(int, numbers))
            return list(map(int, numbers))
        pid, status = map(int, numbers)
        self.alive.discard(pid)
        assert status == 0 or pid in self.killed, f"process {pid} ended with {os.waitstatus_to_exitcode(status)}"
        return []

    def kill(self, pid: int) -> None:
        if pid in self.alive:
            self.killed.add(pid)
            os.kill(pid, signal.SIGKILL)

    def wait_dead(self, *pids: int) -> None:
        while self.alive & set(pids):
            self.hear()

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.killed |= self.alive
        self.process.stdin.close()
        self.process.stdout.read()
        self.process.wait(PATIENCE_S)
        self.process.stdout.close()


@pytest.fixture
def zoo() -> Iterator[Zoo]:
    made = Zoo()
    yield made
    made.close()


def tool(path: Path) -> NodeTool:
    """To the node at ``path``, once it serves."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return NodeTool(path)
        except ResourceError:
            assert time.monotonic() < deadline
            time.sleep(0.002)


def wait_until_nothing_is_held(path: Path) -> None:
    with tool(path) as node:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            description = node.describe()
            assert node.verify().problem == ""
            held = {
                n: description.tenants[""][n] for n in ("pins", "transfers", "bytes_writing", "bytes_draining")
            }
            gone = not any(engine.connected for engine in description.engines)
            if gone and not any(held.values()):
                return
            assert time.monotonic() < deadline, (held, description.engines)
            time.sleep(0.002)


class Survivor:
    """A client in the test's own process, which nobody kills."""

    def __init__(self, path: Path) -> None:
        self.exchange = SharedNodeExchange(path, Hello("survivor", "scheduler", ranks=(0,)))
        self.exchange.wait_until_connected(PATIENCE_S)
        self.worker = Worker(path, "survivor")
        self.seq = 0
        self.hits = 0

    def turn(self, number: int) -> None:
        self.seq += 2
        [answer] = ask(self.exchange, [Acquire(self.seq, KEYS[number], layout(number))])
        if isinstance(answer, Ready):
            memory = self.worker.memory(answer.extents, writable=False)
            if memory is not None:
                found = b"".join(memory)
                assert found == contents(KEYS[number], SIZES[number])[: len(found)]
                self.hits += 1
            ask(self.exchange, [Release(self.seq + 1, answer.pin_id)])
        elif isinstance(answer, Ticket):
            said = self.worker.write(number, answer.transfer_id, answer.extents)
            end = Commit if said == b"+" else Abort
            ask(self.exchange, [end(self.seq + 1, answer.transfer_id)])

    def close(self) -> None:
        self.worker.node.close()
        self.exchange.close()


def test_two_hundred_clients_are_killed(zoo: Zoo, tmp_path: Path) -> None:
    """The scheduler of an engine, its worker, or both, at random instants; four engines at a time."""
    path = tmp_path / "node.sock"
    chance = random.Random(200)
    zoo.bear("node", path, CAPACITY)
    survivor = Survivor(path)
    engines: list[list[int]] = []
    for kills in range(200):
        while len(engines) < 4:
            engines.append(zoo.bear("engine", path, f"engine-{kills}-{len(engines)}", chance.randrange(2**32)))
        until = time.monotonic() + chance.uniform(0.0, 0.03)
        while time.monotonic() < until:
            survivor.turn(chance.randrange(len(KEYS)))
        victim = engines.pop(chance.randrange(len(engines)))
        parts = chance.choice([victim[:1], victim[1:], victim])
        for pid in parts:
            zoo.kill(pid)
        survivor.turn(chance.randrange(len(KEYS)))
        zoo.wait_dead(*victim)  # whoever was left of the engine ends by itself
    for engine in engines:
        for pid in engine:
            zoo.kill(pid)
        zoo.wait_dead(*engine)
    assert survivor.hits > 0
    assert survivor.exchange.statistics()["lost"] == 0
    survivor.close()
    wait_until_nothing_is_held(path)


def test_a_node_is_killed_fifty_times(zoo: Zoo, tmp_path: Path) -> None:
    """Engines go on without it and find the next one by themselves."""
    path = tmp_path / "node.sock"
    chance = random.Random(50)
    [node] = zoo.bear("node", path, CAPACITY)
    survivor = Survivor(path)
    engines = [zoo.bear("engine", path, f"engine-{n}", n) for n in range(2)]
    for _ in range(50):
        until = time.monotonic() + chance.uniform(0.0, 0.05)
        while time.monotonic() < until:
            survivor.turn(chance.randrange(len(KEYS)))
        zoo.kill(node)
        survivor.turn(chance.randrange(len(KEYS)))
        zoo.wait_dead(node)
        survivor.turn(chance.randrange(len(KEYS)))
        [node] = zoo.bear("node", path, CAPACITY)
        before = survivor.hits
        deadline = time.monotonic() + PATIENCE_S
        while survivor.hits == before:  # it is attached to the new one, and reads what was written there
            survivor.turn(chance.randrange(len(KEYS)))
            assert time.monotonic() < deadline
    assert survivor.exchange.statistics()["lost"] == 50
    assert zoo.alive >= {pid for engine in engines for pid in engine}
    with tool(path) as asked:
        deadline = time.monotonic() + PATIENCE_S
        while sum(engine.connected for engine in asked.describe().engines) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    for engine in engines:
        for pid in engine:
            zoo.kill(pid)
        zoo.wait_dead(*engine)
    survivor.close()
    wait_until_nothing_is_held(path)
    os.kill(node, signal.SIGTERM)  # it checks its own books before it ends with 0
    zoo.wait_dead(node)
    assert list(tmp_path.iterdir()) == []
