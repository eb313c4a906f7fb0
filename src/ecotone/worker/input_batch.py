"""A step's tokens, packed into one row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from ecotone.protocol.step import ScheduledRequest
from ecotone.worker.attention import Segment
from ecotone.worker.request_state import RequestState


@dataclass(frozen=True, slots=True, eq=False)
class InputBatch:
    """The requests that compute tokens in this step, side by side.

    Attributes:
        requests, states: what is ordered, and of whom.
        starts: where each request's tokens begin in the packed row, and the row's length.
        token_ids: int64 ``[T]``.
        positions: ``[R, T]``.
    """

    requests: tuple[ScheduledRequest, ...]
    states: tuple[RequestState, ...]
    starts: tuple[int, ...]
    token_ids: Tensor
    positions: Tensor

    @classmethod
    def build(
        cls, requests: Sequence[ScheduledRequest], states: Mapping[str, RequestState], device: torch.device
    ) -> InputBatch:
        """The batch of ``requests``, at least one, each with its state."""
        own = tuple(states[r.req_id] for r in requests)
        token_ids = [token for state, r in zip(own, requests, strict=True) for token in state.token_ids(r)]
        return cls(
            requests=tuple(requests),
            states=own,
            starts=tuple(accumulate((r.num_tokens for r in requests), initial=0)),
            token_ids=torch.tensor(token_ids, dtype=torch.int64, device=device),
            positions=torch.cat([s.positions(r) for s, r in zip(own, requests, strict=True)], dim=1),
        )

    @property
    def req_ids(self) -> tuple[str, ...]:
        """In batch order."""
        return tuple(r.req_id for r in self.requests)

    @property
    def segments(self) -> tuple[Segment, ...]:
        """For the attention plan."""
        return tuple(
            Segment(r.block_ids, r.num_computed_tokens, r.num_tokens, state.block_groups(r))
            for r, state in zip(self.requests, self.states, strict=True)
        )

    def finishing(self) -> list[int]:
        """The requests, by index, all of whose known tokens are computed after this step."""
        return [
            index
            for index, r in enumerate(self.requests)
            if r.num_computed_tokens + r.num_tokens == r.num_known_tokens
        ]
