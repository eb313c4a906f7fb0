"""Connectors with one defect each, of kinds that were seen in the field, and the rule that each must break."""

from __future__ import annotations

from collections import Counter
from typing import ClassVar

import msgspec
import torch
from kit_subjects import file_connector

from ecotone.protocol.connector import CacheLookup
from ecotone.protocol.outputs import ECConnectorStats, ECConnectorWorkerMetadata, RankStats
from ecotone.protocol.wire import register

Ended, Orders, subject = file_connector.Ended, file_connector.Orders, file_connector.subject
FileConnectorFactory = file_connector.FileConnectorFactory
FileScheduler, FileWorker = file_connector.FileScheduler, file_connector.FileWorker


def mutant(scheduler=FileScheduler, worker=FileWorker, base=subject, **capabilities):
    """The file connector with another half."""

    class Factory(FileConnectorFactory):
        def scheduler_half(self, context):
            return scheduler(context)

        def worker_half(self, context):
            half = super().worker_half(context)
            return worker(context, half._directory)

    can = msgspec.structs.replace(base.capabilities, **capabilities)
    return msgspec.structs.replace(base, factory=Factory(), capabilities=can)


class CountsReports(FileScheduler):
    """Counts reports instead of keeping the set of ranks."""

    def __init__(self, context):
        super().__init__(context)
        self._count = Counter()

    def update_connector_output(self, output):
        report = output.ec_connector_worker_meta
        for number, _, there in report.saves if isinstance(report, Ended) else ():
            self._count[number] += 1
            if there and self._count[number] >= len(self._ranks) and number in self._saving:
                self._missing[number] = set()
        super().update_connector_output(output)


class ReadyWhenOrdered(FileScheduler):
    """Announces what it ordered to be saved."""

    def lookup(self, req_id, item):
        return CacheLookup.READY if item.key in self._saving.values() else super().lookup(req_id, item)


class FirstReportDecides(FileScheduler):
    """Takes the first rank's word for all."""

    def __init__(self, context):
        super().__init__(context)
        self._ranks = frozenset([min(self._ranks)])


class OldReportsCount(FileScheduler):
    """Goes by the key: a report of an earlier save of it counts for a later one."""

    def __init__(self, context):
        super().__init__(context)
        self._keys = {}

    def update_connector_output(self, output):
        self._keys.update(self._saving)
        report = output.ec_connector_worker_meta
        if isinstance(report, Ended):
            latest = {key: number for number, key in self._saving.items()}
            renamed = {(latest.get(self._keys.get(n), n), rank, there) for n, rank, there in report.saves}
            output = msgspec.structs.replace(output, ec_connector_worker_meta=Ended(frozenset(renamed)))
        super().update_connector_output(output)


class RemembersFailedLoads(FileScheduler):
    """Goes on promising what it could not deliver."""

    def update_connector_output(self, output):
        super().update_connector_output(msgspec.structs.replace(output, failed_loads=frozenset()))


class WaitsForEver(FileScheduler):
    """PENDING until the report comes."""

    def lookup(self, req_id, item):
        return CacheLookup.PENDING if item.key in self._saving.values() else super().lookup(req_id, item)


class SleepsTooEarly(FileScheduler):
    def has_pending_work(self):
        return False


class NeverSleeps(FileScheduler):
    def has_pending_work(self):
        return True


class KeepsOldWeights(FileScheduler):
    def reset_cache(self, namespace):
        pass


class LateReportOfOldWeights(FileScheduler):
    """Forgets what is stored of the old weights, and not what is being saved."""

    def reset_cache(self, namespace):
        self._stored = {key for key in self._stored if not key.startswith(namespace)}


class Fickle(FileScheduler):
    def __init__(self, context):
        super().__init__(context)
        self._asked = 0

    def lookup(self, req_id, item):
        self._asked += 1
        return CacheLookup.PENDING if self._asked % 7 == 0 else super().lookup(req_id, item)


class StoresNothing(FileScheduler):
    def lookup(self, req_id, item):
        return CacheLookup.MISS


class ConsumerAnnounces(FileScheduler):
    """Takes what a consumer encoded for stored."""

    def update_state_after_alloc(self, req_id, item):
        super().update_state_after_alloc(req_id, item)
        if not self.is_producer:
            self._stored.add(item.key)


