"""The worker half over a real region: copier thread, views, failures, shutdown."""

from __future__ import annotations

import gc
import logging
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from connector_doubles import SPEC, item

from ecotone.connectors.copy.engine import CopyEngine
from ecotone.connectors.copy.thread import ThreadCopyEngine
from ecotone.connectors.messages import (
    EcotoneStepMetadata,
    EcotoneWorkerMetadata,
    FailureReason,
    Order,
    Report,
    ReportKind,
)
from ecotone.connectors.rows import TORCH_DTYPES
from ecotone.connectors.worker import EcotoneWorkerConnector
from ecotone.errors import ContractError, ResourceError
from ecotone.node.exchange import Extent, Layout
from ecotone.node.region import Region
from ecotone.protocol.connector import ECConnectorMetadata, ECWorkerContext
from ecotone.testing.copies import ScriptedCopyEngine

KEY = item("cat").key
OTHER = item("dog").key
REGION_BYTES = 1 << 16


class Bench:
    """A worker half of one rank, the region it attaches to, and the reports it made."""

    def __init__(
        self, engine: CopyEngine | None = None, views: bool = True, ranks: tuple[int, ...] = (0,), rank: int = 0
    ) -> None:
        self.region = Region.create(REGION_BYTES, "region", prefault=False)
        self.ranks = ranks
        self.woken = threading.Event()
        self.engine = engine or ThreadCopyEngine(self.woken.set)
        self.cache: dict[str, torch.Tensor] = {}
        self.attached: list[bool] = []
        self.refusal: Exception | None = None
        context = ECWorkerContext(
            engine_id="e",
            role="ec_both",
            options={},
            rank=rank,
            epoch=7,
            encoder=SPEC,
            device="cpu",
            wakeup=self.woken.set,
        )
        self.half = EcotoneWorkerConnector(context, views, False, self._attach, lambda _: self.engine)

    def _attach(self, writable: bool) -> Region:
        if self.refusal is not None:
            raise self.refusal
        self.attached.append(writable)
        return Region.attach(
            self.region.open_descriptor(writable=writable), self.region.descriptor, prefault=False
        )

    def order(self, transfer_id: int, layout: Layout, *places: tuple[int, int], key: str = KEY) -> Order:
        own = self.region.descriptor
        places = places or ((0, layout.nbytes),)
        extents = tuple(Extent(own.region_id, own.generation, offset, length) for offset, length in places)
        return Order(key, transfer_id, layout, extents)

    def bind(self, loads: tuple[Order, ...] = (), saves: tuple[Order, ...] = ()) -> None:
        self.half.bind_connector_metadata(EcotoneStepMetadata(self.ranks, loads, saves))

    def load(self, *orders: Order) -> None:
        self.bind(loads=orders)
        self.half.start_load_caches(self.cache)
        self.half.wait_for_loads(self.cache)

    def save(self, order: Order, rows: torch.Tensor) -> None:
        self.bind(saves=(order,))
        self.cache[order.key] = rows
        self.half.save_caches(self.cache, order.key)

    def end_step(self) -> set[tuple[int, ReportKind, FailureReason | None]]:
        meta = self.half.build_connector_worker_meta()
        self.half.clear_connector_metadata()
        return set() if meta is None else {(r.transfer_id, r.kind, r.reason) for r in meta.reports}

    def wait_for_reports(self) -> set[tuple[int, ReportKind, FailureReason | None]]:
        """The next reports, found by being woken up for them."""
        while not (found := self.end_step()):
            assert self.woken.wait(30)
            self.woken.clear()
        return found

    def put(self, order: Order, rows: torch.Tensor) -> None:
        """Write an entry as another engine would."""
        data = rows.contiguous().view(torch.uint8).numpy().tobytes()
        for extent in order.extents:
            self.region.view(extent, writable=True)[:] = data[: extent.length]
            data = data[extent.length :]

    def bytes_at(self, *places: tuple[int, int]) -> bytes:
        own = self.region.descriptor
        extents = [Extent(own.region_id, own.generation, *place) for place in places]
        return b"".join(bytes(self.region.view(extent)) for extent in extents)


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.half.shutdown()


