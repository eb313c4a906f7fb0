"""One producer and two consumers, engines of their own, meet in a node: an image is encoded once between them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import cycle

import pytest
from engine_process import EngineProcess, StartEngine, close_all, ecotone
from node_process import NodeProcess

LATE = {"ec_connector": "LateConnector", "ec_connector_module_path": "late_connector"}
PATIENCE_S = 60.0


class Fleet:
    """The node and its engines. The producer's saves can be held."""

    def __init__(self, node: NodeProcess, engines: list[EngineProcess], images: list[str]) -> None:
        self.node = node
        self.producer, *self.consumers = engines
        self._images = images

    def ask(self, engine: EngineProcess, *numbers: int) -> list[list[int]]:
        """About each image, one after the other. A producer answers nothing."""
        return [engine.ask("generate", requests=[self.request(number)])[0] for number in numbers]

    def request(self, number: int) -> dict[str, object]:
        return {"images": [self._images[number]], "text": "What digit is this?"}

    def encodes(self) -> tuple[int, ...]:
        """Of the producer and of each consumer."""
        return tuple(engine.encodes() for engine in (self.producer, *self.consumers))


@pytest.fixture(scope="module")
def fleet(
    start_engine: StartEngine, images: dict[str, list[str]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fleet]:
    node = NodeProcess(tmp_path_factory.mktemp("n"))
    fleet = None
    try:
        configs = [{**ecotone("ec_producer", node=node.option), **LATE}]
        configs += [ecotone("ec_consumer", node=node.option, pending_timeout_s=60.0) for _ in range(2)]
        engines = [start_engine("digits", ec=config) for config in configs]
        for engine in engines:
            engine.wait_until_started()
        fleet = Fleet(node, engines, images["digits"])
        yield fleet
        close_all(engines)
        fleet.node.close()
    finally:
        (node if fleet is None else fleet.node).kill()


def change(before: tuple[int, ...], after: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(b - a for a, b in zip(before, after, strict=True))


def wait_until(holds: Callable[[], bool]) -> None:
    """Of what another process does, and tells nobody."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_an_image_is_encoded_once_between_them(fleet: Fleet) -> None:
    before = fleet.encodes()
    fleet.ask(fleet.producer, 0, 1, 2, 3, 0, 1)
    answers = [fleet.ask(consumer, 0, 1, 2, 3, 0) for consumer in fleet.consumers]
    assert answers[0] == answers[1]
    assert all(answers[0])
    assert change(before, fleet.encodes()) == (4, 0, 0)
    fleet.node.check_integrity()


def test_what_nobody_produced_is_encoded_where_it_is_asked(fleet: Fleet) -> None:
    before = fleet.encodes()
    answers = [fleet.ask(consumer, 4, 5) for consumer in fleet.consumers]
    assert answers[0] == answers[1]
    assert change(before, fleet.encodes()) == (0, 2, 2)
    fleet.ask(fleet.producer, 4, 5)
    for consumer in fleet.consumers:
        fleet.ask(consumer, 6, 7)  # what they know themselves leaves their own caches
    assert fleet.ask(fleet.consumers[0], 4, 5) == answers[0]
    assert change(before, fleet.encodes()) == (2, 4, 4)


def test_the_save_of_an_idle_producer(fleet: Fleet) -> None:
    before = fleet.encodes()
    fleet.producer.ask("rpc", method="hold_saves")
    fleet.ask(fleet.producer, 8)
    waiting, other = fleet.consumers
    pending = fleet.node.of_tenant("pending")
    waiting.send("generate", requests=[fleet.request(8)])
    wait_until(lambda: fleet.node.of_tenant("pending") > pending)
    fleet.ask(other, 0)  # it goes on, and the other one waits
    assert fleet.producer.ask("rpc", method="release_saves") == [1]  # no step is run for that
    [answer] = waiting.answer()
    assert fleet.ask(other, 8) == [answer]
    assert change(before, fleet.encodes()) == (1, 0, 0)


def test_the_node_is_killed(fleet: Fleet) -> None:
    first = fleet.consumers[0]
    fleet.ask(fleet.producer, 9, 10)
    answers = fleet.ask(first, 9, 10)
    first.send("generate", requests=[fleet.request(number) for number in (9, 10, 11, 12, 9, 10)])
    fleet.node.kill()
    found = first.answer()
    assert [found[0], found[1], found[4], found[5]] == answers * 2
    fleet.ask(fleet.producer, 13)
    for consumer in fleet.consumers:
        assert fleet.ask(consumer, 9, 10) == answers
        assert fleet.ask(consumer, 11, 12) == found[2:4]

    fleet.node = NodeProcess(fleet.node.path.parent)
    numbers = cycle(range(14, 40))

    def found_the_new_node() -> bool:
        number = next(numbers)
        fleet.ask(fleet.producer, number)
        before = first.encodes()
        fleet.ask(first, number)
        return first.encodes() == before

    wait_until(found_the_new_node)
    fleet.node.check_integrity()
