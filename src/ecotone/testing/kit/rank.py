"""One rank of the kit's engine: a real model runner and the real hook, over an encoder cache that is watched."""

from __future__ import annotations

from collections.abc import Iterable, Set

import torch
from torch import Tensor

from ecotone.protocol.connector import EncoderSpec
from ecotone.protocol.outputs import ModelRunnerOutput
from ecotone.protocol.params import PoolingParams, SamplingParams
from ecotone.protocol.step import SchedulerOutput
from ecotone.testing.kit.ledger import Ledger
from ecotone.testing.kit.oracle import KitModel, Library
from ecotone.testing.kit.report import ViolationError
from ecotone.worker.ec_connector import NO_OP_EC_CONNECTOR, ActiveECConnector, ECHook
from ecotone.worker.encoder_cache import RankEncoderCache
from ecotone.worker.kv_cache import PagedKVCache
from ecotone.worker.model_runner import ModelRunner

KV_BLOCKS, BLOCK_SIZE = 96, 4


class WatchedCache(RankEncoderCache):
    """An encoder cache that knows what belongs into it.

    Attributes:
        failing: how many of the next loads come to nothing.
        loads: keys that the step under way loads.
    """

    def __init__(self, encoder: EncoderSpec, rank: int, ledger: Ledger, library: Library) -> None:
        super().__init__(encoder, torch.device("cpu"))
        self.failing = 0
        self.loads: Set[str] = frozenset()
        self._rank = rank
        self._ledger = ledger
        self._library = library
        self._right: set[str] = set()
        self._put: set[str] = set()

    def __setitem__(self, key: str, rows: Tensor) -> None:
        self._right.discard(key)
        self._put.add(key)
        super().__setitem__(key, rows)

    def drop(self, keys: Iterable[str]) -> None:
        """See ``RankEncoderCache``."""
        dropped = tuple(keys)
        self._put.difference_update(dropped)
        super().drop(dropped)

    def rows(self, key: str, num_rows: int) -> Tensor | None:
        """See ``RankEncoderCache``. What it hands out is right."""
        if self.failing and key in self.loads and key in self:
            self.failing -= 1
            self.drop((key,))
        if key in self._put and key not in self:
            raise ViolationError(
                "cache-only-what-was-ordered",
                f"{self._library.name(key)!r} vanished from the encoder cache of rank {self._rank}",
            )
        rows = super().rows(key, num_rows)
        if rows is not None:
            self._check(key, rows)
        return rows

    def check(self) -> None:
        """Everything in here is what it should be.

        Raises:
            ViolationError: it is not.
        """
        for key, rows in self.items():
            self._check(key, rows)

    def _check(self, key: str, rows: Tensor) -> None:
        rule = "held-rows-stay" if key in self._right else "right-rows"
        if rule == "held-rows-stay" or key in self.loads:
            self._ledger.check(rule)
        fault = self._library.fault(key, rows)
        if fault is not None:
            raise ViolationError(rule, f"rank {self._rank}: {fault}")
        self._right.add(key)


class KitRank:
    """See the module.

    Args:
        connector: the worker half; ``None`` is a rank without an encoder, which takes no part.
    """

    def __init__(
        self,
        rank: int,
        model: KitModel,
        cache: WatchedCache,
        hook: ActiveECConnector | None,
        task: str,
        ledger: Ledger,
    ) -> None:
        self.cache = cache
        self.encoded: list[str] = []
        self._rank = rank
        self._pooling = task == "embed"
        self._ledger = ledger
        self._hook: ECHook = NO_OP_EC_CONNECTOR if hook is None else hook
        self._runner = ModelRunner(
            model,
            self._hook,
            cache,
            PagedKVCache(model.num_layers, KV_BLOCKS, BLOCK_SIZE),
            PoolingParams if self._pooling else SamplingParams,
            is_output_rank=rank == 0,
        )

    def execute(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        """The first half of a step; ``None`` when it goes on in ``finish``.

        Raises:
            ViolationError: the step left something in the encoder cache that does not belong there.
        """
        loads = {r.item_keys[i] for r in scheduler_output.scheduled for i in r.load}
        encodes = {r.item_keys[i] for r in scheduler_output.scheduled for i in r.encode}
        before = set(self.cache) - set(scheduler_output.free_encoder_keys)
        self.cache.loads = loads
        output = self._runner.execute_model(scheduler_output)
        self._check_cache(before, loads, encodes)
        return output

    def finish(self) -> ModelRunnerOutput:
        """The second half."""
        return self._runner.pool() if self._pooling else self._runner.sample_tokens()

    def clear(self) -> None:
        """Drop every encoding."""
        self.cache.drop(tuple(self.cache))
        self._runner.reset_encoder_cache()

    def _check_cache(self, before: set[str], loads: set[str], encodes: set[str]) -> None:
        self.cache.check()
        self._ledger.check("cache-only-what-was-ordered")
        unasked = set(self.cache) - before - loads - encodes
        if unasked:
            raise ViolationError(
                "cache-only-what-was-ordered",
                f"rank {self._rank} holds {sorted(unasked)}, which the step neither loads nor encodes",
            )
        gone = before - set(self.cache) - loads - encodes
        if gone:
            raise ViolationError(
                "cache-only-what-was-ordered",
                f"{sorted(gone)} vanished from the encoder cache of rank {self._rank}",
            )
