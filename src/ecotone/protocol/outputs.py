"""What one rank says about one step, and how other reports are put beside it without writing to it.

All of it is frozen down to the containers, so that nothing can be written through the shared
``EMPTY_MODEL_RUNNER_OUTPUT``, by accident or on purpose.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from copy import copy
from functools import reduce
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Annotated, Self

import msgspec

from ecotone.errors import ContractError
from ecotone.protocol.arrays import Array
from ecotone.protocol.frozen import EMPTY_MAP, freeze, freeze_rows, frozen_map, set_field
from ecotone.protocol.polymorphic import MetadataMeta, polymorphic

NonNegative = Annotated[int, msgspec.Meta(ge=0)]
MAX_COUNTER = 2**53  # the largest number up to which a float holds every integer


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

    @classmethod
    def aggregate_all(cls, metas: Iterable[Self], /) -> Self:
        """The join of one or more reports, the same as joining them one after the other.

        Override it where one pass over all of them is cheaper: pairwise, each rank's facts are copied once for
        every rank that follows.
        """
        return reduce(lambda joined, meta: joined.aggregate(meta), metas)


if TYPE_CHECKING:
    AnyWorkerMetadata = ECConnectorWorkerMetadata
else:
    AnyWorkerMetadata = polymorphic(ECConnectorWorkerMetadata)


class RankStats(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Counters of one rank since its ``epoch`` began (the rank's start). They only grow.

    Raises:
        ContractError: a counter below 0, not a number, or above ``MAX_COUNTER``.
    """

    rank: int
    epoch: int
    counters: Mapping[str, float] = EMPTY_MAP

    def __post_init__(self) -> None:
        set_field(self, "counters", frozen_map(self.counters))
        for name, value in self.counters.items():
            if not 0 <= value <= MAX_COUNTER:
                raise ContractError(f"rank {self.rank}: counter {name}={value} is not from 0 to {MAX_COUNTER}")

    def aggregate(self, other: RankStats) -> RankStats:
        """The join of two states of the same (rank, epoch): the larger value of each counter."""
        counters = dict(self.counters)
        for name, value in other.counters.items():
            counters[name] = max(value, counters.get(name, value))
        return RankStats(self.rank, self.epoch, counters)


