"""The ranks that divide tensors among them, and what they do together."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Group(Protocol):
    """``size`` ranks, of which this one is ``rank``. Every method is called by all of them, in the same order."""

    rank: int
    size: int

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum of every rank's ``tensor``, written into it."""
        ...

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Every rank's ``tensor``, by rank. They have the same shape and dtype."""
        ...

    def exchange(self, data: bytes) -> list[bytes]:
        """Every rank's ``data``, by rank."""
        ...


class DistributedGroup:
    """A ``Group`` over a process group that has a backend for this device and one for the CPU."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """See ``Group``."""
        dist.all_reduce(tensor, group=self._group)
        return tensor

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """See ``Group``."""
        # As bytes: a backend need not know every dtype to move it.
        local = tensor.contiguous().view(-1).view(torch.uint8)
        gathered = [torch.empty_like(local) for _ in range(self.size)]
        dist.all_gather(gathered, local, group=self._group)
        return [each.view(tensor.dtype).view(tensor.shape) for each in gathered]

    def exchange(self, data: bytes) -> list[bytes]:
        """See ``Group``. Where nobody has anything to say, it costs one number for each rank."""
        lengths = [int(length) for length in self.all_gather(torch.tensor([len(data)]))]
        if not max(lengths):
            return [b""] * self.size
        padded = torch.frombuffer(bytearray(data.ljust(max(lengths), b"\0")), dtype=torch.uint8)
        texts = self.all_gather(padded)
        return [text.numpy().tobytes()[:length] for text, length in zip(texts, lengths, strict=True)]


def share_of(size: int, ranks: int, rank: int) -> tuple[int, int]:
    """``[first, last)`` of ``size`` rows that ``rank`` of ``ranks`` holds: equal shares, the last ones shorter."""
    each = -(-size // ranks)
    return min(rank * each, size), min((rank + 1) * each, size)
