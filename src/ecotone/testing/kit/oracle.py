"""Rows that say what they are: each is computed from its item, the epoch of the weights and its own index, so that
a wrong one, a stale one or one out of order is recognised, and named."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256

import torch
from torch import Tensor

from ecotone.protocol.connector import EncoderSpec
from ecotone.protocol.step import MultiModalItem
from ecotone.testing.kit.plan import ITEMS
from ecotone.testing.models import TinyModel
from ecotone.worker.models.encode import EncodeFailure

_NUMBERS = {name: number for number, name in enumerate(ITEMS)}
_MAX_EPOCHS = 32


def rows_for(item_id: str, epoch: int, encoder: EncoderSpec) -> Tensor:
    """float32 ``[num_rows, width]``, exact, and below 2, so that a model computes on them as on others."""
    number, num_rows = _NUMBERS[item_id], ITEMS[item_id]
    index = torch.arange(num_rows, dtype=torch.float64)[:, None]
    column = torch.arange(encoder.width, dtype=torch.float64)[None, :]
    coded = number / 4 + (epoch % _MAX_EPOCHS) / 128 + index / 2**13 + column / 2**18
    return torch.where(column % 2 == 0, coded, -coded).float()


def describe(row: Tensor, encoder: EncoderSpec, last_epoch: int) -> str:
    """Whose row ``row`` is, in words."""
    if not bool(row.any()):
        return "zeros"
    for item_id in ITEMS:
        for epoch in range(last_epoch + 1):
            same = (rows_for(item_id, epoch, encoder) == row).all(dim=1)
            if bool(same.any()):
                return f"row {int(same.nonzero()[0, 0])} of {item_id!r} (weights {epoch})"
    return "no item's row"


class KitModel(TinyModel):
    """The tiny model with such an encoder.

    Attributes:
        epoch: of the weights.
    """

    def __init__(self) -> None:
        super().__init__()
        self.epoch = 0

    def encode(self, items: Sequence[MultiModalItem]) -> list[Tensor | EncodeFailure]:
        """See ``TinyModel``."""
        return [self._rows(item.item_id) for item in items]

    def _rows(self, item_id: str) -> Tensor | EncodeFailure:
        if item_id == "broken":
            return EncodeFailure("it is broken")
        return rows_for(item_id, self.epoch, self.info.encoder)


class Library:
    """The keys of one run, and what belongs under them.

    Attributes:
        epoch: of the weights.
    """

    def __init__(self, run: str, encoder: EncoderSpec) -> None:
        self.epoch = 0
        self._run = run
        self._encoder = encoder
        self._meaning: dict[str, tuple[str, int]] = {}

    def namespace(self, epoch: int) -> str:
        """Of the keys of that epoch."""
        return sha256(f"{self._run}/{epoch}".encode()).hexdigest()[:32]

    def key(self, item_id: str, epoch: int | None = None) -> str:
        """The key of an item, under the present weights unless another epoch is named."""
        at = self.epoch if epoch is None else epoch
        key = f"{self.namespace(at)}:{sha256(item_id.encode()).hexdigest()}"
        self._meaning[key] = item_id, at
        return key

    def name(self, key: str) -> str:
        """What people call the key."""
        item_id, epoch = self._meaning.get(key, (key, self.epoch))
        return item_id if epoch == self.epoch else f"{item_id} (weights {epoch})"

    def item(self, key: str) -> str:
        """The item under the key; the key itself where it is none of this run."""
        return self._meaning.get(key, (key, 0))[0]

    def is_stale(self, key: str) -> bool:
        """Whether the key is of earlier weights."""
        return self._meaning.get(key, ("", self.epoch))[1] != self.epoch

    def stale_keys(self) -> list[str]:
        """All keys of earlier weights."""
        return [key for key in self._meaning if self.is_stale(key)]

    def fault(self, key: str, rows: Tensor) -> str | None:
        """What is wrong with ``rows`` as those under ``key``; ``None`` where nothing is."""
        if key not in self._meaning:
            return f"key {key} is none of this engine's"
        item_id, epoch = self._meaning[key]
        expected = rows_for(item_id, epoch, self._encoder)
        if rows.shape != expected.shape:
            return f"{item_id!r} has shape {list(rows.shape)} instead of {list(expected.shape)}"
        wrong = (rows != expected).any(dim=1)
        if not bool(wrong.any()):
            return None
        index = int(wrong.nonzero()[0, 0])
        found = describe(rows[index], self._encoder, self.epoch)
        return f"under the key of {item_id!r} (weights {epoch}), row {index} is {found}"
