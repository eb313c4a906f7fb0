"""What came of a step: the check of the ranks' answer, the stop rules, and what the engine hears."""

from __future__ import annotations

from collections.abc import Mapping, Set

import msgspec

from ecotone.engine.request import FINISH_REASONS, Request, RequestStatus
from ecotone.errors import ContractError
from ecotone.protocol.arrays import Array
from ecotone.protocol.outputs import ModelRunnerOutput, TokenLogprobs
from ecotone.protocol.params import PoolingParams, SamplingParams
from ecotone.protocol.step import ScheduledRequest


class RequestDelta(msgspec.Struct, frozen=True, kw_only=True):
    """What is new about one request after a step.

    Attributes:
        req_id: whose news it is.
        new_token_ids: tokens that this step added to its output.
        logprobs: parallel to ``new_token_ids`` where asked for, otherwise empty.
        pooled: float32 ``[width]`` when its pooling finished.
        finished: how it ended; ``None`` while it goes on.
        stop_reason: the one of ``stop_token_ids`` that ended it, if one did.
        error: why it failed; empty otherwise.
    """

    req_id: str
    new_token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    pooled: Array | None = None
    finished: RequestStatus | None = None
    stop_reason: int | None = None
    error: str = ""

    @property
    def finish_reason(self) -> str | None:
        """``stop``, ``length``, ``abort`` or ``error``; ``None`` while it goes on."""
        return None if self.finished is None else FINISH_REASONS[self.finished]


class RowResult(msgspec.Struct, frozen=True):
    """One request's row of a ``ModelRunnerOutput``."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    pooled: Array | None = None


def rows_of(output: ModelRunnerOutput) -> Mapping[str, RowResult]:
    """The output's parallel tuples by request.

    Raises:
        ContractError: a request is named twice.
    """
    ids = output.req_ids
    if len(set(ids)) != len(ids):
        raise ContractError(f"a step's output names a request twice: {list(ids)}")
    return {
        req_id: RowResult(
            output.sampled_token_ids[i] if output.sampled_token_ids else (),
            output.logprobs[i] if output.logprobs else (),
            output.pooler_output[i] if output.pooler_output else None,
        )
        for i, req_id in enumerate(ids)
    }


def check_row(scheduled: ScheduledRequest, request: Request, row: RowResult | None) -> None:
    """Compare one request's row with what the step ordered, before anything is changed by it.

    Raises:
        ContractError: no row, or tokens or a pooled vector missing or unasked for.
    """
    if row is None:
        raise ContractError(f"the step ordered request {request.req_id!r}, and its output does not have it")
    complete = scheduled.num_computed_tokens + scheduled.num_tokens == scheduled.num_known_tokens
    tokens = int(complete and isinstance(request.params, SamplingParams))
    if len(row.token_ids) != tokens:
        raise ContractError(
            f"request {request.req_id!r} sampled {len(row.token_ids)} tokens in a step that samples {tokens}"
        )
    pools = complete and isinstance(request.params, PoolingParams)
    if (row.pooled is not None) != pools:
        raise ContractError(f"request {request.req_id!r}: pooled vector {'missing' if pools else 'unasked for'}")


def requests_with_rows_of(
    keys: Set[str], scheduled: Mapping[str, ScheduledRequest], requests: Mapping[str, Request]
) -> frozenset[str]:
    """Ids of those ``scheduled`` (by id) that computed rows of one of ``keys``."""
    if not keys:
        return frozenset()
    return frozenset(
        req_id
        for req_id, s in scheduled.items()
        for index in requests[req_id].items_in(s.num_computed_tokens, s.num_computed_tokens + s.num_tokens)
        if s.item_keys[index] in keys
    )


def check_stop(
    request: Request, params: SamplingParams, eos_token_ids: Set[int], max_tokens: int
) -> RequestStatus | None:
    """How the token that was just appended ends ``request``, if it does. ``max_tokens``: prompt and output."""
    last = request.output_token_ids[-1]
    may_stop = request.num_output_tokens >= params.min_tokens
    if may_stop and last in eos_token_ids and not params.ignore_eos:
        return RequestStatus.FINISHED_STOPPED
    if may_stop and last in params.stop_token_ids:
        request.stop_reason = last
        return RequestStatus.FINISHED_STOPPED
    if request.num_output_tokens >= params.max_tokens or request.num_tokens >= max_tokens:
        return RequestStatus.FINISHED_LENGTH
    return None
