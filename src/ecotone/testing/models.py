"""A model small enough to be a formula, behind the surface of a real one.

Every token's hidden state depends on the embedding, position and encoder row of every token before it, steeply:
one wrong row, position, block or extra level, or a chunk that is counted twice, and the sampled tokens are others.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ecotone.errors import ModelError
from ecotone.protocol.arrays import Array
from ecotone.protocol.connector import EncoderSpec
from ecotone.protocol.model import ModelInfo
from ecotone.protocol.step import MultiModalItem
from ecotone.worker.attention import AttentionPlan
from ecotone.worker.kv_cache import PagedKVCache
from ecotone.worker.models.encode import EncodeFailure
from ecotone.worker.models.tensors import to_tensor

PLACEHOLDER = 1
HIDDEN, LEVELS, VOCAB, PIXELS = 8, 2, 64, 4


class TinyModel:
    """A closed form in float32 on the CPU.

    An item's input is ``pixels``, float32 ``[num_rows, 4]``; values that are not finite fail to encode, and other
    than ``num_rows`` rows of them give an encoding of the wrong shape. All rows of an item share one position, as
    with M-RoPE, so generated tokens have a delta.

    Attributes:
        encoded: item ids, in the order they were encoded.
    """

    def __init__(self, max_model_len: int = 512) -> None:
        weights = torch.Generator().manual_seed(7)
        self.hidden_size = HIDDEN
        self.num_layers = 1
        self.device = torch.device("cpu")
        self.dtype = torch.float32
        self.encoded: list[str] = []
        self._embedding = torch.randn(VOCAB, HIDDEN, generator=weights)
        self._encoder = torch.randn(PIXELS, HIDDEN * (1 + LEVELS), generator=weights)
        self._mix = torch.randn(HIDDEN * (1 + LEVELS), HIDDEN, generator=weights)
        self._frequencies = torch.randn(HIDDEN, generator=weights)
        self._head = torch.randn(HIDDEN, VOCAB, generator=weights)
        self.info = ModelInfo(
            architecture="TinyModel",
            encoder=EncoderSpec(HIDDEN, LEVELS, "float32"),
            vocab_size=VOCAB,
            max_model_len=max_model_len,
            eos_token_ids=(0,),
        )

    def encode(self, items: Sequence[MultiModalItem]) -> list[Tensor | EncodeFailure]:
        """See ``ModelAdapter``."""
        self.encoded += [item.item_id for item in items]
        return [self._encode(to_tensor(item.inputs["pixels"])) for item in items]

    def embed_tokens(self, ids: Tensor) -> Tensor:
        """See ``ModelAdapter``."""
        return self._embedding[ids]

    def placeholder_mask(self, ids: Tensor) -> Tensor:
        """See ``ModelAdapter``."""
        return ids == PLACEHOLDER

    def positions(self, prompt_token_ids: Sequence[int], items: Sequence[MultiModalItem]) -> tuple[Tensor, int]:
        """See ``ModelAdapter``. R = 1."""
        steps = torch.ones(len(prompt_token_ids), dtype=torch.int64)
        placeholders = self.placeholder_mask(torch.tensor(prompt_token_ids)).nonzero()[:, 0].tolist()
        for item in items:
            first = placeholders.index(item.offset)
            steps[placeholders[first + 1 : first + item.num_rows]] = 0
        positions = steps.cumsum(0) - 1
        return positions[None], int(positions[-1]) + 1 - len(prompt_token_ids)

    def block_groups(self, prompt_token_ids: Sequence[int]) -> None:  # noqa: ARG002
        """See ``ModelAdapter``. It is causal."""
        return

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
        """See ``ModelAdapter``."""
        levels = embeds.new_zeros(len(embeds), LEVELS * HIDDEN)
        if rows_mask is not None and extra is not None:
            levels[rows_mask] = extra
        values = self._values(torch.cat((embeds, levels), dim=1), positions[0])
        kv.write(0, plan.write_slots, values[None], values[None])
        hidden = []
        for rows in plan.rows:
            _, stored = kv.read(0, rows.slots)
            hidden.append(self._hidden(stored[0])[rows.segment.num_computed :])
        return torch.cat(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """See ``ModelAdapter``."""
        return hidden @ self._head

    def reference(
        self,
        prompt_token_ids: Sequence[int],
        items: Sequence[MultiModalItem],
        output_token_ids: Sequence[int] = (),
    ) -> Tensor:
        """Hidden states ``[L, hidden]`` of a prompt and what was generated after it, without batch, chunk, cache
        or block: what any way of running it must come to."""
        ids = torch.tensor([*prompt_token_ids, *output_token_ids])
        rows = torch.cat((self.embed_tokens(ids), torch.zeros(len(ids), LEVELS * HIDDEN)), dim=1)
        placeholders = self.placeholder_mask(ids).nonzero()[:, 0].tolist()
        for item in items:
            first = placeholders.index(item.offset)
            encoding = self._encode(to_tensor(item.inputs["pixels"]))
            if isinstance(encoding, Tensor):
                rows[placeholders[first : first + item.num_rows]] = encoding
        positions, delta = self.positions(prompt_token_ids, items)
        after = torch.arange(len(prompt_token_ids), len(ids)) + delta
        return self._hidden(self._values(rows, torch.cat((positions[0], after))))

    def _encode(self, pixels: Tensor) -> Tensor | EncodeFailure:
        if not bool(pixels.isfinite().all()):
            return EncodeFailure("its pixels are not finite")
        return torch.sin(pixels @ self._encoder)

    def _values(self, rows: Tensor, positions: Tensor) -> Tensor:
        """What each token contributes, ``[T, hidden]``."""
        return torch.sin(rows @ self._mix + positions[:, None] * self._frequencies)

    def _hidden(self, values: Tensor) -> Tensor:
        """Steep in the sum of all contributions so far; in float64, so that chunks of any size sum up alike."""
        return torch.sin(5 * values.double().cumsum(dim=0)).float()


def load_tiny_model(
    path: str, *, device: torch.device, dtype: torch.dtype | None, max_model_len: int | None = None
) -> TinyModel:
    """A ``ModelLoader``. ``path`` is ``"tiny"``.

    Raises:
        ModelError: any other path, device or dtype.
    """
    if path != "tiny" or device.type != "cpu" or dtype not in (None, torch.float32):
        raise ModelError(
            f"the tiny model is 'tiny', float32 and on the cpu, not {path!r}, {dtype} and on {device}"
        )
    return TinyModel(max_model_len or 512)


def tiny_item(
    item_id: str, offset: int, num_rows: int, *, length: int = 0, pixels: Tensor | None = None
) -> MultiModalItem:
    """An item whose pixels follow from its id, unless they are given."""
    if pixels is None:
        draw = torch.Generator().manual_seed(sum(ord(c) * 31**i for i, c in enumerate(item_id)) % 2**31)
        pixels = torch.randn(num_rows, PIXELS, generator=draw)
    inputs = {"pixels": Array.from_numpy(pixels.numpy())}
    return MultiModalItem(
        modality="image", item_id=item_id, offset=offset, num_rows=num_rows, length=length, inputs=inputs
    )
