"""The encoder on several ranks. Which items are encoded follows from the step's orders alone, never from what a
rank holds; what came of it, failures included, is the same on all ranks when a call returns.

``weights`` mode: the ranks divide the tower's weights where transformers has a plan for it. It has none for any
supported family, so each rank runs the whole tower on all items, and they tell each other what failed.
``data`` mode: each rank runs the whole tower on its share of the items, and they gather the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from zlib import crc32

import torch
from torch import Tensor

from ecotone.protocol.connector import EncoderSpec
from ecotone.protocol.step import MultiModalItem
from ecotone.protocol.wire import decode, encode
from ecotone.worker.models.encode import EncodeFailure
from ecotone.worker.parallel.group import Group

Encode = Callable[[Sequence[MultiModalItem]], list[Tensor | EncodeFailure]]
_MAX_REASON = 500  # characters


class Tower:
    """What a rank's own encoder did: ``encode_here``, counted."""

    def __init__(self, encode_here: Encode) -> None:
        self._encode_here = encode_here
        self._items = 0
        self._rows = 0

    def __call__(self, items: Sequence[MultiModalItem]) -> list[Tensor | EncodeFailure]:
        """Rows ``[num_rows, width]`` of each item, or why it has none."""
        self._items += len(items)
        self._rows += sum(item.num_rows for item in items)
        return self._encode_here(items)

    def statistics(self) -> dict[str, float]:
        """Items and rows that this rank itself computed. Where ranks divide the images, fewer than it holds."""
        return {"tower_items": self._items, "tower_rows": self._rows}


def divide(items: Sequence[MultiModalItem], ranks: int) -> list[list[int]]:
    """Which items each rank encodes: those of most rows first, each to whoever has the fewest rows. Where several
    have as few, the item's id decides: with an item a step, it is not always the same rank's."""
    loads = [0] * ranks
    shares: list[list[int]] = [[] for _ in range(ranks)]
    counts = [item.num_rows for item in items]
    for index in sorted(range(len(items)), key=lambda i: (-counts[i], i)):
        idlest = [rank for rank in range(ranks) if loads[rank] == min(loads)]
        rank = idlest[crc32(items[index].item_id.encode()) % len(idlest)]
        loads[rank] += counts[index]
        shares[rank].append(index)
    return shares


class ReplicatedEncoder:
    """Every rank encodes every item; an item that failed on one rank failed."""

    def __init__(self, encode_here: Encode, group: Group) -> None:
        self._encode_here = encode_here
        self._group = group

    def __call__(self, items: Sequence[MultiModalItem]) -> list[Tensor | EncodeFailure]:
        """Rows ``[num_rows, width]`` of each item, or why it has none."""
        results = _guarded(self._encode_here, items)
        failures = _agree(results, range(len(items)), self._group)
        return [failures.get(index, result) for index, result in enumerate(results)]


class DividedEncoder:
    """Each rank encodes its share of the items, and gets the others' rows.

    Args:
        spec: of the rows.
        device: where they are wanted.
    """

    def __init__(self, encode_here: Encode, group: Group, spec: EncoderSpec, device: torch.device) -> None:
        self._encode_here = encode_here
        self._group = group
        self._spec = spec
        self._device = device

    def __call__(self, items: Sequence[MultiModalItem]) -> list[Tensor | EncodeFailure]:
        """Rows ``[num_rows, width]`` of each item in storage of its own, or why it has none."""
        shares = divide(items, self._group.size)
        own = shares[self._group.rank]
        results = _guarded(self._encode_here, [items[i] for i in own])
        failures = _agree(results, own, self._group)
        gathered: dict[int, Tensor | EncodeFailure] = dict(zip(own, results, strict=True))
        for rank, flat in enumerate(self._gather(results, shares, items)):
            position = 0
            for index in shares[rank]:
                end = position + items[index].num_rows
                gathered.setdefault(index, flat[position:end].clone())
                position = end
        return [failures.get(index, gathered[index]) for index in range(len(items))]

    def _gather(
        self, results: Sequence[Tensor | EncodeFailure], shares: list[list[int]], items: Sequence[MultiModalItem]
    ) -> list[Tensor]:
        """By rank, the rows of its items one below the other; those of an item that failed are any."""
        loads = [sum(items[index].num_rows for index in share) for share in shares]
        dtype = getattr(torch, self._spec.dtype)
        flat = torch.zeros(max(loads), self._spec.width, dtype=dtype, device=self._device)
        position = 0
        for index, rows in zip(shares[self._group.rank], results, strict=True):
            end = position + items[index].num_rows
            if isinstance(rows, Tensor):
                flat[position:end] = rows
            position = end
        return self._group.all_gather(flat)


def _guarded(encode_here: Encode, items: Sequence[MultiModalItem]) -> list[Tensor | EncodeFailure]:
    try:
        return encode_here(items) if items else []
    # A rim: the others wait for this rank's answer, and whatever kept it from having one is the answer.
    except Exception as error:  # noqa: BLE001
        return [EncodeFailure(f"the encoder failed: {type(error).__name__}: {error}")] * len(items)


def _agree(
    results: Sequence[Tensor | EncodeFailure], indices: Sequence[int], group: Group
) -> dict[int, EncodeFailure]:
    """Item -> its failure, if it failed on any rank; the first rank's reason counts."""
    own = {
        index: f"on rank {group.rank}: {result.reason[:_MAX_REASON]}"
        for index, result in zip(indices, results, strict=True)
        if isinstance(result, EncodeFailure)
    }
    failures: dict[int, EncodeFailure] = {}
    for told in group.exchange(encode(own) if own else b""):
        for index, reason in (decode(told, dict[int, str]) if told else {}).items():
            failures.setdefault(index, EncodeFailure(reason))
    return failures
