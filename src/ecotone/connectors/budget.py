"""How long a request waits for an encoding that somebody else is writing."""

from __future__ import annotations

from collections import deque

# Before anything was measured.
UNMEASURED_S = 10.0
# Whoever writes it may run on a busier machine, with a longer step; but no longer than this many times what the
# slowest of the latest ones took here, from order to settlement.
FACTOR = 10.0
SHORTEST_S, LONGEST_S = 1.0, 30.0
_KEPT = 32


class PendingBudget:
    """The time after which encoding the item again is the better choice.

    Args:
        fixed_s: what the operator says; ``None`` derives it from what encodings take in this engine.
    """

    def __init__(self, fixed_s: float | None) -> None:
        self._fixed_s = fixed_s
        self._latest: deque[float] = deque(maxlen=_KEPT)

    @property
    def seconds(self) -> float:
        """The present budget."""
        if self._fixed_s is not None:
            return self._fixed_s
        if not self._latest:
            return UNMEASURED_S
        return min(LONGEST_S, max(SHORTEST_S, FACTOR * max(self._latest)))

    def measured(self, seconds: float) -> None:
        """An item was encoded and saved here in this time."""
        self._latest.append(seconds)


class Patience:
    """Each request's waiting for each item: one budget, that its retries do not restart.

    Args:
        fixed_s: see ``PendingBudget``.
    """

    def __init__(self, fixed_s: float | None) -> None:
        self._budget = PendingBudget(fixed_s)
        self._deadlines: dict[str, dict[str, float]] = {}  # req_id -> key -> when waiting ends
        self._began: dict[int, float] = {}  # when the saves in flight were ordered

    @property
    def budget_s(self) -> float:
        """How long a request that begins to wait now would wait, in seconds."""
        return self._budget.seconds

    def is_over(self, req_id: str, key: str, now: float) -> bool:
        """Whether ``req_id`` has waited for ``key`` as long as it may. It waits from the first call on."""
        return now >= self._deadlines.setdefault(req_id, {}).setdefault(key, now + self._budget.seconds)

    def request_finished(self, req_id: str) -> None:
        """It waits for nothing any more."""
        self._deadlines.pop(req_id, None)

    def began(self, transfer_id: int, now: float) -> None:
        """An encode and its save were ordered."""
        self._began[transfer_id] = now

    def ended(self, transfer_id: int, saved_at: float | None) -> None:
        """It ended: saved at this time, or not at all. Nothing comes of one that is unknown or ended before."""
        began = self._began.pop(transfer_id, None)
        if began is not None and saved_at is not None:
            self._budget.measured(saved_at - began)
