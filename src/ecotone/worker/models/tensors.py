"""Wire arrays and torch tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from ecotone.protocol.arrays import Array


def to_tensor(array: Array) -> Tensor:
    """A copy on the CPU (torch tensors are writable, the bytes of an array are not)."""
    tensor = torch.from_numpy(array.to_numpy().copy())
    return tensor.view(torch.bfloat16) if array.dtype == "bfloat16" else tensor


def dtype_name(dtype: torch.dtype) -> str:
    """The name of ``dtype`` in ``ecotone.protocol.arrays.ITEM_SIZES``."""
    return str(dtype).removeprefix("torch.")
