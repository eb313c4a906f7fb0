"""``ecotone node`` and ``ecotone cache`` against a node."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ecotone.cli.app import app
from ecotone.cli.node import parse_tenants
from ecotone.cli.node import run as run_node
from ecotone.errors import ConfigError, EcotoneError
from ecotone.node import Acquire, Commit, Layout, Ticket
from ecotone.node.server.client import SharedNodeExchange
from ecotone.node.server.hosted import HostedNode
from ecotone.node.server.messages import Hello
from ecotone.node.server.node import SharedNode

RUNNER = CliRunner()
NAMESPACES = ["0" * 32, "1" * 32]
KEYS = [f"{namespace}:{sha256(name.encode()).hexdigest()}" for namespace in NAMESPACES for name in "ab"]


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    """A node with four entries of 64 bytes, two in each namespace."""
    path = tmp_path / "node.sock"
    with SharedNode(path, {"": 4096, "blue": 4096}, prefault=False) as node:
        thread = threading.Thread(target=node.run)
        thread.start()
        exchange = SharedNodeExchange(path, Hello("filler", "scheduler"))
        exchange.wait_until_connected(30.0)
        tickets: list[object] = []
        exchange.submit([Acquire(seq, key, Layout("uint8", (64,))) for seq, key in enumerate(KEYS)])
        exchange.flush()
        while len(tickets) < len(KEYS):
            tickets += exchange.poll()
        exchange.submit([Commit(9 + t.seq, t.transfer_id) for t in tickets if isinstance(t, Ticket)])
        exchange.flush()
        while exchange.statistics()["messages_unanswered"]:
            exchange.poll()
        exchange.close()
        yield path
        node.stop()
        thread.join()
        node.check_integrity()


def invoke(*arguments: object) -> str:
    result = RUNNER.invoke(app, ["cache", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def test_stat_counts_by_tenant_engine_and_namespace(path: Path) -> None:
    stat = json.loads(invoke("stat", path, "--json"))
    assert stat["tenants"][""]["entries"] == 4
    assert stat["tenants"]["blue"]["entries"] == 0
    assert [engine["engine_id"] for engine in stat["engines"]] == ["filler"]
    assert {name: row["entries"] for name, row in stat["namespaces"].items()} == dict.fromkeys(NAMESPACES, 2)
    shown = invoke("stat", path)
    assert "filler" in shown
    assert "bytes_ready" in shown


def test_ls_verify_evict_and_clear(path: Path) -> None:
    assert [line.split()[0] for line in invoke("ls", path).splitlines()] == sorted(KEYS)
    assert len(json.loads(invoke("ls", path, "--namespace", NAMESPACES[1], "--json"))) == 2
    assert invoke("verify", path) == "4 entries verified, 256 bytes\n"
    assert invoke("evict", path, "--key", KEYS[0]) == "1 entry evicted, 64 bytes\n"
    assert invoke("clear", path, "--namespace", NAMESPACES[0]) == "1 entry forgotten, 64 bytes\n"
    assert json.loads(invoke("evict", path, "--free", "4032", "--json"))["entries"] == 1
    assert invoke("clear", path) == "1 entry forgotten, 64 bytes\n"
    assert invoke("ls", path) == ""


def test_a_node_inside_an_engine_is_named_by_the_engine() -> None:
    engine = f"cli-{os.getpid()}"
    with HostedNode(4096, engine, prefault=False) as node:
        exchange = SharedNodeExchange(node.address, Hello(engine, "scheduler"))
        exchange.wait_until_connected(30.0)
        exchange.submit([Acquire(1, KEYS[0], Layout("uint8", (64,)))])
        exchange.flush()
        exchange.wait(30.0)
        [ticket] = exchange.poll()
        assert isinstance(ticket, Ticket)
        exchange.submit([Commit(2, ticket.transfer_id)])
        exchange.flush()
        exchange.wait(30.0)
        assert json.loads(invoke("stat", "--engine", engine, "--json"))["tenants"][""]["entries"] == 1
        assert invoke("ls", "--engine", engine).split()[0] == KEYS[0]
        assert invoke("verify", "--engine", engine) == "1 entry verified, 64 bytes\n"
        assert invoke("evict", "--engine", engine, "--key", KEYS[0]) == "1 entry evicted, 64 bytes\n"
        assert invoke("clear", "--engine", engine) == "0 entries forgotten, 0 bytes\n"
        exchange.close()


@pytest.mark.parametrize("arguments", [[], ["somewhere", "--engine", "e"]])
@pytest.mark.parametrize("command", ["stat", "ls", "verify", "clear"])
def test_a_node_is_named_in_one_way(command: str, arguments: list[str]) -> None:
    result = RUNNER.invoke(app, ["cache", command, *arguments])
    assert isinstance(result.exception, ConfigError)
    assert "either WHERE" in str(result.exception)


@pytest.mark.parametrize("arguments", [(), ("--free", "1KiB", "--key", KEYS[0])])
def test_evict_wants_one_of_two(path: Path, arguments: tuple[str, ...]) -> None:
    result = RUNNER.invoke(app, ["cache", "evict", str(path), *arguments])
    assert isinstance(result.exception, ConfigError)


def test_what_cannot_be_evicted_is_said(path: Path) -> None:
    full = RUNNER.invoke(app, ["cache", "evict", str(path), "--free", "1MiB"])
    assert full.stdout == "4 entries evicted, 256 bytes\n"
    assert str(full.exception) == "4096 of 4096 bytes are free, and no more can be now"
    none = RUNNER.invoke(app, ["cache", "evict", str(path), "--key", KEYS[0]])
    assert str(none.exception) == f"there is no entry {KEYS[0]}"
    for arguments in (["evict", "--key", "x"], ["ls", "--namespace", "x"], ["clear", "--tenant", "red"]):
        result = RUNNER.invoke(app, ["cache", arguments[0], str(path), *arguments[1:]])
        assert isinstance(result.exception, EcotoneError)


def test_json_has_the_figures_and_nothing_of_the_wire(path: Path) -> None:
    cleared = invoke("clear", path, "--json")
    assert json.loads(cleared) == {"entries": 4, "nbytes": 256, "files": 0, "file_bytes": 0, "problem": ""}
    assert "256.0" not in cleared
    stat = invoke("stat", path, "--json")
    assert set(json.loads(stat)) == {"version", "node", "tenants", "engines", "namespaces"}
    assert '"bytes_total": 4096,' in stat


def test_budgets_of_tenants() -> None:
    assert parse_tenants("1KiB", ["blue=2KiB", "red=64"]) == {"": 1024, "blue": 2048, "red": 64}
    for bad in ("blue", "=1KiB", "blue="):
        with pytest.raises(ConfigError, match=r"write NAME=SIZE|is not a size"):
            parse_tenants("1KiB", [bad])
    with pytest.raises(ConfigError, match="has a budget already"):
        parse_tenants("1KiB", ["blue=1KiB", "blue=2KiB"])


def test_an_eviction_that_there_is_not(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--eviction 'random' is not one of lru, cost"):
        run_node(tmp_path / "node.sock", {"": 4096}, "random", disk=None, prefault=False)


def test_it_says_when_it_is_ready_and_ends_in_order(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ecotone", "node", "--socket", str(tmp_path / "n"), "--memory", "64KiB"]
    command += ["--disk", str(tmp_path / "disk"), "--disk-size", "1MiB", "--no-prefault"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as node:
        assert node.stderr is not None
        assert node.stderr.readline().startswith("serving 65,536 bytes at")
        second = subprocess.run(command, capture_output=True, text=True, timeout=100)
        assert second.returncode == 1
        assert f"is taken: a node serves there (process {node.pid})" in second.stderr
        node.send_signal(signal.SIGTERM)
        assert node.wait(60) == 0
    assert [entry.name for entry in tmp_path.iterdir()] == ["disk"]
