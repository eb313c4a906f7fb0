"""The barrier with ranks that are processes, writing their shares into one region and reading the whole of it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import msgspec
import pytest
from barrier_rank import SPEC, receive, send
from connector_doubles import FakeClock, item

from ecotone.config import ECConfig
from ecotone.connectors.factory import create_factory
from ecotone.protocol.aggregate import ECOutputAggregator
from ecotone.protocol.connector import CacheLookup, ECItem, ECSchedulerContext, Participant
from ecotone.protocol.outputs import ECConnectorOutput, ModelRunnerOutput
from ecotone.protocol.step import SchedulerOutput
from ecotone.protocol.wire import decode, encode

RANKS = (0, 1)
ROWS = 7  # three rows are rank 0's, four are rank 1's


class Engine:
    """A scheduler half with its node, and a process for each rank."""

    def __init__(self) -> None:
        config = ECConfig(options={"memory": 1 << 16, "prefault": False})
        self.engine_id = uuid4().hex
        self.scheduler = create_factory(config).scheduler_half(
            ECSchedulerContext(
                engine_id=self.engine_id,
                role=config.role,
                options=config.options,
                participants=tuple(Participant(rank, "here") for rank in RANKS),
                encoder=SPEC,
                clock=FakeClock(),
            )
        )
        script = Path(__file__).with_name("barrier_rank.py")
        self.ranks = [
            subprocess.Popen(
                [sys.executable, str(script), self.engine_id, str(rank)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            for rank in RANKS
        ]
        self.counters: list[dict[str, float]] = [{} for _ in RANKS]
        for rank in self.ranks:
            assert receive(rank.stdout) == b"ready"

    def order(self, *wanted: ECItem) -> tuple[dict[str, CacheLookup], SchedulerOutput]:
        said = {}
        for each in wanted:
            said[each.key] = self.scheduler.lookup("r", each)
            if said[each.key] is not CacheLookup.PENDING:
                self.scheduler.update_state_after_alloc("r", each)
        return said, SchedulerOutput(step=1, ec_connector_metadata=self.scheduler.build_connector_meta())

    def carry_out(self, rank: int, order: SchedulerOutput) -> ECConnectorOutput:
        send(self.ranks[rank].stdin, encode(order))
        answer = receive(self.ranks[rank].stdout)
        assert answer is not None
        report = decode(answer, ECConnectorOutput)
        assert not report.failed_loads
        if report.ec_connector_stats is not None:
            self.counters[rank] = report.ec_connector_stats.total()
        return report

    def tell(self, *reports: ECConnectorOutput) -> None:
        """As from an executor: folded by the generic aggregator."""
        folded = ECOutputAggregator().aggregate([ModelRunnerOutput(ec_connector_output=r) for r in reports])
        assert folded is not None
        if folded.ec_connector_output is not None:
            self.scheduler.update_connector_output(folded.ec_connector_output)

    def save(self, rank: int, order: SchedulerOutput) -> list[ECConnectorOutput]:
        """What ``rank`` says until its share is written: empty steps follow on the order's."""
        before = self.counters[rank].get("saves", 0)
        said = [self.carry_out(rank, order)]
        while self.counters[rank].get("saves", 0) == before:
            said.append(self.carry_out(rank, SchedulerOutput(step=1)))
        return said

    def close(self) -> None:
        for rank in self.ranks:
            rank.stdin.close()
            rank.wait()
            rank.stdout.close()
        self.scheduler.check_integrity()
        self.scheduler.shutdown()


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine()
    try:
        yield made
    finally:
        made.close()


def statistics(engine: Engine) -> dict[str, float]:
    return engine.scheduler.statistics()


def test_ready_when_both_have_written_and_not_before(engine: Engine) -> None:
    said, order = engine.order(item("cat", ROWS))
    assert list(said.values()) == [CacheLookup.MISS]
    from_0, from_1 = (engine.save(rank, order) for rank in RANKS)
    # Both shares are in the region. But only rank 0 was heard, again and again.
    for _ in range(3):
        engine.tell(*from_0)
        assert statistics(engine)["node.commits"] == 0
        assert engine.scheduler.has_pending_work()
    said, order = engine.order(item("cat", ROWS))
    assert (list(said.values()), order.ec_connector_metadata) == ([CacheLookup.PENDING], None)
    # A rank that was never a participant says that it saved everything.
    engine.tell(*from_0, *(_as_rank(report, 9) for report in from_1))
    assert statistics(engine)["node.commits"] == 0
    engine.tell(*reversed(from_1))
    assert statistics(engine)["node.commits"] == 1

    # Now both load all of it; the rows are compared over there. The pin falls when both have let go.
    said, order = engine.order(item("cat", ROWS))
    assert list(said.values()) == [CacheLookup.READY]
    engine.tell(engine.carry_out(1, order))
    engine.tell(engine.carry_out(1, SchedulerOutput(step=1)))
    assert engine.counters[1]["views"] == 1
    assert statistics(engine)["node.pins"] == 1
    assert engine.scheduler.has_pending_work()
    engine.tell(engine.carry_out(0, order))
    engine.tell(engine.carry_out(0, SchedulerOutput(step=1)))
    assert statistics(engine)["node.pins"] == 0
    assert not engine.scheduler.has_pending_work()
    # All of it once more changes nothing.
    before = statistics(engine)
    engine.tell(*from_1, *from_0)
    assert {**statistics(engine), "without_effect": 0} == {**before, "without_effect": 0}


def _as_rank(report: ECConnectorOutput, rank: int) -> ECConnectorOutput:
    meta = report.ec_connector_worker_meta
    if meta is None:
        return ECConnectorOutput()
    return ECConnectorOutput(
        ec_connector_worker_meta=msgspec.structs.replace(
            meta, reports=frozenset(msgspec.structs.replace(r, rank=rank) for r in meta.reports)
        )
    )


def test_a_rank_that_dies_before_it_reported_leaves_nothing_reserved(engine: Engine) -> None:
    _, order = engine.order(item("dog", ROWS))
    engine.tell(*engine.save(0, order))
    engine.ranks[1].kill()
    engine.ranks[1].wait()
    assert statistics(engine)["node.commits"] == 0
    assert statistics(engine)["saves_in_flight"] == 1
    engine.scheduler.check_integrity()
    # The engine ends with its rank; leaving the node ends what it had reserved.
    engine.scheduler.shutdown()
    engine.scheduler.check_integrity()