LAYOUT = Layout("float32", (6, SPEC.width))


def rows_of(layout: Layout, seed: int = 0) -> torch.Tensor:
    """Rows of random bits, NaNs of every kind among them."""
    data = np.random.default_rng(seed).integers(0, 256, layout.nbytes, np.uint8)
    return torch.from_numpy(data).view(TORCH_DTYPES[layout.dtype]).view(layout.shape)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("views", [True, False])
@pytest.mark.parametrize("fragmented", [False, True])
def test_round_trips_are_exact_to_the_bit(dtype: str, views: bool, fragmented: bool) -> None:
    bench = Bench(views=views)
    layout = Layout(dtype, (33, 32))
    rows = rows_of(layout)
    places = ((4096, 128), (640, 64), (8192, layout.nbytes - 192)) if fragmented else ((4096, layout.nbytes),)
    bench.save(bench.order(1, layout, *places), rows)
    assert bench.wait_for_reports() == {(1, ReportKind.SAVED, None)}
    assert bench.bytes_at(*places) == rows.view(torch.uint8).numpy().tobytes()
    bench.cache.clear()
    bench.load(bench.order(2, layout, *places))
    assert same_bits(bench.cache[KEY], rows)
    loaded = {(2, ReportKind.LOADED, None), (2, ReportKind.RELEASED, None)}
    if views and not fragmented:
        loaded.remove((2, ReportKind.RELEASED, None))
    assert bench.end_step() == loaded
    bench.half.shutdown()


def test_adjacent_extents_are_one_view(bench: Bench) -> None:
    order = bench.order(1, LAYOUT, (64, 128), (192, LAYOUT.nbytes - 128))
    bench.put(order, rows_of(LAYOUT))
    bench.load(order)
    assert same_bits(bench.cache[KEY], rows_of(LAYOUT))
    assert bench.end_step() == {(1, ReportKind.LOADED, None)}


def test_a_view_reads_the_region_itself(bench: Bench) -> None:
    order = bench.order(1, LAYOUT)
    bench.put(order, rows_of(LAYOUT))
    bench.load(order)
    bench.put(order, rows_of(LAYOUT, seed=1))
    assert same_bits(bench.cache[KEY], rows_of(LAYOUT, seed=1))
    assert bench.attached == [False]


def test_the_pin_of_a_view_falls_with_the_last_thing_that_reads_it(bench: Bench) -> None:
    order = bench.order(1, LAYOUT)
    bench.put(order, rows_of(LAYOUT))
    bench.load(order)
    assert bench.end_step() == {(1, ReportKind.LOADED, None)}
    piece = bench.cache.pop(KEY)[2:4].flatten()
    assert bench.end_step() == set()
    array = piece.numpy()
    del piece
    gc.collect()
    assert bench.end_step() == set()
    copied = array.copy()
    del array
    assert bench.end_step() == {(1, ReportKind.RELEASED, None)}
    assert bench.end_step() == set()
    assert same_bits(torch.from_numpy(copied), rows_of(LAYOUT)[2:4].flatten())


def test_a_view_dropped_on_another_thread_is_reported(bench: Bench) -> None:
    bench.load(bench.order(1, LAYOUT))
    bench.end_step()
    holder = [bench.cache.pop(KEY)]
    thread = threading.Thread(target=holder.clear)
    thread.start()
    thread.join()
    assert bench.end_step() == {(1, ReportKind.RELEASED, None)}


def test_two_views_of_one_entry_are_released_each_by_itself(bench: Bench) -> None:
    bench.load(bench.order(1, LAYOUT))
    first = bench.cache[KEY]
    bench.load(bench.order(2, LAYOUT))
    assert bench.end_step() == {(1, ReportKind.LOADED, None), (2, ReportKind.LOADED, None)}
    del first
    assert bench.end_step() == {(1, ReportKind.RELEASED, None)}
    bench.cache.clear()
    assert bench.end_step() == {(2, ReportKind.RELEASED, None)}


