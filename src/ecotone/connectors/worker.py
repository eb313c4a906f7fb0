"""The worker half: carries out a step's orders beside one rank's encoder cache, and reports what really happened.

A report is made by a completion event: a copy that ended, the death of a view's storage, a failure. Nothing is
inferred from the number of steps that went by.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from queue import SimpleQueue
from typing import Literal, NamedTuple, Protocol

import torch

from ecotone.connectors.copy.engine import CopyEngine, CopyJob, Direction
from ecotone.connectors.messages import (
    EcotoneStepMetadata,
    EcotoneWorkerMetadata,
    FailureReason,
    Order,
    Report,
    ReportKind,
)
from ecotone.connectors.rows import empty_rows, mismatch, view_rows
from ecotone.connectors.shares import cut, joined, share_of_rows
from ecotone.errors import ConfigError, ContractError, ResourceError
from ecotone.node.exchange import Extent
from ecotone.node.region import Region
from ecotone.node.server.messages import Fact
from ecotone.protocol.connector import ECConnectorMetadata, ECWorkerConnector, ECWorkerContext, EncoderCache
from ecotone.protocol.outputs import ECConnectorStats, RankStats

logger = logging.getLogger(__name__)


class _Access(NamedTuple):
    """The region's memory at the pieces of an order, and who copies there."""

    memory: list[memoryview]
    engine: CopyEngine


class _Arrival(NamedTuple):
    """A load that was begun; without a job it is a view."""

    order: Order
    rows: torch.Tensor
    job: CopyJob | None


class NodeListener(Protocol):
    """Where a worker half tells the node itself; see ``WorkerNode``."""

    def tell(self, fact: Fact) -> None: ...

    def reads_in_place(self, claim: int) -> None: ...

    def close(self) -> None: ...


