"""Folding the ranks' answers to one step into the answer of the output rank.

EC reports are joins and know no barrier: who has to report is the connector's business. KV reports do count: a
request is finished when enough ranks said so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from ecotone.errors import ContractError, MissingOutputError
from ecotone.protocol.outputs import (
    ECConnectorOutput,
    ECConnectorStats,
    ECConnectorWorkerMetadata,
    KVConnectorOutput,
    ModelRunnerOutput,
)

T = TypeVar("T")
_EMPTY_SET: frozenset[Any] = frozenset()


class OutputAggregator(Protocol):
    """Folds one connector's part of all ranks' outputs, and nothing else."""

    def aggregate(
        self, outputs: Sequence[ModelRunnerOutput | None], output_rank: int = 0
    ) -> ModelRunnerOutput | None:
        """The output of ``output_rank`` with this part folded; see ``fold_outputs``."""
        ...


def fold_outputs(
    outputs: Sequence[ModelRunnerOutput | None], output_rank: int, aggregators: Iterable[OutputAggregator]
) -> ModelRunnerOutput | None:
    """The output rank's answer with every part folded onto it, whatever the order of ``aggregators``.

    Each aggregator sees what the one before made of the output rank's answer, and the other ranks' answers as
    they came. Nothing is written to.

    Args:
        outputs: one per rank, by rank; ``None`` where a rank returned nothing.
        output_rank: the rank whose tokens and rows count.
        aggregators: of the parts that are in use.

    Returns:
        ``None`` when the output rank returned nothing and nobody has anything to report.

    Raises:
        MissingOutputError: some ranks returned nothing, and a report would or may be lost.
        ContractError: ``output_rank`` is no rank, or reports do not fit together.
    """
    folded = list(outputs)
    _check_rank(folded, output_rank)
    for aggregator in aggregators:
        folded[output_rank] = aggregator.aggregate(folded, output_rank)
    return folded[output_rank]


class ECOutputAggregator:
    """Folds EC reports: sets by union, metadata and statistics by their join. Keeps no state."""

    def aggregate(
        self, outputs: Sequence[ModelRunnerOutput | None], output_rank: int = 0
    ) -> ModelRunnerOutput | None:
        """The output of ``output_rank`` with all ranks' EC reports folded; its KV part is left alone.

        Without any report, the output has no EC part. Without an output at any rank, ``None``.

        Raises:
            MissingOutputError: an output is missing at the output rank while another rank has an EC report, or at
                another rank while the output rank has an output.
            ContractError: ``output_rank`` is no rank, or two ranks' metadata are of different types.
        """
        _check_rank(outputs, output_rank)
        reports = [output.ec_connector_output if output is not None else None for output in outputs]
        base = _base(outputs, output_rank, reports)
        if base is None:
            return None
        return ModelRunnerOutput.with_ec_conn_output(base, _join(reports))


class KVOutputAggregator:
    """Folds KV reports: a request is finished when ``expected_finished_count`` reports of it came in.

    The number a request needs is fixed when its first report comes in. A rank's ``expected_finished_count``
    changes it for requests whose first report comes in the same step or later; those already counting keep
    theirs, since the ranks that took part in their transfers have not changed. When several ranks name a number
    in one step, the largest holds: finished too late is slow, finished too early is wrong.

    Args:
        expected_finished_count: reports that finish a request, at least 1.

    Raises:
        ContractError: it is less.
    """

    def __init__(self, expected_finished_count: int) -> None:
        if expected_finished_count < 1:
            raise ContractError(f"expected_finished_count={expected_finished_count} must be at least 1")
        self.expected_finished_count = expected_finished_count
        self._sending: Mapping[str, int] = {}
        self._recving: Mapping[str, int] = {}

    def aggregate(
        self, outputs: Sequence[ModelRunnerOutput | None], output_rank: int = 0
    ) -> ModelRunnerOutput | None:
        """The output of ``output_rank`` with all ranks' KV reports folded; its EC part is left alone.

        The folded part names the requests that became finished in this step, and all invalid blocks; the
        adjustments are used up here. Without any of it, the output has no KV part.

        Raises:
            MissingOutputError: as for ``ECOutputAggregator``; nothing has been counted then.
            ContractError: ``output_rank`` is no rank.
        """
        _check_rank(outputs, output_rank)
        reports = [output.kv_connector_output if output is not None else None for output in outputs]
        base = _base(outputs, output_rank, reports)
        if base is None:
            return None
        return ModelRunnerOutput.with_kv_conn_output(base, self._count([kv for kv in reports if kv is not None]))

    def statistics(self) -> dict[str, int]:
        """Requests some ranks reported and others have yet to, by direction."""
        return {"kv_sending_counting": len(self._sending), "kv_recving_counting": len(self._recving)}

    def _count(self, reports: Sequence[KVConnectorOutput]) -> KVConnectorOutput | None:
        if not reports:
            return None
        adjusted = max(kv.expected_finished_count for kv in reports)
        self.expected_finished_count = adjusted or self.expected_finished_count
        self._sending, sent = count_down(
            self._sending, self.expected_finished_count, [kv.finished_sending for kv in reports]
        )
        self._recving, received = count_down(
            self._recving, self.expected_finished_count, [kv.finished_recving for kv in reports]
        )
        return KVConnectorOutput(
            finished_sending=sent,
            finished_recving=received,
            invalid_block_ids=_union(kv.invalid_block_ids for kv in reports),
        )


def count_down(
    missing: Mapping[str, int], expected: int, reports: Iterable[frozenset[str]]
) -> tuple[Mapping[str, int], frozenset[str]]:
    """Count one step's reports of one direction.

    Args:
        missing: request -> reports it still needs, at least 1.
        expected: reports that a request needs which is not in ``missing``.
        reports: the requests each rank reported.

    Returns:
        ``missing`` after the step, and the requests that now have all their reports. Surplus reports of the same
        step are dropped; a report that comes in a later step than the last one needed begins a new count.
    """
    after = dict(missing)
    for reported in reports:
        for req_id in reported:
            after[req_id] = after.get(req_id, expected) - 1
    finished = frozenset(req_id for req_id, count in after.items() if count <= 0)
    for req_id in finished:
        del after[req_id]
    return after, finished


def _check_rank(outputs: Sequence[ModelRunnerOutput | None], output_rank: int) -> None:
    if not 0 <= output_rank < len(outputs):
        raise ContractError(f"output rank {output_rank} is none of the {len(outputs)} ranks that were asked")


def _base(
    outputs: Sequence[ModelRunnerOutput | None],
    output_rank: int,
    reports: Sequence[ECConnectorOutput | KVConnectorOutput | None],
) -> ModelRunnerOutput | None:
    """The output to fold ``reports`` (by rank) onto; ``None`` only where nothing is lost by it."""
    base = outputs[output_rank]
    missing = tuple(rank for rank, output in enumerate(outputs) if output is None)
    if base is not None and missing:
        raise MissingOutputError(
            f"ranks {_list(missing)} returned no output, and with it perhaps no report, in a step that has one at "
            f"the output rank {output_rank}",
            missing,
        )
    if base is None:
        reporters = [rank for rank, report in enumerate(reports) if report is not None and not report.is_empty()]
        if reporters:
            raise MissingOutputError(
                f"ranks {_list(missing)} returned no output, the output rank {output_rank} among them: the "
                f"reports of ranks {_list(reporters)} would be lost",
                missing,
            )
    return base


def _join(reports: Sequence[ECConnectorOutput | None]) -> ECConnectorOutput | None:
    given = [ec for ec in reports if ec is not None]
    if len(given) <= 1:
        return given[0] if given else None
    return ECConnectorOutput(
        finished_sending=_union(ec.finished_sending for ec in given),
        finished_recving=_union(ec.finished_recving for ec in given),
        failed_loads=_union(ec.failed_loads for ec in given),
        ec_connector_worker_meta=_join_metadata(reports),
        ec_connector_stats=_join_stats(given),
    )


def _join_metadata(reports: Sequence[ECConnectorOutput | None]) -> ECConnectorWorkerMetadata | None:
    metas = [
        ec.ec_connector_worker_meta for ec in reports if ec is not None and ec.ec_connector_worker_meta is not None
    ]
    if len(metas) <= 1:
        return metas[0] if metas else None
    kinds = {type(meta) for meta in metas}
    if len(kinds) > 1:
        by_rank = ", ".join(
            f"{type(ec.ec_connector_worker_meta).__qualname__} of rank {rank}"
            for rank, ec in enumerate(reports)
            if ec is not None and ec.ec_connector_worker_meta is not None
        )
        raise ContractError(f"worker metadata of different types cannot be joined: {by_rank}")
    return kinds.pop().aggregate_all(metas)


def _join_stats(reports: Iterable[ECConnectorOutput]) -> ECConnectorStats | None:
    stats = [ec.ec_connector_stats for ec in reports if ec.ec_connector_stats is not None]
    if len(stats) <= 1:
        return stats[0] if stats else None
    return ECConnectorStats.aggregate_all(stats)


def _union(sets: Iterable[frozenset[T]]) -> frozenset[T]:
    given = list(filter(None, sets))
    return given[0] if len(given) == 1 else _EMPTY_SET.union(*given)


def _list(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, ranks))
