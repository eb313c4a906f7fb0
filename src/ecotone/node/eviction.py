"""Which entry goes first when memory is short."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush, heapreplace
from itertools import count
from types import MappingProxyType

from ecotone.errors import ConfigError

# What an encoding is taken to cost where nobody said: a vision tower on a GPU fills roughly half a gigabyte a
# second. Only comparisons with stated costs depend on it.
SECONDS_PER_BYTE = 2e-9


class Candidate:
    """What a policy knows of an entry. Compared by identity.

    Attributes:
        nbytes: memory it takes, at least 1.
        cost_s: seconds it takes to compute it again.
        uses: how often it was written or hit.
        evictable: whether it may go now; the policy keeps this and what follows.
        before, after: its neighbours while it is in a policy that keeps a list.
        priority, queued: its place, and whether it has one, in a policy that keeps a heap.
    """

    __slots__ = ("after", "before", "cost_s", "evictable", "nbytes", "priority", "queued", "uses")

    before: Candidate
    after: Candidate

    def __init__(self, nbytes: int, cost_s: float | None) -> None:
        self.nbytes = nbytes
        self.cost_s = nbytes * SECONDS_PER_BYTE if cost_s is None else cost_s
        self.uses = 1
        self.evictable = False
        self.priority = 0.0
        self.queued = False


class EvictionPolicy(ABC):
    """An order among the entries that may go: those that are READY and not pinned."""

    @abstractmethod
    def add(self, candidate: Candidate) -> None:
        """It may go from now on. Called when it was written, and whenever its last pin fell."""

    @abstractmethod
    def remove(self, candidate: Candidate) -> None:
        """It may not go any more: it was pinned, evicted or forgotten."""

    @abstractmethod
    def victim(self) -> Candidate:
        """The one to evict next; there is at least one, and the caller evicts it."""

    @abstractmethod
    def candidates(self) -> Iterable[Candidate]:
        """Everything that may go, in no particular order."""


class LRU(EvictionPolicy):
    """The least recently used first. Every operation takes constant time, and none ever pauses to rebuild a table
    of all entries: the candidates themselves are the links of a ring."""

    def __init__(self) -> None:
        # Never a candidate itself: the newest stands before it, the oldest after it.
        self._ring = Candidate(1, 0.0)
        self._ring.before = self._ring.after = self._ring

    def add(self, candidate: Candidate) -> None:
        ring, newest = self._ring, self._ring.before
        candidate.before, candidate.after = newest, ring
        newest.after = ring.before = candidate
        candidate.evictable = True

    def remove(self, candidate: Candidate) -> None:
        candidate.before.after = candidate.after
        candidate.after.before = candidate.before
        del candidate.before, candidate.after  # it keeps nobody alive
        candidate.evictable = False

    def victim(self) -> Candidate:
        return self._ring.after

    def candidates(self) -> Iterable[Candidate]:
        candidate = self._ring.after
        while candidate is not self._ring:
            yield candidate
            candidate = candidate.after


class GreedyDualSizeFrequency(EvictionPolicy):
    """Evicts where the least computing time per byte is lost, with ageing.

    L. Cherkasova, "Improving WWW Proxies Performance with Greedy-Dual-Size-Frequency Caching Policy", HP
    Laboratories technical report HPL-98-69R1, 1998: priority = clock + uses * cost / size, where the clock is the
    priority of the latest victim, so that what was popular long ago goes in the end.

    An entry's priority only grows. So a hit costs nothing but a multiplication: the entry keeps its place in the
    heap, and is moved to where it belongs when it comes up. O(log n), amortised.
    """

    def __init__(self) -> None:
        self._clock = 0.0
        self._heap: list[tuple[float, int, Candidate]] = []
        self._ticks = count()
        self._evictable = 0

    def add(self, candidate: Candidate) -> None:
        candidate.priority = self._clock + candidate.uses * candidate.cost_s / candidate.nbytes
        candidate.evictable = True
        self._evictable += 1
        if not candidate.queued:
            candidate.queued = True
            # Equal priorities go in the order they came.
            heappush(self._heap, (candidate.priority, next(self._ticks), candidate))

    def remove(self, candidate: Candidate) -> None:
        candidate.evictable = False
        self._evictable -= 1
        if len(self._heap) > 2 * self._evictable + 64:
            self._purge()

    def victim(self) -> Candidate:
        while True:
            priority, _, candidate = self._heap[0]
            if not candidate.evictable:
                heappop(self._heap)
                candidate.queued = False
            elif candidate.priority > priority:
                heapreplace(self._heap, (candidate.priority, next(self._ticks), candidate))
            else:
                self._clock = priority
                return candidate

    def candidates(self) -> Iterable[Candidate]:
        return (candidate for _, _, candidate in self._heap if candidate.evictable)

    def _purge(self) -> None:
        """Most of the heap is pinned or gone: take it out, so that it keeps nothing alive."""
        for _, _, candidate in self._heap:
            candidate.queued = candidate.evictable
        self._heap = [item for item in self._heap if item[2].evictable]
        heapify(self._heap)


EVICTION_POLICIES: MappingProxyType[str, Callable[[], EvictionPolicy]] = MappingProxyType(
    {"lru": LRU, "gdsf": GreedyDualSizeFrequency}
)


def make_policy(name: str) -> EvictionPolicy:
    """A new policy by its name.

    Raises:
        ConfigError: no such policy; the message lists them.
    """
    if name not in EVICTION_POLICIES:
        raise ConfigError(f"eviction policy {name!r} is not one of {', '.join(sorted(EVICTION_POLICIES))}")
    return EVICTION_POLICIES[name]()
