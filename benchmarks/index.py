"""What the node's index takes per operation, with few entries and with many.

Times include making the messages. Entries are chosen at random, and keys arrive as new strings, as from a client,
so that the processor's caches help only where there are few entries. The goal: at most twice the time with a
hundred times the entries.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from hashlib import sha256
from itertools import count, islice
from time import perf_counter
from typing import Any

from benchmarks.harness import Summary, interleave, ratio
from ecotone.node import Acquire, AnyAnswer, AnyOp, Commit, Index, Layout, Ready, Release, Ticket, make_policy

FEW, MANY = 10_000, 1_000_000
POLICIES = ("lru", "gdsf")
_BATCH = 16  # operations that are handed over together, as of one step
_BATCHES = 128  # of a repetition
_LAYOUT = Layout("uint8", (64,))


class _FullIndex:
    """An index without a free byte: ``entries`` are ready, and a few are being written.

    ``hit``, ``miss`` and ``pending`` each return the seconds of one operation, from one repetition.
    """

    def __init__(self, entries: int, policy: str) -> None:
        self._random = random.Random(1)
        self._new = (f"{0:032x}:{sha256(str(number).encode()).hexdigest()}" for number in count())
        self._index = Index((entries + _BATCH) * _LAYOUT.nbytes, "region", 1, make_policy(policy))
        self._written = self._take_new(1)[0]
        self._index.apply("writer", [Acquire(0, key, _LAYOUT) for key in self._written], 0.0)
        for _ in range(entries // _BATCH):
            self._write(self._take_new(1)[0])

    def hit(self) -> float:
        """Acquire of a ready entry, and its Release."""
        ready = self._random.sample(list(self._index.entries), _BATCHES * _BATCH)
        return _time(self._read, _batches(_fresh(key) for key in ready))

    def miss(self) -> float:
        """Acquire of a new entry that evicts another one, and its Commit."""
        return _time(self._write, self._take_new(_BATCHES))

    def pending(self) -> float:
        """Acquire of an entry that somebody else is writing."""
        return _time(self._ask, [[_fresh(key) for key in self._written] for _ in range(4 * _BATCHES)])

    def _take_new(self, batches: int) -> list[list[str]]:
        return _batches(islice(self._new, batches * _BATCH))

    def _read(self, keys: list[str]) -> None:
        self._apply([Release(a.seq, a.pin_id) for a in self._ask(keys) if isinstance(a, Ready)])

    def _write(self, keys: list[str]) -> None:
        self._apply([Commit(a.seq, a.transfer_id) for a in self._ask(keys) if isinstance(a, Ticket)])

    def _ask(self, keys: list[str]) -> list[AnyAnswer]:
        return self._apply([Acquire(seq, key, _LAYOUT) for seq, key in enumerate(keys)])

    def _apply(self, ops: list[AnyOp]) -> list[AnyAnswer]:
        return self._index.apply("client", ops, 0.0)


def run(quick: bool) -> dict[str, Any]:
    """A row for each operation and policy; ``per_s`` counts what the index is asked, two for a hit and a miss."""
    sizes = (FEW, MANY // 10) if quick else (FEW, MANY)
    return {name: row for policy in POLICIES for name, row in _rows(policy, sizes, 10 if quick else 40)}


def _rows(policy: str, sizes: tuple[int, int], rounds: int) -> list[tuple[str, dict[str, float]]]:
    few, many = (_FullIndex(entries, policy) for entries in sizes)
    rows = []
    for name, asked, tasks in (
        ("hit", 2, (few.hit, many.hit)),
        ("miss", 2, (few.miss, many.miss)),
        ("pending", 1, (few.pending, many.pending)),
    ):
        measured = interleave({"few": tasks[0], "many": tasks[1]}, rounds)
        rows.append((f"{name}, {policy}", _row(measured["few"], measured["many"], sizes, asked)))
    return rows


def _row(few: Summary, many: Summary, sizes: tuple[int, int], asked: int) -> dict[str, float]:
    return {
        f"us_at_{sizes[0]}": round(few.median * 1e6, 2),
        f"us_at_{sizes[1]}": round(many.median * 1e6, 2),
        "ratio": ratio(many, few),
        f"per_s_at_{sizes[0]}": round(asked / few.median),
        f"per_s_at_{sizes[1]}": round(asked / many.median),
    }


def _time(function: Callable[[list[str]], object], work: list[list[str]]) -> float:
    start = perf_counter()
    for keys in work:
        function(keys)
    return (perf_counter() - start) / sum(map(len, work))


def _batches(keys: Iterable[str]) -> list[list[str]]:
    keys = iter(keys)
    return list(iter(lambda: list(islice(keys, _BATCH)), []))


def _fresh(key: str) -> str:
    """An equal string that is not the index's own, and not hashed yet."""
    return (key + ".")[:-1]
