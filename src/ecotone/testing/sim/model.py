"""What is computed in a simulation: encodings that name their item, epoch and row, and tokens that depend on all
that a rank stored for them."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from ecotone.node.exchange import Layout
from ecotone.node.keys import Namespace
from ecotone.protocol.connector import EncoderSpec
from ecotone.protocol.step import MultiModalItem
from ecotone.testing.sim.plan import Plan, RequestPlan

SPEC = EncoderSpec(hidden_size=4, levels=0, dtype="int32")
PLACEHOLDER = 1
VOCAB = 50
_LACKING = -1


class Encoding:
    """The only right bytes of one item under one weights epoch."""

    def __init__(self, key: str, item: int, epoch: int, num_rows: int) -> None:
        self.key = key
        self.item = item
        self.epoch = epoch
        self.num_rows = num_rows

    @property
    def layout(self) -> Layout:
        """As the node knows it."""
        return Layout(SPEC.dtype, (self.num_rows, SPEC.width))

    @cached_property
    def rows(self) -> Tensor:
        """int32 ``[num_rows, width]``: item, epoch, row, and a mark."""
        return torch.tensor(
            [[self.item + 1, self.epoch + 1, row + 1, 0x5A5A] for row in range(self.num_rows)]
        ).int()

    @cached_property
    def data(self) -> bytes:
        """The bytes of ``rows``."""
        return self.rows.numpy().tobytes()

    def __str__(self) -> str:
        return f"item {self.item} of epoch {self.epoch}"


class Library:
    """Every encoding of a plan, by key."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._namespaces: list[Namespace] = []
        self._by_number: dict[tuple[int, int], Encoding] = {}
        self._by_key: dict[str, Encoding] = {}

    def namespace(self, epoch: int) -> Namespace:
        """Of the weights after ``epoch`` updates."""
        while len(self._namespaces) <= epoch:
            number = len(self._namespaces)
            self._namespaces.append(
                Namespace(model="sim", revision="", dtype=SPEC.dtype, width=SPEC.width, processor="", epoch=number)
            )
        return self._namespaces[epoch]

    def encoding(self, item: int, epoch: int) -> Encoding:
        """What the encoder makes of ``item``."""
        found = self._by_number.get((item, epoch))
        if found is None:
            key = self.namespace(epoch).key(str(item))
            found = Encoding(key, item, epoch, self._plan.items[item])
            self._by_number[item, epoch] = self._by_key[key] = found
        return found

    def of_key(self, key: str) -> Encoding:
        """The encoding that ``key`` names."""
        return self._by_key[key]

    def is_broken(self, item: int) -> bool:
        """Whether no encoder can encode it."""
        return item in self._plan.broken


def prompt_of(request: RequestPlan, rows: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[MultiModalItem, ...]]:
    """Prompt token ids and items of ``request``; ``rows`` of each item."""
    tokens: list[int] = []
    items = []
    for part in request.parts:
        if part >= 0:
            tokens.append(part)
            continue
        number = -1 - part
        items.append(
            MultiModalItem(modality="image", item_id=str(number), offset=len(tokens), num_rows=rows[number])
        )
        tokens += [PLACEHOLDER] * rows[number]
    return tuple(tokens), tuple(items)


def row_value(item: int, row: int) -> int:
    """What a rank stores for a placeholder: the same under every weights epoch, since keys and values outlive a
    reset of the encoder cache."""
    return 1000 + 100 * item + row


def describe(data: bytes) -> str:
    """What encoding ``data`` is of, row by row."""
    numbers = np.frombuffer(data[: len(data) // 16 * 16], np.int32).reshape(-1, SPEC.width)
    found = [
        f"item {item - 1} epoch {epoch - 1} row {row - 1}" if mark == 0x5A5A else "no encoding"
        for item, epoch, row, mark in numbers.tolist()
    ]
    return "[" + ", ".join(found) + "]"


def next_token(values: Iterable[int | None]) -> int:
    """Depends on every value. (Hashes of tuples of integers are the same in every process.)"""
    return hash(tuple(_LACKING if value is None else value for value in values)) % VOCAB


def expected_tokens(tokens: tuple[int, ...], items: tuple[MultiModalItem, ...], max_tokens: int) -> list[int]:
    """What a request of these prompt ``tokens`` is answered, whatever happens on the way."""
    values = list(tokens)
    for item in items:
        for row in range(item.num_rows):
            values[item.offset + row] = row_value(int(item.item_id), row)
    output: list[int] = []
    while len(output) < max_tokens:
        output.append(next_token(values))
        values.append(output[-1])
    return output
