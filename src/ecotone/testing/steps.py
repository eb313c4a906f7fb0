"""Steps ordered by hand: what a scheduler would send, for tests of who carries it out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from ecotone.protocol.connector import ECConnectorMetadata
from ecotone.protocol.outputs import ModelRunnerOutput
from ecotone.protocol.params import PoolingParams, SamplingParams
from ecotone.protocol.step import MultiModalItem, NewRequestData, ScheduledRequest, SchedulerOutput


class RunsSteps(Protocol):
    """An executor, a worker or a model runner."""

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None: ...

    def sample_tokens(self) -> ModelRunnerOutput: ...


def whole_steps(runs: RunsSteps) -> Callable[[SchedulerOutput], ModelRunnerOutput]:
    """Both halves of a step in one call."""

    def run(scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        output = runs.execute_model(scheduler_output)
        return runs.sample_tokens() if output is None else output

    return run


class OrderedRequest:
    """A request, as far as it got. KV blocks are taken from ``block_ids`` in order."""

    def __init__(
        self,
        req_id: str,
        prompt_token_ids: Sequence[int],
        items: Sequence[MultiModalItem] = (),
        *,
        params: SamplingParams | PoolingParams | None = None,
        seed: int = 0,
        block_ids: Sequence[int] = tuple(range(64)),
    ) -> None:
        self.item_keys = tuple(f"ns:{item.item_id}" for item in items)
        self.data = NewRequestData(
            req_id=req_id,
            prompt_token_ids=tuple(prompt_token_ids),
            items=tuple(items),
            item_keys=self.item_keys,
            params=params or SamplingParams(),
            seed=seed,
        )
        self.block_ids = tuple(block_ids)
        self.num_computed_tokens = 0
        self.output_token_ids: list[int] = []
        self.pooled: list[float] | None = None

    @property
    def num_known_tokens(self) -> int:
        """Prompt and output."""
        return len(self.data.prompt_token_ids) + len(self.output_token_ids)

    def order(
        self, num_tokens: int | None = None, encode: Sequence[int] = (), load: Sequence[int] = ()
    ) -> ScheduledRequest:
        """The next ``num_tokens``, or all that are known and not computed."""
        return ScheduledRequest(
            req_id=self.data.req_id,
            num_computed_tokens=self.num_computed_tokens,
            num_tokens=self.num_known_tokens - self.num_computed_tokens if num_tokens is None else num_tokens,
            num_known_tokens=self.num_known_tokens,
            output_token_ids=tuple(self.output_token_ids),
            block_ids=self.block_ids,
            item_keys=self.item_keys,
            encode=tuple(encode),
            load=tuple(load),
        )

    def take(self, ordered: ScheduledRequest, output: ModelRunnerOutput) -> None:
        """The result of ``ordered`` counts."""
        row = output.req_ids.index(self.data.req_id)
        self.num_computed_tokens += ordered.num_tokens
        self.output_token_ids += output.sampled_token_ids[row]
        pooled = output.pooler_output[row]
        self.pooled = self.pooled if pooled is None else pooled.to_numpy().tolist()


class Steps:
    """Sends steps to ``run``, numbered, and remembers who was announced."""

    def __init__(self, run: Callable[[SchedulerOutput], ModelRunnerOutput]) -> None:
        self._run = run
        self._known: set[str] = set()
        self._step = 0

    def step(
        self,
        *orders: tuple[OrderedRequest, ScheduledRequest],
        metadata: ECConnectorMetadata | None = None,
        finished: Sequence[str] = (),
        free: Sequence[str] = (),
        discard: bool = False,
    ) -> ModelRunnerOutput:
        """Run one step, and take in its result unless it is to be discarded."""
        self._step += 1
        self._known -= set(finished)
        new = [request for request, _ in orders if request.data.req_id not in self._known]
        self._known |= {request.data.req_id for request in new}
        output = self._run(
            SchedulerOutput(
                step=self._step,
                new_requests=tuple(request.data for request in new),
                scheduled=tuple(ordered for _, ordered in orders),
                finished_req_ids=frozenset(finished),
                free_encoder_keys=tuple(free),
                ec_connector_metadata=metadata,
            )
        )
        for request, ordered in () if discard else orders:
            if request.data.req_id not in output.request_errors:
                request.take(ordered, output)
        return output
