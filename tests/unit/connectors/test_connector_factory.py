"""Configuration, the factory, and both halves over a real embedded node."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch
from connector_doubles import SPEC, FakeClock, item

from ecotone.config import ECConfig
from ecotone.connectors.config import parse_options
from ecotone.connectors.factory import EcotoneConnectorFactory, create_factory
from ecotone.errors import ConfigError, ResourceError, RoundTripError, ShutDownError
from ecotone.node.exchange import Layout
from ecotone.node.region import Region
from ecotone.protocol.connector import (
    CacheLookup,
    ECConnectorFactory,
    ECItem,
    ECRole,
    ECSchedulerConnector,
    ECSchedulerContext,
    ECWorkerConnector,
    ECWorkerContext,
    Participant,
)
from ecotone.protocol.outputs import ECConnectorOutput, ECConnectorWorkerMetadata
from ecotone.protocol.step import SchedulerOutput
from ecotone.protocol.wire import decode, encode


class Engine:
    """Both halves of one engine: a scheduler half, ranks with threads of their own, and the wire between them."""

    def __init__(self, role: ECRole = "ec_both", ranks: int = 1, **options: Any) -> None:
        config = ECConfig(role=role, options={"memory": 16384, "prefault": False, **options})
        factory = create_factory(config)
        engine_id = uuid4().hex
        common = {"engine_id": engine_id, "role": role, "options": config.options, "encoder": SPEC}
        self.clock = FakeClock()
        self.scheduler = factory.scheduler_half(
            ECSchedulerContext(
                participants=tuple(Participant(rank, "here") for rank in range(ranks)), clock=self.clock, **common
            )
        )
        self.woken = threading.Event()
        self.workers = [
            factory.worker_half(ECWorkerContext(rank=rank, epoch=1, device="cpu", wakeup=self.woken.set, **common))
            for rank in range(ranks)
        ]
        self.caches: list[dict[str, torch.Tensor]] = [{} for _ in self.workers]

    def step(self, *items: ECItem, rows: dict[str, torch.Tensor] | None = None) -> dict[str, CacheLookup]:
        """One step for these items: those that miss are encoded, which gives ``rows``."""
        said = {}
        for wanted in items:
            said[wanted.key] = self.scheduler.lookup("r", wanted)
            if said[wanted.key] is not CacheLookup.PENDING:
                self.scheduler.update_state_after_alloc("r", wanted)
        meta = self.scheduler.build_connector_meta()
        output = decode(encode(SchedulerOutput(step=1, ec_connector_metadata=meta)), SchedulerOutput)
        reports = []
        for worker, cache in zip(self.workers, self.caches, strict=True):
            if output.ec_connector_metadata is not None:
                worker.bind_connector_metadata(output.ec_connector_metadata)
                worker.start_load_caches(cache)
                worker.wait_for_loads(cache)
                for key, value in (rows or {}).items():
                    if said.get(key) is CacheLookup.MISS:
                        cache[key] = value
                        worker.save_caches(cache, key)
            report = ECConnectorOutput(
                ec_connector_worker_meta=worker.build_connector_worker_meta(),
                ec_connector_stats=worker.get_ec_connector_stats(),
            )
            reports.append(decode(encode(report), ECConnectorOutput))
            worker.clear_connector_metadata()
        for report in reversed(reports):
            self.scheduler.update_connector_output(report)
        return said

    def rest(self) -> None:
        """Empty steps until nothing is pending, each after a rank said that there is something to hear."""
        while self.scheduler.has_pending_work():
            self.step()
            if self.scheduler.has_pending_work():
                assert self.woken.wait(30)
                self.woken.clear()

    def close(self) -> None:
        for worker in self.workers:
            worker.shutdown()
        self.scheduler.check_integrity()
        self.scheduler.shutdown()
        self.scheduler.check_integrity()


@pytest.fixture
def engines() -> Iterator[list[Engine]]:
    made: list[Engine] = []
    yield made
    for engine in made:
        engine.close()


def rows_for(wanted: ECItem, value: float = 1.0) -> dict[str, torch.Tensor]:
    base = torch.arange(wanted.num_rows * SPEC.width, dtype=torch.float32)
    return {wanted.key: (base + value).view(wanted.num_rows, SPEC.width)}


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("load", ["auto", "copy"])
def test_encoded_once_then_loaded_by_every_rank(engines: list[Engine], ranks: int, load: str) -> None:
    engine = Engine(ranks=ranks, load=load)
    engines.append(engine)
    cat = item("cat", num_rows=7)
    assert engine.step(cat, rows=rows_for(cat)) == {cat.key: CacheLookup.MISS}
    engine.rest()
    for cache in engine.caches:
        cache.clear()
    assert engine.step(cat) == {cat.key: CacheLookup.READY}
    for cache in engine.caches:
        assert torch.equal(cache[cat.key], rows_for(cat)[cat.key])
    engine.rest()
    stats = engine.scheduler.statistics()
    assert stats["ranks.saves"] == ranks
    assert stats["ranks.save_bytes"] == Layout("float32", (7, SPEC.width)).nbytes
    assert stats["ranks.views" if load == "auto" else "ranks.loads"] == ranks
    assert stats["node.pins"] == (1 if load == "auto" else 0)
    assert set(engine.scheduler.rank_statistics()) == set(range(ranks))
    for cache in engine.caches:
        cache.clear()
    engine.step()
    assert engine.scheduler.statistics()["node.pins"] == 0


@pytest.mark.parametrize("eviction", ["lru", "cost"])
def test_every_eviction_that_may_be_named_is_there(engines: list[Engine], eviction: str) -> None:
    engine = Engine(eviction=eviction)
    engines.append(engine)
    cat = item("cat")
    assert engine.step(cat, rows=rows_for(cat))[cat.key] is CacheLookup.MISS


def test_a_full_node_is_an_ordinary_answer(engines: list[Engine]) -> None:
    engine = Engine(memory=64 * 16)
    engines.append(engine)
    huge, small = item("huge", num_rows=1000), item("small", num_rows=16)
    assert engine.step(huge, rows=rows_for(huge)) == {huge.key: CacheLookup.MISS}
    assert not engine.scheduler.has_pending_work()
    engine.step(small, rows=rows_for(small))
    engine.rest()
    engine.caches[0].clear()
    assert engine.step(small) == {small.key: CacheLookup.READY}
    # The rank reads all of the region in place, so that nothing can be evicted.
    other = item("other", num_rows=16)
    assert engine.step(other, rows=rows_for(other)) == {other.key: CacheLookup.MISS}
    assert engine.scheduler.statistics()["unsaved.no_room"] == 2
    assert torch.equal(engine.caches[0][small.key], rows_for(small)[small.key])


def test_a_consumer_uses_and_never_writes(engines: list[Engine]) -> None:
    engine = Engine("ec_consumer")
    engines.append(engine)
    cat = item("cat")
    assert engine.step(cat, rows=rows_for(cat)) == {cat.key: CacheLookup.MISS}
    assert engine.step(cat, rows=rows_for(cat)) == {cat.key: CacheLookup.MISS}
    assert engine.scheduler.statistics()["node.tickets"] == 0


def test_a_producer_stores_once_and_then_knows_it(engines: list[Engine]) -> None:
    engine = Engine("ec_producer")
    engines.append(engine)
    cat = item("cat")
    engine.step(cat, rows=rows_for(cat))
    engine.rest()
    assert engine.step(cat) == {cat.key: CacheLookup.READY}
    assert engine.scheduler.statistics()["node.pins"] == 0
    assert not engine.scheduler.has_pending_work()


def test_reset_makes_everything_a_miss(engines: list[Engine]) -> None:
    engine = Engine()
    engines.append(engine)
    cat = item("cat")
    engine.step(cat, rows=rows_for(cat))
    engine.scheduler.reset_cache(cat.key.partition(":")[0])
    engine.rest()
    assert engine.step(cat, rows=rows_for(cat, 5.0)) == {cat.key: CacheLookup.MISS}
    engine.rest()
    engine.caches[0].clear()
    engine.step(cat)
    assert torch.equal(engine.caches[0][cat.key], rows_for(cat, 5.0)[cat.key])


def test_shutdown_with_everything_in_flight_leaves_nothing(engines: list[Engine]) -> None:
    engine = Engine()
    cat, dog = item("cat"), item("dog")
    engine.step(cat, rows=rows_for(cat))
    engine.rest()
    engine.step(cat, dog, rows=rows_for(dog))
    view = engine.caches[0][cat.key]
    engine.close()
    engine.close()
    assert torch.equal(view, rows_for(cat)[cat.key])
    with pytest.raises(ShutDownError):
        engine.scheduler.lookup("r", dog)


def test_a_rank_whose_node_is_gone_reports_it(monkeypatch: pytest.MonkeyPatch, engines: list[Engine]) -> None:
    monkeypatch.setattr("ecotone.connectors.factory.ATTACH_TIMEOUT_S", 0.0)
    engine = Engine(ranks=2)
    engines.append(engine)
    stranger = create_factory(ECConfig()).worker_half(
        ECWorkerContext(
            engine_id="nobody",
            role="ec_both",
            options={},
            rank=0,
            epoch=1,
            encoder=SPEC,
            device="cpu",
            wakeup=engine.woken.set,
        )
    )
    engine.workers[0] = stranger
    cat = item("cat")
    engine.step(cat, rows=rows_for(cat))
    engine.rest()
    assert engine.scheduler.statistics()["ranks.save_failed.region"] == 1
    assert engine.scheduler.statistics()["node.aborts"] == 1
    assert engine.step(cat, rows=rows_for(cat)) == {cat.key: CacheLookup.MISS}
    engine.rest()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nod": "embedded"}, "unknown option 'nod'; known are .*memory.*pending_timeout_s"),
        ({"node": "shared"}, "node='shared' is neither 'embedded' nor 'unix:PATH'"),
        ({"eviction": "random"}, "eviction='random' is not one of lru, cost"),
        ({"load": 3}, "load=3 is not one of auto, view, copy"),
        ({"memory": "much"}, "memory='much' is not a size"),
        ({"memory": "9" * 400}, "is not a size"),
        ({"memory": "1e30"}, "is not a size"),
        ({"memory": -1}, "memory=-1 is not a size"),
        ({"memory": 0}, "memory=0 must be above 0"),
        ({"memory": True}, "memory"),
        ({"pending_timeout_s": -1.0}, "pending_timeout_s=-1.0 must be"),
        ({"pending_timeout_s": float("inf")}, "pending_timeout_s=inf must be"),
        ({"prefault": "yes"}, "prefault"),
    ],
)
def test_options_that_cannot_work_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        create_factory(ECConfig(options=options))


def test_sizes_are_read_as_they_are_written() -> None:
    assert parse_options({"memory": "2GiB"}).memory_bytes == 2 << 30
    assert parse_options({"memory": "0.5 KiB"}).memory_bytes == 512
    assert parse_options({"memory": 2**60 + 1}).memory_bytes == 2**60 + 1  # no float in between
    assert parse_options({}).memory_bytes == 1 << 30


def test_views_are_refused_where_the_cache_is_on_a_gpu() -> None:
    context = ECWorkerContext(
        engine_id="e",
        role="ec_both",
        options={"load": "view"},
        rank=0,
        epoch=1,
        encoder=SPEC,
        device="cuda:0",
        wakeup=lambda: None,
    )
    with pytest.raises(ConfigError, match="'cuda:0': use 'auto' or 'copy'"):
        EcotoneConnectorFactory().worker_half(context)


def test_a_region_larger_than_the_machine_leaves_nothing_behind() -> None:
    with pytest.raises(Exception, match="does not fit"):
        Engine(memory="4000TiB")


def test_ranks_on_two_hosts_are_refused_before_memory_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object, **__: object) -> Region:
        raise AssertionError("a region was made")

    monkeypatch.setattr(Region, "create", unreachable)
    context = ECSchedulerContext(
        engine_id="e",
        role="ec_both",
        options={},
        participants=(Participant(0, "a"), Participant(1, "b")),
        encoder=SPEC,
        clock=FakeClock(),
    )
    with pytest.raises(ConfigError, match="2 hosts"):
        EcotoneConnectorFactory().scheduler_half(context)


class Lossy(ECConnectorWorkerMetadata, frozen=True):
    """A base class field: what a subclass adds would be lost."""

    anything: Any = None

    def aggregate(self, other: Lossy) -> Lossy:
        return self


class LossyWorker(ECWorkerConnector):
    worker_metadata_type = Lossy

    def bind_connector_metadata(self, metadata: object) -> None: ...
    def clear_connector_metadata(self) -> None: ...
    def start_load_caches(self, encoder_cache: object) -> None: ...
    def wait_for_loads(self, encoder_cache: object) -> None: ...
    def save_caches(self, encoder_cache: object, key: str) -> None: ...


class SilentWorker(LossyWorker):
    worker_metadata_type = None


class OwnFactory(ECConnectorFactory):
    """An operator's own connector."""

    def validate(self, role: ECRole, options: dict[str, Any]) -> None:
        if role != "ec_both":
            raise ConfigError(f"role={role!r}: only ec_both")

    def scheduler_half(self, context: ECSchedulerContext) -> ECSchedulerConnector:
        return EcotoneConnectorFactory().scheduler_half(context)

    def worker_half(self, context: ECWorkerContext) -> ECWorkerConnector:
        return LossyWorker(context) if context.options else SilentWorker(context)


