"""What the kit knows of the saves of one engine, whatever the connector believes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from ecotone.testing.kit.report import ViolationError


class Ledger:
    """Who saved what when, and what of it the scheduler half can have heard.

    A step of the engine is named by its number. A rank's report that was built in step n can say of a save in
    step m only if n >= m.

    Args:
        checks: counts, by rule, what was checked.
    """

    def __init__(self, ranks: int, checks: Counter[str]) -> None:
        self.checks = checks
        self.step = 0
        self.heard = dict.fromkeys(range(ranks), 0)  # rank -> newest step of whose report the scheduler half heard
        self.carried: set[str] = set()  # stored by an earlier start of the engine
        self._saves: dict[str, dict[int, int]] = {}  # key -> rank -> step of its first save
        self._forgotten: set[str] = set()

    def saved(self, rank: int, key: str) -> None:
        """The worker half of ``rank`` was given ``key`` to save."""
        self._saves.setdefault(key, {}).setdefault(rank, self.step)

    def failed(self, keys: Iterable[str]) -> None:
        """The scheduler half hears that loads of ``keys`` failed."""
        for key in keys:
            self._saves.pop(key, None)
            self.carried.discard(key)
            self._forgotten.add(key)

    def settled(self) -> set[str]:
        """Keys that every rank saved, and of whose saves the scheduler half can have heard."""
        return {key for key, by_rank in self._saves.items() if self._unheard(by_rank) is None}

    def unsettled(self) -> list[tuple[str, int]]:
        """Keys that every rank saved, each with a rank of which the scheduler half has not heard since."""
        found = ((key, self._unheard(by_rank)) for key, by_rank in self._saves.items())
        return [(key, rank) for key, rank in found if rank is not None]

    def check_ready(self, key: str, name: str, *, reports_decide: bool) -> None:
        """The connector says READY of ``key``.

        Raises:
            ViolationError: it cannot be.
        """
        if key in self.carried:
            return
        by_rank = self._saves.get(key, {})
        if key in self._forgotten:
            self.check("failed-loads-are-forgotten")
            if not by_rank:
                raise ViolationError(
                    "failed-loads-are-forgotten",
                    f"{name!r} is READY: a load of it failed, and nobody saved it since",
                )
        if not reports_decide:
            return
        self.check("ready-after-every-report")
        for rank, heard in self.heard.items():
            if rank not in by_rank:
                raise ViolationError("ready-after-every-report", f"{name!r} is READY: rank {rank} never saved it")
            if heard < by_rank[rank]:
                raise ViolationError(
                    "ready-after-every-report",
                    f"{name!r} is READY: rank {rank} began to save it in step {by_rank[rank]}, and no report that "
                    "it made in or after that step has arrived",
                )

    def check(self, rule: str) -> None:
        """Something could have broken ``rule``."""
        self.checks[rule] += 1

    def _unheard(self, by_rank: dict[int, int]) -> int | None:
        for rank, heard in self.heard.items():
            if rank not in by_rank or heard < by_rank[rank]:
                return rank
        return None
