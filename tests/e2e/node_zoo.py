"""Processes to be killed: nodes, and engines without a model (a scheduler and a worker that run the real client).

Run as a program it is a stable: it forks one animal per command line on stdin, and says on stdout which process
that is, and later how it ended::

    node PATH BYTES                         ->  born PID
    engine PATH NAME SEED                   ->  born PID PID    (scheduler, worker)
                                            ->  ended PID STATUS  (of waitpid)

Every entry holds bytes that follow from its key alone, so that whoever reads knows what must be there.
"""

from __future__ import annotations

import os
import random
import select
import signal
import sys
import time
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

from ecotone.errors import ContractError, ResourceError
from ecotone.node import (
    Abort,
    Acquire,
    AnyAnswer,
    AnyOp,
    Commit,
    Extent,
    Layout,
    Ready,
    Region,
    Release,
    Settled,
    Ticket,
)
from ecotone.node.server.client import SharedNodeExchange
from ecotone.node.server.messages import Fact, Hello
from ecotone.node.server.node import SharedNode
from ecotone.node.server.worker import WorkerNode

NAMESPACE = "0" * 32
KEYS = [f"{NAMESPACE}:{sha256(str(n).encode()).hexdigest()}" for n in range(24)]
SIZES = [64 * (1 + 37 * n % 300) for n in range(24)]
WRONG = 3  # exit status of who read bytes that must not be there


