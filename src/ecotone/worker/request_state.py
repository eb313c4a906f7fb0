"""What a rank remembers of a request: what it was announced with, and what follows from that alone."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ecotone.errors import ContractError
from ecotone.protocol.step import MultiModalItem, NewRequestData, ScheduledRequest
from ecotone.worker.model import Model


class RequestState:
    """Immutable after it is built. Everything that changes comes with each step's ``ScheduledRequest``."""

    def __init__(self, data: NewRequestData, model: Model) -> None:
        """Raises:
        ContractError: an item has more or fewer placeholders in its span of the prompt than rows.
        """
        self.data = data
        positions, self._delta = model.positions(data.prompt_token_ids, data.items)
        self._positions = positions.to(model.device)
        self._block_groups = model.block_groups(data.prompt_token_ids)
        prompt = torch.tensor(data.prompt_token_ids, dtype=torch.int64, device=model.device)
        placeholders = model.placeholder_mask(prompt).nonzero()[:, 0].cpu().numpy()
        self._placeholders = tuple(self._of_item(placeholders, item) for item in data.items)

    @cached_property
    def distinct_prompt_token_ids(self) -> NDArray[Any]:
        """int64, ascending; worked out when a penalty first asks for it."""
        distinct: NDArray[Any] = np.unique(np.array(self.data.prompt_token_ids, dtype=np.int64))
        return distinct

    def _of_item(self, placeholders: NDArray[Any], item: MultiModalItem) -> NDArray[Any]:
        """The prompt positions of ``item``'s rows: they need not be adjacent (some models put text between)."""
        first, last = np.searchsorted(placeholders, (item.offset, item.end))
        own = placeholders[first:last]
        if len(own) != item.num_rows:
            raise ContractError(
                f"request {self.data.req_id}: the item at token {item.offset} has {item.num_rows} encoder rows "
                f"and {len(own)} placeholders within {item.length} tokens"
            )
        return own

    def check(self, scheduled: ScheduledRequest) -> None:
        """Raises:
        ContractError: the step orders what this request does not have.
        """
        known = len(self.data.prompt_token_ids) + len(scheduled.output_token_ids)
        end, num_items = scheduled.num_computed_tokens + scheduled.num_tokens, len(self.data.items)
        rules = (
            ("num_known_tokens", scheduled.num_known_tokens == known),
            ("num_tokens", scheduled.num_tokens >= 1 and end <= known),
            ("item_keys", len(scheduled.item_keys) == num_items),
            ("encode and load", all(0 <= i < num_items for i in (*scheduled.encode, *scheduled.load))),
        )
        for name, holds in rules:
            if not holds:
                raise ContractError(f"request {self.data.req_id}: {name} does not fit the request in {scheduled}")

    def token_ids(self, scheduled: ScheduledRequest) -> tuple[int, ...]:
        """The tokens to compute in this step."""
        prompt, start = self.data.prompt_token_ids, scheduled.num_computed_tokens
        end, split = start + scheduled.num_tokens, len(prompt)
        return prompt[start:end] + scheduled.output_token_ids[max(start - split, 0) : max(end - split, 0)]

    def positions(self, scheduled: ScheduledRequest) -> Tensor:
        """Their positions ``[R, num_tokens]`` (R = 3 with M-RoPE, 1 without)."""
        start = scheduled.num_computed_tokens
        end, split = start + scheduled.num_tokens, self._positions.shape[1]
        within = self._positions[:, start:end]
        if end <= split:
            return within
        generated = torch.arange(max(start, split), end, device=within.device) + self._delta
        return torch.cat((within, generated.expand(len(within), -1).to(within.dtype)), dim=1)

    def block_groups(self, scheduled: ScheduledRequest) -> Tensor | None:
        """Groups ``[num_computed_tokens + num_tokens]`` of tokens that see each other; ``None``: causal."""
        if self._block_groups is None:
            return None
        missing = scheduled.num_computed_tokens + scheduled.num_tokens - len(self._block_groups)
        return torch.nn.functional.pad(self._block_groups, (0, max(missing, 0)), value=-1)

    def needs(self, scheduled: ScheduledRequest) -> list[int]:
        """The items that this step encodes for the request, or whose rows its tokens take."""
        return [
            index
            for index in range(len(self.data.items))
            if index in scheduled.encode or len(self.rows(index, scheduled)[2])
        ]

    def rows(self, index: int, scheduled: ScheduledRequest) -> tuple[int, int, NDArray[Any]]:
        """Which rows ``[first, last)`` of item ``index`` this step's tokens take, and where in the chunk."""
        start = scheduled.num_computed_tokens
        own = self._placeholders[index]
        first, last = (int(i) for i in np.searchsorted(own, (start, start + scheduled.num_tokens)))
        return first, last, own[first:last] - start
