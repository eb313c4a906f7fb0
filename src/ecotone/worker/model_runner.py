"""One rank's step: from a ``SchedulerOutput`` to a ``ModelRunnerOutput``, with the EC report on every way out.

::

    nothing scheduled ------------------------------> no forward, report
    every request failed in the encoder ------------> no forward, report
    the engine only encodes ------------------------> encoded, report
    tokens -> ExecuteModelState --sample_tokens-----> tokens, report
                                \\-pool--------------> vectors, report
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from ecotone.errors import ContractError
from ecotone.protocol.arrays import Array
from ecotone.protocol.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ECConnectorOutput, ModelRunnerOutput
from ecotone.protocol.params import PoolingParams, SamplingParams
from ecotone.protocol.step import ScheduledRequest, SchedulerOutput
from ecotone.worker.attention import AttentionPlan
from ecotone.worker.ec_connector import ECHook, ECStep
from ecotone.worker.encode import encode_items
from ecotone.worker.encoder_cache import RankEncoderCache
from ecotone.worker.gather import gather_encoder_rows
from ecotone.worker.input_batch import InputBatch
from ecotone.worker.kv_cache import PagedKVCache
from ecotone.worker.model import Model
from ecotone.worker.parallel.encoder import Encode
from ecotone.worker.parallel.pipeline import ONLY_STAGE, Stage
from ecotone.worker.penalties import SampleRequest, adjust
from ecotone.worker.pooling import Pooler
from ecotone.worker.request_state import RequestState
from ecotone.worker.sampler import SampledToken, sample, usable


@dataclass(frozen=True, slots=True, eq=False)
class ExecuteModelState:
    """What ``execute_model`` hands to ``sample_tokens`` or ``pool``, once.

    Attributes:
        batch: the requests that ran.
        hidden_states: ``[T, hidden]``, of all their tokens.
        request_errors: of requests that failed in the encoder.
        ec_connector_output: the step's EC report.
    """

    batch: InputBatch
    hidden_states: Tensor
    request_errors: Mapping[str, str]
    ec_connector_output: ECConnectorOutput | None


class ModelRunner:
    """Runs steps as they are ordered. It remembers what requests were announced with, the encoder cache, keys and
    values, and the sums of a pooled mean; a step that is ordered again gives the same result again.

    Args:
        params_type: what the engine's task asks of requests.
        encode: encodes items, together with other ranks where there are others; ``None`` is the model alone.
        stage: the way to the ranks that have the other layers.
        is_output_rank: whether this rank's tokens and vectors count. The others answer with their reports alone.
    """

    def __init__(
        self,
        model: Model,
        ec_connector: ECHook,
        encoder_cache: RankEncoderCache,
        kv_cache: PagedKVCache,
        params_type: type[SamplingParams] | type[PoolingParams],
        *,
        encode: Encode | None = None,
        stage: Stage = ONLY_STAGE,
        is_output_rank: bool = True,
    ) -> None:
        self.ec_connector = ec_connector
        self.encoder_cache = encoder_cache
        self._model = model
        self._kv_cache = kv_cache
        self._params_type = params_type
        self._encode_together = encode or model.encode
        self._stage = stage
        self._is_output_rank = is_output_rank
        self._states: dict[str, RequestState] = {}
        self._pooler = Pooler()
        self._execute_model_state: ExecuteModelState | None = None
        self._counters: Counter[str] = Counter(
            dict.fromkeys(("steps", "tokens", "encodes", "encoded_rows", "encode_failures", "failed_loads"), 0)
        )

    @torch.no_grad()
    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        """Run the step as far as the hidden states.

        Returns ``None`` when it goes on in ``sample_tokens`` or ``pool``, otherwise the step's output.

        Raises:
            ContractError: the step before was not finished, or the orders do not fit what was announced.
        """
        if self._execute_model_state is not None:
            raise ContractError("execute_model was called before the last step's sample_tokens or pool")
        self._counters["steps"] += 1
        self._update_states(scheduler_output)
        self.encoder_cache.drop(scheduler_output.free_encoder_keys)
        if not scheduler_output.scheduled:
            return self._merge_ec_connector_no_forward(scheduler_output, EMPTY_MODEL_RUNNER_OUTPUT)
        with self.ec_connector.step(scheduler_output, self._loads(scheduler_output)) as step:
            errors = self._encode(scheduler_output.scheduled, step) if self._stage.is_first else {}
            if any(r.encode for r in scheduler_output.scheduled):
                errors = self._stage.relay_errors(errors)
            running = [r for r in scheduler_output.scheduled if r.req_id not in errors]
            if not running:
                output = ModelRunnerOutput(request_errors=errors)
                return self._merge_ec_connector_no_forward(scheduler_output, output)
            step.settle()
            if self.ec_connector.is_encode_only:
                output = _encoded(running, errors) if self._is_output_rank else EMPTY_MODEL_RUNNER_OUTPUT
                return ModelRunnerOutput.with_ec_conn_output(output, self._collect(step))
            batch = InputBatch.build(running, self._states, self._model.device)
            hidden_states = self._forward(batch, step)
            state = ExecuteModelState(batch, hidden_states, errors, self._collect(step))
        self._execute_model_state = state
        return None

    @torch.no_grad()
    def sample_tokens(self) -> ModelRunnerOutput:
        """Finish the step: a token for each request whose known tokens are all computed.

        Raises:
            ContractError: there is no step to finish.
        """
        state = self._take_state()
        errors = dict(state.request_errors)
        sampled = self._sample(state, errors) if self._stage.is_last else {}
        if not self._is_output_rank:
            return ModelRunnerOutput.with_ec_conn_output_only(state.ec_connector_output)
        tokens = [sampled.get(i) for i in range(len(state.batch.requests))]
        kept = [(r.req_id, t) for r, t in zip(state.batch.requests, tokens, strict=True) if r.req_id not in errors]
        return ModelRunnerOutput(
            req_ids=tuple(req_id for req_id, _ in kept),
            sampled_token_ids=tuple(() if t is None else (t.token_id,) for _, t in kept),
            logprobs=tuple(() if t is None or t.logprobs is None else (t.logprobs,) for _, t in kept),
            pooler_output=(None,) * len(kept),
            request_errors=errors,
            ec_connector_output=state.ec_connector_output,
        )

    @torch.no_grad()
    def pool(self) -> ModelRunnerOutput:
        """Finish the step: a vector for each request whose prompt is computed.

        Raises:
            ContractError: there is no step to finish.
        """
        state = self._take_state()
        if not self._is_output_rank:
            return ModelRunnerOutput.with_ec_conn_output_only(state.ec_connector_output)
        batch = state.batch
        num_requests, finishing = len(batch.requests), set(batch.finishing())
        return ModelRunnerOutput(
            req_ids=batch.req_ids,
            sampled_token_ids=((),) * num_requests,
            logprobs=((),) * num_requests,
            pooler_output=tuple(self._pool(state, i, i in finishing) for i in range(num_requests)),
            request_errors=state.request_errors,
            ec_connector_output=state.ec_connector_output,
        )

    def reset_encoder_cache(self) -> None:
        """Drop every encoding. Between steps only."""
        self.encoder_cache.clear()

    def statistics(self) -> dict[str, float]:
        """Counters since the start, and gauges."""
        return {
            **self._counters,
            **self.encoder_cache.statistics(),
            "requests": len(self._states),
            "kv_cache_bytes": self._kv_cache.nbytes,
        }

    def _update_states(self, scheduler_output: SchedulerOutput) -> None:
        for req_id in scheduler_output.finished_req_ids:
            self._states.pop(req_id, None)
            self._pooler.forget(req_id)
        for data in scheduler_output.new_requests:
            if not isinstance(data.params, self._params_type):
                raise ContractError(
                    f"request {data.req_id} comes with {type(data.params).__name__}; this engine's task takes "
                    f"{self._params_type.__name__}"
                )
            self._states[data.req_id] = RequestState(data, self._model)
        for scheduled in scheduler_output.scheduled:
            state = self._states.get(scheduled.req_id)
            if state is None:
                raise ContractError(f"request {scheduled.req_id} is scheduled and was never announced")
            state.check(scheduled)

    def _loads(self, scheduler_output: SchedulerOutput) -> dict[str, int]:
        return {
            r.item_keys[i]: self._states[r.req_id].data.items[i].num_rows
            for r in scheduler_output.scheduled
            for i in r.load
        }

    def _encode(self, scheduled: Sequence[ScheduledRequest], step: ECStep) -> dict[str, str]:
        """Encode what is ordered, each key once; returns why which requests cannot go on."""
        jobs = {r.item_keys[i]: self._states[r.req_id].data.items[i] for r in scheduled for i in r.encode}
        failures = encode_items(self._encode_together, self.encoder_cache, jobs)
        for key, item in jobs.items():
            if key not in failures:
                self._counters["encodes"] += 1
                self._counters["encoded_rows"] += item.num_rows
                step.save(key)
        self._counters["encode_failures"] += len(failures)
        errors: dict[str, str] = {}
        for r in scheduled if failures else ():
            for index in self._states[r.req_id].needs(r):
                if r.item_keys[index] in failures:
                    errors.setdefault(r.req_id, f"item {index}: {failures[r.item_keys[index]]}")
        return errors

    def _forward(self, batch: InputBatch, step: ECStep) -> Tensor:
        """``[T, hidden]`` of the batch's tokens, after this stage's layers; their keys and values are stored."""
        model, num_tokens = self._model, batch.starts[-1]
        mask = extra = None
        if self._stage.is_first:
            embeds, mask, extra = self._embed(batch, step)
        else:
            embeds = self._stage.receive(num_tokens)
        plan = AttentionPlan.build(batch.segments, self._kv_cache.block_size, model.device)
        self._counters["tokens"] += num_tokens
        hidden_states = model.forward(embeds, batch.positions, plan, self._kv_cache, rows_mask=mask, extra=extra)
        if not self._stage.is_last:
            self._stage.send(hidden_states)
        return hidden_states

    def _embed(self, batch: InputBatch, step: ECStep) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Embeddings ``[T, hidden]`` with the encoder rows in their places; which tokens these are, bool ``[T]``,
        and the rows' further columns, where there are any."""
        model = self._model
        embeds = model.embed_tokens(batch.token_ids)
        gathered = gather_encoder_rows(batch, self.encoder_cache, step)
        if gathered is None:
            return embeds, None, None
        embeds = embeds.index_copy(0, gathered.index, gathered.rows[:, : model.hidden_size])
        mask = torch.zeros(len(embeds), dtype=torch.bool, device=model.device)
        mask[gathered.index] = True
        return embeds, mask, gathered.rows[:, model.hidden_size :]

    def _collect(self, step: ECStep) -> ECConnectorOutput | None:
        return self._counted(step.collect())

    def _counted(self, report: ECConnectorOutput | None) -> ECConnectorOutput | None:
        self._counters["failed_loads"] += len(report.failed_loads) if report is not None else 0
        return report

    def _merge_ec_connector_no_forward(
        self, scheduler_output: SchedulerOutput, output: ModelRunnerOutput
    ) -> ModelRunnerOutput:
        """``output`` of a step without tokens, with the report of the hook, which runs all the same."""
        ec_only = self.ec_connector.no_forward(scheduler_output)
        return ModelRunnerOutput.with_ec_conn_output(output, self._counted(ec_only.ec_connector_output))

    def _take_state(self) -> ExecuteModelState:
        state, self._execute_model_state = self._execute_model_state, None
        if state is None:
            raise ContractError("there is no step to finish: execute_model was not called, or returned its output")
        return state

    def _sample(self, state: ExecuteModelState, errors: dict[str, str]) -> dict[int, SampledToken]:
        """Index in the batch -> its token. Requests whose logits are no distribution are added to ``errors``."""
        batch = state.batch
        finishing = batch.finishing()
        if not finishing:
            return {}
        requests = [self._sample_request(batch, index) for index in finishing]
        logits = self._model.logits(state.hidden_states[[batch.starts[i + 1] - 1 for i in finishing]])
        if not self._is_output_rank:  # it only had to help with the logits
            return {}
        logits = adjust(logits, requests, self._model.info.eos_token_ids)
        good = usable(logits)
        errors.update(
            {
                batch.requests[i].req_id: "no token can follow: its logits are not finite, or none is allowed"
                for i, ok in zip(finishing, good, strict=True)
                if not ok
            }
        )
        rows = [row for row, ok in enumerate(good) if ok]
        tokens = sample(logits[rows], [requests[row] for row in rows])
        return dict(zip((finishing[row] for row in rows), tokens, strict=True))

    def _sample_request(self, batch: InputBatch, index: int) -> SampleRequest:
        state = batch.states[index]
        params = cast(SamplingParams, state.data.params)  # checked when it was announced
        output = batch.requests[index].output_token_ids
        prompt = state.distinct_prompt_token_ids if params.has_penalties else ()
        return SampleRequest(params, state.data.seed, output, prompt)

    def _pool(self, state: ExecuteModelState, index: int, last_chunk: bool) -> Array | None:
        batch = state.batch
        hidden_states = state.hidden_states[batch.starts[index] : batch.starts[index + 1]]
        request = batch.requests[index]
        params = cast(PoolingParams, batch.states[index].data.params)  # checked when it was announced
        vector = self._pooler.pool(
            request.req_id, params, request.num_computed_tokens, hidden_states, last_chunk=last_chunk
        )
        return None if vector is None else Array.from_numpy(vector.cpu().numpy())


def _encoded(running: Sequence[ScheduledRequest], errors: Mapping[str, str]) -> ModelRunnerOutput:
    """The output of a step that encodes and stops there."""
    return ModelRunnerOutput(
        req_ids=tuple(r.req_id for r in running),
        sampled_token_ids=((),) * len(running),
        logprobs=((),) * len(running),
        pooler_output=(None,) * len(running),
        request_errors=errors,
    )
