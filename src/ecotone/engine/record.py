"""What the engine keeps about a request in flight beside its scheduling: its text and who listens."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import cast

from ecotone.engine.detokenizer import IncrementalDetokenizer
from ecotone.engine.outputs import FinishReason, RequestMetrics, RequestOutput, StreamDelta
from ecotone.engine.request import Request, RequestStatus
from ecotone.engine.step_result import RequestDelta
from ecotone.errors import EcotoneError, RequestFailedError
from ecotone.protocol.arrays import Array
from ecotone.protocol.outputs import TokenLogprobs


class Record:
    """One request in flight: one output of what a caller asked for.

    Args:
        request_id: as the caller knows it.
        index: which of its outputs this is.
        request: as the scheduler has it; read here, never changed.
        detokenizer: grows its text.
        sink: takes its deltas.
        clock: seconds.
    """

    def __init__(
        self,
        request_id: str,
        index: int,
        request: Request,
        detokenizer: IncrementalDetokenizer,
        sink: deque[StreamDelta],
        clock: Callable[[], float],
    ) -> None:
        self.request_id = request_id
        self.index = index
        self.request = request
        self.output: RequestOutput | None = None
        self._detokenizer = detokenizer
        self._sink = sink
        self._clock = clock
        self._logprobs: list[TokenLogprobs] = []
        self._pooled: Array | None = None

    @property
    def has_stopped(self) -> bool:
        """Whether a stop string is complete."""
        return self._detokenizer.stopped_by is not None

    def apply(self, delta: RequestDelta) -> None:
        """Take in what a step brought."""
        self._logprobs += delta.logprobs
        self._pooled = delta.pooled
        # A token that stops is no text, whether the model's own end of sequence or one the caller named.
        tokens = delta.new_token_ids
        visible = tokens[:-1] if delta.finished is RequestStatus.FINISHED_STOPPED else tokens
        text = "".join([self._detokenizer.append(token_id) for token_id in visible])
        if delta.finished is None and not self.has_stopped:
            self._tell(text, delta.new_token_ids)
            return
        reason = "stop" if self.has_stopped else cast(FinishReason, delta.finish_reason)
        error = RequestFailedError(f"request {self.request_id!r}: {delta.error}") if delta.error else None
        self.finish(reason, error, text, tokens)

    def finish(
        self,
        reason: FinishReason,
        error: EcotoneError | None = None,
        text: str = "",
        token_ids: tuple[int, ...] = (),
    ) -> None:
        """It ended; ``text`` and ``token_ids`` came last."""
        text += self._detokenizer.finish()
        request, stopped_by = self.request, self._detokenizer.stopped_by
        self.output = RequestOutput(
            request_id=self.request_id,
            index=self.index,
            text=self._detokenizer.text,
            token_ids=tuple(request.output_token_ids),
            finish_reason=reason,
            stop_reason=stopped_by if stopped_by is not None else request.stop_reason,
            logprobs=tuple(self._logprobs),
            embedding=None if self._pooled is None else self._pooled.to_numpy(),
            error=error,
            metrics=self._metrics(),
        )
        self._tell(text, token_ids)

    def _tell(self, text: str, token_ids: tuple[int, ...]) -> None:
        self._sink.append(
            StreamDelta(
                request_id=self.request_id, index=self.index, text=text, token_ids=token_ids, output=self.output
            )
        )

    def _metrics(self) -> RequestMetrics:
        request = self.request
        first = request.first_token_time
        return RequestMetrics(
            ttft_s=None if first is None else first - request.arrival_time,
            total_s=self._clock() - request.arrival_time,
            num_prompt_tokens=request.num_prompt_tokens,
            num_encoded=request.num_encoded_items,
            num_loaded=request.num_loaded_items,
            num_cached=request.num_cached_items,
        )
