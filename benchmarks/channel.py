"""What the worker -> scheduler channel costs in a step: from a rank's facts to the scheduler half's books.

Each rank reports that it has saved its share of every item of the step; with the last rank's report each save is
settled, so that ``apply`` pays for the whole way to the node's commits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

from benchmarks.harness import interleave, timed
from ecotone.connectors.messages import EcotoneWorkerMetadata, Report, ReportKind
from ecotone.connectors.scheduler import EcotoneSchedulerConnector
from ecotone.node.exchange import Acquire, AnyAnswer, AnyOp, Done, Extent, Lookup, Ticket
from ecotone.protocol import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    ECConnectorOutput,
    ECItem,
    ECOutputAggregator,
    ECSchedulerContext,
    EncoderSpec,
    ModelRunnerOutput,
    Participant,
    decode,
    encode,
    fold_outputs,
)

RANKS = (1, 8, 64)
ITEMS = (0, 1, 64)
STAGES = ("build", "encode", "decode", "fold", "apply")
_SPEC = EncoderSpec(hidden_size=64, levels=0, dtype="bfloat16")
_AGGREGATORS = (ECOutputAggregator(),)


class _Granting:
    """A node that gives out a ticket for every question, at once, so that its own work is not measured."""

    def __init__(self) -> None:
        self._answers: list[AnyAnswer] = []

    def submit(self, ops: Sequence[AnyOp]) -> None:
        for op in ops:
            if isinstance(op, Acquire | Lookup):
                self._answers.append(Ticket(op.seq, op.seq, (Extent("region", 1, 0, op.layout.nbytes),)))
            else:
                self._answers.append(Done(op.seq, True))

    def flush(self) -> None:
        pass

    def poll(self) -> Sequence[AnyAnswer]:
        answers, self._answers = self._answers, []
        return answers

    def wait(self, timeout_s: float) -> None:
        pass

    def statistics(self) -> dict[str, float]:
        return {}

    def close(self) -> None: ...


class _Step:
    """One step of ``ranks`` ranks that save ``items`` items."""

    def __init__(self, ranks: int, items: int) -> None:
        self._ranks = range(ranks)
        self._items = [ECItem(f"{0:032x}:{index:064x}", 64) for index in range(items)]
        _, self._transfer_ids = self._order()
        self._outputs = self.build()
        self._messages = self.encode()
        self._report = self.fold().ec_connector_output or ECConnectorOutput()

    @property
    def bytes_of_a_rank(self) -> int:
        return len(self._messages[0])

    def _order(self) -> tuple[EcotoneSchedulerConnector, list[int]]:
        """A scheduler half that has ordered the step, and the ids of its transfers: the same every time."""
        half = EcotoneSchedulerConnector(
            ECSchedulerContext(
                engine_id="benchmark",
                role="ec_both",
                options={},
                participants=tuple(Participant(rank, "host") for rank in self._ranks),
                encoder=_SPEC,
                clock=perf_counter,
            ),
            _Granting(),
            pending_timeout_s=1.0,
        )
        for item in self._items:
            half.lookup("request", item)
            half.update_state_after_alloc("request", item)
        orders = half.build_connector_meta()
        return half, [order.transfer_id for order in orders.saves] if orders is not None else []

    def build(self) -> list[ModelRunnerOutput]:
        return [ModelRunnerOutput.with_ec_conn_output_only(self._report_of(rank)) for rank in self._ranks]

    def _report_of(self, rank: int) -> ECConnectorOutput | None:
        if not self._transfer_ids:
            return None
        facts = {Report(rank, 1, transfer_id, ReportKind.SAVED) for transfer_id in self._transfer_ids}
        return ECConnectorOutput(ec_connector_worker_meta=EcotoneWorkerMetadata(frozenset(facts)))

    def encode(self) -> list[bytes]:
        return [encode(output) for output in self._outputs]

    def decode(self) -> list[ModelRunnerOutput]:
        return [decode(message, ModelRunnerOutput) for message in self._messages]

    def fold(self) -> ModelRunnerOutput:
        return fold_outputs(self._outputs, 0, _AGGREGATORS) or EMPTY_MODEL_RUNNER_OUTPUT

    def apply(self) -> float:
        """Seconds that a scheduler half takes which knows the step's transfers, and has heard nothing of them."""
        half, _ = self._order()
        start = perf_counter()
        half.update_connector_output(self._report)
        seconds = perf_counter() - start
        if half.has_pending_work():
            raise RuntimeError("the reports did not settle the step's saves")
        return seconds


def _tasks(step: _Step, number: int) -> dict[str, Callable[[], float]]:
    return {
        "build": timed(step.build, number),
        "encode": timed(step.encode, number),
        "decode": timed(step.decode, number),
        "fold": timed(step.fold, number),
        "apply": step.apply,
    }


def run(quick: bool) -> dict[str, Any]:
    """By ``ranks x items``: medians (us) of the stages, all ranks' work added up, and the sum; the deciles of the
    fold; bytes of one rank's message."""
    rows: dict[str, Any] = {}
    for ranks in RANKS:
        for items in ITEMS:
            step = _Step(ranks, items)
            number = max(1, 64 // (ranks * (items + 1)))
            found = interleave(_tasks(step, number), rounds=20 if quick else 200)
            medians = {f"{stage}_us": round(found[stage].median * 1e6, 1) for stage in STAGES}
            rows[f"{ranks} x {items}"] = {
                **medians,
                "channel_us": round(sum(medians.values()), 1),
                "fold_p10_us": found["fold"].as_us()["p10_us"],
                "fold_p90_us": found["fold"].as_us()["p90_us"],
                "bytes_of_a_rank": step.bytes_of_a_rank,
            }
    return rows
