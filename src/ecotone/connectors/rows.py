"""Rows of an encoding as a tensor, in the region's own memory or out of it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from ecotone.node.exchange import Layout
from ecotone.protocol.arrays import ITEM_SIZES

TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_SIZES}


def empty_rows(layout: Layout, device: str) -> torch.Tensor:
    """Rows to copy into. Raises ``RuntimeError`` where the device has no memory for them."""
    return torch.empty(layout.shape, dtype=TORCH_DTYPES[layout.dtype], device=device)


def region_bytes(memory: memoryview) -> torch.Tensor:
    """uint8 ``[n]`` over ``memory``, in place; it keeps the mapping alive."""
    if memory.readonly:
        return torch.from_numpy(np.asarray(_Bytes(memory)))
    return torch.frombuffer(memory, dtype=torch.uint8)


def view_rows(memory: memoryview, layout: Layout, on_death: Callable[[int], object], name: int) -> torch.Tensor:
    """Rows over ``memory``, and ``on_death(name)`` called when nothing reads it any more.

    The tensor's storage is the only owner of an object that is made here, and every slice, reshape or numpy view
    of the tensor holds the storage; so the object dies with the last of them, whoever has it. The callback runs at
    once, on whichever thread dropped it and wherever that was: it must not take a lock.
    """
    owner = _WatchedBytes(memory, on_death, name)
    return torch.from_numpy(np.asarray(owner)).view(TORCH_DTYPES[layout.dtype]).view(layout.shape)


class _Bytes:
    """Memory as numpy takes it. It does not say that a read-only one is read-only: torch has no such tensors and
    would warn of it. A write through the tensor still faults, because the pages themselves are read-only."""

    def __init__(self, memory: memoryview) -> None:
        self._array = np.frombuffer(memory, np.uint8)
        interface = self._array.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}


class _WatchedBytes(_Bytes):
    def __init__(self, memory: memoryview, on_death: Callable[[int], object], name: int) -> None:
        super().__init__(memory)
        self._on_death = on_death
        self._name = name

    def __del__(self) -> None:
        self._on_death(self._name)


def mismatch(rows: torch.Tensor, layout: Layout) -> str | None:
    """What keeps ``rows`` from being an entry of this layout; ``None`` when nothing does."""
    if rows.dtype != TORCH_DTYPES[layout.dtype] or tuple(rows.shape) != layout.shape:
        return f"expected {layout.dtype}{list(layout.shape)}, got {rows.dtype}{list(rows.shape)}"
    return None
