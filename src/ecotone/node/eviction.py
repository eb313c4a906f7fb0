"""Which entry goes first when memory is short."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush
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
    """

    __slots__ = ("cost_s", "nbytes", "uses")

    def __init__(self, nbytes: int, cost_s: float | None) -> None:
        self.nbytes = nbytes
        self.cost_s = nbytes * SECONDS_PER_BYTE if cost_s is None else cost_s
        self.uses = 1


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
    """The least recently used first. Every operation takes constant time."""

    def __init__(self) -> None:
        # Not a plain dict: finding the first key of one passes over all keys deleted before it.
        self._order: OrderedDict[Candidate, None] = OrderedDict()

    def add(self, candidate: Candidate) -> None:
        self._order[candidate] = None

    def remove(self, candidate: Candidate) -> None:
        del self._order[candidate]

    def victim(self) -> Candidate:
        return next(iter(self._order))

    def candidates(self) -> Iterable[Candidate]:
        return self._order.keys()


class GreedyDualSizeFrequency(EvictionPolicy):
    """Evicts where the least computing time per byte is lost, with ageing.

    L. Cherkasova, "Improving WWW Proxies Performance with Greedy-Dual-Size-Frequency Caching Policy", HP
    Laboratories technical report HPL-98-69R1, 1998: priority = clock + uses * cost / size, where the clock is the
    priority of the latest victim, so that what was popular long ago goes in the end.

    A heap in which removed entries stay until they come up or make up half of it: O(log n), amortised.
    """

    def __init__(self) -> None:
        self._clock = 0.0
        self._heap: list[tuple[float, int, Candidate]] = []
        self._ticks = count()
        self._current: dict[Candidate, int] = {}

    def add(self, candidate: Candidate) -> None:
        priority = self._clock + candidate.uses * candidate.cost_s / candidate.nbytes
        tick = next(self._ticks)  # equal priorities go in the order they came
        self._current[candidate] = tick
        heappush(self._heap, (priority, tick, candidate))

    def remove(self, candidate: Candidate) -> None:
        del self._current[candidate]
        if len(self._heap) > 2 * len(self._current) + 64:
            self._heap = [item for item in self._heap if self._current.get(item[2]) == item[1]]
            heapify(self._heap)

    def victim(self) -> Candidate:
        while self._current.get(self._heap[0][2]) != self._heap[0][1]:
            heappop(self._heap)
        self._clock, _, candidate = self._heap[0]
        return candidate

    def candidates(self) -> Iterable[Candidate]:
        return self._current.keys()


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
