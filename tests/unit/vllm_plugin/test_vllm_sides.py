"""Both sides of the plug-in over Ecotone's real halves and a node, driven as vLLM drives them."""

from __future__ import annotations

import sys
import time
import uuid
from contextlib import ExitStack

import pytest
import torch
from plugin_doubles import BRINGS_MEDIA, Feature, Place, Request, request, sent

from ecotone.connectors.factory import EcotoneConnectorFactory
from ecotone.errors import ConfigError, ContractError
from ecotone.node.keys import Namespace
from ecotone.protocol.connector import ECSchedulerContext, ECWorkerContext, EncoderSpec, Participant
from ecotone.vllm.messages import NO_ORDERS, VllmStepMetadata
from ecotone.vllm.scheduler import SchedulerSide
from ecotone.vllm.worker import WorkerSide

SPEC = EncoderSpec(hidden_size=8, levels=0, dtype="float32")
NAMESPACE = Namespace(model="m", revision="r", dtype="float32", width=8, processor="p")


def rows(identifier: str, num_rows: int = 4, width: int = 8) -> torch.Tensor:
    generator = torch.Generator().manual_seed(int.from_bytes(identifier.encode(), "big") % 2**32)
    return torch.rand(num_rows, width, generator=generator)


class Vllm:
    """vLLM's scheduler and one worker around the two sides: an encoder cache of few places, one step at a time."""

    def __init__(self, stack: ExitStack, places: int = 1, memory: str = "1MiB", reach: int = 100) -> None:
        self.places = places
        self.cached: dict[str, None] = {}  # the scheduler's view of the encoder cache, oldest first
        self.encoder_cache: dict[str, torch.Tensor] = {}
        self.encoded: list[str] = []
        self.skipped_s = 0.0
        engine_id = uuid.uuid4().hex
        factory = EcotoneConnectorFactory(hosted=True)
        common = {"engine_id": engine_id, "role": "ec_both", "options": {"memory": memory}, "encoder": SPEC}
        self.half = factory.scheduler_half(
            ECSchedulerContext(participants=(Participant(0, "here"),), clock=self.clock, **common)
        )
        self.scheduler = SchedulerSide(self.half, NAMESPACE, {"image": 8, "wide": 16}, reach, BRINGS_MEDIA)
        stack.callback(self.scheduler.shutdown)
        self.woken = []
        half = factory.worker_half(
            ECWorkerContext(rank=0, epoch=0, device="cpu", wakeup=lambda: self.woken.append(1), **common)
        )
        self.worker = WorkerSide(half)
        stack.callback(self.worker.shutdown)
        stack.callback(self.encoder_cache.clear)

    def clock(self) -> float:
        return time.monotonic() + self.skipped_s

    def step(self, *requests: Request, computed: int = 0) -> tuple[list[str], list[str]]:
        """One step; what it loaded and what it encoded."""
        loads, encodes, evicted = [], [], []
        for one in requests:
            if not self.scheduler.ensure_available(one, computed):
                continue
            for feature in one.mm_features:
                name = feature.identifier
                if name in self.cached or name in (*loads, *encodes):
                    continue
                while len(self.cached) >= self.places:
                    oldest = next(iter(self.cached))
                    del self.cached[oldest]
                    evicted.append(oldest)
                (loads if self.scheduler.has_item(name) else encodes).append(name)
                self.cached[name] = None
                self.scheduler.allocated(name)
        gone = [name for name in evicted if name not in self.cached]
        metadata = sent(self.scheduler.build_orders(gone))
        self.run(metadata, gone, encodes)
        return loads, encodes

    def run(self, metadata: VllmStepMetadata, gone: list[str], encodes: list[str]) -> None:
        for name in gone:
            self.encoder_cache.pop(name, None)
        self.worker.bind(metadata)
        self.worker.load(self.encoder_cache)
        for name in encodes:
            self.encoded.append(name)
            self.encoder_cache[name] = rows(name, width=16 if name.startswith("wide") else 8)
            self.worker.save(self.encoder_cache, name)
        self.deliver()
        self.worker.clear()

    def deliver(self) -> None:
        report = self.worker.report()
        if report is not None:
            self.scheduler.take_in(sent(report))


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """What is asked is answered within the pass, however busy the machine is."""
    monkeypatch.setattr("ecotone.vllm.scheduler.PATIENCE_S", 30.0)


