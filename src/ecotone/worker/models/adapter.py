"""One interface over transformers' multimodal models, cut where a serving engine needs it cut.

encode -> rows per item; embed_tokens -> embeddings the rows are put into; forward -> hidden states over the paged
KV cache; logits. What differs between families is found out once, from signatures and attributes.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ecotone.errors import UnsupportedModelError
from ecotone.protocol.connector import EncoderSpec
from ecotone.protocol.model import ModelInfo
from ecotone.protocol.step import MultiModalItem
from ecotone.worker.attention import ATTENTION_NAME, AttentionPlan, packed_attention
from ecotone.worker.kv_cache import PagedKVCache
from ecotone.worker.models.encode import EncodeFailure, Encoder
from ecotone.worker.models.refusal import obstacle
from ecotone.worker.models.tensors import dtype_name, to_tensor

# transformers' numbers for kinds of tokens (``mm_token_type_ids``); 0 is text.
MODALITY_CODES = {"image": 1, "video": 2, "audio": 3}


class ModelAdapter:
    """A loaded model on one device.

    Not bound to a thread: calls share no state besides the weights (a ``PagedKVCache`` is the caller's).

    Args:
        model: a transformers ``...ForConditionalGeneration`` in its final dtype, on its device. Its language
            model is switched to packed attention, so it no longer runs by itself; the encoder is left alone.
        max_model_len: longest prompt plus output, tokens.
        eos_token_ids: tokens that end a text.

    Raises:
        UnsupportedModelError: its language model attends in a way that packed attention cannot.
    """

    def __init__(self, model: Any, *, max_model_len: int, eos_token_ids: tuple[int, ...] = ()) -> None:
        # Without gradients on the weights no call records a graph, whatever the caller's thread has set.
        self._model = model.eval().requires_grad_(False)
        self._core = model.base_model
        self._language_model = model.get_decoder()
        self._head = model.get_output_embeddings()
        text_config = model.config.get_text_config()
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self.hidden_size: int = text_config.hidden_size
        self.num_layers: int = text_config.num_hidden_layers
        self._softcap: float | None = getattr(text_config, "final_logit_softcapping", None)
        self._placeholders = {
            code: token_id
            for modality, code in MODALITY_CODES.items()
            if (token_id := getattr(model.config, f"{modality}_token_id", None)) is not None
        }
        self._has_mrope = hasattr(self._core, "get_rope_index")
        self._has_blocks = _sees_images_both_ways(type(model))
        _enable_packed_attention(model, self._language_model)
        spec = EncoderSpec(self.hidden_size, num_levels(model.config), dtype_name(self.dtype))
        self._encoder = Encoder(self._core, spec, self.device, self.dtype)
        self.info = ModelInfo(
            architecture=type(model).__name__,
            encoder=spec,
            vocab_size=text_config.vocab_size,
            max_model_len=max_model_len,
            eos_token_ids=eos_token_ids,
            atomic_items=self._has_blocks,
        )

    def encode(self, items: Sequence[MultiModalItem]) -> list[Tensor | EncodeFailure]:
        """One ``[num_rows, width]`` tensor per item, of the encoder spec's dtype and in storage of its own, or
        the reason why that item has none. Items of the same shapes share an encoder call."""
        return self._encoder.encode(items)

    def embed_tokens(self, ids: Tensor) -> Tensor:
        """Embeddings ``[T, hidden]`` of ``ids`` ``[T]``. Those of placeholders are to be replaced by encoder
        rows: some families' placeholder ids lie outside the table, and get any embedding."""
        ids = ids.to(self.device)
        outside = self.placeholder_mask(ids) & (ids >= self.info.vocab_size)
        embeds: Tensor = self._model.get_input_embeddings()(ids.masked_fill(outside, 0)[None])[0]
        return embeds

    def placeholder_mask(self, ids: Tensor) -> Tensor:
        """Which of ``ids`` ``[T]`` stand for encoder rows: bool ``[T]``."""
        return self._token_types(ids) > 0

    def positions(self, prompt_token_ids: Sequence[int], items: Sequence[MultiModalItem]) -> tuple[Tensor, int]:
        """Rotary positions of a prompt.

        Returns:
            int64 ``[R, L]`` with R = 1, or 3 (time, height, width) for families with M-RoPE; and the delta: the
            token at index i >= L has position i + delta, in all R.
        """
        length = len(prompt_token_ids)
        if not self._has_mrope:
            return torch.arange(length, device=self.device)[None], 0
        ids = torch.tensor(prompt_token_ids, dtype=torch.int64)[None]
        grids = {name: values for name in _GRID_INPUTS if (values := _gather(items, name)) is not None}
        positions, delta = self._core.get_rope_index(ids, mm_token_type_ids=self._token_types(ids), **grids)
        return positions[:, 0].to(self.device), int(delta.item())

    def block_groups(self, prompt_token_ids: Sequence[int]) -> Tensor | None:
        """int64 ``[L]``: which item's tokens see each other both ways, -1 elsewhere; ``None`` where the family
        attends causally. A chunk must not end inside such an item."""
        if not self._has_blocks:
            return None
        inside = self.placeholder_mask(torch.tensor(prompt_token_ids, dtype=torch.int64))
        starts = inside & ~torch.nn.functional.pad(inside, (1, 0))[:-1]
        return torch.where(inside, starts.cumsum(0) - 1, -1).to(self.device)

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
        """Run the language model over a step; its keys and values are stored in ``kv``.

        Args:
            embeds: ``[T, hidden]``, encoder rows (their first ``hidden`` columns) already in their places.
            positions: int64 ``[R, T]``.
            plan: what each of the T tokens is part of.
            rows_mask: bool ``[T]``: which tokens are encoder rows. Needed with ``extra`` only.
            extra: ``[rows_mask.sum(), levels * hidden]``: the rows' further columns, for families with levels.

        Returns:
            The last hidden states ``[T, hidden]``.
        """
        arguments: dict[str, Any] = {}
        if rows_mask is not None and extra is not None and len(extra):
            arguments["visual_pos_masks"] = rows_mask[None]
            arguments["deepstack_visual_embeds"] = list(torch.split(extra, self.hidden_size, dim=1))
        with packed_attention(plan, kv):
            output = self._language_model(
                inputs_embeds=embeds[None],
                position_ids=positions[:, None] if self._has_mrope else positions,
                use_cache=False,
                **arguments,
            )
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 ``[N, vocab]`` from hidden states ``[N, hidden]``."""
        logits: Tensor = self._head(hidden).float()
        return logits if self._softcap is None else torch.tanh(logits / self._softcap) * self._softcap

    def _token_types(self, ids: Tensor) -> Tensor:
        types = torch.zeros_like(ids)
        for code, token_id in self._placeholders.items():
            types = types.masked_fill(ids == token_id, code)
        return types


# What get_rope_index wants to know about items, all of a prompt put together.
_GRID_INPUTS = ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")


def _gather(items: Sequence[MultiModalItem], name: str) -> Tensor | None:
    values = [to_tensor(item.inputs[name]) for item in items if name in item.inputs]
    return torch.cat(values) if values else None


def num_levels(config: Any) -> int:
    """Extra levels of rows that a model of this transformers configuration has."""
    vision = getattr(config, "vision_config", None)
    return len(getattr(vision, "deepstack_visual_indexes", None) or ())


def _sees_images_both_ways(kind: type) -> bool:
    """A class whose mask function asks for token types gives images attention in both directions."""
    function = getattr(kind, "create_masks_for_generate", None)
    if function is None:
        return False
    parameters = inspect.signature(function).parameters
    return "token_type_ids" in parameters or "mm_token_type_ids" in parameters


def _enable_packed_attention(model: Any, language_model: Any) -> None:
    reason = obstacle(language_model.config.to_dict())
    if reason is None and any(name.endswith(".sinks") for name, _ in language_model.named_parameters()):
        reason = "its language model has attention sinks, which packed attention does not"
    if reason is not None:
        raise UnsupportedModelError(f"{type(model).__name__} with {type(language_model).__name__}: {reason}")
    model.set_attn_implementation({"text_config": ATTENTION_NAME})
    if language_model.config._attn_implementation != ATTENTION_NAME:
        raise UnsupportedModelError(f"the attention of {type(language_model).__name__} cannot be replaced")
