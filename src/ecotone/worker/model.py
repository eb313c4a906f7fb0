"""The model as the runner sees it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ecotone.protocol.model import ModelInfo
from ecotone.protocol.step import MultiModalItem
from ecotone.worker.attention import AttentionPlan
from ecotone.worker.kv_cache import PagedKVCache
from ecotone.worker.models.encode import EncodeFailure


class Model(Protocol):
    """An encoder and a language model on one device. It keeps no state between calls."""

    info: ModelInfo
    hidden_size: int
    num_layers: int
    device: torch.device

    def encode(self, items: Sequence[MultiModalItem]) -> list[Tensor | EncodeFailure]:
        """Rows ``[num_rows, width]`` of each item, or why it has none."""
        ...

    def embed_tokens(self, ids: Tensor) -> Tensor:
        """int64 ``[T]`` -> ``[T, hidden]``; placeholders get any row."""
        ...

    def placeholder_mask(self, ids: Tensor) -> Tensor:
        """int64 ``[T]`` -> bool ``[T]``: which tokens stand for an encoder row."""
        ...

    def positions(self, prompt_token_ids: Sequence[int], items: Sequence[MultiModalItem]) -> tuple[Tensor, int]:
        """Positions ``[R, L]`` of a prompt, and what to add to the index of a generated token to get its own."""
        ...

    def block_groups(self, prompt_token_ids: Sequence[int]) -> Tensor | None:
        """int64 ``[L]``: tokens with the same number of at least 0 see each other both ways; ``None``: causal."""
        ...

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
        """``[T, hidden]`` -> ``[T, hidden]``. ``rows_mask`` bool ``[T]`` marks encoder rows, ``extra``
        ``[n, levels * hidden]`` has their extra levels."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """``[N, hidden]`` -> float32 ``[N, vocab]``."""
        ...


class ModelLoader(Protocol):
    """Loads the checkpoint folder ``path``.

    Args:
        dtype: ``None`` is float32 on a CPU, the checkpoint's elsewhere.
        divide: takes from the model, before it goes to its device, what other ranks hold.

    Raises:
        ModelError: it cannot be loaded.
    """

    def __call__(
        self,
        path: str,
        *,
        device: torch.device,
        dtype: torch.dtype | None,
        max_model_len: int | None = None,
        divide: Callable[[Any], None] | None = None,
    ) -> Model: ...
