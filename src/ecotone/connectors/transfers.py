"""The barrier: a transfer is settled when every rank that takes part in it has reported, by identity.

::

    save   WRITING --every rank SAVED-----------------> Commit
           WRITING --every rank settled, one FAILED---> Abort    (until then a rank may still be writing)
    load   READING --every rank RELEASED or FAILED----> Release  (and Forget, at the first FAILED)

Reports are facts, not events: one that is repeated, late, of an unknown transfer or of a rank that takes no
part changes nothing. The node may hear the same facts from the ranks themselves; what it settled first is dropped
here without a word to it, whatever was reported so far.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import count

from ecotone.connectors.messages import Report, ReportKind
from ecotone.connectors.shares import share_of_rows
from ecotone.node.exchange import Abort, AnyOp, Commit, Forget, Release


class _Save:
    """A dispatched save: the node's ticket, and the ranks that may still be writing."""

    def __init__(self, ticket_id: int, writing: set[int]) -> None:
        self.ticket_id = ticket_id
        self.writing = writing
        self.failed = False


class _Load:
    """A dispatched load: the node's pin, the ranks it has not reached, and those that may still be reading."""

    def __init__(self, key: str, pin_id: int, ranks: Iterable[int]) -> None:
        self.key = key
        self.pin_id = pin_id
        self.under_way = set(ranks)
        self.reading = set(ranks)
        self.failed = False


class Transfers:
    """Every transfer that is dispatched and not settled. Takes reports, returns what the node must hear.

    Args:
        ranks: who takes part, in order.
        next_seq: numbers the operations it returns.
    """

    def __init__(self, ranks: tuple[int, ...], next_seq: Callable[[], int]) -> None:
        self._ranks = ranks
        self._next_seq = next_seq
        self._next_id = count(1).__next__
        self._saves: dict[int, _Save] = {}
        self._loads: dict[int, _Load] = {}
        self._by_claim: dict[int, int] = {}  # the node's ticket or pin -> transfer id
        self._under_way = 0  # loads that have not reached every rank

    def dispatch_save(self, ticket_id: int, num_rows: int) -> int:
        """The id of a new save, awaited from every rank that has rows to write."""
        writing = {rank for rank in self._ranks if share_of_rows(num_rows, self._ranks, rank)}
        transfer_id = self._next_id()
        self._saves[transfer_id] = _Save(ticket_id, writing)
        self._by_claim[ticket_id] = transfer_id
        return transfer_id

    def dispatch_load(self, key: str, pin_id: int) -> int:
        """The id of a new load, awaited from every rank."""
        transfer_id = self._next_id()
        self._loads[transfer_id] = _Load(key, pin_id, self._ranks)
        self._by_claim[pin_id] = transfer_id
        self._under_way += 1
        return transfer_id

    @property
    def unfinished(self) -> bool:
        """Whether a save is being written or a load has not arrived everywhere. Views that are merely held do
        not count: nobody knows when they end."""
        return bool(self._saves) or self._under_way > 0

    def gauges(self) -> dict[str, float]:
        """Transfers by state."""
        return {"saves_in_flight": len(self._saves), "pins_held": len(self._loads)}

    def apply(self, report: Report) -> list[AnyOp]:
        """Take in one fact; what the node must hear now."""
        save, load = self._saves.get(report.transfer_id), self._loads.get(report.transfer_id)
        if save is not None and report.kind in (ReportKind.SAVED, ReportKind.SAVE_FAILED):
            return self._apply_to_save(save, report)
        if load is not None and report.kind in (ReportKind.LOADED, ReportKind.LOAD_FAILED, ReportKind.RELEASED):
            return self._apply_to_load(load, report)
        return []

    def drop(self, claim: int) -> int | None:
        """The node settled this ticket or pin itself: nothing about its transfer is awaited any more. The id of
        the transfer; ``None`` where there is none under way."""
        transfer_id = self._by_claim.pop(claim, None)
        if transfer_id is None:
            return None
        self._saves.pop(transfer_id, None)
        load = self._loads.pop(transfer_id, None)
        if load is not None:
            self._under_way -= bool(load.under_way)
        return transfer_id

    def _apply_to_save(self, save: _Save, report: Report) -> list[AnyOp]:
        if report.rank not in save.writing:
            return []
        save.writing.discard(report.rank)
        save.failed |= report.kind is ReportKind.SAVE_FAILED
        if save.writing:
            return []
        del self._saves[report.transfer_id], self._by_claim[save.ticket_id]
        end = Abort if save.failed else Commit
        return [end(self._next_seq(), save.ticket_id)]

    def _apply_to_load(self, load: _Load, report: Report) -> list[AnyOp]:
        ops: list[AnyOp] = []
        if report.rank in load.under_way:
            load.under_way.discard(report.rank)
            self._under_way -= not load.under_way
        if report.kind is ReportKind.LOADED or report.rank not in load.reading:
            return ops
        load.reading.discard(report.rank)
        if report.kind is ReportKind.LOAD_FAILED and not load.failed:
            load.failed = True
            ops.append(Forget(self._next_seq(), load.key))
        if not load.reading:
            del self._loads[report.transfer_id], self._by_claim[load.pin_id]
            ops.append(Release(self._next_seq(), load.pin_id))
        return ops