@pytest.fixture
def stack():
    with ExitStack() as stack:
        yield stack


def ready(vllm: Vllm, name: str) -> None:
    """Wait, without a step, until the node has ``name``."""
    while not (vllm.scheduler.ensure_available(request("probe", name), 0) and vllm.scheduler.has_item(name)):
        vllm.scheduler.build_orders([])
    vllm.scheduler.build_orders([])


def test_an_evicted_item_is_loaded_not_encoded(stack):
    vllm = Vllm(stack)
    assert vllm.step(request("1", "A")) == ([], ["A"])
    assert vllm.step(request("2", "B")) == ([], ["B"])  # makes room: A is gone from vLLM
    ready(vllm, "A")
    assert vllm.step(request("3", "A")) == (["A"], [])
    assert torch.equal(vllm.encoder_cache["A"], rows("A"))
    assert vllm.encoded == ["A", "B"]
    statistics = vllm.scheduler.statistics()
    assert (statistics["hits"], statistics["misses"]) == (1, 2)


def test_a_save_needs_no_further_step(stack):
    vllm = Vllm(stack)
    vllm.deliver = lambda: None  # as where vLLM drops what workers report
    vllm.step(request("1", "A"))
    ready(vllm, "A")
    vllm.step(request("2", "B"))
    assert vllm.step(request("3", "A")) == (["A"], [])
    ready(vllm, "B")
    statistics = vllm.scheduler.statistics()
    assert statistics["saves_in_flight"] == 0  # the node said so
    assert statistics["pins_held"] == 1


def test_what_vllm_holds_is_not_asked_about(stack):
    vllm = Vllm(stack, places=2)
    vllm.step(request("1", "A"))
    before = questions_of(vllm)
    assert vllm.step(request("2", "A")) == ([], [])
    assert questions_of(vllm) == before


def questions_of(vllm):
    """What the node was asked, by what it answered."""
    return [vllm.half.statistics()[f"node.{answer}"] for answer in ("hits", "pending", "misses")]


def test_one_evicted_within_the_pass_is_asked_about_after_all(stack):
    vllm = Vllm(stack)
    vllm.step(request("1", "A"))
    ready(vllm, "A")
    # A is vLLM's when the pass asks about the request, and gone when its turn comes.
    assert vllm.step(request("2", "B", "A")) == (["A"], ["B"])


def test_a_pin_that_nobody_took_falls_with_the_pass(stack):
    vllm = Vllm(stack)
    vllm.step(request("1", "A"))
    vllm.step(request("2", "B"))
    ready(vllm, "A")
    assert vllm.scheduler.ensure_available(request("3", "A"), 0)
    assert vllm.scheduler.has_item("A")
    assert vllm.scheduler.build_orders([]) is NO_ORDERS
    vllm.scheduler.ensure_available(request("4", "C"), 0)  # the node has heard of it when it answers this
    assert vllm.half.statistics()["node.pins"] == 0


def test_an_item_is_asked_about_once(stack):
    vllm = Vllm(stack)
    assert vllm.step(request("1", "A", "A"), request("2", "A")) == ([], ["A"])
    assert vllm.scheduler.statistics()["misses"] == 1


@pytest.mark.parametrize(
    "feature",
    [
        Feature("far", Place(100, 4)),  # beyond what a pass schedules
        Feature("past", Place(0, 4)),  # computed already
        Feature("none", Place(10, 4, embeds=0)),  # without rows
        Feature("other", Place(10, 4), modality="smell"),  # of unknown width
    ],
)
def test_nothing_is_asked_about(stack, feature):
    vllm = Vllm(stack)
    one = Request("1", [feature])
    assert vllm.scheduler.ensure_available(one, 4 if feature.identifier == "past" else 0)
    assert not vllm.scheduler.has_item(feature.identifier)
    vllm.scheduler.allocated(feature.identifier)
    assert vllm.scheduler.build_orders([]) is NO_ORDERS