class EcotoneWorkerConnector(ECWorkerConnector):
    """See the module.

    Args:
        context: rank, what an encoding looks like, where the encoder cache lives.
        views: whether an entry in one piece is read in place.
        one_mapping: whether loads go through the writable mapping too. Otherwise they have a read-only one of
            their own, so that nothing that reads an entry can change it.
        attach: maps the node's region, writable or read-only; called with the first order that needs it, since
            the node may not exist before.
        make_engine: the copy engine, given the first region that was attached.
        node: hears of each copy's end, and of each view's, when it happens; ``None`` where it is enough that the
            scheduler half hears of it with a step's report.
    """

    worker_metadata_type = EcotoneWorkerMetadata

    def __init__(
        self,
        context: ECWorkerContext,
        views: bool,
        one_mapping: bool,
        attach: Callable[[bool], Region],
        make_engine: Callable[[Region], CopyEngine],
        node: NodeListener | None = None,
    ) -> None:
        super().__init__(context)
        self._rank = context.rank
        self._epoch = context.epoch
        self._device = context.device
        self._views = views
        self._one_mapping = one_mapping
        self._attach = attach
        self._make_engine = make_engine
        self._node = node
        self._regions: dict[bool, Region] = {}  # by whether it is writable
        self._engine: CopyEngine | None = None
        self._closed = False

        self._ranks: tuple[int, ...] = ()
        self._loads: dict[str, Order] = {}  # ordered in this step and not begun
        self._saves: dict[str, Order] = {}
        self._arriving: dict[int, _Arrival] = {}  # begun in this step, not in the encoder cache
        self._copying: dict[int, Order] = {}  # by transfer id, until the copy's completion event
        self._reports: set[Report] = set()
        self._dead_views: SimpleQueue[int] = SimpleQueue()  # filled by the death of views, on any thread
        self._counters: dict[str, float] = {}
        self._told_counters: dict[str, float] = {}

    # -- the step ---------------------------------------------------------------------------------------------

    def bind_connector_metadata(self, metadata: ECConnectorMetadata) -> None:
        """See the contract.

        Raises:
            ContractError: the orders are another connector's.
        """
        if not isinstance(metadata, EcotoneStepMetadata):
            raise ContractError(f"orders of type {type(metadata).__name__} are not this connector's")
        self._end_step()
        self._ranks = metadata.ranks
        self._loads = {order.key: order for order in metadata.loads}
        self._saves = {order.key: order for order in metadata.saves}

    def clear_connector_metadata(self) -> None:
        """See the contract. What was ordered and not begun is reported as failed."""
        self._end_step()

    def start_load_caches(self, encoder_cache: EncoderCache) -> None:  # noqa: ARG002 - filled when rows arrived
        """See the contract."""
        orders, self._loads = self._loads, {}
        for order in orders.values():
            self._start_load(order)

    def wait_for_loads(self, encoder_cache: EncoderCache) -> None:
        """See the contract. On a GPU the compute stream waits, not the caller."""
        for arrival in self._arriving.values():
            if arrival.job is not None and self._engine is not None:
                self._engine.fence(arrival.job)
        self._collect_copies()
        arrived, self._arriving = self._arriving, {}
        for order, rows, job in arrived.values():
            encoder_cache[order.key] = rows
            if job is None:
                self._count("views", 1)
                self._count("view_bytes", order.layout.nbytes)
                self._report(order.transfer_id, ReportKind.LOADED)

    def save_caches(self, encoder_cache: EncoderCache, key: str) -> None:
        """See the contract."""
        order = self._saves.pop(key, None)
        if order is None:
            return
        rows = encoder_cache[key]
        fault = mismatch(rows, order.layout)
        if fault is not None:
            self._fail(order, ReportKind.SAVE_FAILED, FailureReason.LAYOUT, fault)
            return
        share = share_of_rows(order.layout.shape[0], self._ranks, self._rank)
        if not share:
            return
        rows = rows.detach()[share.start : share.stop].contiguous()
        row_bytes = rows.nbytes // len(share)
        pieces = cut(joined(order.extents), share.start * row_bytes, share.stop * row_bytes)
        access = self._access(order, pieces, rows.nbytes, ReportKind.SAVE_FAILED)
        if access is not None:
            job = CopyJob(order.transfer_id, Direction.SAVE, access.memory, rows, self._teller(order, save=True))
            self._submit(order, job, access.engine)

    def build_connector_worker_meta(self) -> EcotoneWorkerMetadata | None:
        """See the contract."""
        self._abandon_saves()
        self._collect_copies()
        while not self._dead_views.empty():  # nobody else takes from it
            self._report(self._dead_views.get_nowait(), ReportKind.RELEASED)
        if not self._reports:
            return None
        reports, self._reports = self._reports, set()
        return EcotoneWorkerMetadata(frozenset(reports))

    def get_ec_connector_stats(self) -> ECConnectorStats | None:
        """``saves``, ``loads`` (copies), ``views``, their bytes and seconds, failures by reason; ``None`` when
        nothing changed since the last call."""
        if self._counters == self._told_counters:
            return None
        self._told_counters = self._counters.copy()
        return ECConnectorStats((RankStats(self._rank, self._epoch, self._counters),))

    def shutdown(self) -> None:
        """Returns when no copy touches the region any more. Views that are still read keep their memory."""
        self._closed = True
        self._let_go()
        if self._node is not None:
            self._node.close()

    # -- inside -----------------------------------------------------------------------------------------------

    def _start_load(self, order: Order) -> None:
        access = self._access(order, joined(order.extents), order.layout.nbytes, ReportKind.LOAD_FAILED)
        if access is None:
            return
        if self._views and len(access.memory) == 1:
            rows = view_rows(access.memory[0], order.layout, self._view_watcher(order), order.transfer_id)
            self._arriving[order.transfer_id] = _Arrival(order, rows, None)
            return
        try:
            rows = empty_rows(order.layout, self._device)
        except RuntimeError as failure:
            self._fail(order, ReportKind.LOAD_FAILED, FailureReason.MEMORY, str(failure))
            return
        job = CopyJob(order.transfer_id, Direction.LOAD, access.memory, rows, self._teller(order, save=False))
        self._arriving[order.transfer_id] = _Arrival(order, rows, job)
        self._submit(order, job, access.engine)

    def _access(self, order: Order, pieces: list[Extent], nbytes: int, kind: ReportKind) -> _Access | None:
        """The way to ``pieces`` of the region, ``nbytes`` in all; ``None`` after reporting that there is none."""
        if self._closed:
            self._fail(order, kind, FailureReason.CLOSED, "the connector was shut down")
            return None
        writable = kind is ReportKind.SAVE_FAILED
        try:
            region, engine = self._attached(writable or self._one_mapping, pieces[0])
            memory = [region.view(piece, writable=writable) for piece in pieces]
        except (ResourceError, ConfigError, ContractError, OSError) as failure:
            self._fail(order, kind, FailureReason.REGION, str(failure))
            return None
        if sum(map(len, memory)) != nbytes:
            self._fail(order, kind, FailureReason.REGION, f"{order.extents} do not hold {nbytes} bytes")
            return None
        return _Access(memory, engine)

    def _attached(self, writable: bool, wanted: Extent) -> tuple[Region, CopyEngine]:
        region = self._regions.get(writable)
        if region is not None and region.descriptor.generation != wanted.generation:
            self._let_go()  # the node was restarted: what it hands out now is another region
            region = None
        if region is None:
            region = self._regions[writable] = self._attach(writable)
        if self._engine is None:
            self._engine = self._make_engine(region)
        return region, self._engine

    def _let_go(self) -> None:
        """Leave the regions. Views of them that are still read keep their memory."""
        if self._engine is not None:
            self._engine.close()
            self._collect_copies()
            self._engine = None
        for region in self._regions.values():
            region.close()
        self._regions.clear()

    def _submit(self, order: Order, job: CopyJob, engine: CopyEngine) -> None:
        self._copying[order.transfer_id] = order
        engine.submit(job)

    def _collect_copies(self) -> None:
        if not self._copying or self._engine is None:
            return
        for done in self._engine.poll():
            order = self._copying.pop(done.job.job_id)
            save = done.job.direction is Direction.SAVE
            if done.error is not None:
                self._arriving.pop(order.transfer_id, None)
                kind = ReportKind.SAVE_FAILED if save else ReportKind.LOAD_FAILED
                self._fail(order, kind, FailureReason.COPY, done.error)
                continue
            name = "save" if save else "load"
            self._count(f"{name}s", 1)
            self._count(f"{name}_bytes", done.job.rows.nbytes)
            self._count(f"{name}_seconds", done.seconds)
            kinds = (ReportKind.SAVED,) if save else (ReportKind.LOADED, ReportKind.RELEASED)
            for kind in kinds:
                self._report(order.transfer_id, kind)

    def _end_step(self) -> None:
        for order in self._loads.values():
            self._fail(order, ReportKind.LOAD_FAILED, FailureReason.NOT_LOADED, "the step loaded nothing")
        self._loads = {}
        self._arriving.clear()
        self._abandon_saves()

    def _abandon_saves(self) -> None:
        for order in self._saves.values():
            self._fail(order, ReportKind.SAVE_FAILED, FailureReason.NOT_ENCODED, "the step did not encode it")
        self._saves = {}

    def _report(self, transfer_id: int, kind: ReportKind, reason: FailureReason | None = None) -> None:
        self._reports.add(Report(self._rank, self._epoch, transfer_id, kind, reason))

    def _fail(self, order: Order, kind: ReportKind, reason: FailureReason, detail: str) -> None:
        logger.warning("rank %d: %s of %s (%s): %s", self._rank, kind, order.key, reason, detail)
        self._count(f"{kind}.{reason}", 1)
        if self._node is not None:
            self._node.tell(self._fact(order, "failed" if kind is ReportKind.SAVE_FAILED else "released"))
        self._report(order.transfer_id, kind, reason)

    # -- telling the node itself ------------------------------------------------------------------------------

    def _fact(self, order: Order, kind: Literal["saved", "failed", "released"]) -> Fact:
        ranks = self._ranks
        if kind != "released":
            ranks = tuple(rank for rank in ranks if share_of_rows(order.layout.shape[0], ranks, rank))
        return Fact(order.claim, self._rank, ranks, kind)

    def _teller(self, order: Order, *, save: bool) -> Callable[[str | None], object] | None:
        """Tells the node of a copy's end, on the thread that knows of it first."""
        if self._node is None:
            return None
        tell, failed = self._node.tell, self._fact(order, "failed" if save else "released")
        good = self._fact(order, "saved" if save else "released")
        return lambda error: tell(good if error is None else failed)

    def _view_watcher(self, order: Order) -> Callable[[int], object]:
        """Notes, and tells the node, that a view is dead. A finalizer calls it: it takes no lock."""
        if self._node is None:
            return self._dead_views.put
        self._node.reads_in_place(order.claim)
        tell, fact, note = self._node.tell, self._fact(order, "released"), self._dead_views.put

        def died(transfer_id: int) -> None:
            note(transfer_id)
            tell(fact)

        return died

    def _count(self, name: str, amount: float) -> None:
        self._counters[name] = self._counters.get(name, 0) + amount
