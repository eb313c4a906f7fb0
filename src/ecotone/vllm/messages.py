"""What the two sides say to each other inside vLLM's own messages.

vLLM pickles them together with the rest of a step; what Ecotone puts in is bytes of its wire format, decoded and
checked as everywhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Self

import msgspec

from ecotone.protocol.connector import AnyConnectorMetadata
from ecotone.protocol.frozen import EMPTY_MAP, frozen_map, set_field
from ecotone.protocol.outputs import ECConnectorOutput
from ecotone.protocol.wire import decode, encode


class VllmStepMetadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The orders of one step, scheduler -> workers.

    Attributes:
        orders: ``None`` where there are none.
        identifiers: what vLLM's encoder cache calls an item, by the key that the orders have for it.
        host: the machine that the scheduler is on; empty where there are no orders.
    """

    orders: AnyConnectorMetadata | None = None
    identifiers: Mapping[str, str] = EMPTY_MAP
    host: str = ""

    def __post_init__(self) -> None:
        set_field(self, "identifiers", frozen_map(self.identifiers))

    def __reduce__(self) -> str | tuple[Callable[[bytes], VllmStepMetadata], tuple[bytes]]:
        # Most steps have none: the name alone takes a fraction of the time.
        return "NO_ORDERS" if self is NO_ORDERS else (_step_metadata, (encode(self),))


NO_ORDERS = VllmStepMetadata()
"""Of every step without orders: vLLM's runners insist on an object."""


class VllmWorkerMetadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A rank's report, or several ranks' joined, workers -> scheduler.

    Attributes:
        report: the connector's metadata and statistics (vLLM's V1 runner takes no statistics from a worker, so
            they travel in here), and nothing else.
    """

    report: ECConnectorOutput

    def aggregate(self, other: Self) -> VllmWorkerMetadata:
        """The join of both. Neither is changed."""
        meta, stats = self.report.ec_connector_worker_meta, self.report.ec_connector_stats
        other_meta, other_stats = other.report.ec_connector_worker_meta, other.report.ec_connector_stats
        if meta is None or other_meta is None:
            meta = other_meta if meta is None else meta
        else:
            meta = meta.aggregate(other_meta)
        if stats is None or other_stats is None:
            stats = other_stats if stats is None else stats
        else:
            stats = stats.aggregate(other_stats)
        return VllmWorkerMetadata(ECConnectorOutput(ec_connector_worker_meta=meta, ec_connector_stats=stats))

    def __reduce__(self) -> tuple[Callable[[bytes], VllmWorkerMetadata], tuple[bytes]]:
        return _worker_metadata, (encode(self),)


def _step_metadata(data: bytes) -> VllmStepMetadata:
    return decode(data, VllmStepMetadata)


def _worker_metadata(data: bytes) -> VllmWorkerMetadata:
    return decode(data, VllmWorkerMetadata)
