"""A node on a thread of an engine's process: found by the engine's id, looked into from any thread."""

from __future__ import annotations

import logging
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from server_helpers import PATIENCE_S, UNIT, ask, heard, key, wait_for

from ecotone.errors import ConfigError, ResourceError
from ecotone.node import Acquire, Lookup, Ready, Settled, Ticket, Unreachable
from ecotone.node.disk import DiskConfig
from ecotone.node.server.client import SharedNodeExchange
from ecotone.node.server.hosted import HostedNode, hosted_address
from ecotone.node.server.loop import Loop
from ecotone.node.server.messages import Fact, Hello
from ecotone.node.server.tool import NodeTool
from ecotone.node.server.worker import WorkerNode

ENGINE = f"hosted-{os.getpid()}"


@pytest.fixture
def node() -> Iterator[HostedNode]:
    with HostedNode(64 * 64, ENGINE, prefault=False) as made:
        yield made
    made.check_integrity()


def scheduler(node: HostedNode) -> SharedNodeExchange:
    exchange = SharedNodeExchange(node.address, Hello(ENGINE, "scheduler", ranks=(0,)))
    exchange.wait_until_connected(PATIENCE_S)
    return exchange


def worker(node: HostedNode) -> WorkerNode:
    return WorkerNode(node.address, Hello(ENGINE, "worker", access="write"), PATIENCE_S)


def test_a_worker_saves_and_tells_and_the_scheduler_hears(node: HostedNode) -> None:
    assert node.address == hosted_address(ENGINE)
    exchange, end = scheduler(node), worker(node)
    [ticket] = ask(exchange, Acquire(1, key("x"), UNIT))
    assert isinstance(ticket, Ticket)
    region = end.attach(writable=True, prefault=False)
    region.view(ticket.extents[0], writable=True)[:] = b"e" * 64
    end.tell(Fact(ticket.transfer_id, 0, (0,), "saved"))
    wait_for(lambda: node.statistics()["bytes_ready"] == 64)
    answers, news = heard(exchange, Lookup(2, key("x"), UNIT))
    assert [(told.claim, told.committed) for told in news] == [(ticket.transfer_id, True)]
    assert isinstance(answers[0], Ready)
    assert bytes(region.view(answers[0].extents[0])) == b"e" * 64
    region.close()
    end.close()
    exchange.close()


OTHER_PROCESS = """
import sys
from ecotone.node.server.messages import Hello
from ecotone.node.server.hosted import hosted_address
from ecotone.node.server.worker import WorkerNode
end = WorkerNode(hosted_address(sys.argv[1]), Hello(sys.argv[1], "worker", access="write"), 30.0)
region = end.attach(writable=True, prefault=False)
print(region.descriptor.size, flush=True)
sys.stdin.read()
"""


def test_another_process_finds_it_and_its_death_is_news(node: HostedNode) -> None:
    exchange = scheduler(node)
    [ticket] = ask(exchange, Acquire(1, key("x"), UNIT))
    assert isinstance(ticket, Ticket)
    command = [sys.executable, "-c", OTHER_PROCESS, ENGINE]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == f"{64 * 64}\n"
        process.kill()
    wait_for(lambda: not node.statistics()["transfers"])
    news = heard(exchange, Lookup(2, key("y"), UNIT))[1]
    assert [(told.claim, told.committed) for told in news] == [(ticket.transfer_id, False)]
    exchange.close()


def test_an_engine_id_in_use_is_refused_and_free_again_afterwards() -> None:
    with HostedNode(64 * 64, ENGINE, prefault=False), pytest.raises(ConfigError, match=f"{ENGINE}.*a node serves"):
        HostedNode(64 * 64, ENGINE, prefault=False)
    HostedNode(64 * 64, ENGINE, prefault=False).close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "best"}, "best"),
        ({"capacity_bytes": 1}, "at least"),
        ({"disk": 1}, "directory"),
    ],
)
def test_what_cannot_work_leaves_the_name_free(options: dict[str, object], message: str, tmp_path: Path) -> None:
    if "disk" in options:
        (tmp_path / "file").write_text("")
        options = {"disk": DiskConfig(root=str(tmp_path / "file"), budget=2**20)}
    with pytest.raises(ConfigError, match=message):
        HostedNode(**{"capacity_bytes": 64 * 64, "engine_id": ENGINE, "prefault": False, **options})  # type: ignore
    HostedNode(64 * 64, ENGINE, prefault=False).close()


