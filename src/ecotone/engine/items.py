"""One medium becomes one item: the encoder's input tensors, its rows, and the digest that names it."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Collection
from typing import Any

import msgspec
import numpy as np
import transformers

from ecotone.engine.medium import Medium
from ecotone.engine.processors import placeholders
from ecotone.errors import InvalidMediaError
from ecotone.node.keys import options_digest
from ecotone.protocol.arrays import Array
from ecotone.protocol.step import MultiModalItem

# What a processor returns about the text; everything else it returns is the encoder's.
_TEXT_OUTPUTS = frozenset(
    ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "text_replacement_offsets")
)


class Item(msgspec.Struct, frozen=True):
    """A preprocessed medium: the item (at offset 0) and the text that stands for it in a prompt."""

    item: MultiModalItem
    replacement: str

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(len(array.data) for array in self.item.inputs.values())


class ItemProcessor:
    """Preprocesses media one by one, and remembers the latest. Not thread-safe.

    ``item_id`` is the SHA-256 of all that the encoder sees (names, dtypes, shapes and bytes of its input tensors)
    and of how it was made (processor classes and options, library version): the same in every process. What a
    caller may choose, like the frames of a video and their rate, is in it by what it changes.

    Args:
        processor: a Hugging Face processor.
        row_token_ids: of the tokens that stand for one encoder row each.
        cache_bytes: bytes of tensors that are remembered.
    """

    def __init__(self, processor: Any, row_token_ids: Collection[int], cache_bytes: int = 64 << 20) -> None:
        self._processor = processor
        self._tokens = placeholders(processor)
        self._row_token_ids = list(row_token_ids)
        self._cache_bytes = cache_bytes
        self._cache: OrderedDict[bytes, Item] = OrderedDict()
        self._used = 0
        self.options = _options(processor)

    def process(self, medium: Medium) -> Item:
        """The item of ``medium``.

        Raises:
            InvalidMediaError: the model's processor cannot take it.
        """
        item = self._cache.get(medium.content)
        if item is None:
            item = self._preprocess(medium)
            self._remember(medium.content, item)
        self._cache.move_to_end(medium.content)
        return item

    def _remember(self, content: bytes, item: Item) -> None:
        self._cache[content] = item
        self._used += item.nbytes
        while self._used > self._cache_bytes and len(self._cache) > 1:
            self._used -= self._cache.popitem(last=False)[1].nbytes

    def _preprocess(self, medium: Medium) -> Item:
        try:
            out = self._processor(
                text=[self._tokens[medium.modality]],
                **medium.arguments,
                # Video processors know torch tensors only; for the others it makes no difference.
                return_tensors="pt" if medium.modality == "video" else "np",
                return_text_replacement_offsets=True,
            )
        # A rim: processors have their own limits on sizes and shapes, each with its own exception.
        except Exception as error:
            raise InvalidMediaError(f"{medium.name}: the model's processor cannot take it: {error}") from error
        inputs = {
            name: Array.from_numpy(np.asarray(out[name])) for name in sorted(out) if name not in _TEXT_OUTPUTS
        }
        num_rows = int(np.isin(np.asarray(out["input_ids"]), self._row_token_ids).sum())
        if num_rows == 0:
            raise InvalidMediaError(f"{medium.name}: the model's processor makes nothing of it")
        facts = (medium.modality, self.options, num_rows, list(inputs.items()))
        item_id = hashlib.sha256(msgspec.msgpack.encode(facts)).hexdigest()
        replacement = out["text_replacement_offsets"][0][0]["replacement"]
        item = MultiModalItem(
            modality=medium.modality, item_id=item_id, offset=0, num_rows=num_rows, inputs=inputs
        )
        return Item(item, replacement)


def _options(processor: Any) -> str:
    """Digest of everything about the processor that may change what it makes of a medium."""
    facts = {
        "transformers": transformers.__version__,
        "processor": type(processor).__name__,
        "parts": {name: type(getattr(processor, name)).__name__ for name in processor.get_attributes()},
        "options": processor.to_dict(),
    }
    return options_digest(facts)
