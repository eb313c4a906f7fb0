"""One image becomes one item: the encoder's input tensors, its rows, and the digest that names it."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import Any

import msgspec
import transformers
from PIL import Image

from ecotone.errors import InvalidMediaError
from ecotone.node.keys import options_digest
from ecotone.protocol.arrays import Array
from ecotone.protocol.step import MultiModalItem

# What a processor returns about the text; everything else it returns is the encoder's.
_TEXT_OUTPUTS = frozenset(
    ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "text_replacement_offsets")
)


class Item(msgspec.Struct, frozen=True):
    """A preprocessed image: the item (at offset 0) and the text that stands for it in a prompt."""

    item: MultiModalItem
    replacement: str

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(len(array.data) for array in self.item.inputs.values())


class ItemProcessor:
    """Preprocesses images one by one, and remembers the latest. Not thread-safe.

    ``item_id`` is the SHA-256 of all that the encoder sees (names, dtypes, shapes and bytes of its input tensors)
    and of how it was made (processor classes and options, library version): the same in every process.
    """

    def __init__(self, processor: Any, cache_bytes: int = 64 << 20) -> None:
        self._processor = processor
        self._cache_bytes = cache_bytes
        self._cache: OrderedDict[bytes, Item] = OrderedDict()
        self._used = 0
        self.options = _options(processor)

    def process(self, image: Image.Image) -> Item:
        """The item of an RGB image.

        Raises:
            InvalidMediaError: the model's processor cannot take this image.
        """
        content = hashlib.sha256(msgspec.msgpack.encode((image.size, image.tobytes()))).digest()
        item = self._cache.get(content)
        if item is None:
            item = self._preprocess(image)
            self._remember(content, item)
        self._cache.move_to_end(content)
        return item

    def _remember(self, content: bytes, item: Item) -> None:
        self._cache[content] = item
        self._used += item.nbytes
        while self._used > self._cache_bytes and len(self._cache) > 1:
            self._used -= self._cache.popitem(last=False)[1].nbytes

    def _preprocess(self, image: Image.Image) -> Item:
        token, token_id = self._processor.image_token, self._processor.image_token_id
        try:
            out = self._processor(
                text=[token], images=[image], return_tensors="np", return_text_replacement_offsets=True
            )
        # A rim: processors have their own limits on sizes and shapes, each with its own exception.
        except Exception as error:
            raise InvalidMediaError(
                f"image of {image.width} x {image.height} pixels: the model's processor cannot take it: {error}"
            ) from error
        inputs = {name: Array.from_numpy(out[name]) for name in sorted(out) if name not in _TEXT_OUTPUTS}
        num_rows = int((out["input_ids"] == token_id).sum())
        facts = ("image", self.options, num_rows, list(inputs.items()))
        item_id = hashlib.sha256(msgspec.msgpack.encode(facts)).hexdigest()
        replacement = out["text_replacement_offsets"][0][0]["replacement"]
        return Item(
            MultiModalItem(modality="image", item_id=item_id, offset=0, num_rows=num_rows, inputs=inputs),
            replacement,
        )


def _options(processor: Any) -> str:
    """Digest of everything about the processor that may change what it makes of an image."""
    facts = {
        "transformers": transformers.__version__,
        "processor": type(processor).__name__,
        "image_processor": type(processor.image_processor).__name__,
        "options": processor.to_dict(),
    }
    return options_digest(facts)
