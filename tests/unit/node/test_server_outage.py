"""A scheduler whose connection breaks may live on, and what it was given is not given to others meanwhile."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from server_helpers import Running, ask, key, wait_for

from ecotone.node import Acquire, Layout, Ticket

WHOLE = Layout("uint8", (4096,))  # the region is a page

# Takes a ticket, breaks its connection without a word (as after answers that came too late), and lives on.
CLIENT = """
import sys
from pathlib import Path
from ecotone.node import Acquire, Layout
from ecotone.node.server.link import Link
from ecotone.node.server.messages import Answers, Batch, Hello

link = Link(Path(sys.argv[1]), Hello("broken", "scheduler", ranks=(0,)))
link.send(Batch((Acquire(1, sys.argv[2], Layout("uint8", (4096,))),)))
answers = []
while not any(isinstance(message, Answers) for message in answers):
    link.wait(30)
    answers += link.receive()
link.close()
print("broken", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Running]:
    running = Running(tmp_path / "node.sock", size=WHOLE.nbytes)
    yield running
    running.stop()


def test_a_broken_connection_ends_nothing_until_its_process_is_gone(node: Running) -> None:
    command = [sys.executable, "-c", CLIENT, str(node.path), key("theirs")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "broken\n"
        wait_for(lambda: node.statistics()["bytes_draining"] == WHOLE.nbytes)
        other = node.scheduler("other")
        [answer] = ask(other, Acquire(1, key("ours"), WHOLE))
        assert not isinstance(answer, Ticket)  # its ranks may still write there
        process.kill()
    wait_for(lambda: node.statistics()["bytes_draining"] == 0)
    [answer] = ask(other, Acquire(2, key("ours"), WHOLE))
    assert isinstance(answer, Ticket)
    other.close()


def test_who_leaves_gives_everything_back_at_once(node: Running) -> None:
    one = node.scheduler("one")
    [answer] = ask(one, Acquire(1, key("theirs"), WHOLE))
    assert isinstance(answer, Ticket)
    one.close()
    wait_for(lambda: node.statistics()["bytes_free"] == WHOLE.nbytes)
