"""A scheduler's and a worker's ends, over a real socket."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from server_helpers import NAMESPACE, PATIENCE_S, UNIT, Running, ask, is_refused, key, wait_for

from ecotone.errors import ConfigError, ContractError, DecodeError, ResourceError, ShutDownError
from ecotone.node import (
    Abort,
    Absent,
    Acquire,
    Commit,
    Done,
    ForgetAll,
    Lookup,
    NoRoom,
    Pending,
    Ready,
    Release,
    Ticket,
    Unreachable,
)
from ecotone.node.region import RegionDescriptor
from ecotone.node.server.client import SharedNodeExchange
from ecotone.node.server.link import Link, LostError
from ecotone.node.server.listen import Address
from ecotone.node.server.messages import (
    MAX_BATCH_OPS,
    PREAMBLE,
    VERSION,
    Answers,
    ClientMessage,
    Fact,
    Hello,
    Keep,
    NodeMessage,
    Welcome,
)
from ecotone.node.server.tool import NodeTool
from ecotone.node.server.worker import WorkerNode


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "node.sock"


@pytest.fixture
def node(path: Path) -> Iterator[Running]:
    running = Running(path)
    yield running
    running.stop()
    assert not path.exists()


@pytest.fixture
def restart(path: Path) -> Iterator[Callable[[], Running]]:
    """Nodes one after the other at the same path."""
    nodes: list[Running] = []

    def make() -> Running:
        if nodes:
            nodes[-1].stop()
        nodes.append(Running(path))
        return nodes[-1]

    yield make
    nodes[-1].stop()


def worker(path: Path, name: str = "engine", rank: int = 0, access: str = "write", **options: str) -> WorkerNode:
    return WorkerNode(path, Hello(name, "worker", access=access, rank=rank, **options), PATIENCE_S)  # type: ignore


def write(node: Running, exchange: SharedNodeExchange, name: str, data: bytes = b"") -> None:
    [ticket] = ask(exchange, Acquire(1, key(name), UNIT))
    assert isinstance(ticket, Ticket)
    if data:
        end = worker(node.path)
        region = end.attach(writable=True, prefault=False)
        region.view(ticket.extents[0], writable=True)[: len(data)] = data
        region.close()
        end.close()
    else:
        ask(exchange, Commit(2, ticket.transfer_id))


# -- asking ---------------------------------------------------------------------------------------------------


def test_answers_come_in_order_and_nothing_goes_out_before_the_step_ends(node: Running) -> None:
    exchange = node.scheduler()
    exchange.submit([Acquire(1, key("x"), UNIT)])
    exchange.submit([Lookup(2, key("x"), UNIT), Lookup(3, key("y"), UNIT)])
    assert exchange.poll() == []
    assert exchange.statistics()["batches"] == 0
    answers = ask(exchange, ForgetAll(4, NAMESPACE))
    assert [type(answer) for answer in answers] == [Ticket, Pending, Absent, Done]
    assert exchange.statistics()["batches"] == 1
    exchange.flush()  # a step that needs nothing
    assert exchange.statistics()["batches"] == 1
    exchange.close()


def test_more_operations_than_fit_into_a_message(node: Running) -> None:
    exchange = node.scheduler()
    count = 2 * MAX_BATCH_OPS + 3
    exchange.submit([Lookup(seq, key(str(seq)), UNIT) for seq in range(count)])
    exchange.flush()
    answers: list[object] = []
    wait_for(lambda: len(answers) == count, lambda: answers.extend(exchange.poll()))
    assert answers == [Absent(seq) for seq in range(count)]
    exchange.close()


def test_two_engines_share_one_ticket(node: Running) -> None:
    a, b = node.scheduler("a"), node.scheduler("b")
    [ticket] = ask(a, Acquire(1, key("x"), UNIT))
    assert isinstance(ticket, Ticket)
    assert ask(b, Acquire(1, key("x"), UNIT)) == [Pending(1)]
    assert ask(b, Commit(2, ticket.transfer_id)) == [Done(2, effect=False)]
    assert ask(a, Commit(2, ticket.transfer_id)) == [Done(2, effect=True)]
    [ready] = ask(b, Acquire(3, key("x"), UNIT))
    assert isinstance(ready, Ready)
    assert ready.extents == ticket.extents
    a.close()
    b.close()


def test_a_dead_holder_releases_who_waits(node: Running) -> None:
    a, b = node.scheduler("a"), node.scheduler("b")
    ask(a, Acquire(1, key("x"), UNIT))
    assert ask(b, Acquire(1, key("x"), UNIT)) == [Pending(1)]
    a.close()
    wait_for(lambda: isinstance(ask(b, Acquire(2, key("x"), UNIT))[0], Ticket))
    b.close()


def test_closed_ends_refuse(node: Running) -> None:
    exchange = node.scheduler()
    exchange.close()
    exchange.close()
    for use in (lambda: exchange.submit([]), exchange.flush, exchange.poll):
        with pytest.raises(ShutDownError):
            use()


# -- the region -----------------------------------------------------------------------------------------------


def test_what_one_process_side_writes_the_other_reads_and_cannot_change(node: Running) -> None:
    exchange = node.scheduler()
    [ticket] = ask(exchange, Acquire(1, key("x"), UNIT))
    assert isinstance(ticket, Ticket)
    end = worker(node.path)
    end.attach(writable=True, prefault=False).view(ticket.extents[0], writable=True)[:4] = b"rows"
    end.tell(Fact(ticket.transfer_id, 0, (0,), "saved"))
    ready = wait_for(lambda: isinstance(answer := ask(exchange, Acquire(2, key("x"), UNIT))[0], Ready) and answer)
    assert isinstance(ready, Ready)
    assert ask(exchange, Commit(3, ticket.transfer_id)) == [Done(3, effect=False)]  # heard twice is heard once
    reader = worker(node.path, access="read", rank=0)
    region = reader.attach(writable=False, prefault=False)
    assert bytes(region.view(ready.extents[0])[:4]) == b"rows"
    with pytest.raises(ContractError, match="read-only"):
        region.view(ready.extents[0], writable=True)
    assert "only reads" in is_refused(lambda: reader.attach(writable=True, prefault=False))
    for part in (end, reader, exchange):
        part.close()


def test_memory_that_may_still_be_written_is_kept_until_the_last_process_is_gone(node: Running) -> None:
    exchange, other = node.scheduler("engine", (0, 1)), node.scheduler("other")
    ask(exchange, Acquire(1, key("x"), UNIT))
    ends = [worker(node.path, rank=rank) for rank in (0, 1)]
    for end in ends:
        end.attach(writable=True, prefault=False)
    exchange.close()
    wait_for(lambda: node.statistics()["bytes_draining"] == 64)
    assert isinstance(ask(other, Acquire(1, key("x"), UNIT))[0], Ticket)  # nobody waits for the dead
    ends[0].close()
    assert node.statistics()["bytes_draining"] == 64
    ends[1].close()
    wait_for(lambda: node.statistics()["bytes_draining"] == 0)
    other.close()


def test_a_worker_whose_scheduler_is_gone_is_not_given_the_region(node: Running) -> None:
    assert "is not connected" in is_refused(lambda: worker(node.path).attach(writable=True, prefault=False))
    exchange = node.scheduler()
    end = worker(node.path)
    end.attach(writable=False, prefault=False)
    late = worker(node.path, rank=1)
    exchange.close()
    with NodeTool(node.path) as tool:
        wait_for(lambda: not tool.describe().node["schedulers"])
    assert "is not connected" in is_refused(lambda: late.attach(writable=True, prefault=False))
    end.close()
    late.close()


def test_a_dead_worker_ends_its_part(node: Running) -> None:
    exchange = node.scheduler()
    end = worker(node.path)
    end.attach(writable=True, prefault=False)
    write(node, exchange, "ready")
    [ready, ticket] = ask(exchange, Acquire(5, key("ready"), UNIT), Acquire(6, key("x"), UNIT))
    assert isinstance(ready, Ready)
    assert isinstance(ticket, Ticket)
    end.close()
    wait_for(lambda: not (node.statistics()["pins"] or node.statistics()["transfers"]))
    assert isinstance(ask(exchange, Acquire(7, key("x"), UNIT))[0], Ticket)
    exchange.close()


def test_a_worker_that_still_reads_in_place_is_not_gone_when_it_is_closed(node: Running) -> None:
    exchange = node.scheduler()
    write(node, exchange, "x")
    [ready] = ask(exchange, Acquire(3, key("x"), UNIT))
    assert isinstance(ready, Ready)
    end = worker(node.path)
    end.attach(writable=False, prefault=False)
    end.reads_in_place(ready.pin_id)
    end.close()
    exchange.close()
    with NodeTool(node.path) as tool:
        wait_for(lambda: not tool.describe().node["schedulers"])
        assert tool.describe().node["workers"] == 1
        assert node.statistics()["pins"] == 1
        end.tell(Fact(ready.pin_id, 0, (0,), "released"))
        wait_for(lambda: not tool.describe().node["workers"])
    assert node.statistics()["pins"] == 0
    with pytest.raises(ResourceError, match="was closed"):
        end.attach(writable=False, prefault=False)


def test_facts_about_what_an_engine_does_not_hold_change_nothing(node: Running) -> None:
    exchange, other = node.scheduler("engine"), node.scheduler("other")
    [ticket] = ask(exchange, Acquire(1, key("x"), UNIT))
    assert isinstance(ticket, Ticket)
    end = worker(node.path, "other")
    end.attach(writable=True, prefault=False)
    for kind in ("saved", "failed", "released"):
        end.tell(Fact(ticket.transfer_id, 0, (0,), kind))  # type: ignore[arg-type]
        end.tell(Fact(12345, 0, (0,), kind))  # type: ignore[arg-type]
    end.close()
    assert ask(other, Acquire(1, key("x"), UNIT)) == [Pending(1)]
    exchange.close()
    other.close()


# -- tenants and refusals -------------------------------------------------------------------------------------


def test_tenants_have_a_region_and_a_budget_each(path: Path) -> None:
    node = Running(path, tenants={"": 4096, "blue": 8192})
    plain = node.scheduler()
    blue = SharedNodeExchange(path, Hello("engine", "scheduler", tenant="blue"))
    blue.wait_until_connected(PATIENCE_S)
    [one], [two] = ask(plain, Acquire(1, key("x"), UNIT)), ask(blue, Acquire(1, key("x"), UNIT))
    assert isinstance(one, Ticket)
    assert isinstance(two, Ticket)
    assert one.extents[0].region_id != two.extents[0].region_id
    assert (node.statistics("")["bytes_total"], node.statistics("blue")["bytes_total"]) == (4096, 8192)
    with pytest.raises(ConfigError, match=r"no tenant 'red'; there are '', 'blue'"):
        SharedNodeExchange(path, Hello("e", "scheduler", tenant="red")).wait_until_connected(PATIENCE_S)
    plain.close()
    blue.close()
    node.stop()


def test_another_user_is_refused(path: Path) -> None:
    node = Running(path, uid=os.geteuid() + 1)
    with pytest.raises(ConfigError, match="no node at"):
        SharedNodeExchange(path, Hello("e", "scheduler")).wait_until_connected(0.0)
    with pytest.raises(ResourceError, match=r"hung up|Broken pipe|reset"):
        NodeTool(path)
    node.stop()


def test_a_socket_of_another_users_process_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = Running(path)
    monkeypatch.setattr("ecotone.node.server.link.peer_uid", lambda _: 12345)
    with pytest.raises(ConfigError, match="belongs to user 12345"):
        SharedNodeExchange(path, Hello("e", "scheduler")).wait_until_connected(PATIENCE_S)
    monkeypatch.undo()
    node.stop()


def test_no_node_is_said_plainly(path: Path) -> None:
    exchange = SharedNodeExchange(path, Hello("e", "scheduler"))
    with pytest.raises(ConfigError, match=r"no node at .*: nothing is there; 'ecotone node' starts one"):
        exchange.wait_until_connected(3600.0)  # at once, whatever patience there is
    path.write_text("")
    with pytest.raises(ConfigError, match=r"no node at .*: that is no socket"):
        exchange.wait_until_connected(3600.0)


def test_a_socket_that_does_not_answer_yet_is_waited_for(node: Running) -> None:
    tries = []

    def open_link(address: Address, hello: Hello) -> Link:
        tries.append(address)
        if len(tries) == 1:
            raise LostError("Connection refused")  # bound, and not listening yet
        return Link(address, hello)

    exchange = SharedNodeExchange(node.path, Hello("e", "scheduler"), open_link=open_link)
    exchange.wait_until_connected(PATIENCE_S)
    assert exchange.is_connected
    assert len(tries) == 2
    exchange.close()


def test_another_version_answers(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        exchange = SharedNodeExchange(path, Hello("e", "scheduler"))
        exchange.submit([])
        accepted, _ = listener.accept()
        with accepted:
            accepted.sendall(PREAMBLE[:8] + (77).to_bytes(4, "little"))
            with pytest.raises(
                ConfigError, match=f"it speaks version 77 of the protocol, and this is version {VERSION}"
            ):
                exchange.wait_until_connected(PATIENCE_S)


def test_a_newer_connection_of_an_engine_takes_the_place_of_the_older(node: Running) -> None:
    old, new = node.scheduler(), node.scheduler()
    assert isinstance(ask(new, Acquire(1, key("x"), UNIT))[0], Ticket)
    assert isinstance(ask(old, Lookup(1, key("x"), UNIT))[0], Unreachable)
    old.close()
    new.close()


def test_who_is_no_scheduler_may_not_ask(node: Running) -> None:
    with pytest.raises(DecodeError, match="not printable"):
        Hello("\0tier", "scheduler")
    exchange = SharedNodeExchange(node.path, Hello("e", "tool"))
    exchange.wait_until_connected(PATIENCE_S)
    assert ask(exchange, Lookup(1, key("x"), UNIT)) == [Unreachable(1)]
    exchange.close()


# -- losing the node ------------------------------------------------------------------------------------------


class Scripted(Link):
    """A link that brings what it is told to, and takes everything."""

    def __init__(self, *inbox: NodeMessage | LostError) -> None:
        self.inbox = list(inbox)
        self.sent: list[ClientMessage] = []

    @property
    def unsent_bytes(self) -> int:
        return 0

    def send(self, message: ClientMessage) -> None:
        self.sent.append(message)

    def pump(self) -> None:
        pass

    def receive(self) -> Iterator[NodeMessage]:
        while self.inbox:
            message = self.inbox.pop(0)
            if isinstance(message, LostError):
                raise message
            yield message

    def close(self) -> None:
        pass


def test_what_is_known_is_said_again_where_nothing_shows_that_it_arrived(path: Path) -> None:
    welcome = Welcome("node", 1, RegionDescriptor("node", 1, 4096))
    links = [Scripted(welcome) for _ in range(3)]
    waiting = iter(links)
    exchange = SharedNodeExchange(path, Hello("e", "scheduler"), open_link=lambda *_: next(waiting))
    exchange.submit([Acquire(1, key("x"), UNIT)])
    exchange.flush()
    links[0].inbox.append(LostError("it hung up"))
    assert list(exchange.poll()) == [Unreachable(1)]
    exchange.poll()
    assert links[1].sent == [Keep(frozenset())]  # nobody knows what became of the question
    links[1].inbox.append(LostError("it hung up"))
    exchange.poll()
    exchange.poll()
    assert links[2].sent == [Keep(frozenset())]
    # With an answer to something later, it arrived; what is idle then is asked for no news.
    exchange.submit([Lookup(2, key("x"), UNIT)])
    exchange.flush()
    links[2].inbox.append(Answers((Absent(2),)))
    assert list(exchange.poll()) == [Absent(2)]
    links[2].inbox.append(LostError("it hung up"))
    exchange.poll()
    assert exchange.is_connected


def test_without_its_node_an_engine_goes_on_and_finds_the_next_one(
    restart: Callable[[], Running], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    node = restart()
    exchange = node.scheduler()
    write(node, exchange, "x")
    [before] = ask(exchange, Acquire(3, key("x"), UNIT))
    assert isinstance(before, Ready)
    exchange.submit([Acquire(4, key("y"), UNIT)])
    node.stop()
    assert ask(exchange, Release(5, before.pin_id)) == [Unreachable(4), Done(5, effect=False)]
    for seq in range(6, 16):
        assert ask(exchange, Acquire(seq, key("x"), UNIT))[-1] == Unreachable(seq)
    statistics = exchange.statistics()
    assert (statistics["lost"], statistics["connected"]) == (1, 0)
    assert statistics["unreachable"] == 12
    assert [record.levelname for record in caplog.records] == ["WARNING"]  # one for all of it
    restart()
    after = wait_for(lambda: isinstance(a := ask(exchange, Acquire(20, key("x"), UNIT))[0], Ticket) and a)
    assert isinstance(after, Ticket)
    assert after.extents[0].generation != before.extents[0].generation
    assert caplog.records[-1].getMessage().endswith("is there again")
    # What the old node gave means nothing to the new one.
    assert ask(exchange, Release(21, before.pin_id)) == [Done(21, effect=False)]
    exchange.close()


def test_a_worker_follows_its_node_to_another_region(restart: Callable[[], Running]) -> None:
    node = restart()
    exchange = node.scheduler()
    [ticket] = ask(exchange, Acquire(1, key("x"), UNIT))
    assert isinstance(ticket, Ticket)
    end = worker(node.path)
    view = end.attach(writable=True, prefault=False).view(ticket.extents[0], writable=True)
    view[:3] = b"old"
    node = restart()
    wait_for(lambda: exchange.is_connected, exchange.poll)
    ticket = wait_for(lambda: isinstance(a := ask(exchange, Acquire(2, key("x"), UNIT))[0], Ticket) and a)  # type: ignore
    region = end.attach(writable=True, prefault=False)
    region.view(ticket.extents[0], writable=True)[:3] = b"new"
    assert bytes(view[:3]) == b"old"  # what is mapped stays
    end.tell(Fact(ticket.transfer_id, 0, (0,), "saved"))
    wait_for(lambda: isinstance(ask(exchange, Acquire(3, key("x"), UNIT))[0], Ready))
    node.stop()
    assert "No such file" in is_refused(lambda: end.attach(writable=True, prefault=False))
    end.tell(Fact(1, 0, (0,), "saved"))  # nobody hears it
    end.close()
    exchange.close()


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_connection_that_breaks_loses_what_never_arrived_and_nothing_else(
    node: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    exchange = node.scheduler(clock=clock, answer_timeout_s=3.0)
    end = worker(node.path)
    end.attach(writable=True, prefault=False)
    [kept] = ask(exchange, Acquire(1, key("kept"), UNIT))
    assert isinstance(kept, Ticket)
    link = exchange._link  # the one way to make the answer of a live node late
    monkeypatch.setattr(link, "receive", lambda: iter(()))
    exchange.submit([Acquire(2, key("lost"), UNIT)])
    exchange.flush()
    wait_for(lambda: node.statistics()["tickets"] == 2)
    clock.now += 3.1
    assert exchange.poll() == [Unreachable(2)]
    wait_for(lambda: exchange.is_connected, lambda: (exchange.poll(), setattr(clock, "now", clock.now + 0.01)))
    wait_for(lambda: node.statistics()["transfers"] == 1)  # "kept" drains, "lost" is nobody's
    assert node.statistics()["bytes_draining"] == 64
    assert ask(exchange, Abort(4, kept.transfer_id)) == [Done(4, effect=True)]
    assert node.statistics()["bytes_draining"] == 0
    end.close()
    exchange.close()


def test_no_room_is_an_answer_like_any_other(node: Running) -> None:
    exchange = node.scheduler()
    tickets = ask(exchange, *(Acquire(seq, key(str(seq)), UNIT) for seq in range(65)))
    assert isinstance(tickets[-1], NoRoom)
    assert all(isinstance(ticket, Ticket) for ticket in tickets[:-1])
    exchange.close()