def test_modalities_have_widths_of_their_own(stack):
    vllm = Vllm(stack)
    wide = Request("1", [Feature("wide", Place(0, 4), modality="wide")])
    vllm.step(wide)
    vllm.step(request("2", "A"))
    ready(vllm, "A")
    assert vllm.step(wide) == (["wide"], [])
    assert vllm.encoder_cache["wide"].shape == (4, 16)


def test_a_step_without_media_costs_no_message(stack):
    vllm = Vllm(stack)
    assert vllm.scheduler.ensure_available(Request("1", []), 0)
    assert vllm.scheduler.build_orders([]) is NO_ORDERS
    assert sent(NO_ORDERS) is NO_ORDERS


def test_what_somebody_is_writing_is_waited_for_and_then_encoded(stack):
    vllm = Vllm(stack)
    # The order for A never reaches a worker, so its ticket stays open.
    vllm.scheduler.ensure_available(request("1", "A"), 0)
    vllm.scheduler.allocated("A")
    vllm.scheduler.build_orders([])
    vllm.scheduler.build_orders(["A"])
    assert vllm.step(request("2", "A")) == ([], [])
    vllm.skipped_s = 1e6
    assert vllm.step(request("2", "A")) == ([], ["A"])
    assert vllm.scheduler.statistics()["unsaved.waited"] == 1


def test_after_a_reset_nothing_old_is_found(stack):
    vllm = Vllm(stack, places=2)
    vllm.step(request("1", "A"))
    ready(vllm, "A")
    assert vllm.half.statistics()["node.entries"] == 1
    vllm.scheduler.reset()
    assert vllm.half.statistics()["node.entries"] == 0  # at once, though the engine may rest from now on
    vllm.cached.clear()
    vllm.encoder_cache.clear()
    assert vllm.step(request("2", "A")) == ([], ["A"])
    vllm.step(request("3", "B"), request("4", "C"))
    ready(vllm, "A")
    assert vllm.step(request("5", "A")) == (["A"], [])  # and the new one is


def bare(req_id: str, identifier: str) -> Request:
    """One that tells the size of an image and leaves the image out."""
    return Request(req_id, [Feature(identifier, Place(2, 4), data={"grid": [1, 2, 2]})])


def test_a_request_without_its_image_is_served_from_what_is_stored(stack):
    vllm = Vllm(stack)
    vllm.step(request("1", "A"))
    ready(vllm, "A")
    assert vllm.step(bare("2", "A")) == ([], [])  # vLLM holds it
    vllm.step(request("3", "B"))
    assert vllm.step(bare("4", "A")) == (["A"], [])
    assert vllm.scheduler.take_unavailable() == set()


def test_a_request_without_its_image_fails_alone_where_nothing_is_stored(stack):
    vllm = Vllm(stack)
    assert vllm.step(bare("1", "A"), request("2", "B")) == ([], ["B"])
    assert vllm.scheduler.take_unavailable() == {"1"}
    assert vllm.scheduler.take_unavailable() == set()
    vllm.scheduler.request_finished("1")
    assert vllm.step(request("3", "A")) == ([], ["A"])  # and left no ticket behind


def test_one_that_was_aborted_is_not_failed(stack):
    vllm = Vllm(stack)
    vllm.step(bare("1", "A"))
    vllm.scheduler.request_finished("1")
    assert vllm.scheduler.take_unavailable() == set()


def test_a_request_without_its_image_beside_one_that_brings_it(stack):
    vllm = Vllm(stack)
    assert vllm.step(request("1", "A"), bare("2", "A")) == ([], ["A"])
    ready(vllm, "A")
    vllm.step(request("3", "B"))
    assert vllm.step(bare("4", "A"), bare("5", "A")) == (["A"], [])
    assert vllm.scheduler.take_unavailable() == set()


def test_an_image_that_is_computed_in_part_is_vllms(stack):
    vllm = Vllm(stack, memory="4KiB", reach=2000)
    big = request("1", "A", rows=1000)  # is not stored
    assert vllm.step(big) == ([], ["A"])
    rest = Request("1", [Feature("A", Place(2, 1000), data={"grid": [1, 2, 500]})])
    assert vllm.scheduler.ensure_available(rest, 3, is_running=True)
    vllm.scheduler.build_orders([])
    vllm.scheduler.reset()  # empties vLLM's own cache, too
    assert not vllm.scheduler.ensure_available(rest, 3, is_running=True)
    assert vllm.scheduler.take_unavailable() == {"1"}