def test_a_view_outlives_the_connector_and_the_node(bench: Bench) -> None:
    order = bench.order(1, LAYOUT)
    bench.put(order, rows_of(LAYOUT))
    bench.load(order)
    bench.half.shutdown()
    bench.region.close()
    assert same_bits(bench.cache[KEY], rows_of(LAYOUT))
    bench.cache.clear()


def test_nothing_can_be_written_through_a_view() -> None:
    program = """
import os
from ecotone.connectors.rows import view_rows
from ecotone.node.exchange import Extent, Layout
from ecotone.node.region import Region
whole = Region.create(4096, "r")
own = whole.descriptor
reader = Region.attach(whole.open_descriptor(writable=False), own)
rows = view_rows(reader.view(Extent("r", own.generation, 0, 64)), Layout("float32", (4, 4)), print, 1)
assert rows.sum() == 0
print("readable", flush=True)
rows[0, 0] = 1.0
print("written", flush=True)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout == "readable\n"
    assert done.returncode == -signal.SIGSEGV


def test_each_rank_writes_its_rows_and_no_others() -> None:
    for rank, share in ((0, range(2)), (3, range(2, 4)), (9, range(4, 6)), (5, range(0))):
        bench = Bench(ranks=(0, 3, 9), rank=rank)
        bench.save(bench.order(1, LAYOUT), rows_of(LAYOUT))
        if share:
            assert bench.wait_for_reports() == {(1, ReportKind.SAVED, None)}
        else:
            assert bench.end_step() == set()
        expected = torch.zeros(LAYOUT.shape)
        expected[share.start : share.stop] = rows_of(LAYOUT)[share.start : share.stop]
        assert bench.bytes_at((0, LAYOUT.nbytes)) == expected.numpy().tobytes()
        bench.half.shutdown()


def test_what_was_not_ordered_is_not_saved(bench: Bench) -> None:
    bench.cache[KEY] = rows_of(LAYOUT)
    bench.half.save_caches(bench.cache, KEY)
    bench.bind(saves=(bench.order(1, LAYOUT, key=OTHER),))
    bench.half.save_caches(bench.cache, KEY)
    assert bench.end_step() == {(1, ReportKind.SAVE_FAILED, FailureReason.NOT_ENCODED)}
    assert bench.attached == []


def test_nothing_is_reported_before_the_copy_has_ended() -> None:
    engine = ScriptedCopyEngine()
    bench = Bench(engine)
    bench.save(bench.order(1, LAYOUT), rows_of(LAYOUT))
    for _ in range(5):
        assert bench.end_step() == set()
        bench.bind()
    assert engine.jobs == [1]
    engine.complete(1)
    assert bench.end_step() == {(1, ReportKind.SAVED, None)}


def test_copies_may_end_in_any_order() -> None:
    engine = ScriptedCopyEngine()
    bench = Bench(engine)
    for transfer_id in (1, 2, 3):
        bench.save(bench.order(transfer_id, LAYOUT), rows_of(LAYOUT))
    engine.complete(3)
    engine.fail(1, "broken")
    assert bench.end_step() == {(3, ReportKind.SAVED, None), (1, ReportKind.SAVE_FAILED, FailureReason.COPY)}
    engine.complete(2)
    assert bench.end_step() == {(2, ReportKind.SAVED, None)}


def test_the_source_of_a_save_lives_until_it_was_copied() -> None:
    engine = ScriptedCopyEngine()
    bench = Bench(engine)
    bench.save(bench.order(1, LAYOUT), rows_of(LAYOUT))
    bench.cache.clear()  # the rank's cache evicted it meanwhile
    gc.collect()
    engine.complete(1)
    assert bench.end_step() == {(1, ReportKind.SAVED, None)}
    assert bench.bytes_at((0, LAYOUT.nbytes)) == rows_of(LAYOUT).numpy().tobytes()


def test_a_load_that_fails_leaves_no_rows_behind() -> None:
    bench = Bench(ScriptedCopyEngine(fence_error="broken"), views=False)
    bench.load(bench.order(1, LAYOUT), bench.order(2, LAYOUT, key=OTHER))
    assert bench.cache == {}
    failed = ReportKind.LOAD_FAILED, FailureReason.COPY
    assert bench.end_step() == {(1, *failed), (2, *failed)}


def test_rows_of_the_wrong_shape_or_dtype_are_not_saved(bench: Bench) -> None:
    for wrong in (torch.zeros(5, SPEC.width), torch.zeros(6, SPEC.width, dtype=torch.float16), torch.zeros(6)):
        bench.save(bench.order(1, LAYOUT), wrong)
        assert bench.end_step() == {(1, ReportKind.SAVE_FAILED, FailureReason.LAYOUT)}
    assert bench.attached == []


def test_rows_that_do_not_lie_together_are_saved_as_they_read(bench: Bench) -> None:
    wide = rows_of(Layout("float32", (6, 2 * SPEC.width)))
    bench.save(bench.order(1, LAYOUT), wide[:, ::2])
    assert bench.wait_for_reports() == {(1, ReportKind.SAVED, None)}
    assert bench.bytes_at((0, LAYOUT.nbytes)) == wide[:, ::2].contiguous().numpy().tobytes()


def test_rows_with_gradients_and_rows_from_inference_mode_are_saved(bench: Bench) -> None:
    bench.save(bench.order(1, LAYOUT), torch.ones(LAYOUT.shape, requires_grad=True))
    assert bench.wait_for_reports() == {(1, ReportKind.SAVED, None)}
    with torch.inference_mode():
        bench.save(bench.order(2, LAYOUT), torch.full(LAYOUT.shape, 2.0))
        assert bench.wait_for_reports() == {(2, ReportKind.SAVED, None)}
    assert bench.bytes_at((0, 4)) == np.float32(2).tobytes()


@pytest.mark.parametrize("views", [True, False])
def test_loads_work_inside_inference_mode(views: bool) -> None:
    bench = Bench(views=views)
    order = bench.order(1, LAYOUT)
    bench.put(order, rows_of(LAYOUT))
    with torch.inference_mode():
        bench.load(order)
        assert same_bits(bench.cache[KEY], rows_of(LAYOUT))
    bench.half.shutdown()


def test_orders_that_no_hook_began_are_reported(bench: Bench) -> None:
    bench.bind(loads=(bench.order(1, LAYOUT),), saves=(bench.order(2, LAYOUT, key=OTHER),))
    bench.bind()  # the step ended without a word; the next one begins
    assert bench.end_step() == {
        (1, ReportKind.LOAD_FAILED, FailureReason.NOT_LOADED),
        (2, ReportKind.SAVE_FAILED, FailureReason.NOT_ENCODED),
    }


def test_a_view_that_was_begun_and_never_waited_for_is_released(bench: Bench) -> None:
    bench.bind(loads=(bench.order(1, LAYOUT),))
    bench.half.start_load_caches(bench.cache)
    bench.half.clear_connector_metadata()
    assert bench.end_step() == {(1, ReportKind.RELEASED, None)}
    assert bench.cache == {}


def test_a_region_that_cannot_be_attached_fails_the_orders_and_is_tried_again(bench: Bench) -> None:
    bench.refusal = ResourceError("nobody is there")
    bench.load(bench.order(1, LAYOUT))
    bench.save(bench.order(2, LAYOUT), rows_of(LAYOUT))
    assert bench.end_step() == {
        (1, ReportKind.LOAD_FAILED, FailureReason.REGION),
        (2, ReportKind.SAVE_FAILED, FailureReason.REGION),
    }
    bench.refusal = None
    bench.load(bench.order(3, LAYOUT))
    assert bench.end_step() == {(3, ReportKind.LOADED, None)}


def test_extents_that_cannot_be_right_are_not_touched(bench: Bench) -> None:
    own = bench.region.descriptor
    for extent in (
        Extent("elsewhere", own.generation, 0, LAYOUT.nbytes),
        Extent(own.region_id, own.generation - 1, 0, LAYOUT.nbytes),
        Extent(own.region_id, own.generation, REGION_BYTES, LAYOUT.nbytes),
        Extent(own.region_id, own.generation, 0, LAYOUT.nbytes - 64),
    ):
        bench.load(Order(KEY, 1, LAYOUT, (extent,)))
        assert bench.end_step() == {(1, ReportKind.LOAD_FAILED, FailureReason.REGION)}
        bench.save(Order(KEY, 1, LAYOUT, (extent,)), rows_of(LAYOUT))
        assert bench.end_step() == {(1, ReportKind.SAVE_FAILED, FailureReason.REGION)}


def test_no_memory_for_the_rows_is_a_report(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(views=False)

    def refuse(layout: Layout, device: str) -> torch.Tensor:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr("ecotone.connectors.worker.empty_rows", refuse)
    bench.load(bench.order(1, LAYOUT))
    assert bench.end_step() == {(1, ReportKind.LOAD_FAILED, FailureReason.MEMORY)}
    bench.half.shutdown()


def test_reports_carry_rank_and_epoch(bench: Bench) -> None:
    bench.load(bench.order(1, LAYOUT))
    assert bench.half.build_connector_worker_meta() == EcotoneWorkerMetadata(
        frozenset({Report(0, 7, 1, ReportKind.LOADED)})
    )


def test_statistics_are_cumulative_and_said_only_when_they_changed(bench: Bench) -> None:
    assert bench.half.get_ec_connector_stats() is None
    bench.save(bench.order(1, LAYOUT), rows_of(LAYOUT))
    bench.wait_for_reports()
    bench.load(bench.order(2, LAYOUT))
    bench.load(bench.order(3, LAYOUT, (0, 64), (128, LAYOUT.nbytes - 64)))
    bench.bind(saves=(bench.order(4, LAYOUT),))
    bench.end_step()
    stats = bench.half.get_ec_connector_stats()
    assert stats is not None
    (entry,) = stats.ranks
    assert (entry.rank, entry.epoch) == (0, 7)
    counters = dict(entry.counters)
    assert counters.pop("save_seconds") > 0
    assert counters.pop("load_seconds") > 0
    assert counters == {
        "saves": 1,
        "save_bytes": LAYOUT.nbytes,
        "loads": 1,
        "load_bytes": LAYOUT.nbytes,
        "views": 1,
        "view_bytes": LAYOUT.nbytes,
        "save_failed.not_encoded": 1,
    }
    assert bench.half.get_ec_connector_stats() is None


def test_shutdown_with_saves_on_their_way_ends_them_and_touches_nothing_after() -> None:
    engine = ScriptedCopyEngine()
    bench = Bench(engine)
    bench.save(bench.order(1, LAYOUT), rows_of(LAYOUT))
    bench.half.shutdown()
    assert bench.end_step() == {(1, ReportKind.SAVE_FAILED, FailureReason.COPY)}
    assert bench.bytes_at((0, LAYOUT.nbytes)) == bytes(LAYOUT.nbytes)
    bench.save(bench.order(2, LAYOUT), rows_of(LAYOUT))
    bench.load(bench.order(3, LAYOUT))
    assert bench.end_step() == {
        (2, ReportKind.SAVE_FAILED, FailureReason.CLOSED),
        (3, ReportKind.LOAD_FAILED, FailureReason.CLOSED),
    }
    bench.half.shutdown()


def test_shutdown_before_any_order_is_nothing(bench: Bench) -> None:
    bench.half.shutdown()
    assert bench.attached == []


def test_orders_of_another_connector_are_refused(bench: Bench) -> None:
    class Other(ECConnectorMetadata, frozen=True):
        pass

    with pytest.raises(ContractError, match="Other"):
        bench.half.bind_connector_metadata(Other())


def test_failures_are_logged_with_what_was_wrong(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        bench.save(bench.order(1, LAYOUT), torch.zeros(5, SPEC.width))
    assert "expected float32[6, 16], got torch.float32[5, 16]" in caplog.text
