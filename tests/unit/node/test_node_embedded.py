"""The embedded node: a region, an index and a server that begin and end together."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from ecotone.errors import ConfigError, ContractError, ResourceError, ShutDownError
from ecotone.node import (
    Absent,
    Acquire,
    Commit,
    Done,
    EmbeddedNode,
    Layout,
    Lookup,
    Namespace,
    NodeExchange,
    NoRoom,
    Pending,
    Ready,
    Release,
    Ticket,
    attach_region,
)
from ecotone.testing.exchange import DelayedExchange

NS = Namespace(model="m", revision="r", dtype="uint8", width=64, processor="p")
UNIT = Layout("uint8", (1, 64))


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def node(clock: Clock) -> Iterator[EmbeddedNode]:
    with EmbeddedNode(4 * 64, "engine-e", clock=clock, prefault=False) as made:
        yield made
        made.check_integrity()


def write(node: EmbeddedNode, exchange: NodeExchange, name: str, data: bytes) -> None:
    exchange.submit([Acquire(1, NS.key(name), UNIT)])
    (ticket,) = exchange.poll()
    assert isinstance(ticket, Ticket)
    (extent,) = ticket.extents
    node.region.view(extent, writable=True)[:] = data.ljust(64)
    exchange.submit([Commit(2, ticket.transfer_id)])
    assert list(exchange.poll()) == [Done(2, effect=True)]


def test_what_one_client_writes_another_process_side_reads(node: EmbeddedNode) -> None:
    write(node, node.connect("a"), "x", b"rows")
    reader = node.connect("b")
    reader.submit([Lookup(7, NS.key("x"), UNIT)])
    (ready,) = reader.poll()
    assert isinstance(ready, Ready)
    attached = attach_region("engine-e", 30.0, writable=False)
    assert bytes(attached.view(ready.extents[0])).rstrip() == b"rows"
    attached.close()


def test_answers_are_there_at_once_in_order_and_only_once(node: EmbeddedNode) -> None:
    exchange = node.connect("a")
    exchange.submit([Acquire(1, NS.key("x"), UNIT), Lookup(2, NS.key("x"), UNIT)])
    exchange.submit([Lookup(3, NS.key("y"), UNIT)])
    assert [type(answer) for answer in exchange.poll()] == [Ticket, Pending, Absent]
    assert list(exchange.poll()) == []


def test_the_capacity_is_what_was_asked_for_not_whole_pages(node: EmbeddedNode) -> None:
    exchange = node.connect("a")
    exchange.submit([Acquire(n, NS.key(str(n)), UNIT) for n in range(5)])
    assert [type(answer) for answer in exchange.poll()] == [Ticket] * 4 + [NoRoom]
    assert exchange.statistics()["bytes_total"] == 256


def test_leases_follow_the_injected_clock(node: EmbeddedNode, clock: Clock) -> None:
    exchange = node.connect("a")
    write(node, exchange, "x", b"rows")
    exchange.submit([Acquire(3, NS.key("x"), UNIT, lease_s=5.0)])
    (ready,) = exchange.poll()
    assert node.statistics()["pins"] == 1
    clock.now += 5.0
    assert node.statistics()["pins"] == 0
    assert isinstance(ready, Ready)
    exchange.submit([Release(4, ready.pin_id)])
    assert list(exchange.poll()) == [Done(4, effect=False)]


def test_a_client_that_closes_holds_nothing_and_may_come_back(node: EmbeddedNode) -> None:
    exchange = node.connect("a")
    exchange.submit([Acquire(1, NS.key("x"), UNIT)])
    with pytest.raises(ContractError, match="'a' is connected already"):
        node.connect("a")
    exchange.close()
    exchange.close()
    assert node.statistics()["bytes_free"] == 256
    with pytest.raises(ShutDownError, match="'a' has left"):
        exchange.submit([])
    with pytest.raises(ShutDownError, match="'a' has left"):
        exchange.poll()
    write(node, node.connect("a"), "x", b"rows")


def test_closing_late_does_not_end_the_successor(node: EmbeddedNode) -> None:
    old = node.connect("a")
    node.disconnect("a")
    new = node.connect("a")
    new.submit([Acquire(1, NS.key("x"), UNIT)])
    old.close()
    assert node.statistics()["transfers"] == 1
    assert [type(answer) for answer in new.poll()] == [Ticket]


def test_a_lost_client_is_refused_and_its_memory_waits_for_its_end(node: EmbeddedNode) -> None:
    exchange = node.connect("a")
    exchange.submit([Acquire(1, NS.key("x"), UNIT)])
    node.disconnect("a", may_still_touch=True)
    with pytest.raises(ShutDownError, match="'a' has left the node, or was lost"):
        exchange.submit([Lookup(2, NS.key("x"), UNIT)])
    assert node.statistics()["bytes_draining"] == 64
    node.client_gone("a")
    assert node.statistics()["bytes_free"] == 256


def test_after_close_nothing_is_held_and_everything_is_refused() -> None:  # hazard 34
    node = EmbeddedNode(256, "engine-e", prefault=False)
    exchange = node.connect("a")
    exchange.submit([Acquire(1, NS.key("x"), UNIT)])
    (ticket,) = exchange.poll()
    assert isinstance(ticket, Ticket)
    view = node.region.view(ticket.extents[0], writable=True)
    node.close()
    node.close()
    view[:] = bytes(64)  # still mapped
    for refused in (lambda: node.connect("b"), lambda: exchange.submit([]), lambda: exchange.poll()):
        with pytest.raises(ShutDownError, match="closed"):
            refused()
    exchange.close()
    node.check_integrity()
    assert (node.statistics()["transfers"], exchange.statistics()["bytes_writing"]) == (0, 0)
    EmbeddedNode(256, "engine-e", prefault=False).close()  # the name is free again


def test_what_cannot_work_is_refused_before_anything_is_kept(node: EmbeddedNode) -> None:
    with pytest.raises(ConfigError, match="capacity_bytes=63 must be at least 64"):
        EmbeddedNode(63, "other")
    with pytest.raises(ConfigError, match="max_pieces=0"):
        EmbeddedNode(64, "other", max_pieces=0)
    with pytest.raises(ConfigError, match="'fifo' is not one of"):
        EmbeddedNode(64, "other", policy="fifo")
    with pytest.raises(ResourceError, match="does not fit"):
        EmbeddedNode(2**50, "other", prefault=False)  # so that a missing check cannot fill the machine's memory
    with pytest.raises(ConfigError, match="'engine-e' is taken"):
        EmbeddedNode(64, "engine-e")
    EmbeddedNode(64, "other").close()


def test_clients_in_several_threads_and_a_scraper_do_not_disturb_each_other(node: EmbeddedNode) -> None:  # 43
    stop = threading.Event()
    errors: list[BaseException] = []

    def client(name: str) -> None:
        exchange = node.connect(name)
        for n in range(300):
            exchange.submit([Acquire(n, NS.key(str(n % 7)), UNIT)])
            (answer,) = exchange.poll()
            if isinstance(answer, Ticket):
                exchange.submit([Commit(n, answer.transfer_id)])
            elif isinstance(answer, Ready):
                exchange.submit([Release(n, answer.pin_id)])
            exchange.poll()
        exchange.close()

    def scrape() -> None:
        while not stop.is_set():
            node.check_integrity()
            stats = node.statistics()
            parts = sum(stats[f"bytes_{part}"] for part in ("free", "writing", "ready", "draining"))
            if parts != stats["bytes_total"]:
                errors.append(AssertionError(stats))

    clients = [threading.Thread(target=client, args=(name,)) for name in "abc"]
    scraper = threading.Thread(target=scrape)
    scraper.start()
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join()
    stop.set()
    scraper.join()
    assert not errors
    stats = node.statistics()
    assert stats["hits"] + stats["misses"] + stats["pending"] == 900
    assert stats["pins"] == stats["transfers"] == 0


def test_delayed_answers_come_after_as_many_polls_and_in_order(node: EmbeddedNode) -> None:
    exchange = DelayedExchange(node.connect("a"), lambda answer: {1: 2, 2: 0, 3: 1}[answer.seq])
    exchange.submit([Acquire(1, NS.key("x"), UNIT), Lookup(2, NS.key("x"), UNIT)])
    assert exchange.statistics()["transfers"] == 1  # carried out at once
    assert list(exchange.poll()) == []
    exchange.submit([Lookup(3, NS.key("y"), UNIT)])
    assert list(exchange.poll()) == []
    assert [answer.seq for answer in exchange.poll()] == [1, 2, 3]
    assert list(exchange.poll()) == []


def test_a_fixed_delay_and_none(node: EmbeddedNode) -> None:
    for delay in (0, 3):
        exchange = DelayedExchange(node.connect(f"client-{delay}"), delay)
        exchange.submit([Lookup(1, NS.key("x"), UNIT)])
        assert [len(exchange.poll()) for _ in range(5)] == [int(n == delay) for n in range(5)]
        exchange.submit([Lookup(2, NS.key("x"), UNIT)])
        exchange.close()
        with pytest.raises(ShutDownError):
            exchange.poll()