def test_a_connector_of_ones_own_is_found_and_asked() -> None:
    factory = create_factory(ECConfig(connector=f"{__name__}:OwnFactory"))
    context = ECWorkerContext(
        engine_id="e", role="ec_both", options={}, rank=0, epoch=1, encoder=SPEC, device="cpu", wakeup=lambda: None
    )
    assert isinstance(factory.worker_half(context), SilentWorker)
    with pytest.raises(ConfigError, match="only ec_both"):
        create_factory(ECConfig(connector=f"{__name__}:OwnFactory", role="ec_consumer"))


def test_reports_that_would_not_survive_the_wire_are_refused_when_the_connector_is_made() -> None:
    factory = create_factory(ECConfig(connector=f"{__name__}:OwnFactory"))
    context = ECWorkerContext(
        engine_id="e",
        role="ec_both",
        options={"lossy": True},
        rank=0,
        epoch=1,
        encoder=SPEC,
        device="cpu",
        wakeup=lambda: None,
    )
    with pytest.raises(RoundTripError, match="anything"):
        factory.worker_half(context)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Nonsense", "not one of EcotoneConnector, nor 'module:Class'"),
        (":Class", "nor 'module:Class'"),
        ("no_such_module_here:Class", "cannot be imported: No module named 'no_such_module_here'"),
        (f"{__name__}:NoSuchClass", "there is no such class"),
        (f"{__name__}:LossyWorker", "LossyWorker is no ECConnectorFactory class"),
        (f"{__name__}:rows_for", "rows_for is no ECConnectorFactory class"),
    ],
)
def test_a_connector_that_is_none_is_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        create_factory(ECConfig(connector=name))


@pytest.mark.parametrize(
    ("options", "kind", "says"),
    [
        ({"memory": "64TiB"}, ResourceError, "does not fit"),
        ({"disk": "/proc/ecotone"}, ConfigError, "cannot be made"),
        ({"node": "unix:/nonexistent/node"}, ConfigError, "no node at '/nonexistent/node': nothing is there"),
        ({"node": "unix:/proc/version"}, ConfigError, "that is no socket"),
    ],
)
def test_what_the_machine_does_not_have_is_said_before_anything_starts(
    options: dict[str, Any], kind: type[Exception], says: str
) -> None:
    factory = create_factory(ECConfig(options=options))  # nothing is wrong with what was written
    with pytest.raises(kind, match=says):
        factory.check_machine("ec_both", options)


def test_a_machine_that_has_it_all(tmp_path: Path) -> None:
    for options in ({}, {"memory": 4096, "disk": str(tmp_path / "new" / "disk")}):
        create_factory(ECConfig(options=options)).check_machine("ec_both", options)
    assert (tmp_path / "new" / "disk").is_dir()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "node"))
        there = {"node": f"unix:{tmp_path / 'node'}"}
        create_factory(ECConfig(options=there)).check_machine("ec_both", there)
