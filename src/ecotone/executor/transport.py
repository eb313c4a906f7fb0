"""How messages get to ranks outside this process, and how their answers, their signals and their ends get back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias


class Answered(NamedTuple):
    """A rank sent a ``Reply``."""

    rank: int
    message: bytes | memoryview


class Died(NamedTuple):
    """A rank is no more, and why. Every answer it gave came before."""

    rank: int
    cause: str


class Signalled(NamedTuple):
    """Some rank has something to report outside a step."""


class Interrupted(NamedTuple):
    """``Transport.interrupt`` was called."""


Event: TypeAlias = Answered | Died | Signalled | Interrupted


class Transport(ABC):
    """The ranks of one executor. One caller at a time; only ``interrupt`` may come from any thread.

    Attributes:
        init_method: where ``torch.distributed`` lets the ranks find each other.
    """

    init_method: str

    @abstractmethod
    def send_starts(self, messages: Sequence[bytes]) -> None:
        """Send each rank its own first message; each answers."""

    @abstractmethod
    def send(self, message: bytes, reply_rank: int | None) -> None:
        """Send a ``Call`` to every rank that lives. ``reply_rank``: the one that answers, if not all."""

    @abstractmethod
    def wait(self, timeout: float | None) -> list[Event]:
        """What happened since the last call; waits up to ``timeout`` seconds (``None``: for ever) for something to
        happen. May return nothing sooner."""

    @abstractmethod
    def interrupt(self) -> None:
        """Make ``wait`` return, the present call or the next."""

    @abstractmethod
    def close(self, last_message: bytes, grace_s: float) -> None:
        """Send ``last_message`` to every rank, give them ``grace_s`` seconds to end, and then end them. Returns
        when none of them runs any more. Called once."""
