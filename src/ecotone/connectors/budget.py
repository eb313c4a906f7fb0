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
