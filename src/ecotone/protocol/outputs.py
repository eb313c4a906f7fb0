"""What one rank says about one step, and how other reports are put beside it without writing to it.

All of it is frozen down to the containers, so that nothing can be written through the shared
``EMPTY_MODEL_RUNNER_OUTPUT``, by accident or on purpose.
"""

from __future__ import annotations

from abc import ABCMeta, abstractmethod
from collections.abc import Mapping
from typing import Self

import msgspec

from ecotone.protocol.arrays import Array
from ecotone.protocol.frozen import EMPTY_MAP, frozen_map, set_field


class MetadataMeta(msgspec.StructMeta, ABCMeta):
    """Makes abstract methods hold on structs."""


class ECConnectorWorkerMetadata(msgspec.Struct, frozen=True, metaclass=MetadataMeta):
    """What a connector's worker half tells its scheduler half about one step.

    Subclass it as a frozen struct: ``class M(ECConnectorWorkerMetadata, frozen=True)``.
    """

    @abstractmethod
    def aggregate(self, other: Self) -> Self:
        """The join of two reports.

        Pure (neither operand changes), commutative, associative and idempotent: replays, another order and
        folding twice change nothing. A set of facts joined by union is the simplest such type.
        """


class RankStats(msgspec.Struct, frozen=True, order=True, forbid_unknown_fields=True):
    """Counters of one rank since its ``epoch`` began (the rank's start). They only grow."""

    rank: int
    epoch: int
    counters: Mapping[str, float] = EMPTY_MAP

    def __post_init__(self) -> None:
        set_field(self, "counters", frozen_map(self.counters))