class ShutsDownOnce(FileScheduler):
    closed = False

    def shutdown(self):
        if self.closed:
            raise RuntimeError("closed twice")
        self.closed = True


class ShortKeys(FileWorker):
    """Cuts the key so far that two items share a file."""

    def _path(self, key):
        return super()._path(key[:33])


class LoadsFromTheWrongRow(FileWorker):
    def wait_for_loads(self, encoder_cache):
        super().wait_for_loads(encoder_cache)
        for key in self._orders.loads:
            if key in encoder_cache:
                encoder_cache[key] = encoder_cache[key].roll(1, dims=0)


class LosesBits(FileWorker):
    """Stores at half precision."""

    def save_caches(self, encoder_cache, key):
        super().save_caches({key: encoder_cache[key].half().float()}, key)


class RaisesOnLoad(FileWorker):
    """A file that is gone ends the engine."""

    def wait_for_loads(self, encoder_cache):
        for key in self._orders.loads:
            if not self._path(key).exists():
                raise FileNotFoundError(self._path(key))
        super().wait_for_loads(encoder_cache)


class ReusesItsBuffer(FileWorker):
    """Hands out one buffer for every load."""

    buffer: ClassVar = torch.zeros(64, 24)

    def wait_for_loads(self, encoder_cache):
        for key in self._orders.loads:
            found = {}
            for_one = self._orders
            self._orders = Orders(loads=(key,))
            super().wait_for_loads(found)
            self._orders = for_one
            for name, rows in found.items():
                view = self.buffer[: len(rows)]
                view.copy_(rows)
                encoder_cache[name] = view


class Preloads(FileWorker):
    """Puts back what it saved last, asked or not."""

    last = None

    def save_caches(self, encoder_cache, key):
        super().save_caches(encoder_cache, key)
        if self.last is not None:
            encoder_cache[self.last[0]] = self.last[1]
        self.last = key, encoder_cache[key]


class TakesOut(FileWorker):
    """Frees what it saved."""

    def save_caches(self, encoder_cache, key):
        super().save_caches(encoder_cache, key)
        del encoder_cache[key]


class Undeclared(FileWorker):
    worker_metadata_type = None


class ForgetsFailedSaves(FileWorker):
    """Says nothing of a save whose encode failed."""

    def build_connector_worker_meta(self):
        self._saves = {}
        return super().build_connector_worker_meta()


class FallingCounter(FileWorker):
    def get_ec_connector_stats(self):
        return ECConnectorStats((RankStats(self._rank, 0, {"waiting": float(len(self._orders.loads))}),))


@register
class Concatenates(ECConnectorWorkerMetadata, frozen=True, forbid_unknown_fields=True):
    """A list that is concatenated: folding twice says it twice."""

    numbers: tuple[int, ...] = ()

    def aggregate(self, other):
        return Concatenates(self.numbers + other.numbers)


@register
class KeepsTheLatter(ECConnectorWorkerMetadata, frozen=True, forbid_unknown_fields=True):
    """Which of two reports is heard depends on their order."""

    number: int = 0

    def aggregate(self, other):
        return other


@register
class Averages(ECConnectorWorkerMetadata, frozen=True, forbid_unknown_fields=True):
    number: float = 0.0

    def aggregate(self, other):
        return Averages((self.number + other.number) / 2)


@register
class ByTruth(ECConnectorWorkerMetadata, frozen=True, forbid_unknown_fields=True):
    """Ignores a report that is falsy."""

    numbers: frozenset[int] = frozenset()

    def aggregate(self, other):
        return msgspec.structs.replace(self, numbers=self.numbers | other.numbers) if other else self


@register
class ChangesItself(ECConnectorWorkerMetadata, frozen=True, forbid_unknown_fields=True):
    """Writes into its own container."""

    numbers: set[int] = msgspec.field(default_factory=set)

    def aggregate(self, other):
        self.numbers.update(other.numbers)
        return self


