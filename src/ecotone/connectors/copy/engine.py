"""What a copy engine is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch


class Direction(Enum):
    """Which way the bytes go, seen from the encoder cache."""

    SAVE = "save"
    LOAD = "load"


@dataclass(eq=False, slots=True)
class CopyJob:
    """One transfer. It keeps its tensors alive until it is done.

    Attributes:
        job_id: unique among the engine's jobs.
        direction: of all its copies.
        copies: (destination, source) pairs, uint8 ``[n]`` each, of equal length. Nobody writes to a source, nor
            touches a destination, before the job is done.
    """

    job_id: int
    direction: Direction
    copies: Sequence[tuple[torch.Tensor, torch.Tensor]]

    @property
    def nbytes(self) -> int:
        """Bytes it moves."""
        return sum(source.numel() for _, source in self.copies)


@dataclass(slots=True)
class CopyDone:
    """A job's end: it touches no memory any more. ``error`` is ``None`` when every byte arrived; ``seconds`` is
    the time its copies took."""

    job: CopyJob
    error: str | None
    seconds: float


class CopyEngine(ABC):
    """Carries out jobs. One thread calls it; what it uses inside is its own affair."""

    @abstractmethod
    def submit(self, job: CopyJob) -> None:
        """Start ``job``. Never blocks; what goes wrong is told by ``poll``."""

    @abstractmethod
    def fence(self, job: CopyJob) -> None:
        """What the caller computes from here on (on its current stream, where there is one) comes after the
        job's last byte. The job may have failed: ``poll`` says so, on a CPU at once."""

    @abstractmethod
    def poll(self) -> list[CopyDone]:
        """The jobs that ended since the last call, by their completion event."""

    @abstractmethod
    def close(self) -> None:
        """Returns when no copy touches memory any more. Jobs that had not begun end with an error, which a last
        ``poll`` tells. Idempotent."""


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a contiguous ``tensor`` as uint8 ``[nbytes]``, sharing its memory."""
    return tensor.reshape(-1).view(torch.uint8)
