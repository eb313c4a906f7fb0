"""What the scheduler's side says to each request of a pass, and what it believes of vLLM's own encoder cache."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

import pytest
from plugin_doubles import BRINGS_MEDIA, request

from ecotone.connectors.messages import EcotoneStepMetadata, EcotoneWorkerMetadata, Report, ReportKind
from ecotone.connectors.scheduler import EcotoneSchedulerConnector
from ecotone.node.embedded import EmbeddedNode
from ecotone.node.exchange import AnyAnswer
from ecotone.node.keys import Namespace
from ecotone.protocol.connector import ECSchedulerContext, EncoderSpec, Participant
from ecotone.protocol.outputs import ECConnectorOutput
from ecotone.vllm.messages import NO_ORDERS, VllmWorkerMetadata
from ecotone.vllm.scheduler import PATIENCE_S, SchedulerSide

NAMESPACE = Namespace(model="m", revision="r", dtype="float32", width=8, processor="p")
BUDGET_S = 10.0


class Slow:
    """An exchange that keeps its answers to itself while ``silent``, and notes how long it is waited for."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.silent = False
        self.waits: list[float] = []

    def poll(self) -> Sequence[AnyAnswer]:
        return () if self.silent else self._inner.poll()

    def wait(self, timeout_s: float) -> None:
        self.waits.append(timeout_s)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class Bed:
    """The scheduler's side over a node in here, one request and item at a time; no worker."""

    def __init__(self) -> None:
        self.now = 0.0
        node = EmbeddedNode(2**20, uuid.uuid4().hex, clock=self.clock, prefault=False)
        self.exchange = Slow(node.connect("bed"))
        context = ECSchedulerContext(
            engine_id="bed",
            role="ec_both",
            options={},
            participants=(Participant(0, "here"),),
            encoder=EncoderSpec(hidden_size=8, levels=0, dtype="float32"),
            clock=self.clock,
        )
        half = EcotoneSchedulerConnector(context, self.exchange, BUDGET_S, node.close)
        self.side = SchedulerSide(half, NAMESPACE, {"image": 8}, 100, BRINGS_MEDIA)

    def clock(self) -> float:
        return self.now

    def may_run(self, req_id: str, name: str, rows: int = 4) -> bool:
        return self.side.ensure_available(request(req_id, name, rows=rows), 0)

    def schedule(self, req_id: str, name: str, rows: int = 4) -> EcotoneStepMetadata | None:
        """A pass of one request; its orders."""
        assert self.may_run(req_id, name, rows)
        self.side.has_item(name)
        self.side.allocated(name)
        return self.side.build_orders(()).orders

    def store(self, name: str) -> None:
        """The node has it, and vLLM does not."""
        orders = self.schedule("store", name)
        report = Report(0, 0, orders.saves[0].transfer_id, ReportKind.SAVED)
        meta = EcotoneWorkerMetadata(frozenset({report}))
        self.side.take_in(VllmWorkerMetadata(ECConnectorOutput(ec_connector_worker_meta=meta)))
        self.side.build_orders([name])


@pytest.fixture
def bed():
    bed = Bed()
    yield bed
    bed.side.shutdown()


def test_who_waited_longest_is_not_held_up_by_those_who_come_before_it(bed):
    bed.schedule("writer", "A")
    bed.side.build_orders(["A"])
    assert not bed.may_run("old", "A")
    bed.side.build_orders(())
    bed.now = BUDGET_S - 1
    assert not bed.may_run("new", "A")  # of higher priority: it is asked first
    assert not bed.may_run("old", "A")
    bed.side.build_orders(())
    bed.now = BUDGET_S + 1
    assert not bed.may_run("new", "A")
    assert bed.may_run("old", "A")


def test_one_identifier_for_items_of_two_sizes_loads_no_rows_of_the_other(bed):
    bed.store("A")
    assert bed.may_run("small", "A")  # and is not scheduled, for want of something else
    assert bed.may_run("large", "A", rows=9)
    assert not bed.side.has_item("A")
    bed.side.allocated("A")
    assert bed.side.build_orders(()) is NO_ORDERS
    assert bed.side.statistics()["unsaved.ambiguous"] == 1


def test_nor_writes_to_memory_of_the_others_size(bed):
    assert bed.may_run("small", "A")
    assert bed.may_run("large", "A", rows=9)
    bed.side.allocated("A")
    assert bed.side.build_orders(()) is NO_ORDERS


def test_an_answer_that_came_late_is_about_the_item_that_was_asked_about(bed):
    bed.store("A")
    bed.exchange.silent = True
    assert not bed.may_run("small", "A")
    bed.side.build_orders(())
    bed.exchange.silent = False
    bed.side.build_orders(())  # the answer arrives with the next pass, and holds memory
    assert bed.may_run("large", "A", rows=9)
    assert not bed.side.has_item("A")


def test_a_node_that_was_late_is_waited_for_once_in_a_pass(bed):
    bed.exchange.silent = True
    for name in "ABC":
        assert not bed.may_run(name, name)
    assert bed.exchange.waits == [PATIENCE_S, 0.0, 0.0]
    bed.side.build_orders(())
    bed.may_run("D", "D")
    assert bed.exchange.waits[-1] == PATIENCE_S


def test_what_was_given_and_evicted_in_one_pass_is_not_vllms(bed):
    assert bed.may_run("preempted", "A")
    bed.side.allocated("A")
    bed.side.build_orders(["A"])
    assert not bed.may_run("next", "A")  # is asked about, and is being written


def test_weights_of_one_life_are_not_those_of_the_next_under_the_same_engine_id(bed):
    again = Bed()
    for side in (bed.side, again.side):
        side.reset()
    [one], [other] = bed.schedule("1", "A").saves, again.schedule("1", "A").saves
    again.side.shutdown()
    assert one.key != other.key
