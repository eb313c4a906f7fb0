"""One node at one path, however many start, and whatever the last one left behind."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from server_helpers import PATIENCE_S, Running

from ecotone.errors import ConfigError, ResourceError
from ecotone.node.server.node import SharedNode
from ecotone.node.server.notify import notify
from ecotone.node.server.tool import NodeTool

# Twice twenty nodes, forked before the start so that they start at the same instant. The one that serves ends in
# order or by SIGKILL, in turns, so that half of the pairs find what a dead node left.
PAIRS = """
import json, os, signal, sys
from pathlib import Path
from ecotone.errors import ConfigError
from ecotone.node.server.node import SharedNode

path, found = Path(sys.argv[1]), []
for number in range(20):
    start_r, start_w = os.pipe()
    said_r, said_w = os.pipe()
    children = []
    for _ in range(2):
        pid = os.fork()
        if pid == 0:
            os.close(start_w)
            os.read(start_r, 1)
            try:
                with SharedNode(path, {"": 4096}, prefault=False) as node:
                    signal.signal(signal.SIGTERM, lambda *_: node.stop())
                    os.write(said_w, b"S" + str(os.getpid()).encode() + b";")
                    node.run()
            except ConfigError as error:
                os.write(said_w, b"T" + str(error).encode() + b";")
            os._exit(0)
        children.append(pid)
    os.close(start_w)
    said = b""
    while said.count(b";") < 2:
        said += os.read(said_r, 4096)
    words = said.decode().split(";")[:2]
    server = next(int(word[1:]) for word in words if word[0] == "S")
    os.kill(server, signal.SIGKILL if number % 2 else signal.SIGTERM)
    for pid in children:
        os.waitpid(pid, 0)
    found.append(sorted(words))
    for fd in (start_r, said_r, said_w):
        os.close(fd)
print(json.dumps(found))
"""


def test_of_twenty_pairs_exactly_one_serves_each_time(tmp_path: Path) -> None:
    path = tmp_path / "node.sock"
    done = subprocess.run([sys.executable, "-c", PAIRS, str(path)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    pairs = json.loads(done.stdout)
    assert len(pairs) == 20
    for serves, is_taken in pairs:
        assert serves[0] == "S"
        assert is_taken[0] == "T"
        assert "is taken: a node serves there (process" in is_taken
    Running(path).stop()  # the last one was killed
    assert list(tmp_path.iterdir()) == []


# A handler that changes nothing: then only what the signal itself leaves behind makes the loop go round, which it
# says by asking the clock.
ROUNDS = """
import os, signal, sys
from pathlib import Path
from ecotone.node.server.node import SharedNode

def clock():
    os.write(1, b"r")
    return 0.0

signal.signal(signal.SIGUSR1, lambda *_: None)
with SharedNode(Path(sys.argv[1]), {"": 4096}, prefault=False, clock=clock) as node:
    signal.signal(signal.SIGTERM, lambda *_: node.stop())
    node.run()
"""


def test_a_signal_makes_the_loop_go_round(tmp_path: Path) -> None:
    path = tmp_path / "node.sock"
    command = [sys.executable, "-c", ROUNDS, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, bufsize=0) as process:
        try:
            assert process.stdout is not None
            while not path.exists():
                assert process.poll() is None
            NodeTool(path).close()  # it serves; its turns are over when the next byte is due to the signal alone
            while True:
                ready, _, _ = select.select([process.stdout], [], [], 1.0)
                if not ready:
                    break
                process.stdout.read(4096)
            process.send_signal(signal.SIGUSR1)
            assert process.stdout.read(1) == b"r"
            process.send_signal(signal.SIGTERM)
            assert process.wait() == 0
        finally:
            process.kill()


def test_something_else_than_a_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "node.sock"
    path.write_text("mine")
    with pytest.raises(ConfigError, match="something else than a socket"):
        SharedNode(path, {"": 4096})
    assert path.read_text() == "mine"


@pytest.mark.parametrize(
    ("name", "message"), [("missing/node.sock", "the folder is missing"), ("x" * 120, "at most 107 bytes")]
)
def test_paths_that_cannot_be(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SharedNode(tmp_path / name, {"": 4096})


def test_what_cannot_be_given_takes_no_place(tmp_path: Path) -> None:
    path = tmp_path / "node.sock"
    for tenants, error in (({"": 2**60}, ResourceError), ({"": 4096, "blue": 1}, ConfigError)):
        with pytest.raises(error):
            SharedNode(path, tenants)
        assert not path.exists()
    with pytest.raises(ConfigError, match="eviction policy"):
        SharedNode(path, {"": 4096}, policy="random")
    assert list(tmp_path.iterdir()) == []


def test_only_its_user_can_reach_the_socket(tmp_path: Path) -> None:
    path = tmp_path / "node.sock"
    node = Running(path)
    assert path.stat().st_mode & 0o777 == 0o600
    NodeTool(path).close()
    node.stop()
    node.stop()


@pytest.mark.parametrize("abstract", [False, True])
def test_a_service_manager_hears_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, abstract: bool) -> None:
    name = f"ecotone-notify-{os.getpid()}"
    address = "\0" + name if abstract else str(tmp_path / name)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(address)
        manager.settimeout(PATIENCE_S)
        monkeypatch.setenv("NOTIFY_SOCKET", address.replace("\0", "@"))
        notify("READY=1")
        assert manager.recv(100) == b"READY=1"
    notify("STOPPING=1")  # it is gone, and nothing comes of it
    monkeypatch.delenv("NOTIFY_SOCKET")
    notify("READY=1")
