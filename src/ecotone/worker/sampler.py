"""From logits to tokens.

A token's random number depends on the request's seed and on how many tokens it has, and on nothing else: not on
the batch, not on the rank, not on whether the step is run for the second time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log

import numpy as np
import torch
from torch import Tensor

from ecotone.protocol.arrays import Array
from ecotone.protocol.outputs import TokenLogprobs
from ecotone.worker.penalties import SampleRequest


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A token, and its log probabilities where they were asked for."""

    token_id: int
    logprobs: TokenLogprobs | None


def usable(logits: Tensor) -> list[bool]:
    """Per row of ``logits`` ``[N, vocab]``, whether there is a distribution in it: a NaN, +inf or nothing but -inf
    makes none."""
    usable_rows: list[bool] = logits.logsumexp(dim=-1).isfinite().tolist()
    return usable_rows


def sample(logits: Tensor, requests: Sequence[SampleRequest]) -> list[SampledToken]:
    """One token for each row of ``logits`` (float32 ``[N, vocab]``, adjusted, every row usable)."""
    token_ids = logits.argmax(dim=-1)
    drawn = [row for row, request in enumerate(requests) if request.params.temperature > 0]
    if drawn:
        token_ids[drawn] = _draw(logits[drawn], [requests[row] for row in drawn])
    logprobs = _logprobs(logits, token_ids, requests)
    return [SampledToken(token_id, logprobs.get(row)) for row, token_id in enumerate(token_ids.tolist())]


def uniform(seed: int, num_output_tokens: int) -> float:
    """The request's random number in [0, 1) for the token that follows ``num_output_tokens``."""
    stream = np.random.Philox(key=seed & (2**64 - 1), counter=num_output_tokens)
    return float(np.random.Generator(stream).random())


def _scale(logits: Tensor, requests: Sequence[SampleRequest]) -> Tensor:
    """float64 logits over temperature, the best at 0: in float32 a small temperature would overflow."""
    temperatures = torch.tensor([r.params.temperature or 1.0 for r in requests], dtype=torch.float64)
    best = logits.amax(dim=-1, keepdim=True)
    return (logits.double() - best) / temperatures.to(logits.device)[:, None]


def _draw(logits: Tensor, requests: Sequence[SampleRequest]) -> Tensor:
    """int64 ``[M]``. Only rows that are cut by top-k or top-p pay for a sort."""
    scaled = _cut_min_p(_scale(logits, requests), requests)
    token_ids = torch.empty(len(requests), dtype=torch.int64, device=scaled.device)
    cut = [r.params.top_k > 0 or r.params.top_p < 1 for r in requests]
    for is_cut in (False, True):
        rows = [row for row, flag in enumerate(cut) if flag is is_cut]
        if not rows:
            continue
        chosen = [requests[row] for row in rows]
        uniforms = torch.tensor([uniform(r.seed, len(r.output_token_ids)) for r in chosen], dtype=torch.float64)
        uniforms = uniforms.to(scaled.device)
        if is_cut:
            probs, order = _cut(scaled[rows], chosen)
            token_ids[rows] = order.gather(1, _invert(probs, uniforms)[:, None])[:, 0]
        else:
            token_ids[rows] = _invert(scaled[rows].exp(), uniforms)
    return token_ids


def _cut_min_p(scaled: Tensor, requests: Sequence[SampleRequest]) -> Tensor:
    """``scaled`` with -inf where a token is less than ``min_p`` times as probable as the best (at 0)."""
    if not any(r.params.min_p for r in requests):
        return scaled
    least = [log(r.params.min_p) if r.params.min_p else -torch.inf for r in requests]
    floor = torch.tensor(least, dtype=scaled.dtype, device=scaled.device)
    return scaled.masked_fill(scaled < floor[:, None], -torch.inf)


def _cut(scaled: Tensor, requests: Sequence[SampleRequest]) -> tuple[Tensor, Tensor]:
    """Unnormalised probabilities, most probable first and 0 where top-k or top-p cuts, and their token ids.

    top-p counts what is left after top-k, renormalised. Equal logits stand in the order of their ids."""
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    vocab = ordered.shape[-1]
    top_k = torch.tensor([r.params.top_k or vocab for r in requests], device=scaled.device)
    top_p = torch.tensor([r.params.top_p for r in requests], dtype=torch.float64, device=scaled.device)
    probs = ordered.exp().masked_fill(torch.arange(vocab, device=scaled.device) >= top_k[:, None], 0.0)
    before = probs.cumsum(dim=-1) - probs
    enough = top_p[:, None] * probs.sum(dim=-1, keepdim=True)
    return probs.masked_fill(before >= enough, 0.0), order


def _invert(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Index ``[M]`` drawn with probability proportional to float64 ``weights`` ``[M, vocab]``, by inverting their
    running sum: the first index whose sum is beyond the random number's share, so never one without weight."""
    cumulative = weights.cumsum(dim=-1)
    # A number of at most 1 - 2**-53 times the total is below the total, in float64 too.
    target = uniforms[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True)[:, 0]


def _logprobs(logits: Tensor, token_ids: Tensor, requests: Sequence[SampleRequest]) -> dict[int, TokenLogprobs]:
    """row -> log probabilities, of the rows that ask for them."""
    rows = [row for row, request in enumerate(requests) if request.params.logprobs is not None]
    if not rows:
        return {}
    logprobs = _scale(logits[rows], [requests[row] for row in rows]).log_softmax(dim=-1)
    sampled = logprobs.gather(1, token_ids[rows][:, None])[:, 0].tolist()
    most = max(requests[row].params.logprobs or 0 for row in rows)
    values, ids = logprobs.topk(min(most, logprobs.shape[-1]), dim=-1)
    best, best_ids = values.float().cpu().numpy(), ids.cpu().numpy()
    out = {}
    for i, row in enumerate(rows):
        k = requests[row].params.logprobs or 0
        out[row] = TokenLogprobs(sampled[i], Array.from_numpy(best_ids[i, :k]), Array.from_numpy(best[i, :k]))
    return out
