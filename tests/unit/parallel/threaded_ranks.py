"""Ranks in threads of one process: what they compute is what processes would, and quick to make."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from threading import Barrier
from typing import Any

import torch
from torch import Tensor

from ecotone.protocol.aggregate import ECOutputAggregator, fold_outputs
from ecotone.protocol.outputs import ModelRunnerOutput
from ecotone.protocol.params import PoolingParams, SamplingParams
from ecotone.protocol.step import SchedulerOutput
from ecotone.worker.ec_connector import NO_OP_EC_CONNECTOR, ECHook
from ecotone.worker.encoder_cache import RankEncoderCache
from ecotone.worker.kv_cache import PagedKVCache
from ecotone.worker.model_runner import ModelRunner
from ecotone.worker.models import ModelAdapter
from ecotone.worker.parallel.encoder import DividedEncoder, Encode, ReplicatedEncoder
from ecotone.worker.parallel.pipeline import ONLY_STAGE, Stage, cut_stage
from ecotone.worker.parallel.tensor import shard

WAIT_S = 60.0


class Meeting:
    """Where the threads of one group meet."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = Barrier(size, timeout=WAIT_S)
        self.told: list[Any] = [None] * size

    def groups(self) -> list[ThreadGroup]:
        return [ThreadGroup(self, rank) for rank in range(self.size)]


class ThreadGroup:
    """A ``Group``. ``calls`` names what was done together, in order."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting = meeting
        self.rank, self.size = rank, meeting.size
        self.calls: list[str] = []

    def _share(self, value: Any) -> list[Any]:
        self._meeting.told[self.rank] = value
        self._meeting.barrier.wait()
        told = list(self._meeting.told)
        self._meeting.barrier.wait()
        return told

    def all_reduce(self, tensor: Tensor) -> Tensor:
        self.calls.append("all_reduce")
        return tensor.copy_(torch.stack(self._share(tensor.clone())).sum(0))

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        self.calls.append("all_gather")
        told = self._share(tensor.clone())
        assert len({(t.shape, t.dtype) for t in told}) == 1
        return told

    def exchange(self, data: bytes) -> list[bytes]:
        self.calls.append("exchange")
        return self._share(data)


class QueueStage:
    """A ``Stage`` over queues; what passes is counted."""

    def __init__(self, before: SimpleQueue[Any] | None, behind: SimpleQueue[Any] | None) -> None:
        self._before, self._behind = before, behind
        self.is_first, self.is_last = before is None, behind is None

    def relay_errors(self, errors: Any) -> dict[str, str]:
        known = dict(errors) if self._before is None else self._before.get(timeout=WAIT_S)
        if self._behind is not None:
            self._behind.put(known)
        return known

    def receive(self, num_tokens: int) -> Tensor:
        hidden: Tensor = self._before.get(timeout=WAIT_S)
        assert hidden.shape[0] == num_tokens
        return hidden

    def send(self, hidden_states: Tensor) -> None:
        self._behind.put(hidden_states.clone())


class ThreadedRanks:
    """``tp * pp`` runners over the parts of ``model``, stepped together.

    Args:
        model: a transformers model; it is copied.
        hook: makes the EC hook of a first-stage rank from its number and encoder cache.
        encode_here: what the tower of a rank does, by rank; by default the model's own.
    """

    def __init__(
        self,
        model: Any,
        tp: int,
        pp: int,
        *,
        mode: str = "weights",
        pooling: bool = False,
        hook: Callable[[int, RankEncoderCache], ECHook] | None = None,
        encode_here: Callable[[int, ModelAdapter], Encode] | None = None,
    ) -> None:
        self.groups = [group for _ in range(pp) for group in Meeting(tp).groups()]
        self.output_rank = (pp - 1) * tp
        self.runners: list[ModelRunner] = []
        self.caches: list[RankEncoderCache] = []
        self.models: list[ModelAdapter] = []
        self._pooling = pooling
        queues = [[SimpleQueue() for _ in range(tp)] for _ in range(pp - 1)]
        for rank in range(tp * pp):
            stage, place = divmod(rank, tp)
            part = copy.deepcopy(model)
            if pp > 1:
                cut_stage(part, pp, stage)
            if tp > 1:
                shard(part, self.groups[rank])
            adapter = ModelAdapter(part, max_model_len=512)
            cache = RankEncoderCache(adapter.info.encoder, adapter.device)
            own = adapter.encode if encode_here is None else encode_here(rank, adapter)
            encode = own
            if tp > 1:
                group = self.groups[rank]
                encode = ReplicatedEncoder(own, group)
                if mode == "data":
                    encode = DividedEncoder(own, group, adapter.info.encoder, adapter.device)
            way: Stage = ONLY_STAGE
            if pp > 1:
                before = queues[stage - 1][place] if stage else None
                way = QueueStage(before, queues[stage][place] if stage < pp - 1 else None)
            runner = ModelRunner(
                adapter,
                NO_OP_EC_CONNECTOR if hook is None or stage else hook(rank, cache),
                cache,
                PagedKVCache(adapter.num_layers, 64, 8),
                PoolingParams if pooling else SamplingParams,
                encode=encode,
                stage=way,
                is_output_rank=rank == self.output_rank,
            )
            self.runners.append(runner)
            self.caches.append(cache)
            self.models.append(adapter)
        self._threads = ThreadPoolExecutor(tp * pp)

    def run(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """A whole step on all ranks, folded. All go on to the second half, or none does."""
        outputs = self.each(lambda runner: runner.execute_model(scheduler_output))
        assert len({output is None for output in outputs}) == 1
        if outputs[0] is None:
            outputs = self.each(lambda runner: runner.pool() if self._pooling else runner.sample_tokens())
        for rank, output in enumerate(outputs):
            assert rank == self.output_rank or not output.req_ids
        folded = fold_outputs(outputs, self.output_rank, [ECOutputAggregator()])
        assert folded is not None
        return folded

    def each(self, act: Callable[[ModelRunner], Any]) -> Sequence[Any]:
        """``act`` on every rank at once; a rank that raises ends the wait of those in its group."""

        def guarded(rank: int) -> Any:
            try:
                return act(self.runners[rank])
            except BaseException:
                self.groups[rank]._meeting.barrier.abort()
                raise

        futures = [self._threads.submit(guarded, rank) for rank in range(len(self.runners))]
        return [future.result() for future in futures]

    def close(self) -> None:
        self._threads.shutdown()
