"""From hidden states to one vector per prompt, or one per token, over chunked prefill."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ecotone.errors import ContractError
from ecotone.protocol.params import PoolingParams


class Pooler:
    """Pools prompts that are computed in chunks.

    What a prompt has come to so far (the sum behind a mean, or the vectors of its tokens) is kept by the token
    position it reaches, and that from which a chunk started stays until the next chunk: a chunk that is ordered
    again starts from the same, and counts once.
    """

    def __init__(self) -> None:
        self._reached: dict[str, dict[int, Any]] = {}

    def pool(
        self, req_id: str, params: PoolingParams, start: int, hidden_states: Tensor, *, last_chunk: bool
    ) -> Tensor | None:
        """Take in ``hidden_states`` ``[n, hidden]`` of the tokens from ``start`` on.

        Returns the pooled vector, float32 ``[hidden]``, with the last chunk, or ``[tokens, hidden]`` of all the
        prompt's tokens; ``None`` before.

        Raises:
            ContractError: the tokens before ``start`` were never seen.
        """
        pooled: Tensor
        if params.pooling == "mean":
            nothing = hidden_states.new_zeros((), dtype=torch.float64)
            total = self._add(req_id, start, len(hidden_states), nothing, hidden_states.double().sum(dim=0))
            pooled = total / (start + len(hidden_states))
        elif params.pooling == "token":
            # On the CPU, where they are wanted in the end: prompts under way could fill a device with them.
            chunks = self._add(req_id, start, len(hidden_states), (), (hidden_states.float().cpu(),))
            pooled = torch.cat(chunks) if last_chunk else hidden_states
        else:
            pooled = hidden_states[-1].double()
        if not last_chunk:
            return None
        if params.normalize:
            pooled = torch.nn.functional.normalize(pooled, dim=-1)
        return pooled.float()

    def forget(self, req_id: str) -> None:
        """``req_id`` ended. (One that starts anew does so at token 0, from nothing.)"""
        self._reached.pop(req_id, None)

    def _add(self, req_id: str, start: int, num_tokens: int, nothing: Any, chunk: Any) -> Any:
        """What the prompt comes to with ``chunk``; ``nothing`` is what it was at its first token."""
        reached = self._reached.get(req_id, {}) if start else {0: nothing}
        if start not in reached:
            raise ContractError(f"request {req_id}: a chunk starts at token {start}, which no chunk has reached")
        total = reached[start] + chunk
        self._reached[req_id] = {start: reached[start], start + num_tokens: total}
        return total
