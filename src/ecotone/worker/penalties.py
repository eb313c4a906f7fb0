"""Logits as the tokens before them change them: what must not come yet, and what came often enough.

All of it follows from the request's own prompt and output, so a step that is ordered again comes to the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ecotone.protocol.params import SamplingParams


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One row of the logits: how its token is chosen, and what came before.

    Attributes:
        seed: of the request's random numbers.
        output_token_ids: all tokens generated so far. Their number is the place in the random numbers.
        prompt_token_ids: the tokens of the prompt, each at least once.
    """

    params: SamplingParams
    seed: int
    output_token_ids: Sequence[int]
    prompt_token_ids: Sequence[int] | NDArray[Any] = ()


def adjust(logits: Tensor, requests: Sequence[SampleRequest], eos_token_ids: Sequence[int]) -> Tensor:
    """``logits`` (float32 ``[N, vocab]``) with early stops ruled out and penalties applied; they themselves stay
    as they are. Only rows that ask for it cost anything."""
    early = _Cells()
    for row, request in enumerate(requests):
        params = request.params
        if len(request.output_token_ids) < params.min_tokens:
            eos = () if params.ignore_eos else eos_token_ids
            early.add(row, np.unique(np.array((*eos, *params.stop_token_ids), dtype=np.int64)))
    penalized = [row for row, request in enumerate(requests) if request.params.has_penalties]
    if not early.rows and not penalized:
        return logits
    logits = logits.clone()
    _penalize(logits, requests, penalized)
    if early.rows:
        logits[early.index(logits)] = -torch.inf
    return logits


class _Cells:
    """Places in a matrix ``[N, vocab]``, and a number for each."""

    def __init__(self) -> None:
        self.rows: list[NDArray[Any]] = []
        self._columns: list[NDArray[Any]] = []
        self._values: list[NDArray[Any]] = []

    def add(self, row: int, columns: NDArray[Any], values: NDArray[Any] | None = None) -> None:
        self.rows.append(np.full(len(columns), row))
        self._columns.append(columns)
        self._values.append(np.zeros(len(columns)) if values is None else values)

    def _inside(self, vocab: int) -> NDArray[Any]:
        # A placeholder's id may lie outside the vocabulary, and so may what a caller names as a stop.
        inside: NDArray[Any] = np.concatenate(self._columns) < vocab
        return inside

    def index(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Those that are inside ``like``."""
        inside = self._inside(like.shape[1])
        rows, columns = np.concatenate(self.rows)[inside], np.concatenate(self._columns)[inside]
        return torch.from_numpy(rows).to(like.device), torch.from_numpy(columns).to(like.device)

    def values(self, like: Tensor) -> Tensor:
        """Parallel to ``index``."""
        values = np.concatenate(self._values)[self._inside(like.shape[1])]
        return torch.from_numpy(values).to(like.device, like.dtype)


def _penalize(logits: Tensor, requests: Sequence[SampleRequest], rows: Sequence[int]) -> None:
    """In place. Repetition first: it looks at the sign of what the model said."""
    repeated, counted = _Cells(), _Cells()
    for row in rows:
        params = requests[row].params
        output, counts = np.unique(np.array(requests[row].output_token_ids, dtype=np.int64), return_counts=True)
        if params.repetition_penalty != 1:
            # A token that is in both is written twice, with one value: sorting it out would take longer.
            seen = np.concatenate((output, np.asarray(requests[row].prompt_token_ids, dtype=np.int64)))
            repeated.add(row, seen, np.full(len(seen), params.repetition_penalty))
        if params.presence_penalty or params.frequency_penalty:
            counted.add(row, output, params.presence_penalty + params.frequency_penalty * counts)
    if repeated.rows:
        index, penalty = repeated.index(logits), repeated.values(logits)
        values = logits[index]
        logits[index] = torch.where(values > 0, values / penalty, values * penalty)
    if counted.rows:
        index = counted.index(logits)
        logits[index] = logits[index] - counted.values(logits)
