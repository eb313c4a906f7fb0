"""The one wire type of arrays: pixel values, logprobs, pooled rows."""

from __future__ import annotations

from math import prod
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ecotone.errors import DecodeError

# Size of one element in bytes. bfloat16 is not a numpy type: its bits travel, and torch interprets them.
ITEM_SIZES = {
    "bool": 1, "uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8,
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8,
}  # fmt: skip


class Array(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A dense, C-contiguous, little-endian array.

    Attributes:
        dtype: a key of ``ITEM_SIZES``.
        shape: lengths of the axes; ``()`` is a scalar.
        data: the elements, exactly ``prod(shape) * ITEM_SIZES[dtype]`` bytes.

    Raises:
        DecodeError: unknown dtype, a negative length, or a size that does not fit the data.
    """

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_SIZES:
            raise DecodeError(f"array dtype {self.dtype!r} is not one of {', '.join(ITEM_SIZES)}")
        if any(n < 0 for n in self.shape):
            raise DecodeError(f"array shape {self.shape} has a negative length")
        need = prod(self.shape) * ITEM_SIZES[self.dtype]
        if need != len(self.data):
            raise DecodeError(f"array {self.dtype}{list(self.shape)} needs {need} bytes, got {len(self.data)}")

    @classmethod
    def from_numpy(cls, array: NDArray[Any]) -> Array:
        """A copy of ``array``, of any numpy dtype listed in ``ITEM_SIZES``."""
        return cls(array.dtype.name, array.shape, np.ascontiguousarray(array).tobytes())

    def to_numpy(self) -> NDArray[Any]:
        """A read-only view of the bytes. bfloat16 comes as its bits, uint16."""
        dtype = "uint16" if self.dtype == "bfloat16" else self.dtype
        return np.frombuffer(self.data, dtype).reshape(self.shape)