def test_of_an_image_that_was_left_out_the_prefix_cache_has_a_part(stack):
    vllm = Vllm(stack)
    assert vllm.step(bare("1", "A"), computed=3) == ([], [])
    assert vllm.scheduler.take_unavailable() == {"1"}
    vllm.step(request("2", "A"))
    ready(vllm, "A")
    vllm.step(request("3", "B"))
    assert vllm.step(bare("4", "A"), computed=3) == (["A"], [])


def test_media_are_told_from_sizes():
    tells = Feature("A", Place(0, 4), data={"grid": 1})
    assert not BRINGS_MEDIA(tells)
    assert BRINGS_MEDIA(Feature("A", Place(0, 4), data={"grid": 1, "pixels": 2}))
    assert BRINGS_MEDIA(Feature("A", Place(0, 4), data=None))
    assert BRINGS_MEDIA(Feature("A", Place(0, 4), modality="audio", data={"grid": 1}))


def test_an_item_larger_than_the_region_is_encoded_and_counted(stack):
    vllm = Vllm(stack, memory="4KiB", reach=2000)
    big = request("1", "A", rows=1000)
    vllm.scheduler.ensure_available(big, 0)
    assert not vllm.scheduler.has_item("A")
    vllm.scheduler.allocated("A")
    assert vllm.scheduler.build_orders([]) is NO_ORDERS
    assert vllm.scheduler.statistics()["unsaved.no_room"] == 1


def test_rows_of_another_shape_are_not_saved(stack, caplog):
    vllm = Vllm(stack)
    vllm.scheduler.ensure_available(request("1", "A"), 0)
    vllm.scheduler.allocated("A")
    vllm.worker.bind(vllm.scheduler.build_orders([]))
    vllm.encoder_cache["A"] = rows("A", num_rows=5)
    vllm.worker.save(vllm.encoder_cache, "A")
    vllm.deliver()
    vllm.worker.clear()
    assert "expected float32[4, 8], got torch.float32[5, 8]" in caplog.text
    assert vllm.step(request("2", "A")) == ([], ["A"])


def test_a_rank_without_an_encoder_takes_no_part():
    worker = WorkerSide(None)
    worker.bind(NO_ORDERS)
    cache = {"A": rows("A")}
    worker.load(cache)
    worker.save(cache, "A")
    assert worker.report() is None
    worker.clear()
    worker.shutdown()
    assert list(cache) == ["A"]


def test_a_scheduler_elsewhere_is_refused(stack):
    vllm = Vllm(stack)
    vllm.scheduler.ensure_available(request("1", "A"), 0)
    vllm.scheduler.allocated("A")
    orders = vllm.scheduler.build_orders([])
    with pytest.raises(ConfigError, match="'elsewhere'"):
        vllm.worker.bind(VllmStepMetadata(orders.orders, orders.identifiers, "elsewhere"))


def test_another_connectors_report_is_refused(stack):
    with pytest.raises(ContractError, match="of type dict"):
        Vllm(stack).scheduler.take_in({})


def test_a_step_without_images_costs_a_few_calls(stack):
    vllm = Vllm(stack)
    vllm.step(request("1", "A"))  # both sides are attached, and have counters
    vllm.step(request("2", "A"))
    while vllm.half.has_pending_work():
        vllm.step()
    calls: list[str] = []

    def note(frame, event, _):
        if event == "call":
            calls.append(frame.f_code.co_qualname)

    sys.setprofile(note)
    try:
        metadata = vllm.scheduler.build_orders(())
        vllm.worker.bind(metadata)
        vllm.worker.load(vllm.encoder_cache)
        report = vllm.worker.report()
        vllm.worker.clear()
    finally:
        sys.setprofile(None)

    assert metadata is NO_ORDERS
    assert report is None
    assert len(calls) <= 20, calls  # in an engine each takes most of a microsecond, and 20 are the goal
