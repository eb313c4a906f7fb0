"""Which encoder rows a step's tokens take, and putting them in place."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ecotone.worker.ec_connector import ECStep
from ecotone.worker.encoder_cache import RankEncoderCache
from ecotone.worker.input_batch import InputBatch


@dataclass(frozen=True, slots=True, eq=False)
class EncoderRows:
    """Copies of encoder rows (nothing here keeps a cache entry, or a view behind it, alive).

    Attributes:
        index: int64 ``[n]``, where in the packed row they belong, ascending.
        rows: ``[n, width]``.
    """

    index: Tensor
    rows: Tensor


def gather_encoder_rows(batch: InputBatch, cache: RankEncoderCache, step: ECStep) -> EncoderRows | None:
    """The rows of the step's placeholder tokens; ``None`` when there is no such token.

    Rows that this rank does not hold are reported to ``step`` and are zeros: all ranks go through the step
    together, and its result is discarded for whoever needed them.
    """
    index, rows = [], []
    for request, state, start in zip(batch.requests, batch.states, batch.starts, strict=False):
        prefilling = request.num_computed_tokens < len(state.data.prompt_token_ids)
        for i, item in enumerate(state.data.items if prefilling else ()):
            first, last, where = state.rows(i, request)
            if first == last:
                continue
            index.append(where + start)
            rows.append(_rows(cache, step, request.item_keys[i], item.num_rows)[first:last])
    if not rows:
        return None
    return EncoderRows(torch.from_numpy(np.concatenate(index)).to(cache.device), torch.cat(rows))


def _rows(cache: RankEncoderCache, step: ECStep, key: str, num_rows: int) -> Tensor:
    rows = cache.rows(key, num_rows)
    if rows is not None:
        return rows
    if not step.is_failed(key):
        step.fail(key)
    dtype = getattr(torch, cache.encoder.dtype)
    return torch.zeros(num_rows, cache.encoder.width, dtype=dtype, device=cache.device)
