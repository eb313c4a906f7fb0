"""What workers' words and deaths settle reaches their scheduler along with its next answers, and once."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from server_helpers import PATIENCE_S, Running, ask, heard, key, wait_for

from ecotone.node import (
    Acquire,
    Commit,
    Forget,
    ForgetAll,
    Layout,
    Lookup,
    Pending,
    Ready,
    Settled,
    Ticket,
    Unreachable,
)
from ecotone.node.region import RegionDescriptor
from ecotone.node.server.client import SharedNodeExchange
from ecotone.node.server.link import Link
from ecotone.node.server.messages import MAX_SETTLED, PREAMBLE, Fact, Hello, Welcome, framed
from ecotone.node.server.worker import WorkerNode

SMALL = Layout("uint8", (64,))
NONE = Lookup(99, key("none"), SMALL)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Running]:
    running = Running(tmp_path / "node.sock", size=64 * 4096)
    yield running
    running.stop()


@pytest.fixture
def exchange(node: Running) -> Iterator[SharedNodeExchange]:
    made = node.scheduler(ranks=(0, 1))
    yield made
    made.close()


def worker(node: Running, rank: int) -> WorkerNode:
    end = WorkerNode(node.path, Hello("engine", "worker", access="write", rank=rank), PATIENCE_S)
    end.attach(writable=True, prefault=False)
    return end


def pair(node: Running) -> tuple[WorkerNode, WorkerNode]:
    return worker(node, 0), worker(node, 1)


def plain(news: list[Settled]) -> list[tuple[int, bool]]:
    assert all(0 <= told.age_s < PATIENCE_S and told.seq == 0 for told in news)
    return [(told.claim, told.committed) for told in news]


def test_what_the_ranks_settled_is_told_once(node: Running, exchange: SharedNodeExchange) -> None:
    one, two = pair(node)
    [good, bad] = ask(exchange, Acquire(1, key("good"), SMALL), Acquire(2, key("bad"), SMALL))
    assert isinstance(good, Ticket)
    assert isinstance(bad, Ticket)
    one.tell(Fact(good.transfer_id, 0, (0, 1), "saved"))
    one.tell(Fact(bad.transfer_id, 0, (0, 1), "failed"))
    wait_for(lambda: node.facts() == 2)
    assert heard(exchange, NONE)[1] == []  # one of two ranks
    two.tell(Fact(good.transfer_id, 1, (0, 1), "saved"))
    two.tell(Fact(bad.transfer_id, 1, (0, 1), "saved"))
    wait_for(lambda: node.facts() == 4)
    answers, news = heard(exchange, Acquire(3, key("good"), SMALL), Commit(4, good.transfer_id))
    assert plain(news) == [(good.transfer_id, True), (bad.transfer_id, False)]
    assert isinstance(answers[0], Ready)
    assert heard(exchange, NONE)[1] == []
    one.tell(Fact(answers[0].pin_id, 0, (0, 1), "released"))
    two.tell(Fact(answers[0].pin_id, 1, (0, 1), "released"))
    wait_for(lambda: node.facts() == 6)
    assert plain(heard(exchange, NONE)[1]) == [(answers[0].pin_id, False)]
    assert exchange.statistics()["held"] == 0
    assert exchange.statistics()["settled"] == 3
    one.close()
    two.close()


def test_what_the_scheduler_settled_first_is_no_news(node: Running, exchange: SharedNodeExchange) -> None:
    one = worker(node, 0)
    [ticket] = ask(exchange, Acquire(1, key("x"), SMALL))
    assert isinstance(ticket, Ticket)
    ask(exchange, Commit(2, ticket.transfer_id))
    one.tell(Fact(ticket.transfer_id, 0, (0,), "saved"))
    wait_for(lambda: node.facts() == 1)
    assert heard(exchange, NONE)[1] == []
    one.close()


def test_the_deaths_of_ranks_are_news(node: Running, exchange: SharedNodeExchange) -> None:
    one, two = pair(node)
    [ticket] = ask(exchange, Acquire(1, key("x"), SMALL))
    assert isinstance(ticket, Ticket)
    one.close()
    two.close()
    wait_for(lambda: not node.statistics()["transfers"])
    assert plain(heard(exchange, NONE)[1]) == [(ticket.transfer_id, False)]


def test_it_says_how_long_ago_it_was(tmp_path: Path) -> None:
    now = [100.0]
    node = Running(tmp_path / "node.sock", clock=lambda: now[0])
    exchange, end = node.scheduler(), worker(node, 0)
    [ticket] = ask(exchange, Acquire(1, key("x"), SMALL))
    assert isinstance(ticket, Ticket)
    end.tell(Fact(ticket.transfer_id, 0, (0,), "saved"))
    wait_for(lambda: node.facts() == 1)
    now[0] += 7.0
    assert heard(exchange, NONE)[1] == [Settled(0, ticket.transfer_id, True, 7.0)]
    end.close()
    exchange.close()
    node.stop()


def test_a_message_takes_a_bounded_part_of_it_along(node: Running, exchange: SharedNodeExchange) -> None:
    count = MAX_SETTLED + 10
    one = worker(node, 0)
    tickets = ask(exchange, *(Acquire(n, key(str(n)), SMALL) for n in range(count)))
    claims = [ticket.transfer_id for ticket in tickets if isinstance(ticket, Ticket)]
    assert len(claims) == count
    for claim in claims:
        one.tell(Fact(claim, 0, (0,), "saved"))
    wait_for(lambda: node.facts() == count)
    first, second = heard(exchange, NONE)[1], heard(exchange, NONE)[1]
    assert plain([*first, *second]) == [(claim, True) for claim in claims]
    assert len(first) == MAX_SETTLED
    assert exchange.statistics()["held"] == 0
    one.close()


def test_news_that_a_broken_connection_swallowed_are_told_again(node: Running) -> None:
    links: list[Link] = []

    def open_link(path: Path, hello: Hello) -> Link:
        links.append(Link(path, hello))
        return links[-1]

    exchange = SharedNodeExchange(node.path, Hello("engine", "scheduler", ranks=(0,)), open_link=open_link)
    exchange.wait_until_connected(PATIENCE_S)
    end = worker(node, 0)
    [ticket] = ask(exchange, Acquire(1, key("x"), SMALL))
    assert isinstance(ticket, Ticket)
    end.tell(Fact(ticket.transfer_id, 0, (0,), "saved"))
    wait_for(lambda: node.facts() == 1)
    exchange.submit([NONE])
    exchange.flush()
    links[0].wait(PATIENCE_S)  # the answer is here, and with it the news; nobody has read it
    links[0].close()
    wait_for(lambda: any(isinstance(a, Unreachable) for a in exchange.poll()))
    wait_for(lambda: exchange.is_connected, exchange.poll)
    assert plain(heard(exchange, NONE)[1]) == [(ticket.transfer_id, False)]
    assert exchange.statistics()["held"] == 0
    end.close()
    exchange.close()


def test_what_a_node_gave_that_is_gone_is_over(node: Running, exchange: SharedNodeExchange) -> None:
    [one, two] = ask(exchange, Acquire(1, key("x"), SMALL), Acquire(2, key("y"), SMALL))
    assert isinstance(one, Ticket)
    assert isinstance(two, Ticket)
    node.stop()
    wait_for(lambda: not exchange.is_connected, lambda: heard(exchange, NONE))
    again = Running(node.path)
    news: list[Settled] = []
    wait_for(lambda: len(news) == 2, lambda: news.extend(a for a in exchange.poll() if isinstance(a, Settled)))
    assert sorted(plain(news)) == sorted([(one.transfer_id, False), (two.transfer_id, False)])
    assert exchange.statistics()["held"] == 0
    exchange.close()
    again.stop()


# -- waiting --------------------------------------------------------------------------------------------------


def test_waiting_ends_with_the_answers(node: Running, exchange: SharedNodeExchange) -> None:
    for number in range(20):
        exchange.submit([Acquire(number, key("x"), SMALL), Forget(100, key("none")), ForgetAll(101, "1" * 32)])
        exchange.flush()
        exchange.wait(PATIENCE_S)
        answers = exchange.poll()
        assert [answer.seq for answer in answers] == [number, 100, 101]
        assert isinstance(answers[0], Ticket if number == 0 else Pending)
    began = time.monotonic()
    exchange.wait(PATIENCE_S)  # nothing was asked
    assert time.monotonic() - began < PATIENCE_S


def test_waiting_ends_with_the_time_or_with_the_node(tmp_path: Path) -> None:
    path = tmp_path / "mute.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        exchange = SharedNodeExchange(path, Hello("engine", "scheduler"))
        exchange.submit([])
        accepted, _ = listener.accept()
        with accepted:
            accepted.sendall(PREAMBLE + framed(Welcome("mute", 1, RegionDescriptor("region", 1, 4096))))
            exchange.wait_until_connected(PATIENCE_S)
            exchange.submit([NONE])
            exchange.flush()
            exchange.wait(0.05)
            assert exchange.poll() == []
            hanging_up = threading.Thread(target=accepted.close)
            hanging_up.start()
            exchange.wait(PATIENCE_S)
            hanging_up.join()
    assert exchange.poll() == [Unreachable(99)]
    exchange.close()