class ECConnectorStats(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Cumulative counters per (rank, epoch): joined by maximum, summed only when exported."""

    ranks: tuple[RankStats, ...] = ()

    def aggregate(self, other: ECConnectorStats) -> ECConnectorStats:
        """The join: for each (rank, epoch, counter) the larger value."""
        merged: dict[tuple[int, int], dict[str, float]] = {}
        for entry in (*self.ranks, *other.ranks):
            counters = merged.setdefault((entry.rank, entry.epoch), {})
            for name, value in entry.counters.items():
                counters[name] = max(value, counters.get(name, value))
        return ECConnectorStats(
            tuple(RankStats(rank, epoch, merged[rank, epoch]) for rank, epoch in sorted(merged))
        )

    def total(self) -> dict[str, float]:
        """Each counter summed over all ranks and epochs."""
        out: dict[str, float] = {}
        for entry in self.ranks:
            for name, value in entry.counters.items():
                out[name] = out.get(name, 0) + value
        return out


class ECConnectorOutput(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One rank's EC report of one step, or the fold of several ranks' reports.

    Attributes:
        finished_sending, finished_recving: ids of requests whose transfers ended on this rank.
        failed_loads: keys this rank was ordered to load and does not hold after the step. The scheduler
            discards the step's result of every request that needed one of them, on all ranks.
        ec_connector_worker_meta: what the connector's worker half has to say; ``None`` when nothing.
        ec_connector_stats: the connector's counters on this rank; ``None`` when it keeps none.
    """

    finished_sending: frozenset[str] = frozenset()
    finished_recving: frozenset[str] = frozenset()
    failed_loads: frozenset[str] = frozenset()
    ec_connector_worker_meta: ECConnectorWorkerMetadata | None = None
    ec_connector_stats: ECConnectorStats | None = None

    def __post_init__(self) -> None:
        for name in ("finished_sending", "finished_recving", "failed_loads"):
            set_field(self, name, frozenset(getattr(self, name)))

    def is_empty(self) -> bool:
        """Whether dropping this report would lose nothing. A falsy metadata object still counts."""
        return (
            not self.finished_sending
            and not self.finished_recving
            and not self.failed_loads
            and self.ec_connector_worker_meta is None
            and self.ec_connector_stats is None
        )


class KVConnectorOutput(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One rank's KV report of one step, or the fold of several.

    Attributes:
        finished_sending, finished_recving: ids of requests whose transfers ended on this rank.
        invalid_block_ids: KV blocks that could not be loaded.
        expected_finished_count: how many reports finish a request from now on; 0 leaves it as it is.
    """

    finished_sending: frozenset[str] = frozenset()
    finished_recving: frozenset[str] = frozenset()
    invalid_block_ids: frozenset[int] = frozenset()
    expected_finished_count: int = 0

    def __post_init__(self) -> None:
        for name in ("finished_sending", "finished_recving", "invalid_block_ids"):
            set_field(self, name, frozenset(getattr(self, name)))

    def is_empty(self) -> bool:
        """Whether dropping this report would lose nothing."""
        return (
            not self.finished_sending
            and not self.finished_recving
            and not self.invalid_block_ids
            and not self.expected_finished_count
        )


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Log probabilities of one sampled token and of the most probable ones.

    Attributes:
        sampled: log probability of the sampled token, natural log, after temperature, before top-k/top-p.
        top_ids: int64 ``[k]``, most probable first.
        top_logprobs: float32 ``[k]``.
    """

    sampled: float
    top_ids: Array
    top_logprobs: Array


class ModelRunnerOutput(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One rank's result of one step.

    Attributes:
        req_ids: the requests that ran in this step, in batch order; the next three are parallel to it.
        sampled_token_ids: per request, the tokens sampled in this step (empty while prefilling).
        logprobs: per request, one entry for each sampled token; empty where none were asked for.
        pooler_output: per request, float32 ``[width]`` when its pooling finished in this step.
        request_errors: request id -> reason, for requests that cannot go on (only they end).
        kv_connector_output, ec_connector_output: the connectors' reports; ``None`` when there is none.
    """

    req_ids: tuple[str, ...] = ()
    sampled_token_ids: tuple[tuple[int, ...], ...] = ()
    logprobs: tuple[tuple[TokenLogprobs, ...], ...] = ()
    pooler_output: tuple[Array | None, ...] = ()
    request_errors: Mapping[str, str] = EMPTY_MAP
    kv_connector_output: KVConnectorOutput | None = None
    ec_connector_output: ECConnectorOutput | None = None

    def __post_init__(self) -> None:
        set_field(self, "req_ids", tuple(self.req_ids))
        set_field(self, "sampled_token_ids", tuple(tuple(ids) for ids in self.sampled_token_ids))
        set_field(self, "logprobs", tuple(tuple(entries) for entries in self.logprobs))
        set_field(self, "pooler_output", tuple(self.pooler_output))
        set_field(self, "request_errors", frozen_map(self.request_errors))

    @staticmethod
    def with_ec_conn_output(output: ModelRunnerOutput, ec: ECConnectorOutput | None) -> ModelRunnerOutput:
        """``output`` with its EC report replaced (an empty report becomes ``None``); ``output`` is unchanged."""
        ec = None if ec is None or ec.is_empty() else ec
        if ec is output.ec_connector_output:
            return output
        return msgspec.structs.replace(output, ec_connector_output=ec)

    @staticmethod
    def with_ec_conn_output_only(ec: ECConnectorOutput | None) -> ModelRunnerOutput:
        """An output with nothing but an EC report; the shared empty output when there is nothing to report."""
        return ModelRunnerOutput.with_ec_conn_output(EMPTY_MODEL_RUNNER_OUTPUT, ec)

    @staticmethod
    def with_kv_conn_output(output: ModelRunnerOutput, kv: KVConnectorOutput | None) -> ModelRunnerOutput:
        """``output`` with its KV report replaced (an empty report becomes ``None``); ``output`` is unchanged."""
        kv = None if kv is None or kv.is_empty() else kv
        if kv is output.kv_connector_output:
            return output
        return msgspec.structs.replace(output, kv_connector_output=kv)

    @staticmethod
    def with_kv_conn_output_only(kv: KVConnectorOutput | None) -> ModelRunnerOutput:
        """An output with nothing but a KV report; the shared empty output when there is nothing to report."""
        return ModelRunnerOutput.with_kv_conn_output(EMPTY_MODEL_RUNNER_OUTPUT, kv)


EMPTY_MODEL_RUNNER_OUTPUT = ModelRunnerOutput()
