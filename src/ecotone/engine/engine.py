"""The public engine: prompts in, texts or vectors out, each image encoded once."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeAlias
from uuid import uuid4

from ecotone.config import EngineConfig
from ecotone.engine.build import ExecutorFactory, build, make_config
from ecotone.engine.core import EngineCore
from ecotone.engine.fair_lock import FairLock
from ecotone.engine.inputs import Prompt
from ecotone.engine.outputs import RequestOutput, StreamDelta
from ecotone.engine.record import Record
from ecotone.engine.request import Request
from ecotone.engine.samples import join_samples, make_samples, num_samples
from ecotone.engine.settler import Settler
from ecotone.engine.statistics import collect_statistics
from ecotone.engine.stream import Stream
from ecotone.errors import RequestError
from ecotone.executor.factory import create_executor
from ecotone.protocol.model import ModelInfo
from ecotone.protocol.params import PoolingParams, SamplingParams
from ecotone.protocol.step import MultiModalItem

AnyPrompt: TypeAlias = Prompt | str
AnyParams: TypeAlias = SamplingParams | PoolingParams

# What a step under way gets to end when the engine is closed.
CLOSE_GRACE_S = 5.0


class Engine:
    """Runs one model.

    Thread-safe: callers take turns, in the order they came. No thread steps on its own while requests are in
    flight: whoever waits for a request takes the steps, and each step serves everybody's requests. When none is
    left, a thread takes the steps that settle what they left behind (saves under way), and then rests.

    A step that fails ends the requests in flight with ``RequestFailedError``; every later call raises
    ``ShutDownError`` with the reason.

    Args:
        config: a configuration, or the folder of a model.
        executor_factory: how steps reach the ranks; by default as ``config.executor`` says.
        overrides: options of ``EngineConfig``.

    Raises:
        ConfigError, ModelError, ResourceError: it cannot work; nothing was left behind.
    """

    def __init__(
        self,
        config: EngineConfig | str | Path,
        *,
        executor_factory: ExecutorFactory = create_executor,
        **overrides: Any,
    ) -> None:
        self.config = make_config(config, overrides)
        self._parts = build(self.config, executor_factory, time.monotonic)
        self._namespace = self._parts.namespace
        self._lock = FairLock()
        self._outbox: deque[StreamDelta] = deque()
        self._abandoned: deque[str] = deque()
        self._numbers = itertools.count(1)
        self._seeds = random.Random(self.config.seed)
        self._settler = Settler(self._settle_once)

    @property
    def model_info(self) -> ModelInfo:
        """Facts about the model."""
        return self._parts.model_info

    # -- whole requests ---------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: AnyPrompt | Sequence[AnyPrompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Texts for prompts, in their order.

        A single prompt that cannot be served raises. In a list, one bad prompt does not spoil the others: its
        output has ``finish_reason="error"`` and the ``error``.

        Args:
            prompts: one, or a sequence.
            params: for all of them, or one for each.

        Raises:
            RequestError, RequestFailedError: of a single prompt.
            ShutDownError: the engine was closed, or stopped after a failure.
        """
        return self._run(prompts, SamplingParams() if params is None else params)

    def embed(
        self,
        prompts: AnyPrompt | Sequence[AnyPrompt],
        params: PoolingParams | Sequence[PoolingParams] | None = None,
    ) -> list[RequestOutput]:
        """Vectors for prompts (``RequestOutput.embedding``), in their order; otherwise as ``generate``."""
        return self._run(prompts, PoolingParams() if params is None else params)

    def stream(self, prompt: AnyPrompt, params: SamplingParams | None = None) -> Stream:
        """One prompt's text as it grows. The request is taken in at once; ending the iteration early aborts it.

        Raises:
            RequestError: it cannot be served.
            ShutDownError: the engine was closed, or stopped after a failure.
        """
        sink: deque[StreamDelta] = deque()
        request_id = self._next_id()
        records = self._submit(request_id, prompt, SamplingParams() if params is None else params, sink)

        def fetch() -> StreamDelta:
            while True:
                with self._locked() as core:
                    if sink:
                        return sink.popleft()
                    _step_or_wait(core)

        return Stream(request_id, fetch, self.abort, self._abandoned.append, len(records))

    # -- step by step -----------------------------------------------------------------------------------------

    def add_request(
        self, prompt: AnyPrompt, params: AnyParams | None = None, request_id: str | None = None
    ) -> str:
        """Take in a request whose deltas ``step`` returns; its id.

        Raises:
            RequestError: it cannot be served, or the id is in flight.
            ShutDownError: the engine was closed, or stopped after a failure.
        """
        if params is None:
            params = SamplingParams() if self.config.task == "generate" else PoolingParams()
        request_id = self._next_id() if request_id is None else request_id
        self._submit(request_id, prompt, params, self._outbox)
        return request_id

    def step(self) -> list[StreamDelta]:
        """One step for everybody; what is new about requests of ``add_request``."""
        with self._locked() as core:
            if not self._outbox and core.has_work:
                _step_or_wait(core)
            deltas = list(self._outbox)
            self._outbox.clear()
            return deltas

    def has_unfinished_requests(self) -> bool:
        """Whether a request is in flight, or a delta is waiting for ``step``."""
        with self._locked() as core:
            return bool(core.num_records or self._outbox)

    def abort(self, request_id: str) -> bool:
        """End a request, whoever waits for it; its output says ``abort``. Whether it was in flight."""
        with self._locked() as core:
            return core.abort(request_id)

    # -- the whole engine -------------------------------------------------------------------------------------

    def reset_encoder_cache(self) -> None:
        """The model's weights changed: no encoding made before is used again, here or in any store. Keys and
        values of requests in flight, and everything else, stay.

        Raises:
            ShutDownError: the engine was closed, or stopped after a failure.
        """
        parts = self._parts
        with self._locked() as core:
            core.drain()
            core.check_usable()
            before, self._namespace = self._namespace, self._namespace.next_epoch(uuid4().hex)
            try:
                if parts.connector is not None:
                    parts.connector.reset_cache(before.digest)
                parts.scheduler.reset_encoder_cache(lambda request: self._keys(request.items))
                parts.executor.collective_rpc("reset_encoder_cache")
            except BaseException as error:
                core.fail(f"the engine stopped: a reset failed with {type(error).__name__}: {error}", error)
                raise

    def settle(self, timeout_s: float = 10.0) -> bool:
        """Step until nothing is in flight and nothing pending, so that statistics are final; whether it is so."""
        deadline = time.monotonic() + timeout_s
        while True:
            with self._locked() as core:
                if not core.has_work:
                    return True
                _step_or_wait(core)
            if time.monotonic() > deadline:
                return False

    def statistics(self) -> dict[str, Any]:
        """Counters and gauges; see ``collect_statistics``.

        Raises:
            ShutDownError: the engine was closed.
        """
        with self._locked() as core:
            return collect_statistics(self._parts, core, self._namespace)

    def check_integrity(self) -> None:
        """Compare the books of everything that owns memory.

        Raises:
            IntegrityError: naming what does not add up.
        """
        with self._locked() as core:
            self._parts.scheduler.check_integrity()
            core.check_integrity()
            if self._parts.connector is not None:
                self._parts.connector.check_integrity()

    def close(self) -> None:
        """End the requests in flight, and give everything back. Idempotent.

        A step under way gets ``CLOSE_GRACE_S`` to end; then ranks in processes of their own are ended under it.
        """
        impatience = threading.Timer(CLOSE_GRACE_S, self._parts.executor.interrupt)
        impatience.daemon = True
        impatience.start()
        try:
            with self._lock:
                self._parts.core.fail("the engine was closed")
            self._settler.close()
        finally:
            impatience.cancel()
            impatience.join()
        with self._lock:
            self._parts.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- inside -----------------------------------------------------------------------------------------------

    @contextmanager
    def _locked(self) -> Iterator[EngineCore]:
        core = self._parts.core
        with self._lock:
            while self._abandoned:
                core.abort(self._abandoned.popleft())
            try:
                yield core
            finally:
                if not core.num_records and core.has_work:
                    self._settler.wake()

    def _settle_once(self) -> bool:
        with self._lock:
            core = self._parts.core
            if core.num_records:
                return False  # whoever waits for them steps
            core.step()
            return core.has_work

    def _run(
        self, prompts: AnyPrompt | Sequence[AnyPrompt], params: AnyParams | Sequence[AnyParams]
    ) -> list[RequestOutput]:
        single = isinstance(prompts, (str, Prompt))
        if isinstance(prompts, Mapping):  # its keys would be answered
            raise RequestError(f"prompts must be a prompt or a sequence of them, not {type(prompts).__name__}")
        batch = [prompts] if isinstance(prompts, (str, Prompt)) else list(prompts)
        each = [params] * len(batch) if isinstance(params, (SamplingParams, PoolingParams)) else list(params)
        if len(each) != len(batch):
            raise RequestError(f"{len(batch)} prompts with {len(each)} params; give one for all, or one for each")
        records: list[list[Record] | RequestOutput] = []
        try:
            for prompt, its_params in zip(batch, each, strict=True):
                records.append(self._try_submit(prompt, its_params))
            outputs = self._wait(records)
        except BaseException:
            for record in records:
                if isinstance(record, list):
                    self.abort(record[0].request_id)
            raise
        errors = [each.error for output in outputs for each in (output, *output.samples) if each.error is not None]
        if single and errors:
            raise errors[0]
        return outputs

    def _try_submit(self, prompt: AnyPrompt, params: AnyParams) -> list[Record] | RequestOutput:
        request_id = self._next_id()
        try:
            return self._submit(request_id, prompt, params, deque(maxlen=0))
        except RequestError as error:
            return RequestOutput(request_id=request_id, finish_reason="error", error=error)

    def _wait(self, records: Sequence[list[Record] | RequestOutput]) -> list[RequestOutput]:
        """Step until all of them ended."""
        return [
            record
            if isinstance(record, RequestOutput)
            else join_samples([self._wait_for(each) for each in record])
            for record in records
        ]

    def _wait_for(self, record: Record) -> RequestOutput:
        while True:
            with self._locked() as core:
                if record.output is not None:
                    return record.output
                _step_or_wait(core)

    def _next_id(self) -> str:
        return f"request-{next(self._numbers)}"

    def _submit(
        self, request_id: str, prompt: AnyPrompt, params: AnyParams, sink: deque[StreamDelta]
    ) -> list[Record]:
        arrival_time = time.monotonic()
        self._check_params(params)
        processed = self._parts.inputs.process(prompt)
        with self._locked() as core:
            seed = params.seed if isinstance(params, SamplingParams) else None
            make = partial(
                Request,
                prompt_token_ids=processed.token_ids,
                params=params,
                items=processed.items,
                item_keys=self._keys(processed.items),
                arrival_time=arrival_time,
            )
            seed = self._seeds.getrandbits(63) if seed is None else seed
            samples = make_samples(
                request_id, seed, num_samples(params), lambda req_id, seed: make(req_id, seed=seed)
            )
            return core.add(request_id, samples, sink)

    def _check_params(self, params: AnyParams) -> None:
        wanted = SamplingParams if self.config.task == "generate" else PoolingParams
        if not isinstance(params, wanted):
            raise RequestError(
                f"an engine of task={self.config.task!r} takes {wanted.__name__}, not {type(params).__name__}"
            )

    def _keys(self, items: Sequence[MultiModalItem]) -> tuple[str, ...]:
        return tuple(self._namespace.key(item.item_id) for item in items)


def _step_or_wait(core: EngineCore) -> None:
    if not core.step():
        core.wait_for_progress()
