"""What a caller gets: deltas while a request runs, and the whole of it when it ended."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec
from numpy.typing import NDArray

from ecotone.errors import EcotoneError
from ecotone.protocol.outputs import TokenLogprobs

FinishReason: TypeAlias = Literal["stop", "length", "abort", "error"]


class RequestMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """How a request went.

    Attributes:
        ttft_s: seconds from submission to the first token, preprocessing included; ``None`` without a token.
        total_s: seconds from submission to the end.
        num_prompt_tokens: tokens of the prompt, one per encoder row included.
        num_encoded: items that the encoder ran for.
        num_loaded: items that came from outside the ranks.
        num_cached: items that the ranks held already.
    """

    ttft_s: float | None
    total_s: float
    num_prompt_tokens: int
    num_encoded: int
    num_loaded: int
    num_cached: int


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True):
    """A request that ended.

    Attributes:
        request_id: whose output it is.
        index: which of its ``n`` outputs.
        text: what was generated, up to the stop string.
        token_ids: every token that was generated, those of a stop string and the end of sequence included.
        finish_reason: ``stop``, ``length``, ``abort`` or ``error``.
        stop_reason: the stop string, or the one of ``stop_token_ids``, that ended it.
        logprobs: parallel to ``token_ids`` where asked for, otherwise empty.
        embedding: float32 ``[width]`` of an engine that embeds; ``[tokens, width]`` with ``pooling="token"``.
        error: why it failed, for ``error``; ``raise`` it where there is no other output to go on with.
        metrics: how it went; ``None`` where it was never taken in.
        samples: with ``n`` above 1 what ``generate`` returns is the first output, and has all of them here.
    """

    request_id: str
    index: int = 0
    text: str = ""
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    embedding: NDArray[Any] | None = None
    error: EcotoneError | None = None
    metrics: RequestMetrics | None = None
    samples: tuple[RequestOutput, ...] = ()


class StreamDelta(msgspec.Struct, frozen=True, kw_only=True):
    """What is new about a request.

    Attributes:
        request_id: whose news it is.
        index: of which of its ``n`` outputs.
        text: text that became certain; the texts of all deltas add up to the output's.
        token_ids: tokens that were generated since the last delta.
        output: the whole output, in its last delta.
    """

    request_id: str
    index: int = 0
    text: str = ""
    token_ids: tuple[int, ...] = ()
    output: RequestOutput | None = None