def contents(key: str, size: int) -> bytes:
    return sha256(key.encode()).digest() * (-(-size // 32))


def layout(number: int) -> Layout:
    return Layout("uint8", (SIZES[number],))


def run_node(path: Path, size: int) -> None:
    with SharedNode(path, {"": size}, prefault=False) as node:
        signal.signal(signal.SIGTERM, lambda *_: node.stop())
        node.run()
        node.check_integrity()


def ask(exchange: SharedNodeExchange, ops: Sequence[AnyOp]) -> list[AnyAnswer]:
    """As a scheduler does in its steps, without other work between them."""
    exchange.submit(ops)
    exchange.flush()
    answers: list[AnyAnswer] = []
    while len(answers) < len(ops):
        found = [answer for answer in exchange.poll() if not isinstance(answer, Settled)]
        answers += found
        if not found:
            time.sleep(0.0005)
    return answers


def run_scheduler(path: Path, name: str, seed: int, orders: int, reports: int) -> None:
    """Asks for entries for ever; has its worker write what is missing and read what is there."""
    chance = random.Random(seed)
    exchange = SharedNodeExchange(path, Hello(name, "scheduler", ranks=(0,)))
    exchange.wait_until_connected(20.0)
    seq = 0
    while True:
        seq += 2
        number = chance.randrange(len(KEYS))
        [answer] = ask(exchange, [Acquire(seq, KEYS[number], layout(number))])
        end: AnyOp
        if isinstance(answer, Ready):
            command(orders, "read", number, answer.pin_id, answer.extents)
            if not os.read(reports, 1):
                return
            end = Release(seq + 1, answer.pin_id)
        elif isinstance(answer, Ticket):
            command(orders, "write", number, answer.transfer_id, answer.extents)
            said = os.read(reports, 1)
            if not said:
                return
            end = (Commit if said == b"+" else Abort)(seq + 1, answer.transfer_id)
        else:
            continue
        if chance.random() < 0.5:  # otherwise the worker's own word must do
            ask(exchange, [end])


def command(orders: int, what: str, number: int, claim: int, extents: Sequence[Extent]) -> None:
    pieces = ",".join(f"{e.region_id}/{e.generation}/{e.offset}/{e.length}" for e in extents)
    try:
        os.write(orders, f"{what} {number} {claim} {pieces}\n".encode())
    except BrokenPipeError:
        os._exit(0)


class Worker:
    """Attaches as the worker half does: with the first order, and again for another region."""

    def __init__(self, path: Path, name: str) -> None:
        self.node = WorkerNode(path, Hello(name, "worker", access="write", rank=0))
        self.region: Region | None = None
        self.kept: tuple[int, list[memoryview]] | None = None

    def memory(self, extents: Sequence[Extent], writable: bool) -> list[memoryview] | None:
        try:
            if self.region is None or self.region.descriptor.generation != extents[0].generation:
                self.region = self.node.attach(writable=True, prefault=False)
            return [self.region.view(extent, writable=writable) for extent in extents]
        except (ResourceError, ContractError):
            return None  # its node is gone

    def write(self, number: int, claim: int, extents: Sequence[Extent]) -> bytes:
        memory = self.memory(extents, writable=True)
        if memory is None:
            return b"-"
        data = contents(KEYS[number], SIZES[number])
        for _ in range(2):  # slowly: it is killed in the middle of it, or goes on when its scheduler is dead
            position = 0
            for piece in memory:
                for start in range(0, len(piece), 4096):
                    stop = min(start + 4096, len(piece))
                    piece[start:stop] = data[position + start : position + stop]
                    time.sleep(0)
                position += len(piece)
        self.node.tell(Fact(claim, 0, (0,), "saved"))
        return b"+"

    def read(self, number: int, claim: int, extents: Sequence[Extent]) -> bytes:
        memory = self.memory(extents, writable=False)
        if memory is None:
            return b"-"
        expected = contents(KEYS[number], SIZES[number])
        for _ in range(2):
            found = b"".join(memory)
            if found != expected[: len(found)]:
                os.write(2, f"WRONG bytes of {number} in {extents}\n".encode())
                os._exit(WRONG)
        self.node.tell(Fact(claim, 0, (0,), "released"))
        return b"+"


def run_worker(path: Path, name: str, orders: int, reports: int) -> None:
    """Does what it is ordered, and goes on to the end of it when nobody is there any more to hear of it."""
    worker = Worker(path, name)
    with os.fdopen(orders) as lines:
        for line in lines:
            what, number, claim, pieces = line.split()
            extents = []
            for piece in pieces.split(","):
                region_id, generation, offset, length = piece.split("/")
                extents.append(Extent(region_id, int(generation), int(offset), int(length)))
            act = worker.write if what == "write" else worker.read
            said = act(int(number), int(claim), extents)
            try:
                os.write(reports, said)
            except BrokenPipeError:
                break
    worker.node.close()


class Stable:
    def __init__(self) -> None:
        self.alive: set[int] = set()

    def serve(self) -> None:
        buffered = b""
        while True:
            readable, _, _ = select.select([0], [], [], 0.005)
            if readable:
                data = os.read(0, 4096)
                if not data:
                    break
                *lines, buffered = (buffered + data).split(b"\n")
                for line in lines:
                    self.bear(line.decode().split())
            self.bury(os.WNOHANG)
        for pid in self.alive:
            os.kill(pid, signal.SIGKILL)
        self.bury(0)

    def bear(self, words: list[str]) -> None:
        if words[0] == "node":
            pids = [self.fork(lambda: run_node(Path(words[1]), int(words[2])), ())]
        else:
            order_r, order_w = os.pipe()
            report_r, report_w = os.pipe()
            path, name, seed = Path(words[1]), words[2], int(words[3])
            pids = [
                self.fork(lambda: run_scheduler(path, name, seed, order_w, report_r), (order_r, report_w)),
                self.fork(lambda: run_worker(path, name, order_r, report_w), (order_w, report_r)),
            ]
            for fd in (order_r, order_w, report_r, report_w):
                os.close(fd)
        say("born", *pids)

    def fork(self, live, close) -> int:
        pid = os.fork()
        if pid:
            self.alive.add(pid)
            return pid
        status = 1
        try:
            for fd in (0, 1, *close):
                os.close(fd)
            live()
            status = 0
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
        finally:
            os._exit(status)

    def bury(self, flags: int) -> None:
        while self.alive:
            pid, status = os.waitpid(-1, flags)
            if pid == 0:
                return
            self.alive.discard(pid)
            say("ended", pid, status)


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    sys.setswitchinterval(0.001)
    Stable().serve()
