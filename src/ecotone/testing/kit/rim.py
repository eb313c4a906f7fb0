"""Between the ranks and the scheduler: reports pass here, late, again or never, as the plan says."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ecotone.errors import EcotoneError
from ecotone.protocol.aggregate import ECOutputAggregator, fold_outputs
from ecotone.protocol.outputs import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    ECConnectorOutput,
    ECConnectorWorkerMetadata,
    ModelRunnerOutput,
)
from ecotone.protocol.wire import decode, encode
from ecotone.testing.kit.ledger import Ledger
from ecotone.testing.kit.report import ViolationError

_KEPT = 6  # metadata objects whose joins are compared


class Rim:
    """Folds the ranks' outputs of a step, once the plan has had its way with their reports.

    Attributes:
        lost: whether a report never came: what was in it is unknown for ever.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.lost = False
        self._ledger = ledger
        self._delay: dict[int, int] = {}
        self._lose: set[int] = set()
        self._again: list[tuple[int, int, ECConnectorOutput]] = []  # rank, built, report
        self._late: list[tuple[int, int, int, ECConnectorOutput]] = []  # due, rank, built, report
        self._past: dict[int, list[tuple[int, int, ECConnectorOutput]]] = {}

    @property
    def holds_reports(self) -> bool:
        """Whether a report is on its way."""
        return bool(self._late)

    def delay(self, rank: int, steps: int) -> None:
        """The next report of ``rank`` comes ``steps`` late."""
        self._delay[rank] = steps

    def lose(self, rank: int) -> None:
        """The next report of ``rank`` never comes."""
        self._lose.add(rank)

    def repeat(self, rank: int, back: int) -> None:
        """A report that ``rank`` made earlier is heard again with the next step."""
        past = self._past.get(rank, [])
        if len(past) >= back:
            self._again.append(past[-back])

    def late_of(self, rank: int, since: int) -> bool:
        """Whether a report that ``rank`` made in or after step ``since`` is on its way."""
        return any(who == rank and built >= since for _, who, built, _ in self._late)

    def fold(self, outputs: Sequence[ModelRunnerOutput]) -> ModelRunnerOutput:
        """The output rank's answer, as the scheduler gets it."""
        step = self._ledger.step
        passed = [self._pass(rank, output) for rank, output in enumerate(map(self._cross, outputs))]
        extra = self._again + [late[1:] for late in self._late if late[0] <= step]
        for rank, built, _ in extra:
            self._heard(rank, built)
        self._late = [late for late in self._late if late[0] > step]
        self._again = []
        every = [*passed, *(ModelRunnerOutput.with_ec_conn_output_only(report) for _, _, report in extra)]
        self._check_joins([m for m in map(_metadata, every) if m is not None])
        folded = fold_outputs(every, 0, [ECOutputAggregator()])
        return folded if folded is not None else EMPTY_MODEL_RUNNER_OUTPUT

    def _cross(self, output: ModelRunnerOutput) -> ModelRunnerOutput:
        """``output`` as it comes from another process."""
        if output.ec_connector_output is None:
            return output
        self._ledger.check("reports-cross-the-wire")
        try:
            received = decode(encode(output), ModelRunnerOutput)
        except EcotoneError as error:
            raise ViolationError("reports-cross-the-wire", str(error)) from error
        if received.ec_connector_output != output.ec_connector_output:
            raise ViolationError(
                "reports-cross-the-wire",
                f"sent {output.ec_connector_output}, received {received.ec_connector_output}",
            )
        return received

    def _pass(self, rank: int, output: ModelRunnerOutput) -> ModelRunnerOutput:
        """What of ``output`` comes now. Failed loads always do: they are the runner's word."""
        report = output.ec_connector_output
        if report is None or report.ec_connector_worker_meta is None:
            return output
        step = self._ledger.step
        now = ECConnectorOutput(failed_loads=report.failed_loads)
        rest = msgspec.structs.replace(report, failed_loads=frozenset())
        if rank in self._lose:
            self._lose.discard(rank)
            self.lost = True
            return ModelRunnerOutput.with_ec_conn_output(output, now)
        self._past.setdefault(rank, []).append((rank, step, rest))
        steps = self._delay.pop(rank, 0)
        if steps:
            self._late.append((step + steps, rank, step, rest))
            return ModelRunnerOutput.with_ec_conn_output(output, now)
        self._heard(rank, step)
        return output

    def _heard(self, rank: int, built: int) -> None:
        if rank in self._ledger.heard:
            self._ledger.heard[rank] = max(self._ledger.heard[rank], built)

    def _check_joins(self, metas: Sequence[ECConnectorWorkerMetadata]) -> None:
        metas = metas[:_KEPT]
        if len({type(meta) for meta in metas}) != 1:
            return
        self._ledger.check("reports-join")
        kind = type(metas[0])
        forwards = kind.aggregate_all(metas)
        others: dict[str, ECConnectorWorkerMetadata] = {
            "in another order": kind.aggregate_all(metas[::-1]),
            "with repetitions": kind.aggregate_all([*metas, *metas]),
            "joined with a part of them again": forwards.aggregate(metas[-1]),
        }
        for how, joined in others.items():
            if joined != forwards:
                raise ViolationError("reports-join", f"{list(metas)} say something else {how}")


def _metadata(output: ModelRunnerOutput) -> ECConnectorWorkerMetadata | None:
    report = output.ec_connector_output
    return None if report is None else report.ec_connector_worker_meta
