"""From hidden states to one vector per prompt, over chunked prefill."""

from __future__ import annotations

import torch
from torch import Tensor

from ecotone.errors import ContractError
from ecotone.protocol.params import PoolingParams


class Pooler:
    """Pools prompts that are computed in chunks.

    The sum behind a mean is kept by the token position it reaches, and the one a chunk started from stays until
    the next chunk: a chunk that is ordered again starts from the same sum, and counts once.
    """

    def __init__(self) -> None:
        self._sums: dict[str, dict[int, Tensor]] = {}

    def pool(
        self, req_id: str, params: PoolingParams, start: int, hidden_states: Tensor, *, last_chunk: bool
    ) -> Tensor | None:
        """Take in ``hidden_states`` ``[n, hidden]`` of the tokens from ``start`` on.

        Returns the pooled vector, float32 ``[hidden]``, with the last chunk; ``None`` before.

        Raises:
            ContractError: the tokens before ``start`` were never seen.
        """
        if params.pooling == "mean":
            vector = self._mean(req_id, start, hidden_states)
        else:
            vector = hidden_states[-1].double()
        if not last_chunk:
            return None
        if params.normalize:
            vector = torch.nn.functional.normalize(vector, dim=0)
        return vector.float()

    def forget(self, req_id: str) -> None:
        """``req_id`` ended, or starts anew."""
        self._sums.pop(req_id, None)

    def _mean(self, req_id: str, start: int, hidden_states: Tensor) -> Tensor:
        sums = self._sums.get(req_id, {}) if start else {0: hidden_states.new_zeros((), dtype=torch.float64)}
        if start not in sums:
            raise ContractError(f"request {req_id}: a chunk starts at token {start}, which no chunk has reached")
        end = start + len(hidden_states)
        total = sums[start] + hidden_states.double().sum(dim=0)
        self._sums[req_id] = {start: sums[start], end: total}
        return total / end
