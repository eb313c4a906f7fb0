"""The scheduler's account of what the ranks' encoder caches hold. The ranks do what it says, and nothing else."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Set

from ecotone.engine.request import Request
from ecotone.errors import ContractError, IntegrityError


class _Entry:
    """One held encoding: its rows, and the occurrences (request id, item index) that still need it."""

    __slots__ = ("num_rows", "references")

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.references: set[tuple[str, int]] = set()


class EncoderCacheManager:
    """Decides what is in every rank's encoder cache, by key, within a capacity in encoder rows.

    An encoding is referenced by occurrence: the same image twice in a request is two references to one entry.
    Without a reference it is freeable: still held, a hit for whoever asks, and the first to go (least recently
    freed) when room is needed. Ranks learn of evictions once per pass, by ``get_freed_keys``; until then whoever
    was given something in the pass keeps its references, since the step's orders stand.
    """

    def __init__(self, cache_size: int) -> None:
        self.cache_size = cache_size
        self.num_evictions = 0
        self._entries: dict[str, _Entry] = {}
        self._freeable: OrderedDict[str, int] = OrderedDict()  # key -> rows
        self._references: dict[str, dict[int, str]] = {}  # request id -> item index -> key
        self._freed: dict[str, None] = {}  # an ordered set: gone from here since the last pass ended
        self._used_rows = 0
        self._freeable_rows = 0

    @property
    def num_used_rows(self) -> int:
        """Rows held, referenced or not."""
        return self._used_rows

    @property
    def num_available_rows(self) -> int:
        """Rows that new references may claim: never held, or held by nobody's reference."""
        return self.cache_size - self._used_rows + self._freeable_rows

    @property
    def has_notices(self) -> bool:
        """Whether ``get_freed_keys`` would name something."""
        return any(key not in self._entries for key in self._freed)

    def is_cached(self, key: str) -> bool:
        """Whether the ranks hold ``key`` (or will, once this pass's orders are carried out)."""
        return key in self._entries

    def rows_to_claim(self, key: str, num_rows: int) -> int:
        """What referencing ``key`` takes from ``num_available_rows``: nothing if it is referenced already."""
        entry = self._entries.get(key)
        return 0 if entry is not None and entry.references else num_rows

    def get_cached_input_ids(self, request: Request) -> Set[int]:
        """Indices of the items of ``request`` that it holds references for."""
        return frozenset(self._references.get(request.req_id, ()))

    def owners(self) -> Set[str]:
        """Ids of the requests that hold references."""
        return self._references.keys()

    def check_and_update_cache(self, request: Request, index: int) -> bool:
        """Reference item ``index`` of ``request`` if the ranks hold it; whether they do."""
        entry = self._entries.get(request.item_keys[index])
        if entry is None:
            return False
        self._refer(request, index, entry)
        return True

    def allocate(self, request: Request, index: int) -> None:
        """Reference item ``index`` of ``request``, which this step encodes or loads; evicts what must go for it.

        Raises:
            ContractError: no room even after evicting everything freeable (the caller asked nobody whether it
                fits), or the key is held with another number of rows.
        """
        key, num_rows = request.item_keys[index], request.items[index].num_rows
        entry = self._entries.get(key)
        if entry is None:
            if num_rows > self.num_available_rows:
                raise ContractError(
                    f"{num_rows} encoder rows allocated where {self.num_available_rows} are available"
                )
            while self._used_rows + num_rows > self.cache_size:
                self._forget(next(iter(self._freeable)))
                self.num_evictions += 1
            entry = self._entries[key] = _Entry(num_rows)
            self._used_rows += num_rows
            self._freeable[key] = num_rows
            self._freeable_rows += num_rows
        self._refer(request, index, entry)

    def free_encoder_input(self, request: Request, index: int) -> None:
        """Give back the reference of item ``index``; the last one makes the encoding freeable. Idempotent."""
        references = self._references.get(request.req_id, {})
        key = references.pop(index, None)
        if key is None:
            return
        if not references:
            del self._references[request.req_id]
        entry = self._entries[key]
        entry.references.remove((request.req_id, index))
        if not entry.references:
            self._freeable[key] = entry.num_rows
            self._freeable_rows += entry.num_rows

    def free(self, request: Request) -> None:
        """Give back every reference of ``request``. Idempotent."""
        for index in sorted(self.get_cached_input_ids(request)):
            self.free_encoder_input(request, index)

    def drop(self, key: str) -> None:
        """The ranks do not hold ``key`` after all, or not all of them: forget it, whoever references it."""
        entry = self._entries.get(key)
        if entry is None:
            return
        for req_id, index in entry.references:
            del self._references[req_id][index]
            if not self._references[req_id]:
                del self._references[req_id]
        if entry.references:
            entry.references.clear()
            self._freeable[key] = entry.num_rows
            self._freeable_rows += entry.num_rows
        self._forget(key)

    def reset(self) -> None:
        """Forget everything; the next ``get_freed_keys`` names it."""
        for key in list(self._entries):
            self.drop(key)

    def get_freed_keys(self) -> tuple[str, ...]:
        """End the pass: the keys that ranks drop now.

        A key that was evicted and allocated again within the pass is not among them: the notice would remove
        the new encoding.
        """
        freed = tuple(key for key in self._freed if key not in self._entries)
        self._freed.clear()
        return freed

    def check_integrity(self) -> None:
        """Compare the books with each other.

        Raises:
            IntegrityError: naming what does not add up.
        """
        by_entry = {(*ref, key) for key, entry in self._entries.items() for ref in entry.references}
        by_request = {(req, i, key) for req, refs in self._references.items() for i, key in refs.items()}
        idle = {key: entry.num_rows for key, entry in self._entries.items() if not entry.references}
        checks = {
            "references by entry and by request differ": by_entry == by_request,
            "freeable is not what nobody references": dict(self._freeable) == idle,
            "freeable rows are miscounted": self._freeable_rows == sum(idle.values()),
            "used rows are miscounted": self._used_rows == sum(e.num_rows for e in self._entries.values()),
            "more rows are held than there are": 0 <= self._used_rows <= self.cache_size,
            "a request without references is remembered": all(self._references.values()),
        }
        for message, holds in checks.items():
            if not holds:
                raise IntegrityError(f"encoder cache manager: {message}")

    def _refer(self, request: Request, index: int, entry: _Entry) -> None:
        key, num_rows = request.item_keys[index], request.items[index].num_rows
        if num_rows != entry.num_rows:
            raise ContractError(f"key {key} names {entry.num_rows} encoder rows and {num_rows} encoder rows")
        entry.references.add((request.req_id, index))
        self._references.setdefault(request.req_id, {})[index] = key
        if self._freeable.pop(key, None) is not None:
            self._freeable_rows -= num_rows

    def _forget(self, key: str) -> None:
        rows = self._freeable.pop(key)
        self._freeable_rows -= rows
        self._used_rows -= rows
        del self._entries[key]
        self._freed[key] = None
