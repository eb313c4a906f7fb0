"""The one wire type of arrays: pixel values, logprobs, pooled rows."""

from __future__ import annotations

from math import prod
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ecotone.errors import DecodeError
from ecotone.protocol.frozen import freeze, set_field

# Size of one element in bytes. bfloat16 is not a numpy type: its bits travel, and torch interprets them.
ITEM_SIZES = {
    "bool": 1, "uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8,
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8,
}  # fmt: skip
MAX_AXES = 32  # also bounds the time it takes to multiply lengths that came from elsewhere
MAX_BYTES = 2**62  # of the axes that are not empty: an array of no elements can still name absurd lengths


class Array(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A dense, C-contiguous, little-endian array.

    Attributes:
        dtype: a key of ``ITEM_SIZES``.
        shape: lengths of the axes, at most ``MAX_AXES``; ``()`` is a scalar.
        data: the elements, exactly ``prod(shape) * ITEM_SIZES[dtype]`` bytes.

    Raises:
        DecodeError: unknown dtype, a negative length, too many axes, a size that does not fit the
            data, or a bool that is neither 0 nor 1.
    """

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    def __post_init__(self) -> None:
        freeze(self, tuple, "shape")
        if type(self.data) is not bytes:
            set_field(self, "data", memoryview(self.data).tobytes())
        item_size = ITEM_SIZES.get(self.dtype)
        if item_size is None:
            raise DecodeError(f"array dtype {self.dtype!r} is not one of {', '.join(ITEM_SIZES)}")
        if len(self.shape) > MAX_AXES:
            raise DecodeError(f"array has {len(self.shape)} axes; at most {MAX_AXES} are allowed")
        if any(n < 0 for n in self.shape):
            raise DecodeError(f"array shape {self.shape} has a negative length")
        need = prod(self.shape) * item_size
        if need != len(self.data):
            raise DecodeError(f"array {self.dtype}{list(self.shape)} needs {need} bytes, got {len(self.data)}")
        if self.dtype == "bool" and self.data.translate(None, b"\x00\x01"):
            raise DecodeError("array of bool has bytes other than 0 and 1")
        if not need and prod(n for n in self.shape if n) * item_size > MAX_BYTES:
            raise DecodeError(f"array {self.dtype}{list(self.shape)} has axes beyond {MAX_BYTES} bytes")

    @classmethod
    def from_numpy(cls, array: NDArray[Any]) -> Array:
        """A copy of ``array``, of any numpy dtype listed in ``ITEM_SIZES``, in any byte order.

        Raises:
            DecodeError: another dtype.
        """
        little = array.astype(array.dtype.newbyteorder("<"), order="C", copy=False)
        return cls(array.dtype.name, array.shape, little.tobytes())

    def to_numpy(self) -> NDArray[Any]:
        """A read-only view of the bytes. bfloat16 comes as its bits, uint16."""
        name = "uint16" if self.dtype == "bfloat16" else self.dtype
        return np.frombuffer(self.data, np.dtype(name).newbyteorder("<")).reshape(self.shape)
