"""What the two halves of the Ecotone connector say to each other: orders one way, reports the other."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Self

import msgspec

from ecotone.node.exchange import Extent, Layout
from ecotone.protocol.connector import ECConnectorMetadata
from ecotone.protocol.outputs import ECConnectorWorkerMetadata
from ecotone.protocol.wire import register


class Order(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One transfer between the ranks' encoder caches and the node's region.

    Attributes:
        key: the item's cache key.
        transfer_id: of this dispatch alone; every report about it carries the number.
        layout: dtype and shape ``[num_rows, width]`` of the whole entry.
        extents: in order hold the entry's bytes.
        claim: the node's number of the ticket or pin, for what a rank tells the node itself.
    """

    key: str
    transfer_id: int
    layout: Layout
    extents: tuple[Extent, ...]
    claim: int = 0


@register
class EcotoneStepMetadata(ECConnectorMetadata, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The orders of one step.

    Attributes:
        ranks: who takes part. Every one of them carries out every load; of each save it writes its share of the
            rows (``share_of_rows``).
        loads: from the region into the encoder cache.
        saves: from the encoder cache into the region, once the item was encoded in this step.
    """

    ranks: tuple[int, ...]
    loads: tuple[Order, ...] = ()
    saves: tuple[Order, ...] = ()


class ReportKind(StrEnum):
    """A fact about one transfer on one rank. After every kind but ``LOADED`` the rank no longer touches the
    region's memory for this transfer."""

    SAVED = "saved"  # its share is in the region
    SAVE_FAILED = "save_failed"
    LOADED = "loaded"  # the rows are in its encoder cache
    LOAD_FAILED = "load_failed"
    RELEASED = "released"  # nothing on the rank reads the region for this load any more


class FailureReason(StrEnum):
    """Why a transfer failed on a rank."""

    REGION = "region"  # the region cannot be attached, or the order is not about it
    LAYOUT = "layout"  # the rows do not have the dtype and shape that were ordered
    NOT_ENCODED = "not_encoded"  # the step ended and the item was not encoded
    NOT_LOADED = "not_loaded"  # the step ended before the load had begun
    MEMORY = "memory"  # the device has no room for the rows
    COPY = "copy"  # the copy itself failed
    CLOSED = "closed"  # the connector was shut down


class Report(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """One fact. ``epoch`` tells one start of the rank from the next; ``reason`` is given with a failure."""

    rank: int
    epoch: int
    transfer_id: int
    kind: ReportKind
    reason: FailureReason | None = None


@register
class EcotoneWorkerMetadata(ECConnectorWorkerMetadata, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A set of facts, joined by union."""

    reports: frozenset[Report] = frozenset()

    def aggregate(self, other: Self) -> Self:
        """The union of both."""
        return msgspec.structs.replace(self, reports=self.reports | other.reports)

    @classmethod
    def aggregate_all(cls, metas: Iterable[Self], /) -> Self:
        """The union of any number of reports, in time linear in their facts."""
        return cls(frozenset().union(*(meta.reports for meta in metas)))
