"""Whatever one process of the same user does to the socket, the others are answered meanwhile."""

from __future__ import annotations

import os
import random
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
from server_helpers import PATIENCE_S, UNIT, ask, key, wait_for

from ecotone.errors import DecodeError, ResourceError, WireError
from ecotone.node import Absent, Acquire, Lookup, Ready, Ticket
from ecotone.node.exchange import MAX_DIMENSIONS, Commit, Layout
from ecotone.node.server.client import SharedNodeExchange
from ecotone.node.server.messages import (
    MAX_FRAME_BYTES,
    PREAMBLE,
    VERSION,
    Attach,
    Batch,
    Clear,
    Evict,
    Facts,
    FrameReader,
    Hello,
    Keep,
    List,
    Refusal,
    client_message,
    framed,
    node_message,
)
from ecotone.node.server.tool import NodeTool


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where a node serves in a process of its own; in the end its books are right, and it ends in order."""
    path = tmp_path_factory.mktemp("hostile") / "node.sock"
    command = [sys.executable, "-m", "ecotone", "node", "--socket", str(path), "--memory", "1MiB"]
    with subprocess.Popen(command) as process:
        deadline = time.monotonic() + PATIENCE_S
        while not path.exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        yield path
        with NodeTool(path) as tool:
            assert tool.verify().problem == ""
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0


class Probe:
    """A well-behaved client: what it reads is right, and how long each answer took."""

    def __init__(self, path: Path) -> None:
        self.exchange = SharedNodeExchange(path, Hello(f"probe-{os.getpid()}-{id(self)}", "scheduler"))
        wait_for(lambda: self.exchange.is_connected, self.exchange.poll)
        [answer] = ask(self.exchange, Acquire(1, key("probe"), UNIT))
        if isinstance(answer, Ticket):
            ask(self.exchange, Commit(2, answer.transfer_id))
        self.seq = 2
        self.seconds: list[float] = []

    def __call__(self) -> None:
        self.seq += 2
        start = time.perf_counter()
        answers = ask(self.exchange, Lookup(self.seq, key("probe"), UNIT), Lookup(self.seq + 1, key("none"), UNIT))
        self.seconds.append(time.perf_counter() - start)
        assert isinstance(answers[0], Ready)
        assert answers[1] == Absent(self.seq + 1)

    def report(self) -> None:
        assert self.exchange.statistics()["lost"] == 0
        self.exchange.close()
        ordered = sorted(self.seconds)
        median, worst = ordered[len(ordered) // 2] * 1e3, ordered[-1] * 1e3
        print(f"{len(ordered)} answers meanwhile: median {median:.2f} ms, worst {worst:.2f} ms")


@pytest.fixture
def probe(path: Path) -> Iterator[Probe]:
    made = Probe(path)
    yield made
    made()
    made.report()


def connected(path: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(str(path))  # waits where the backlog is full; with a time-out it would not
    connection.settimeout(PATIENCE_S)
    return connection


def is_hung_up(connection: socket.socket) -> bytes:
    """What was said before the end."""
    said = b""
    with suppress(ConnectionResetError, BrokenPipeError):
        while data := connection.recv(2**16):
            said += data
    connection.close()
    return said


def is_broken(connection: socket.socket, data: bytes = b"x" * 1000) -> bool:
    """Whether nobody takes ``data`` any more: not just now, but ever. A message that is cut is one, too."""
    try:
        connection.send(data)
    except BlockingIOError:
        return False
    except (BrokenPipeError, ConnectionResetError):
        return True
    return False


def test_random_bytes(path: Path, probe: Probe) -> None:
    chance = random.Random(5)
    for number in range(200):
        connection = connected(path)
        start = PREAMBLE if number % 2 else b""
        with suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(start + chance.randbytes(chance.randrange(13, 300)) + b"\xff" * 8)
        with suppress(OSError):
            connection.shutdown(socket.SHUT_WR)
        is_hung_up(connection)
        if number % 20 == 0:
            probe()


def frame(data: bytes) -> bytes:
    return len(data).to_bytes(4, "little") + data


HELLO = framed(Hello("hostile", "scheduler"))


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "is no Ecotone node or client"),
        (PREAMBLE + (MAX_FRAME_BYTES + 1).to_bytes(4, "little"), "at most"),
        (PREAMBLE + frame(b""), "not a"),
        (PREAMBLE + frame(b"\x91" * 100_000), "not a"),
        (PREAMBLE + frame(msgspec.msgpack.encode({"msg": "hello", "engine_id": "e", "part": "root"})), "not a"),
        (PREAMBLE + frame(msgspec.msgpack.encode({"msg": "hello", "x": 1})), "not a"),
        (PREAMBLE + framed(Batch((Lookup(1, key("x"), UNIT),))), "first message must be a Hello"),
        (PREAMBLE + HELLO + HELLO, "a scheduler may not send a Hello"),
        (PREAMBLE + HELLO + framed(Attach(True)), "a scheduler may not send a Attach"),
        (PREAMBLE + framed(Hello("t", "tool")) + framed(Keep(frozenset({1}))), "a tool may not send a Keep"),
        (PREAMBLE + framed(Hello("t", "worker")), "scheduler of engine 't' is not connected"),
        (PREAMBLE + framed(Hello("t", "tool", tenant="red")), "no tenant 'red'"),
    ],
    ids=[
        "http",
        "oversized",
        "empty",
        "nested",
        "root",
        "field",
        "early",
        "twice",
        "attach",
        "keep",
        "lone",
        "red",
    ],
)
def test_messages_that_are_none_are_refused_with_a_reason(path: Path, probe: Probe, sent: bytes, why: str) -> None:
    connection = connected(path)
    connection.sendall(sent)
    said = is_hung_up(connection)
    reader = FrameReader()
    messages = [node_message(data) for data in reader.feed(said)]
    assert isinstance(messages[-1], Refusal)
    assert why in messages[-1].reason
    probe()


def test_another_version_is_told_ours_and_nothing_else(path: Path, probe: Probe) -> None:
    connection = connected(path)
    connection.sendall(PREAMBLE[:8] + (VERSION + 1).to_bytes(4, "little") + b"whatever that version says")
    assert is_hung_up(connection) == PREAMBLE


def test_truncated_messages_hold_up_nobody(path: Path, probe: Probe) -> None:
    whole = PREAMBLE + HELLO + framed(Batch((Lookup(1, key("x"), UNIT),)))
    connections = []
    for stop in range(1, len(whole), 3):
        connections.append(connected(path))
        connections[-1].sendall(whole[:stop])
    for _ in range(10):
        probe()
    for connection in connections:
        connection.close()
    probe()


def test_a_client_that_stops_reading_is_dropped(path: Path, probe: Probe) -> None:
    connection = connected(path)
    connection.sendall(PREAMBLE + framed(Hello("deaf", "scheduler")))
    batch = framed(Batch(tuple(Lookup(seq, key("x"), UNIT) for seq in range(1024))))
    connection.setblocking(False)
    wait_for(lambda: is_broken(connection, batch), probe)
    connection.close()
    with NodeTool(path) as tool:
        assert "deaf" not in {engine.engine_id for engine in tool.describe().engines if engine.connected}


def test_a_worker_that_stops_reading_is_watched_until_its_process_is_gone(path: Path, probe: Probe) -> None:
    """It was given the memory and may write to it for as long as it lives, whether it is served or not."""
    scheduler = SharedNodeExchange(path, Hello("mute", "scheduler"))
    wait_for(lambda: scheduler.is_connected, scheduler.poll)
    [ticket] = ask(scheduler, Acquire(1, key("mute"), UNIT))
    assert isinstance(ticket, Ticket)
    connection = connected(path)
    connection.sendall(PREAMBLE + framed(Hello("mute", "worker", access="write")) + framed(Attach(True)))
    connection.sendall(framed(Attach(False)) + frame(b"nonsense"))
    connection.setblocking(False)
    wait_for(lambda: is_broken(connection))
    scheduler.close()
    with NodeTool(path) as tool:
        wait_for(lambda: tool.describe().tenants[""]["bytes_draining"] == 64)
        probe()
        assert tool.describe().tenants[""]["bytes_draining"] == 64
        connection.close()
        wait_for(lambda: tool.describe().tenants[""]["bytes_draining"] == 0)


def test_ten_thousand_connections(path: Path, probe: Probe) -> None:
    """Which say nothing, or only who they are; and more of them than the node may have make no difference."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = min(10_000, hard - 200) if hard != resource.RLIM_INFINITY else 10_000
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, count + 200), hard))
    connections = []
    try:
        for number in range(count):
            connections.append(connected(path))
            if number % 10 == 0:
                connections[-1].sendall(PREAMBLE + framed(Hello(f"crowd-{number}", "scheduler")))
            if number % 500 == 0:
                probe()
        for _ in range(20):
            probe()
        newcomer = Probe(path)
        newcomer()
        newcomer.exchange.close()
    finally:
        for connection in connections:
            connection.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    probe()


