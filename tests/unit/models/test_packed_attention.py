"""The paged cache and the plan of a step, apart from any model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ecotone.errors import ContractError, ResourceError, UnsupportedModelError
from ecotone.worker.attention import ATTENTION_NAME, AttentionPlan, Segment, packed_attention
from ecotone.worker.kv_cache import PagedKVCache

CPU = torch.device("cpu")
HEADS, KV_HEADS, WIDTH = 4, 2, 8


def test_pools_are_made_when_a_layer_first_writes() -> None:
    kv = PagedKVCache(num_layers=3, num_blocks=4, block_size=2)
    assert kv.nbytes == 0
    keys, values = torch.randn(1, 3, 5), torch.randn(1, 3, 7)
    slots = torch.tensor([6, 0, 3])
    kv.write(2, slots, keys, values)
    assert kv.nbytes == 8 * (5 + 7) * 4
    got_keys, got_values = kv.read(2, slots)
    assert torch.equal(got_keys, keys)
    assert torch.equal(got_values, values)
    with pytest.raises(IndexError, match="KV layer 1 is read before"):
        kv.read(1, slots)


@pytest.mark.parametrize("num_blocks", [2**50, 2**62])
def test_a_cache_larger_than_the_machine(num_blocks: int) -> None:
    kv = PagedKVCache(num_layers=2, num_blocks=num_blocks, block_size=16)
    states = torch.zeros(1, 1, 8)
    with pytest.raises(ResourceError, match=f"{num_blocks} KV blocks of 16 tokens: no memory"):
        kv.write(0, torch.tensor([0]), states, states)


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ([], "no tokens"),
        ([Segment([0], 0, 0)], "a segment of 0 tokens after 0"),
        ([Segment([0], -1, 1)], "a segment of 1 tokens after -1"),
        ([Segment([0, 1], 3, 6)], "9 tokens do not fit 2 blocks of 4"),
        ([Segment([0, 1], 0, 6, torch.zeros(5))], "block groups for 5 of 6 tokens"),
    ],
)
def test_a_step_that_cannot_be_is_refused(segments: list[Segment], message: str) -> None:
    with pytest.raises(ContractError, match=message):
        AttentionPlan.build(segments, 4, CPU)


def test_slots_follow_the_blocks() -> None:
    plan = AttentionPlan.build([Segment([3, 0, 9], 3, 4), Segment([1], 0, 2)], 4, CPU)
    assert plan.num_tokens == 6
    assert plan.write_slots.tolist() == [15, 0, 1, 2, 4, 5]


def attend(
    plan: AttentionPlan, kv: PagedKVCache, states: tuple[Tensor, Tensor, Tensor], window: int | None
) -> Tensor:
    function: Any = ALL_ATTENTION_FUNCTIONS[ATTENTION_NAME]
    query, key, value = (x[None] for x in states)
    with packed_attention(plan, kv):
        out: Tensor = function(SimpleNamespace(layer_idx=0), query, key, value, None, sliding_window=window)[0]
    return out[0]


@pytest.mark.parametrize("name", ["softcap", "s_aux", "position_bias"])
def test_what_would_change_the_result_is_not_ignored(name: str) -> None:
    function: Any = ALL_ATTENTION_FUNCTIONS[ATTENTION_NAME]
    states = torch.zeros(1, HEADS, 3, WIDTH)
    with pytest.raises(UnsupportedModelError, match=f"SimpleNamespace attends with {name}"):
        function(SimpleNamespace(layer_idx=0), states, states, states, None, **{name: torch.ones(1)})


def plain_attention(states: tuple[Tensor, Tensor, Tensor], window: int | None, groups: Tensor | None) -> Tensor:
    """By the definition, one head at a time: [T, heads, width]."""
    query, key, value = states
    length = query.shape[1]
    i, j = torch.arange(length)[:, None], torch.arange(length)[None]
    allowed = j <= i
    if groups is not None:
        allowed = allowed | ((groups[:, None] == groups[None]) & (groups[None] >= 0))
    if window is not None:
        allowed = allowed & (j > i - window)
    out = []
    for head in range(HEADS):
        shared = head // (HEADS // KV_HEADS)
        scores = query[head] @ key[shared].T * WIDTH**-0.5
        out.append(scores.masked_fill(~allowed, float("-inf")).softmax(-1) @ value[shared])
    return torch.stack(out, 1)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=4),
    chunks=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    window=st.sampled_from([None, 1, 3, 64]),
    with_groups=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_cut_of_any_batch_is_plain_attention(
    lengths: list[int], chunks: list[int], window: int | None, with_groups: bool, seed: int
) -> None:
    """Sequences of any length, advanced by any chunks in shared steps, in shuffled blocks."""
    generator = torch.Generator().manual_seed(seed)
    block_size, blocks_each = 4, 5
    order = torch.randperm(len(lengths) * blocks_each, generator=generator).tolist()
    kv = PagedKVCache(1, len(order), block_size)
    groups = [
        torch.cat([torch.tensor([-1, -1]), torch.full((3,), 0), torch.full((15,), -1)])[:n]
        if with_groups
        else None
        for n in lengths
    ]
    states = [
        tuple(torch.randn(heads, n, WIDTH, generator=generator) for heads in (HEADS, KV_HEADS, KV_HEADS))
        for n in lengths
    ]
    outputs: list[list[Tensor]] = [[] for _ in lengths]
    done, turn = [0] * len(lengths), 0
    while any(d < n for d, n in zip(done, lengths, strict=True)):
        segments, parts, who = [], [], []
        for index, n in enumerate(lengths):
            end = min(n, done[index] + chunks[(turn + index) % len(chunks)])
            if with_groups and 2 < end < 5:
                end = min(n, 5)  # a chunk does not end inside a group
            if done[index] < n:
                start = done[index]
                own = order[index * blocks_each : (index + 1) * blocks_each]
                known = groups[index]
                segments.append(Segment(own, start, end - start, None if known is None else known[:end]))
                parts.append(tuple(x[:, start:end] for x in states[index]))
                who.append(index)
                done[index] = end
        packed = tuple(torch.cat(x, 1) for x in zip(*parts, strict=True))
        plan = AttentionPlan.build(segments, block_size, CPU)
        out = attend(plan, kv, packed, window)  # type: ignore[arg-type]
        for index, part in zip(who, torch.split(out, [s.num_tokens for s in segments]), strict=True):
            outputs[index].append(part)
        turn += 1
    for index, known in enumerate(groups):
        want = plain_attention(states[index], window, known)  # type: ignore[arg-type]
        torch.testing.assert_close(torch.cat(outputs[index]), want, rtol=0, atol=2e-6)
