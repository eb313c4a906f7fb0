"""What the tests of the connector share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ecotone.connectors.messages import EcotoneWorkerMetadata, FailureReason, Report, ReportKind
from ecotone.connectors.scheduler import EcotoneSchedulerConnector
from ecotone.node.exchange import (
    Absent,
    Acquire,
    AnyAnswer,
    AnyOp,
    Done,
    Extent,
    Lookup,
    NoRoom,
    Pending,
    Ready,
    Settled,
    Ticket,
)
from ecotone.node.keys import Namespace
from ecotone.protocol.connector import ECItem, ECRole, ECSchedulerContext, EncoderSpec, Participant
from ecotone.protocol.outputs import ECConnectorOutput

SPEC = EncoderSpec(hidden_size=8, levels=1, dtype="float32")
NAMESPACE = Namespace(model="m", revision="r", dtype="float32", width=SPEC.width, processor="p")


def item(name: str, num_rows: int = 4, namespace: Namespace = NAMESPACE) -> ECItem:
    return ECItem(namespace.key(name), num_rows)


class ScriptedNode:
    """Answers each question as the test said, or keeps its answers while ``silent``."""

    def __init__(self) -> None:
        self.verdicts: dict[str, str] = {}
        self.silent = False
        self.patient = False  # whether it stays silent past a wait
        self.waited: list[float] = []
        self.ops: list[AnyOp] = []
        self.closed = 0
        self.flushes = 0
        self._queue: list[AnyAnswer] = []
        self._id = 100

    def said(self, kind: type[AnyOp]) -> list[AnyOp]:
        return [op for op in self.ops if type(op) is kind]

    def submit(self, ops: Sequence[AnyOp]) -> None:
        for op in ops:
            self.ops.append(op)
            self._queue.append(self._answer(op))

    def _answer(self, op: AnyOp) -> AnyAnswer:
        if not isinstance(op, (Acquire, Lookup)):
            return Done(op.seq, True)
        self._id += 1
        extents = (Extent("region", 1, 0, op.layout.nbytes),)
        return {
            "ready": Ready(op.seq, self._id, extents),
            "ticket": Ticket(op.seq, self._id, extents),
            "pending": Pending(op.seq),
            "absent": Absent(op.seq),
            "no_room": NoRoom(op.seq),
        }[self.verdicts.get(op.key, "ticket" if isinstance(op, Acquire) else "absent")]

    def flush(self) -> None:
        self.flushes += 1

    def poll(self) -> Sequence[AnyAnswer]:
        if self.silent:
            return []
        answers, self._queue = self._queue, []
        return answers

    def wait(self, timeout_s: float) -> None:
        self.waited.append(timeout_s)
        self.silent &= self.patient

    def settle(self, claim: int, *, committed: bool, age_s: float = 0.0) -> None:
        """The node heard of it from the ranks."""
        self._queue.append(Settled(0, claim, committed, age_s))

    def statistics(self) -> dict[str, float]:
        return {"entries": 3}

    def close(self) -> None:
        self.closed += 1


class FakeClock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def scheduler_context(
    role: ECRole = "ec_both", ranks: Iterable[int] = (0,), clock: FakeClock | None = None, host: str = "h"
) -> ECSchedulerContext:
    return ECSchedulerContext(
        engine_id="engine",
        role=role,
        options={},
        participants=tuple(Participant(rank, host) for rank in ranks),
        encoder=SPEC,
        clock=clock or FakeClock(),
    )


class Bench:
    """A scheduler half over a scripted node, and short words for what is done with it."""

    def __init__(self, role: ECRole = "ec_both", ranks: Iterable[int] = (0,), timeout: float = 5.0) -> None:
        self.node = ScriptedNode()
        self.clock = FakeClock()
        self.ended: list[bool] = []
        self.half = EcotoneSchedulerConnector(
            scheduler_context(role, ranks, self.clock), self.node, timeout, lambda: self.ended.append(True)
        )

    def report(self, *reports: Report, failed_loads: Iterable[str] = ()) -> None:
        meta = EcotoneWorkerMetadata(frozenset(reports)) if reports else None
        self.half.update_connector_output(
            ECConnectorOutput(failed_loads=frozenset(failed_loads), ec_connector_worker_meta=meta)
        )


def fact(transfer_id: int, kind: ReportKind, rank: int = 0, reason: FailureReason | None = None) -> Report:
    return Report(rank, 1, transfer_id, kind, reason)
