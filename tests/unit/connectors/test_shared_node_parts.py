"""The connector over a shared node: its options, its budget, and what a worker half tells the node itself."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from connector_doubles import SPEC, Bench, FakeClock, fact, item, scheduler_context

from ecotone.connectors.budget import FACTOR, LONGEST_S, SHORTEST_S, UNMEASURED_S, PendingBudget
from ecotone.connectors.config import parse_options
from ecotone.connectors.factory import EcotoneConnectorFactory
from ecotone.connectors.messages import ReportKind
from ecotone.connectors.scheduler import EcotoneSchedulerConnector
from ecotone.errors import ConfigError
from ecotone.node.server.node import SharedNode
from ecotone.node.server.tool import NodeTool
from ecotone.protocol.connector import CacheLookup, ECSchedulerContext, ECWorkerContext

PATIENCE_S = 30.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"node": "unix:"}, "neither 'embedded' nor 'unix:PATH'"),
        ({"node": "tcp:host"}, "neither 'embedded' nor 'unix:PATH'"),
        ({"node": "unix:/x", "memory": "1GiB"}, "memory='1GiB': a shared node has its own"),
        ({"node": "unix:/x", "eviction": "lru"}, "eviction='lru': a shared node has its own"),
        ({"tenant": "blue"}, "an embedded node has one tenant"),
    ],
)
def test_options_that_contradict_each_other(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_options(options)


def test_the_path_of_the_node() -> None:
    assert parse_options({}).node_path is None
    assert parse_options({"node": "unix:/run/node.sock", "tenant": "blue"}).node_path == Path("/run/node.sock")


def test_the_budget_follows_the_slowest_of_the_latest_encodings() -> None:
    budget = PendingBudget(None)
    assert budget.seconds == UNMEASURED_S
    budget.measured(0.001)
    assert budget.seconds == SHORTEST_S
    budget.measured(0.5)
    assert budget.seconds == FACTOR * 0.5
    budget.measured(100.0)
    assert budget.seconds == LONGEST_S
    for _ in range(32):
        budget.measured(0.2)
    assert budget.seconds == FACTOR * 0.2
    assert PendingBudget(3.0).seconds == 3.0


def test_a_scheduler_half_measures_what_was_saved() -> None:
    bench = Bench(timeout=None)  # type: ignore[arg-type]
    assert bench.half.lookup("r", item("x")) is CacheLookup.MISS
    bench.half.update_state_after_alloc("r", item("x"))
    meta = bench.half.build_connector_meta()
    assert meta is not None
    assert bench.node.flushes == 1
    bench.clock.now += 0.7
    bench.report(fact(meta.saves[0].transfer_id, ReportKind.SAVED))
    assert bench.half.statistics()["pending_budget_s"] == pytest.approx(7.0)


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    """Where a node serves on a thread of this process; its books are right in the end."""
    path = tmp_path / "node.sock"
    with SharedNode(path, {"": 2**16}, prefault=False) as node:
        thread = threading.Thread(target=node.run)
        thread.start()
        yield path
        node.stop()
        thread.join()
        node.check_integrity()


def contexts(path: Path, engine_id: str) -> tuple[ECSchedulerContext, ECWorkerContext]:
    options = {"node": f"unix:{path}", "prefault": False}
    made = scheduler_context(clock=FakeClock())
    scheduler = ECSchedulerContext(
        engine_id=engine_id,
        role="ec_both",
        options=options,
        participants=made.participants,
        encoder=SPEC,
        clock=made.clock,
    )
    worker = ECWorkerContext(
        engine_id=engine_id,
        role="ec_both",
        options=options,
        rank=0,
        epoch=1,
        encoder=SPEC,
        device="cpu",
        wakeup=lambda: None,
    )
    return scheduler, worker


def hosted_contexts() -> tuple[ECSchedulerContext, ECWorkerContext]:
    options = {"memory": 2**16, "prefault": False}
    engine_id = f"hosted-parts-{os.getpid()}"
    scheduler, worker = contexts(Path("unused"), engine_id)
    return (
        msgspec.structs.replace(scheduler, options=options),
        msgspec.structs.replace(worker, options=options),
    )


def test_a_hosted_engine_needs_no_reports() -> None:
    """Everything that a scheduler half must know of its ranks comes from the node: no report is ever delivered."""
    factory = EcotoneConnectorFactory(hosted=True)
    contexts = hosted_contexts()
    half, worker = factory.scheduler_half(contexts[0]), factory.worker_half(contexts[1])
    assert isinstance(half, EcotoneSchedulerConnector)
    cat, rows = item("cat"), torch.arange(4 * SPEC.width, dtype=torch.float32).view(4, SPEC.width)

    def run(cache: dict[str, torch.Tensor]) -> CacheLookup:
        """A pass and a step."""
        half.prepare([cat], PATIENCE_S)
        said = half.lookup("r", cat)
        assert said is not CacheLookup.PENDING
        half.update_state_after_alloc("r", cat)
        worker.bind_connector_metadata(half.build_connector_meta())
        worker.start_load_caches(cache)
        worker.wait_for_loads(cache)
        worker.save_caches(cache, cat.key)
        worker.build_connector_worker_meta()  # and the engine loses it
        return said

    def hear() -> None:
        """Of what was settled: with the answer to some other question."""
        half.prepare([item("other")], PATIENCE_S)
        half.build_connector_meta()

    assert run({cat.key: rows}) is CacheLookup.MISS
    while half.statistics()["node.bytes_ready"] == 0:
        pass
    hear()
    assert half.statistics()["saves_in_flight"] == 0
    cache: dict[str, torch.Tensor] = {}
    assert run(cache) is CacheLookup.READY
    assert torch.equal(cache[cat.key], rows)
    assert half.statistics()["pins_held"] == half.statistics()["node.pins"] == 1
    cache.clear()  # the view is dead
    while half.statistics()["node.pins"]:
        pass
    hear()
    assert half.statistics()["pins_held"] == half.statistics()["node.held"] == 0
    half.check_integrity()
    worker.shutdown()
    half.shutdown()
    half.check_integrity()
    half.shutdown()
    factory.scheduler_half(contexts[0]).shutdown()  # the name is free again


def test_a_hosted_factory_uses_the_node_that_is_named(path: Path) -> None:
    half = EcotoneConnectorFactory(hosted=True).scheduler_half(contexts(path, "named")[0])
    with NodeTool(path) as tool:
        assert [engine.engine_id for engine in tool.describe().engines] == ["named"]
    half.shutdown()


def test_a_save_is_ready_for_others_though_its_scheduler_hears_of_nothing(path: Path) -> None:
    """An idle engine runs no steps: the worker's word, after the copy's end, is enough."""
    factory = EcotoneConnectorFactory()
    halves = {name: [factory.scheduler_half(contexts(path, name)[0]), factory.worker_half(contexts(path, name)[1])]
              for name in ("a", "b")}  # fmt: skip
    one, two = halves["a"][0], halves["b"][0]
    rows = torch.arange(4 * SPEC.width, dtype=torch.float32).view(4, SPEC.width)

    def say(half: Any, req_id: str) -> CacheLookup:
        while True:
            said: CacheLookup = half.lookup(req_id, item("x"))
            if said is not CacheLookup.PENDING:
                return said
            half.build_connector_meta()

    assert say(one, "r") is CacheLookup.MISS
    one.update_state_after_alloc("r", item("x"))
    meta = one.build_connector_meta()
    writer = halves["a"][1]
    writer.bind_connector_metadata(meta)
    writer.save_caches({item("x").key: rows}, item("x").key)
    # No report is collected from the writer, and none reaches its scheduler half.
    assert say(two, "s") is CacheLookup.READY
    two.update_state_after_alloc("s", item("x"))
    reader, cache = halves["b"][1], {}
    reader.bind_connector_metadata(two.build_connector_meta())
    reader.start_load_caches(cache)
    reader.wait_for_loads(cache)
    assert torch.equal(cache[item("x").key], rows)
    with NodeTool(path) as tool:
        assert tool.describe().tenants[""]["pins"] == 1
        cache.clear()  # the view's death is told by itself, too
        while tool.describe().tenants[""]["pins"]:
            pass
    for scheduler_half, worker_half in halves.values():
        worker_half.shutdown()
        scheduler_half.shutdown()