def test_values_that_would_be_expensive_are_refused_when_they_are_read() -> None:
    with pytest.raises(DecodeError, match="dimensions"):
        Layout("uint8", (1,) * (MAX_DIMENSIONS + 1))
    op = msgspec.msgpack.decode(framed(Batch((Lookup(1, key("x"), UNIT),)))[4:])["ops"][0]
    good = msgspec.msgpack.decode(framed(Batch((Lookup(1, key("x"), UNIT),)))[4:])
    good["ops"][0]["layout"][1] = [2**62] * 100_000
    with pytest.raises(WireError):
        client_message(msgspec.msgpack.encode(good))
    for message, field, value in (
        (Batch((Lookup(1, key("x"), UNIT),)), "ops", [op] * 2000),
        (Facts(()), "facts", [[1, 0, [0], "saved"]] * 2000),
        (Hello("e", "scheduler"), "ranks", list(range(5000))),
        (Hello("e", "scheduler"), "engine_id", "x" * 201),
        (Hello("e", "scheduler"), "engine_id", ""),
        (List(), "namespace", "../etc"),
        (Evict(), "key", "../etc"),
        (Clear(), "namespace", "0"),
    ):
        raw = msgspec.msgpack.decode(framed(message)[4:])
        raw[field] = value
        with pytest.raises(WireError):
            client_message(msgspec.msgpack.encode(raw))


def test_a_tool_says_why_it_gets_no_answer(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match="No such file"):
        NodeTool(tmp_path / "none.sock")
