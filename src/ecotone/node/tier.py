"""What lies behind the region: where entries are kept that memory has no room for, and after a restart.

Two sides drive a tier. The **index** tells it what becomes of entries, and asks it on a miss (``Tier``); the
**owner** of the region (the embedded node, the node server) lets its results in (``OwnedTier``)::

    index.tier = tier                           # once, before the first operation
    answers = index.apply(client, ops, now)     # as without a tier
    tier.pump(now)                              # after each batch, and after each notify()

Everything here is called by one thread at a time (under the owner's lock, or in its loop), never blocks and does
no I/O, but for what says otherwise. ``notify`` is given to the tier by the owner: the tier calls it from a thread
of its own when results are waiting, and the owner then calls ``pump`` from wherever it may touch the index.

How a tier moves bytes, in terms of the index:

* A **demotion** is a pin: the tier writes an entry out while it is READY (``Index.pin_for_tier``), so that its
  eviction needs no copy and waits for nothing. What is evicted before its turn came is dropped, and counted.
* A **promotion** is a ticket: on a miss of a key that the tier holds, the index makes the tier the entry's writer,
  and the client hears Pending; then Ready, or, where the bytes did not verify, what it would have heard anyhow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from ecotone.node.entry import Entry
from ecotone.node.exchange import Extent, Layout


class Tier(Protocol):
    """What the index tells and asks."""

    def holds(self, key: str, layout: Layout) -> bool:
        """Whether a promotion of this entry is worth a try. What is known to be of another layout is forgotten."""
        ...

    def promote(self, key: str, layout: Layout, transfer_id: int, extents: Sequence[Extent]) -> None:
        """Fill ``extents``; the transfer ends with ``Index.end_promotion``."""
        ...

    def committed(self, entry: Entry) -> None:
        """The entry became READY, by whoever wrote it."""
        ...

    def evicted(self, entry: Entry) -> None:
        """The entry is leaving memory, and nothing but memory."""
        ...

    def forget(self, key: str) -> bool:
        """The entry must not be found any more; whether it was known here."""
        ...

    def forget_all(self, namespace: str) -> bool:
        """No entry of the namespace must be found any more, not after a restart either; whether one was known."""
        ...


class OwnedTier(Tier, Protocol):
    """What the owner of the region does with it."""

    def pump(self, now: float) -> None:
        """Take in what was finished, and order what is next."""
        ...

    def barrier(self) -> int:
        """Names everything that was reset so far."""
        ...

    def is_durable(self, barrier: int) -> bool:
        """Whether what ``barrier`` names would survive a crash now. The answer to a ForgetAll should wait for it,
        for a bounded time; ``notify`` is called when it may have changed."""
        ...

    def wait_durable(self, barrier: int, timeout_s: float) -> bool:
        """Wait for ``is_durable``, at most ``timeout_s`` seconds. The one call that blocks: from any thread, and
        not while holding the owner's lock."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Return when ``pump`` has something to take in, or after so many seconds. Blocks; from any thread."""
        ...

    @property
    def is_adopted(self) -> bool:
        """Whether everything is known that an earlier life left, as far as it can be known now. A key that is not
        known yet is a miss."""
        ...

    @property
    def is_flushed(self) -> bool:
        """Whether everything in memory is written out, as far as it can be."""
        ...

    def statistics(self) -> dict[str, float]:
        """Counters and gauges; safe from any thread that may touch the index."""
        ...

    def check_integrity(self) -> None:
        """Recompute what is kept as a sum or a second view.

        Raises:
            IntegrityError: the first thing that does not add up.
        """
        ...

    def close(self) -> None:
        """End its thread, and unlock what it uses. Blocks for as long as one file takes; not while holding what
        ``notify`` waits for. Idempotent."""
        ...

    def let_go(self, now: float) -> None:
        """After ``close``: end its pins and promotions."""
        ...


def pump_until(
    tier: OwnedTier,
    reached: Callable[[OwnedTier], bool],
    owner: AbstractContextManager[object],
    clock: Callable[[], float],
    timeout_s: float,
) -> bool:
    """Drive ``tier``, under the owner's lock, until ``reached`` or ``timeout_s`` are over; whether it was. Blocks:
    for the start (``is_adopted``) and the orderly end (``is_flushed``)."""
    deadline = clock() + timeout_s
    while True:
        with owner:
            now = clock()
            tier.pump(now)
            if reached(tier):
                return True
        if now >= deadline:
            return False
        tier.wait(deadline - now)