class ECConnectorStats(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Cumulative counters per (rank, epoch): joined by maximum, summed only when exported.

    Attributes:
        ranks: by ascending (rank, epoch), one entry each; brought into that form when built.
    """

    ranks: tuple[RankStats, ...] = ()

    def __post_init__(self) -> None:
        freeze(self, tuple, "ranks")
        identities = [(entry.rank, entry.epoch) for entry in self.ranks]
        if any(left >= right for left, right in pairwise(identities)):
            set_field(self, "ranks", _join_ranks(self.ranks))

    def aggregate(self, other: ECConnectorStats) -> ECConnectorStats:
        """The join: for each (rank, epoch, counter) the larger value."""
        return ECConnectorStats(_join_ranks((*self.ranks, *other.ranks)))

    @classmethod
    def aggregate_all(cls, stats: Iterable[ECConnectorStats], /) -> ECConnectorStats:
        """The join of any number of statistics, in time linear in their entries."""
        return cls(_join_ranks(chain.from_iterable(part.ranks for part in stats)))

    def total(self) -> dict[str, float]:
        """Each counter summed over all ranks and epochs."""
        out: dict[str, float] = {}
        for entry in self.ranks:
            for name, value in entry.counters.items():
                out[name] = out.get(name, 0) + value
        return out


def _join_ranks(entries: Iterable[RankStats]) -> tuple[RankStats, ...]:
    merged: dict[tuple[int, int], RankStats] = {}
    for entry in entries:
        identity = entry.rank, entry.epoch
        known = merged.get(identity)
        merged[identity] = entry if known is None else known.aggregate(entry)
    return tuple(merged[identity] for identity in sorted(merged))


class ECConnectorOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One rank's EC report of one step, or the fold of several ranks' reports.

    Attributes:
        finished_sending, finished_recving: ids of requests whose transfers ended on this rank.
        failed_loads: keys the step needed on this rank, ordered to be loaded or said to be held, that were not
            there in the right shape. The scheduler discards the step's result of every request that needed one
            of them, on all ranks.
        ec_connector_worker_meta: what the connector's worker half has to say; ``None`` when nothing.
        ec_connector_stats: the connector's counters on this rank; ``None`` when it keeps none.
    """

    finished_sending: frozenset[str] = frozenset()
    finished_recving: frozenset[str] = frozenset()
    failed_loads: frozenset[str] = frozenset()
    ec_connector_worker_meta: AnyWorkerMetadata | None = None
    ec_connector_stats: ECConnectorStats | None = None

    def __post_init__(self) -> None:
        freeze(self, frozenset, "finished_sending", "finished_recving", "failed_loads")

    def is_empty(self) -> bool:
        """Whether dropping this report would lose nothing. A falsy metadata object still counts."""
        return (
            not self.finished_sending
            and not self.finished_recving
            and not self.failed_loads
            and self.ec_connector_worker_meta is None
            and self.ec_connector_stats is None
        )


class KVConnectorOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One rank's KV report of one step, or the fold of several.

    Attributes:
        finished_sending, finished_recving: ids of requests whose transfers ended on this rank.
        invalid_block_ids: KV blocks that could not be loaded.
        expected_finished_count: how many reports finish a request from now on; 0 leaves it as it is.

    Raises:
        ContractError: ``expected_finished_count`` is negative.
    """

    finished_sending: frozenset[str] = frozenset()
    finished_recving: frozenset[str] = frozenset()
    invalid_block_ids: frozenset[int] = frozenset()
    expected_finished_count: NonNegative = 0

    def __post_init__(self) -> None:
        freeze(self, frozenset, "finished_sending", "finished_recving", "invalid_block_ids")
        if self.expected_finished_count < 0:
            raise ContractError(f"expected_finished_count={self.expected_finished_count} must be 0 or more")

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
        sampled: log probability of the sampled token, natural log, after penalties and temperature, before
            min-p, top-k and top-p cut anything off.
        top_ids: int64 ``[k]``, most probable first.
        top_logprobs: float32 ``[k]``.
    """

    sampled: float
    top_ids: Array
    top_logprobs: Array


class ModelRunnerOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One rank's result of one step.

    Attributes:
        req_ids: the requests that ran in this step, in batch order. The next three are parallel to it, or empty.
        sampled_token_ids: per request, the tokens sampled in this step (empty while prefilling).
        logprobs: per request, one entry for each sampled token; empty where none were asked for.
        pooler_output: per request, float32 ``[width]`` (or ``[tokens, width]``) when its pooling finished in this
            step.
        request_errors: request id -> reason, for requests that cannot go on (only they end).
        kv_connector_output, ec_connector_output: the connectors' reports; ``None`` when there is none.

    Raises:
        ContractError: a field that is neither parallel to ``req_ids`` nor empty.
    """

    req_ids: tuple[str, ...] = ()
    sampled_token_ids: tuple[tuple[int, ...], ...] = ()
    logprobs: tuple[tuple[TokenLogprobs, ...], ...] = ()
    pooler_output: tuple[Array | None, ...] = ()
    request_errors: Mapping[str, str] = EMPTY_MAP
    kv_connector_output: KVConnectorOutput | None = None
    ec_connector_output: ECConnectorOutput | None = None

    def __post_init__(self) -> None:
        freeze(self, tuple, "req_ids", "pooler_output")
        freeze_rows(self, "sampled_token_ids")
        freeze_rows(self, "logprobs")
        set_field(self, "request_errors", frozen_map(self.request_errors))
        for name in ("sampled_token_ids", "logprobs", "pooler_output"):
            entries = len(getattr(self, name))
            if entries not in (0, len(self.req_ids)):
                raise ContractError(f"{name} has {entries} entries for {len(self.req_ids)} requests")

    @staticmethod
    def with_ec_conn_output(output: ModelRunnerOutput, ec: ECConnectorOutput | None) -> ModelRunnerOutput:
        """``output`` with its EC report replaced (an empty report becomes ``None``); ``output`` is unchanged."""
        ec = None if ec is None or ec.is_empty() else ec
        return _with_part(output, "ec_connector_output", ec)

    @staticmethod
    def with_ec_conn_output_only(ec: ECConnectorOutput | None) -> ModelRunnerOutput:
        """An output with nothing but an EC report; the shared empty output when there is nothing to report."""
        return ModelRunnerOutput.with_ec_conn_output(EMPTY_MODEL_RUNNER_OUTPUT, ec)

    @staticmethod
    def with_kv_conn_output(output: ModelRunnerOutput, kv: KVConnectorOutput | None) -> ModelRunnerOutput:
        """``output`` with its KV report replaced (an empty report becomes ``None``); ``output`` is unchanged."""
        kv = None if kv is None or kv.is_empty() else kv
        return _with_part(output, "kv_connector_output", kv)

    @staticmethod
    def with_kv_conn_output_only(kv: KVConnectorOutput | None) -> ModelRunnerOutput:
        """An output with nothing but a KV report; the shared empty output when there is nothing to report."""
        return ModelRunnerOutput.with_kv_conn_output(EMPTY_MODEL_RUNNER_OUTPUT, kv)


def _with_part(output: ModelRunnerOutput, name: str, part: msgspec.Struct | None) -> ModelRunnerOutput:
    if part is getattr(output, name):
        return output
    replaced = copy(output)  # all of it is frozen already: building it anew would only check that again
    set_field(replaced, name, part)
    return replaced


EMPTY_MODEL_RUNNER_OUTPUT = ModelRunnerOutput()
