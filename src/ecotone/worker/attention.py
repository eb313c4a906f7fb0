"""Attention over a step's tokens packed into one row, with the keys and values in blocks.

All tokens of a step (prefill chunks and decode tokens of many requests) go through the language model as one
sequence ``[1, T, hidden]``: norms, projections and MLPs run once over T rows, without padding. Only attention
looks at requests, here, in a function that transformers' models call in place of their own. It writes the step's
keys and values into the paged cache and lets each request attend to its own blocks.

The plan of the step reaches the function through a context variable, as models in between need not pass unknown
arguments on. Every thread has its own, so engines in several threads do not meet.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface

from ecotone.errors import ContractError, UnsupportedModelError
from ecotone.worker.kv_cache import PagedKVCache

ATTENTION_NAME = "ecotone_packed"
# Arguments of transformers' attention functions that change the result: capped scores, attention sinks, biases.
_MUST_BE_ABSENT = ("softcap", "s_aux", "position_bias")


@dataclass(frozen=True, eq=False)
class Segment:
    """One request's share of a step.

    Attributes:
        block_ids: its KV blocks, in order; more than needed is fine.
        num_computed: tokens whose keys and values are stored already.
        num_tokens: tokens of this step, at least 1.
        block_groups: int ``[num_computed + num_tokens]``: tokens with the same number of at least 0 see each
            other whatever their order (images of some families); ``None`` is plain causal attention.
    """

    block_ids: Sequence[int]
    num_computed: int
    num_tokens: int
    block_groups: Tensor | None = None

    @property
    def length(self) -> int:
        """Tokens stored after the step."""
        return self.num_computed + self.num_tokens


@dataclass(frozen=True, eq=False)
class _Rows:
    """A segment as every layer uses it: its rows in the step, and the slots of all its tokens."""

    segment: Segment
    start: int
    slots: Tensor
    views: dict[int | None, tuple[Tensor, Tensor | None]] = field(default_factory=dict)

    def view(self, window: int | None) -> tuple[Tensor, Tensor | None]:
        """The slots its tokens may look at under a sliding window, int64 [n], and the mask, bool [num_tokens, n].

        No mask: the mask is causal from the first token on, or there is a single token, which sees them all.
        """
        if window not in self.views:
            self.views[window] = self._view(window)
        return self.views[window]

    def _view(self, window: int | None) -> tuple[Tensor, Tensor | None]:
        segment = self.segment
        first = 0 if window is None else max(0, segment.num_computed + 1 - window)
        slots = self.slots[first:]
        starts_plain = segment.num_computed == 0 and (window is None or segment.length <= window)
        if segment.num_tokens == 1 or (starts_plain and segment.block_groups is None):
            return slots, None
        query = torch.arange(segment.num_computed, segment.length, device=slots.device)[:, None]
        key = torch.arange(first, segment.length, device=slots.device)[None]
        mask = key <= query
        if segment.block_groups is not None:
            groups = segment.block_groups.to(slots.device)
            same = groups[segment.num_computed : segment.length, None] == groups[None, first : segment.length]
            mask |= same & (groups[None, first : segment.length] >= 0)
        if window is not None:
            mask &= key > query - window
        return slots, mask


@dataclass(frozen=True, eq=False)
class AttentionPlan:
    """Where a step's tokens are stored and what they see; made once, used by every layer.

    Attributes:
        num_tokens: T, tokens of the step.
        write_slots: int64 ``[T]``: where the step's keys and values go.
    """

    num_tokens: int
    write_slots: Tensor
    rows: tuple[_Rows, ...]

    @classmethod
    def build(cls, segments: Sequence[Segment], block_size: int, device: torch.device) -> AttentionPlan:
        """The plan of a step whose tokens are those of ``segments``, in order.

        Raises:
            ContractError: no segment, a segment without tokens, or with too few blocks.
        """
        if not segments:
            raise ContractError("a step with no tokens has no attention plan")
        rows, start = [], 0
        within = torch.arange(block_size, device=device)
        for segment in segments:
            _check(segment, block_size)
            blocks = torch.tensor(segment.block_ids, dtype=torch.int64, device=device)
            slots = (blocks[:, None] * block_size + within).flatten()[: segment.length]
            rows.append(_Rows(segment, start, slots))
            start += segment.num_tokens
        return cls(start, torch.cat([r.slots[r.segment.num_computed :] for r in rows]), tuple(rows))


def _check(segment: Segment, block_size: int) -> None:
    if segment.num_tokens < 1 or segment.num_computed < 0:
        raise ContractError(f"a segment of {segment.num_tokens} tokens after {segment.num_computed}")
    room = len(segment.block_ids) * block_size
    if room < segment.length:
        raise ContractError(f"{segment.length} tokens do not fit {len(segment.block_ids)} blocks of {block_size}")
    if segment.block_groups is not None and len(segment.block_groups) < segment.length:
        raise ContractError(f"block groups for {len(segment.block_groups)} of {segment.length} tokens")


_STEP: ContextVar[tuple[AttentionPlan, PagedKVCache]] = ContextVar("ecotone_step")


@contextmanager
def packed_attention(plan: AttentionPlan, kv: PagedKVCache) -> Iterator[None]:
    """Within this block, in this thread, language models attend according to ``plan`` and store in ``kv``."""
    token = _STEP.set((plan, kv))
    try:
        yield
    finally:
        _STEP.reset(token)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """transformers' attention signature: query [1, heads, T, d], key and value [1, kv_heads, T, d] ->
    [1, T, heads, d]. Masks are the plan's; transformers makes none, as no mask function is registered under
    this name.

    Raises:
        UnsupportedModelError: an argument that would change the result, and is not known here.
    """
    ignored = [name for name in _MUST_BE_ABSENT if others.get(name) is not None]
    if ignored:
        raise UnsupportedModelError(f"{type(module).__name__} attends with {ignored[0]}, which would be ignored")
    plan, kv = _STEP.get()
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    kv.write(layer, plan.write_slots, key[0], value[0])
    out = query.new_empty(query.shape[2], query.shape[1], value.shape[3])
    for rows in plan.rows:
        slots, mask = rows.view(sliding_window)
        end = rows.start + rows.segment.num_tokens
        keys, values = kv.read(layer, slots)
        out[rows.start : end] = _grouped(query[0, :, rows.start : end], keys, values, mask, scaling)
    return out[None], None


def _grouped(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float | None) -> Tensor:
    """query [heads, t, d], keys and values [kv_heads, n, d] -> [t, heads, d]; heads share keys in groups."""
    heads, tokens, _ = query.shape
    if tokens == 1:
        # The heads of a group stand in for tokens: nothing is repeated, and nothing masked.
        query = query.reshape(1, len(keys), heads // len(keys), -1)
        out = functional.scaled_dot_product_attention(query, keys[None], values[None], scale=scaling)
        return out.reshape(1, heads, -1)
    out = functional.scaled_dot_product_attention(
        query[None],
        keys[None],
        values[None],
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=heads != len(keys),
    )
    return out[0].transpose(0, 1)


AttentionInterface.register(ATTENTION_NAME, _attend)