@register
class OtherAll(ECConnectorWorkerMetadata, frozen=True, forbid_unknown_fields=True):
    """Its fast way of joining many forgets the last."""

    numbers: frozenset[int] = frozenset()

    def aggregate(self, other):
        return OtherAll(self.numbers | other.numbers)

    @classmethod
    def aggregate_all(cls, metas):
        return cls(frozenset().union(*(meta.numbers for meta in list(metas)[:-1])))


class HoldsAnything(ECConnectorWorkerMetadata, frozen=True, forbid_unknown_fields=True):
    """Has a field that no receiver could decode."""

    facts: frozenset[int] = frozenset()
    note: object = None

    def aggregate(self, other):
        return HoldsAnything(self.facts | other.facts)


METADATA = {
    Concatenates: "metadata-is-idempotent",
    KeepsTheLatter: "metadata-is-commutative",
    Averages: "metadata-is-associative",
    ByTruth: "metadata-counts-when-falsy",
    ChangesItself: "metadata-is-pure",
    OtherAll: "metadata-aggregates-all",
    HoldsAnything: "metadata-round-trips",
}


class ReportsConcatenation(FileWorker):
    """Reports what is no join."""

    worker_metadata_type = Concatenates

    def build_connector_worker_meta(self):
        super().build_connector_worker_meta()
        return Concatenates((self._rank,))


class SecretOrders(Orders, frozen=True, forbid_unknown_fields=True):
    """Orders that nobody registered."""


class SendsUnregistered(FileScheduler):
    def build_connector_meta(self):
        orders = super().build_connector_meta()
        return None if orders is None else SecretOrders(orders.loads, orders.saves)


SCHEDULERS = {
    CountsReports: ("ready-after-every-report", "one rank reports twice, one late (1)"),
    ReadyWhenOrdered: ("ready-after-every-report", "asked for while it is saved (0)"),
    FirstReportDecides: ("ready-after-every-report", "one rank reports late (1)"),
    OldReportsCount: ("ready-after-every-report", "an old report comes again after the key was saved anew (1)"),
    RemembersFailedLoads: ("failed-loads-are-forgotten", "a load fails (0)"),
    WaitsForEver: ("every-request-ends", "a report never comes (0)"),
    SleepsTooEarly: ("awake-while-pending", "a report comes late (0)"),
    NeverSleeps: ("rests-when-done", "hit (0)"),
    KeepsOldWeights: ("reset-forgets", "weights change (0)"),
    LateReportOfOldWeights: ("reset-forgets", "weights change during a save (0)"),
    Fickle: ("same-answer-within-a-pass", "one is held while another is loaded (0)"),
    StoresNothing: ("saved-is-found", "saved is found (0)"),
    ConsumerAnnounces: ("consumer-stores-nothing", "hit (4)"),
    ShutsDownOnce: ("shutdown-at-any-time", "hit (0)"),
    SendsUnregistered: ("orders-cross-the-wire", "hit (0)"),
}
WORKERS = {
    ShortKeys: ("right-rows", "one is held while another is loaded (0)"),
    LoadsFromTheWrongRow: ("right-rows", "hit (0)"),
    LosesBits: ("right-rows", "one is held while another is loaded (0)"),
    RaisesOnLoad: ("errors-are-reports", "the store loses all (0)"),
    ReusesItsBuffer: ("held-rows-stay", "one is held while another is loaded (0)"),
    Preloads: ("cache-only-what-was-ordered", "weights change (0)"),
    TakesOut: ("cache-only-what-was-ordered", "hit (0)"),
    Undeclared: ("metadata-is-declared", "hit (0)"),
    ForgetsFailedSaves: ("rests-when-done", "encode fails (0)"),
    FallingCounter: ("counters-only-grow", "hit (0)"),
    ReportsConcatenation: ("reports-join", "hit (0)"),
}
CONNECTORS = {
    **{kind.__name__: (mutant(scheduler=kind), *found) for kind, found in SCHEDULERS.items()},
    **{kind.__name__: (mutant(worker=kind), *found) for kind, found in WORKERS.items()},
    "ClaimsZeroCopy": (mutant(zero_copy=True), "loads-share-memory", "loads share memory (0)"),
    "ClaimsToBeDurable": (mutant(durable=True), "found-after-restart", "found after a restart (0)"),
}
"""Name -> the connector, the rule it breaks, and the example in which that shows first."""
