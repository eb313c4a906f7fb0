"""An executor that answers a prompt ``...:text`` with ``text``, token by token, and fails when told to."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from ecotone.config import EngineConfig
from ecotone.executor.base import Executor, Future, Ready
from ecotone.protocol.arrays import Array
from ecotone.protocol.connector import ECConnectorFactory, EncoderSpec, Participant
from ecotone.protocol.model import ModelInfo
from ecotone.protocol.outputs import ModelRunnerOutput
from ecotone.protocol.step import NewRequestData, ScheduledRequest, SchedulerOutput

COLON, EOS = 25, 257  # of the tokenizer in tiny_processor
MODEL_INFO = ModelInfo(
    architecture="Echo",
    encoder=EncoderSpec(4, 0, "float32"),
    vocab_size=258,
    max_model_len=200,
    eos_token_ids=(EOS,),
)


class EchoExecutor(Executor):
    """One rank without a model.

    Attributes:
        before_step, on_shutdown: called at the beginning of each step, and at the end; may raise or block.
        request_errors: id -> reason: these requests fail in their next step.
        steps: what was ordered.
        waits: how often somebody waited for progress.
    """

    output_rank = 0
    max_concurrent_steps = 1

    def __init__(self) -> None:
        self.before_step: Callable[[SchedulerOutput], None] = lambda _: None
        self.on_shutdown: Callable[[], None] = lambda: None
        self.request_errors: dict[str, str] = {}
        self.steps: list[SchedulerOutput] = []
        self.calls: list[str] = []
        self.waits = 0
        self.shutdowns = 0
        self._announced: dict[str, NewRequestData] = {}

    def submit_step(self, scheduler_output: SchedulerOutput) -> Future[ModelRunnerOutput]:
        return Ready(lambda: self.run_step(scheduler_output))

    def run_step(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        output = self.execute_model(scheduler_output)
        return self.sample_tokens() if output is None else output

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        self.before_step(scheduler_output)
        self.steps.append(scheduler_output)
        for req_id in scheduler_output.finished_req_ids:
            self._announced.pop(req_id, None)
        self._announced.update((data.req_id, data) for data in scheduler_output.new_requests)
        return None

    def sample_tokens(self) -> ModelRunnerOutput:
        scheduled = self.steps[-1].scheduled
        errors = {
            r.req_id: self.request_errors.pop(r.req_id) for r in scheduled if r.req_id in self.request_errors
        }
        rows = [(r, self._sample(r)) for r in scheduled if r.req_id not in errors]
        return ModelRunnerOutput(
            req_ids=tuple(r.req_id for r, _ in rows),
            sampled_token_ids=tuple(tokens for _, tokens in rows),
            request_errors=errors,
        )

    def _sample(self, scheduled: ScheduledRequest) -> tuple[int, ...]:
        if scheduled.num_computed_tokens + scheduled.num_tokens < scheduled.num_known_tokens:
            return ()
        prompt = self._announced[scheduled.req_id].prompt_token_ids
        answer = (*prompt[prompt.index(COLON) + 1 :], EOS)
        return (answer[len(scheduled.output_token_ids) % len(answer)],)

    def collective_rpc(self, method: str, *args: Any, **kwargs: Any) -> Any:
        self.calls.append(method)
        results = {"model_info": MODEL_INFO, "statistics": {"rank": 0, "pid": 1}, "reset_encoder_cache": None}
        return [results[method]]

    def participants(self) -> tuple[Participant, ...]:
        return (Participant(0, "here"),)

    def init_ec_output_aggregator(self) -> None:
        self.calls.append("init_ec_output_aggregator")

    def init_kv_output_aggregator(self, expected_finished_count: int) -> None:
        raise NotImplementedError

    def wait_for_progress(self, timeout_s: float) -> None:
        self.waits += 1

    def check_health(self) -> None:
        pass

    def shutdown(self) -> None:
        self.shutdowns += 1
        self.on_shutdown()


class PoolingExecutor(EchoExecutor):
    """Answers every prompt with one vector: its length."""

    def sample_tokens(self) -> ModelRunnerOutput:
        scheduled = self.steps[-1].scheduled
        return ModelRunnerOutput(
            req_ids=tuple(r.req_id for r in scheduled),
            sampled_token_ids=((),) * len(scheduled),
            logprobs=((),) * len(scheduled),
            pooler_output=tuple(Array("float32", (1,), struct.pack("<f", r.num_known_tokens)) for r in scheduled),
        )


class Executors:
    """An executor factory that keeps what it made."""

    def __init__(self, kind: type[EchoExecutor] = EchoExecutor) -> None:
        self.made: list[EchoExecutor] = []
        self._kind = kind

    def __call__(
        self, config: EngineConfig, ec_factory: ECConnectorFactory | None, engine_id: str
    ) -> EchoExecutor:
        self.made.append(self._kind())
        return self.made[-1]