def test_the_processs_limits_are_left_alone() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft = min(256, before[1])
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, before[1]))
    try:
        with HostedNode(64 * 64, ENGINE, prefault=False):
            assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == soft
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_it_is_looked_into_from_other_threads_while_it_serves(node: HostedNode) -> None:
    exchange = scheduler(node)
    ended, faults = threading.Event(), []

    def look() -> None:
        while not ended.is_set():
            try:
                node.check_integrity()
                stats = node.statistics()
                parts = sum(stats[f"bytes_{part}"] for part in ("free", "writing", "ready", "draining"))
                assert parts == stats["bytes_total"]
            except Exception as error:
                faults.append(error)

    lookers = [threading.Thread(target=look) for _ in range(3)]
    for looker in lookers:
        looker.start()
    for number in range(300):
        ask(exchange, Acquire(number, key(str(number)), UNIT))
    ended.set()
    for looker in lookers:
        looker.join()
    exchange.close()
    assert faults == []


def test_closing_ends_the_thread_and_every_connection_and_the_figures_stay(node: HostedNode) -> None:
    exchange, end = scheduler(node), worker(node)
    end.attach(writable=True, prefault=False).close()
    ask(exchange, Acquire(1, key("x"), UNIT))
    closers = [threading.Thread(target=node.close) for _ in range(2)]
    for closer in closers:
        closer.start()
    for closer in closers:
        closer.join()
    node.close()
    assert not any(thread.name == "ecotone-hosted-node" for thread in threading.enumerate())
    assert isinstance(ask(exchange, Lookup(2, key("x"), UNIT))[0], Unreachable)
    assert node.statistics()["tickets"] == 1
    node.check_integrity()
    with pytest.raises(ResourceError, match="@ecotone-node/"):
        NodeTool(node.address)
    end.close()
    exchange.close()


def test_a_tool_looks_into_it(node: HostedNode) -> None:
    exchange = scheduler(node)
    with NodeTool(node.address) as tool:
        assert tool.describe().engines[0].engine_id == ENGINE
        assert tool.verify().problem == ""
    exchange.close()


def test_an_error_on_its_thread_is_logged_and_hangs_up(
    node: HostedNode, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    exchange = scheduler(node)

    def fail(_loop: Loop) -> None:
        raise RuntimeError("a fault")

    with caplog.at_level(logging.ERROR):
        monkeypatch.setattr(Loop, "_end_silent", fail)
        [answer] = ask(exchange, Acquire(1, key("x"), UNIT))
        wait_for(lambda: "ended with an error" in caplog.text)
    assert "a fault" in caplog.text
    if isinstance(answer, Ticket):  # it was sent before the fault
        [answer] = ask(exchange, Acquire(2, key("x"), UNIT))
    assert isinstance(answer, Unreachable)
    assert not [told for told in exchange.poll() if isinstance(told, Settled)]
    exchange.close()


def test_what_it_wrote_to_its_disk_is_there_for_the_next_one(tmp_path: Path) -> None:
    disk = DiskConfig(root=str(tmp_path / "disk"), budget=2**20)
    for life in range(2):
        with HostedNode(64 * 64, ENGINE, prefault=False, disk=disk) as node:
            exchange, end = scheduler(node), worker(node)
            region = end.attach(writable=True, prefault=False)
            if life == 0:
                [ticket] = ask(exchange, Acquire(1, key("x"), UNIT))
                assert isinstance(ticket, Ticket)
                region.view(ticket.extents[0], writable=True)[:] = b"d" * 64
                end.tell(Fact(ticket.transfer_id, 0, (0,), "saved"))
                wait_for(lambda node=node: node.statistics()["bytes_ready"] == 64)  # type: ignore[misc]
            else:
                wait_for(lambda e=exchange: isinstance(ask(e, Lookup(1, key("x"), UNIT))[0], Ready))  # type: ignore
            region.close()
            end.close()
            exchange.close()
        node.check_integrity()
