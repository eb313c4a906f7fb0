"""What a copy engine is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

import torch


class Direction(Enum):
    """Which way the bytes go, seen from the encoder cache."""

    SAVE = "save"
    LOAD = "load"


@dataclass(eq=False, slots=True)
class CopyJob:
    """One transfer. It keeps its memory alive until it is done.

    Attributes:
        job_id: unique among the engine's jobs.
        direction: of its copies.
        memory: pieces of the region, in order; writable for a save.
        rows: C-contiguous, with as many bytes as ``memory`` has. Nobody writes to the source of a job, or touches
            its destination, before it is done.
        on_end: called with its error, or ``None``, as soon as the engine knows that it is done, on whichever
            thread that is. It must not take a lock.
    """

    job_id: int
    direction: Direction
    memory: Sequence[memoryview]
    rows: torch.Tensor
    on_end: Callable[[str | None], object] | None = None


@dataclass(slots=True)
class CopyDone:
    """A job's end: it touches no memory any more. ``error`` is ``None`` when every byte arrived; ``seconds`` is
    the time its copies took."""

    job: CopyJob
    error: str | None
    seconds: float


def ended(job: CopyJob, error: str | None, seconds: float) -> CopyDone:
    """The end of ``job``, told to who wants to know at once."""
    if job.on_end is not None:
        job.on_end(error)
    return CopyDone(job, error, seconds)


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
