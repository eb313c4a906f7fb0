"""The real scheduler, rank and connector around a model whose every logit is kept, and that can be broken on
purpose."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import torch
from family_cases import CasePrompt
from torch import Tensor

from ecotone.config import ECConfig, EngineConfig
from ecotone.connectors.factory import create_factory
from ecotone.engine.admission import SchedulerLimits
from ecotone.engine.request import Request
from ecotone.engine.scheduler import Scheduler
from ecotone.executor.uniproc import UniprocExecutor
from ecotone.protocol.connector import ECSchedulerConnector, ECSchedulerContext
from ecotone.protocol.params import SamplingParams
from ecotone.protocol.step import MultiModalItem, SchedulerOutput
from ecotone.worker.attention import AttentionPlan
from ecotone.worker.kv_cache import PagedKVCache
from ecotone.worker.models import EncodeFailure, ModelAdapter
from ecotone.worker.worker import Worker

MUTATIONS = ("rows shifted by one", "no levels", "plain positions", "causal only", "blocks cut")


class WatchedModel:
    """An adapter that keeps the logits of a step's tokens. ``mutation`` breaks one thing about it.

    Placeholders are never the most probable token: the library's forward would take one for an item.
    """

    def __init__(self, adapter: ModelAdapter, mutation: str | None = None) -> None:
        assert mutation is None or mutation in MUTATIONS
        self._adapter = adapter
        self._mutation = mutation
        self.info = adapter.info
        if mutation == "blocks cut":
            self.info = msgspec.structs.replace(adapter.info, atomic_items=False)
        self.step_logits = torch.empty(0)
        self.encoder_calls: list[list[str]] = []
        self._banned = adapter.placeholder_mask(torch.arange(adapter.info.vocab_size))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._adapter, name)

    def encode(self, items: Sequence[MultiModalItem]) -> list[Tensor | EncodeFailure]:
        self.encoder_calls.append([item.item_id for item in items])
        rows = self._adapter.encode(items)
        if self._mutation == "rows shifted by one":
            return [r.roll(1, 0) if isinstance(r, Tensor) else r for r in rows]
        return rows

    def positions(self, ids: Sequence[int], items: Sequence[MultiModalItem]) -> tuple[Tensor, int]:
        positions, delta = self._adapter.positions(ids, items)
        if self._mutation == "plain positions":
            return torch.arange(len(ids)).expand(len(positions), -1), 0
        return positions, delta

    def block_groups(self, ids: Sequence[int]) -> Tensor | None:
        return None if self._mutation == "causal only" else self._adapter.block_groups(ids)

    def forward(
        self,
        embeds: Tensor,
        positions: Tensor,
        plan: AttentionPlan,
        kv: PagedKVCache,
        *,
        rows_mask: Tensor | None = None,
        extra: Tensor | None = None,
    ) -> Tensor:
        extra = None if self._mutation == "no levels" else extra
        hidden = self._adapter.forward(embeds, positions, plan, kv, rows_mask=rows_mask, extra=extra)
        self.step_logits = self._adapter.logits(hidden)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return self._adapter.logits(hidden).masked_fill(self._banned, -1e9)


@dataclass
class Outcome:
    """What a run came to: of each request the logits of all tokens computed, and the tokens generated; the steps
    with tokens; the item ids of each encoder step."""

    logits: dict[str, Tensor] = field(default_factory=dict)
    output: dict[str, list[int]] = field(default_factory=dict)
    steps: list[SchedulerOutput] = field(default_factory=list)
    encoder_calls: list[list[str]] = field(default_factory=list)

    def ordered(self, kind: str) -> list[str]:
        """Keys whose ``encode`` or ``load`` was ordered."""
        return [s.item_keys[i] for step in self.steps for s in step.scheduled for i in getattr(s, kind)]


@contextmanager
def engine(folder: Any, model: WatchedModel, **options: Any) -> Iterator[tuple[Scheduler, UniprocExecutor]]:
    ec = ECConfig(options={"memory": "4MiB", "pending_timeout_s": 600.0, "prefault": False})
    given = {"block_size": 8, "kv_blocks": 96, **options}
    config = EngineConfig(model=str(folder), device="cpu", ec=ec, **given)
    factory = create_factory(ec)
    make_rank = partial(Worker, load=lambda *_, **__: model)
    engine_id = uuid.uuid4().hex
    executor = UniprocExecutor(config, factory, engine_id, make_rank=make_rank)
    connector: ECSchedulerConnector | None = None
    try:
        connector = factory.scheduler_half(
            ECSchedulerContext(
                engine_id=engine_id,
                role=ec.role,
                options=ec.options,
                participants=executor.participants(),
                encoder=model.info.encoder,
                clock=time.monotonic,
            )
        )
        executor.init_ec_output_aggregator()
        limits = SchedulerLimits.from_config(config, model.info)
        yield Scheduler(limits, connector, (), time.monotonic), executor
    finally:
        executor.shutdown()
        if connector is not None:
            connector.shutdown()


def run(
    folder: Any, model: WatchedModel, prompts: Mapping[str, CasePrompt], *, num_tokens: int, **options: Any
) -> Outcome:
    """All ``prompts``, each joining a step after the one before, until each has ``num_tokens`` more."""
    outcome = Outcome()
    waiting = list(prompts)
    with engine(folder, model, **options) as (scheduler, executor):
        while waiting or scheduler.has_work():
            if waiting:
                name = waiting.pop(0)
                scheduler.add_request(_request(name, prompts[name], num_tokens))
            order = scheduler.schedule()
            result = executor.execute_model(order)
            if result is None:
                _keep(order, model.step_logits, outcome)
                result = executor.sample_tokens()
            assert not result.request_errors
            report = result.ec_connector_output
            assert report is None or not report.failed_loads
            for delta in scheduler.update_from_output(order, result):
                outcome.output.setdefault(delta.req_id, []).extend(delta.new_token_ids)
            scheduler.check_integrity()
            if not order.scheduled:
                executor.wait_for_progress(0.01)
    outcome.encoder_calls = model.encoder_calls
    return outcome


def _request(name: str, prompt: CasePrompt, num_tokens: int) -> Request:
    keys = tuple(f"{0:032x}:{item.item_id}" for item in prompt.items)
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    return Request(name, tuple(prompt.ids), params, items=prompt.items, item_keys=keys, arrival_time=0.0)


def _keep(order: SchedulerOutput, logits: Tensor, outcome: Outcome) -> None:
    outcome.steps.append(order)
    parts = torch.split(logits, [s.num_tokens for s in order.scheduled])
    for scheduled, part in zip(order.scheduled, parts, strict=True):
        before = outcome.logits.get(scheduled.req_id, part[:0])
        assert len(before) >= scheduled.num_computed_tokens
        outcome.logits[scheduled.req_id] = torch.cat((before[: scheduled.num_computed_tokens], part))
