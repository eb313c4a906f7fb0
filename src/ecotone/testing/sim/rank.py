"""One rank's step, on the same ways out as the model runner's, with the real hook and the real worker half."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from ecotone.protocol.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput
from ecotone.protocol.step import MultiModalItem, NewRequestData, ScheduledRequest, SchedulerOutput
from ecotone.testing.sim.model import Library, describe, next_token, row_value
from ecotone.testing.sim.world import ViolationError
from ecotone.worker.ec_connector import ECHook, ECStep
from ecotone.worker.encoder_cache import RankEncoderCache


class SimRank:
    """Encodes, gathers and computes as ordered, and checks every row that it reads.

    Args:
        name: for the timeline.
        capacity_rows: of its encoder cache.
        block_size: tokens in a KV block.

    Attributes:
        epoch: updates of its weights.
    """

    def __init__(
        self,
        name: str,
        hook: ECHook,
        cache: RankEncoderCache,
        library: Library,
        capacity_rows: int,
        block_size: int,
    ) -> None:
        self.name = name
        self.hook = hook
        self.cache = cache
        self.epoch = 0
        self._library = library
        self._capacity_rows = capacity_rows
        self._block_size = block_size
        self._requests: dict[str, NewRequestData] = {}
        self._store: dict[tuple[int, int], int | None] = {}

    @property
    def known(self) -> Set[str]:
        """Requests that it was told of, and not yet that they ended."""
        return self._requests.keys()

    def execute(self, order: SchedulerOutput) -> ModelRunnerOutput:
        """The whole step.

        Raises:
            ViolationError: it reads what it must not, or is ordered what cannot be.
        """
        self._update(order)
        if not order.scheduled:
            return self.hook.no_forward(order)
        with self.hook.step(order, self._loads(order)) as step:
            errors = self._encode(order.scheduled, step)
            running = [s for s in order.scheduled if s.req_id not in errors]
            if not running:
                report = self.hook.no_forward(order).ec_connector_output
                return ModelRunnerOutput.with_ec_conn_output(ModelRunnerOutput(request_errors=errors), report)
            step.settle()
            if self.hook.is_encode_only:
                return ModelRunnerOutput.with_ec_conn_output(_answers(running, errors, {}), step.collect())
            self._check_rows_held()
            ordered = {s.item_keys[i] for s in order.scheduled for i in s.load}
            sampled = {s.req_id: self._compute(s, step, ordered) for s in running}
            return ModelRunnerOutput.with_ec_conn_output(_answers(running, errors, sampled), step.collect())

    def _update(self, order: SchedulerOutput) -> None:
        for req_id in order.finished_req_ids:
            self._requests.pop(req_id, None)
        for new in order.new_requests:
            if new.req_id in self._requests:
                raise ViolationError("order", f"{new.req_id} is announced twice to {self.name}")
            self._requests[new.req_id] = new
        self.cache.drop(order.free_encoder_keys)

    def _loads(self, order: SchedulerOutput) -> dict[str, int]:
        return {
            s.item_keys[i]: self._requests[s.req_id].items[i].num_rows for s in order.scheduled for i in s.load
        }

    def _encode(self, scheduled: Sequence[ScheduledRequest], step: ECStep) -> dict[str, str]:
        failures = {}
        for key in dict.fromkeys(s.item_keys[i] for s in scheduled for i in s.encode):
            encoding = self._library.of_key(key)
            if self._library.is_broken(encoding.item):
                failures[key] = f"{encoding} is broken"
                continue
            self.cache[key] = self._library.encoding(encoding.item, self.epoch).rows
            step.save(key)
        return {
            s.req_id: failures[s.item_keys[i]]
            for s in scheduled
            for i in self._needed(s)
            if s.item_keys[i] in failures
        }

    def _needed(self, s: ScheduledRequest) -> list[int]:
        start, end = s.num_computed_tokens, s.num_computed_tokens + s.num_tokens
        items = self._requests[s.req_id].items
        return [i for i, item in enumerate(items) if i in s.encode or (item.offset < end and item.end > start)]

    def _check_rows_held(self) -> None:
        held = sum(len(rows) for rows in self.cache.values())
        if held > self._capacity_rows:
            raise ViolationError("order", f"{self.name} holds {held} encoder rows of {self._capacity_rows}")

    def _compute(self, s: ScheduledRequest, step: ECStep, ordered: set[str]) -> int | None:
        """Store what the chunk's tokens are; the next token if all that are known are stored now."""
        new = self._requests[s.req_id]
        known = new.prompt_token_ids + s.output_token_ids
        start, end = s.num_computed_tokens, s.num_computed_tokens + s.num_tokens
        values: dict[int, int | None] = {}
        for item, key in zip(new.items, s.item_keys, strict=True):
            if item.offset < end and item.end > start:
                values.update(self._read(item, key, step, ordered))
        for position in range(start, end):
            self._store[self._slot(s, position)] = values.get(position, known[position])
        if end < len(known):
            return None
        return next_token(self._store.get(self._slot(s, p)) for p in range(len(known)))

    def _read(self, item: MultiModalItem, key: str, step: ECStep, ordered: set[str]) -> dict[int, int | None]:
        """Position -> value of an item's placeholders; ``None`` where its rows are not there."""
        encoding = self._library.of_key(key)
        rows = self.cache.rows(key, item.num_rows)
        if rows is None:
            if key not in ordered:
                raise ViolationError("held", f"{self.name} does not hold {encoding}, and was not told to load it")
            if not step.is_failed(key):
                step.fail(key)
            return dict.fromkeys(range(item.offset, item.end))
        data = rows.numpy().tobytes()
        wanted = self._library.encoding(int(item.item_id), self.epoch)
        if data != wanted.data:
            raise ViolationError("read", f"{self.name} reads {wanted} and finds {describe(data)}")
        return {item.offset + row: row_value(encoding.item, row) for row in range(item.num_rows)}

    def _slot(self, s: ScheduledRequest, position: int) -> tuple[int, int]:
        return s.block_ids[position // self._block_size], position % self._block_size


class Bystander:
    """The last stage of a pipeline: it has no encoder, takes no part in transfers, and says the tokens."""

    def __init__(self, hook: ECHook) -> None:
        self._hook = hook

    def execute(self, order: SchedulerOutput, first: ModelRunnerOutput) -> ModelRunnerOutput:
        """What it answers when the stage before it answers ``first``."""
        if not order.scheduled:
            return self._hook.no_forward(order)
        with self._hook.step(order, {}) as step:
            return ModelRunnerOutput.with_ec_conn_output(first, step.collect())


def _answers(
    running: Sequence[ScheduledRequest], errors: Mapping[str, str], sampled: Mapping[str, int | None]
) -> ModelRunnerOutput:
    tokens = [sampled.get(s.req_id) for s in running]
    return ModelRunnerOutput(
        req_ids=tuple(s.req_id for s in running),
        sampled_token_ids=tuple(() if token is None else (token,) for token in tokens),
        pooler_output=(None,) * len(running),
        request_errors=errors,
    )


def report_only(output: ModelRunnerOutput) -> ModelRunnerOutput:
    """What a rank answers whose tokens do not count."""
    if output.ec_connector_output is None:
        return EMPTY_MODEL_RUNNER_OUTPUT
    return ModelRunnerOutput.with_ec_conn_output_only(output.ec_connector_output)
