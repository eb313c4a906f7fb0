"""The EC connector's two halves, as contracts.

One step, seen from the connector::

    scheduler half                                  worker half (every rank with an encoder)
      lookup(req_id, item) -> READY|PENDING|MISS
      update_state_after_alloc(req_id, item)
      build_connector_meta() -- ECConnectorMetadata -->  bind_connector_metadata(meta)
                                                         start_load_caches(cache)
                                                         wait_for_loads(cache)       before rows are gathered
                                                         save_caches(cache, key)     for each item encoded
                                                         get_finished(finished_req_ids)
                                                         build_connector_worker_meta()
      update_connector_output(folded)  <-- ECConnectorOutput --  get_ec_connector_stats()
                                                         clear_connector_metadata()
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, MutableMapping
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import msgspec

from ecotone.protocol.outputs import (
    ECConnectorOutput,
    ECConnectorStats,
    ECConnectorWorkerMetadata,
)
from ecotone.protocol.polymorphic import MetadataMeta, polymorphic

if TYPE_CHECKING:
    import torch

ECRole = Literal["ec_producer", "ec_consumer", "ec_both"]

# key -> rows [num_rows, width] of the encoder spec's dtype. The rows may be a view of memory that others read
# too: nobody writes to them.
EncoderCache = MutableMapping[str, "torch.Tensor"]


class ECConnectorMetadata(msgspec.Struct, frozen=True, metaclass=MetadataMeta):
    """What a connector's scheduler half orders its worker halves to do in one step. Subclass it frozen."""


if TYPE_CHECKING:
    AnyConnectorMetadata = ECConnectorMetadata
else:
    AnyConnectorMetadata = polymorphic(ECConnectorMetadata)


class EncoderSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The shape of what the encoder produces.

    Attributes:
        hidden_size: width of the rows the language model consumes.
        levels: extra (DeepStack) levels of the same width that travel with each row.
        dtype: element type, a key of ``ITEM_SIZES``.
    """

    hidden_size: int
    levels: int
    dtype: str

    @property
    def width(self) -> int:
        """Elements of one row: the embedding and its extra levels, side by side."""
        return self.hidden_size * (1 + self.levels)


class Participant(msgspec.Struct, frozen=True, order=True, forbid_unknown_fields=True):
    """A rank that takes part in EC transfers: it has an encoder cache and a connector.

    Attributes:
        rank: its global rank.
        host: identifies the machine it runs on.
    """

    rank: int
    host: str


class ECItem(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An item as the connector knows it.

    Attributes:
        key: hex digest, namespace included.
        num_rows: its encoder rows.
        width: elements of a row, where they are not those of the ``EncoderSpec``: a model's modalities may differ.
    """

    key: str
    num_rows: int
    width: int | None = None


class CacheLookup(StrEnum):
    """Where an item stands outside the ranks. "Not yet" and "not at all" are different answers."""

    READY = "ready"  # can be loaded in this pass
    PENDING = "pending"  # not yet: ask again in a later pass
    MISS = "miss"  # not at all: encode it


class ECConnectorContext(msgspec.Struct, frozen=True, kw_only=True):
    """What both halves are built from.

    Attributes:
        engine_id: unique per engine start; both halves of one engine share it.
        role: whether this engine stores encodings, uses stored ones, or both.
        options: the connector's own options as configured; the connector parses them.
    """

    engine_id: str
    role: ECRole
    options: dict[str, Any]


class ECSchedulerContext(ECConnectorContext, frozen=True, kw_only=True):
    """What a scheduler half is built from: who takes part, what an encoding looks like, and the clock (s)."""

    participants: tuple[Participant, ...]
    encoder: EncoderSpec
    clock: Callable[[], float]


class ECWorkerContext(ECConnectorContext, frozen=True, kw_only=True):
    """What a worker half is built from.

    Attributes:
        rank: this rank.
        epoch: distinguishes this start of the rank from earlier ones.
        encoder: what an encoding looks like.
        device: where the encoder cache lives, e.g. ``cpu`` or ``cuda:0`` (always with its index).
        wakeup: to be called, from any thread, when a report became available while no step was running.
    """

    rank: int
    epoch: int
    encoder: EncoderSpec
    device: str
    wakeup: Callable[[], None]


class ECConnectorBase(ABC):
    """What both halves have in common."""

    def __init__(self, context: ECConnectorContext) -> None:
        self.role: ECRole = context.role

    @property
    def is_producer(self) -> bool:
        """Whether this engine stores what it encodes."""
        return self.role in ("ec_producer", "ec_both")

    @property
    def is_consumer(self) -> bool:
        """Whether this engine uses what was stored."""
        return self.role in ("ec_consumer", "ec_both")

    @property
    def is_encode_only(self) -> bool:
        """Whether this engine encodes and stops there: it has no language model work to do."""
        return self.is_producer and not self.is_consumer

    def shutdown(self) -> None:
        """Give everything back. Called once or more, also after a failure."""


class ECSchedulerConnector(ECConnectorBase):
    """The half beside the scheduler. It never blocks."""

    @abstractmethod
    def lookup(self, req_id: str, item: ECItem) -> CacheLookup:
        """Where ``item`` stands, asked when ``req_id`` is about to be scheduled.

        READY holds good until ``build_connector_meta`` ends the pass. Asking again in the same pass gives the
        same answer.
        """

    @abstractmethod
    def update_state_after_alloc(self, req_id: str, item: ECItem) -> None:
        """``item``, answered READY or MISS in this pass, is loaded or encoded in this step.

        Called once per distinct key and step. Whatever was answered and not allocated is given back when the
        pass ends.
        """

    @abstractmethod
    def build_connector_meta(self) -> ECConnectorMetadata | None:
        """End the pass: the orders of this step, or ``None``."""

    def update_connector_output(self, output: ECConnectorOutput) -> None:
        """Take in what all ranks reported, folded. May hear a fact twice, late, or about transfers long gone."""

    def request_finished(self, req_id: str) -> None:
        """``req_id`` ended, in whichever way, and will not be looked up again."""

    def has_pending_work(self) -> bool:
        """Whether steps are still needed although no request is left. True for ever would never let it rest."""
        return False

    def reset_cache(self, namespace: str) -> None:
        """The model's weights changed: no key of this namespace may be found again."""

    def statistics(self) -> dict[str, float]:
        """Counters and gauges by name, all ranks' reports included."""
        return {}

    def rank_statistics(self) -> dict[int, dict[str, float]]:
        """Each rank's own counters, as it last reported them."""
        return {}

    def check_integrity(self) -> None:
        """Compare the books of the memory it owns.

        Raises:
            IntegrityError: naming what does not add up.
        """


class ECWorkerConnector(ECConnectorBase):
    """The half beside one rank's encoder cache."""

    worker_metadata_type: ClassVar[type[ECConnectorWorkerMetadata] | None] = None
    """The concrete type ``build_connector_worker_meta`` returns; ``None`` when it always returns ``None``."""

    @abstractmethod
    def bind_connector_metadata(self, metadata: ECConnectorMetadata) -> None:
        """The orders of the step that begins."""

    @abstractmethod
    def clear_connector_metadata(self) -> None:
        """The step ended."""

    @abstractmethod
    def start_load_caches(self, encoder_cache: EncoderCache) -> None:
        """Start every load the bound orders name. Errors are reports, not exceptions."""

    @abstractmethod
    def wait_for_loads(self, encoder_cache: EncoderCache) -> None:
        """Settle the loads: whatever arrived is in ``encoder_cache`` and may be read by the compute that
        follows; what is not there failed."""

    @abstractmethod
    def save_caches(self, encoder_cache: EncoderCache, key: str) -> None:
        """``encoder_cache[key]`` was just encoded: start its save if one was ordered. Errors are reports."""

    def get_finished(self, finished_req_ids: frozenset[str]) -> tuple[frozenset[str], frozenset[str]]:
        """Requests whose sending, and whose receiving, ended since the last call."""
        return frozenset(), frozenset()

    def build_connector_worker_meta(self) -> ECConnectorWorkerMetadata | None:
        """What happened since the last call, for the scheduler half; ``None`` when nothing did."""
        return None

    def get_ec_connector_stats(self) -> ECConnectorStats | None:
        """This rank's cumulative counters, or ``None``."""
        return None


class ECConnectorFactory(ABC):
    """Builds the two halves of one kind of connector, each where it will live."""

    @abstractmethod
    def validate(self, role: ECRole, options: dict[str, Any]) -> None:
        """Refuse a configuration that cannot work, before anything is started.

        Raises:
            ConfigError: naming the value and what is allowed.
        """

    def check_machine(self, role: ECRole, options: dict[str, Any]) -> None:
        """Refuse what cannot work on this machine as it is now. Called once, where the scheduler half will be, and
        before any rank is started.

        Raises:
            ConfigError, ResourceError: naming what is missing.
        """

    @abstractmethod
    def scheduler_half(self, context: ECSchedulerContext) -> ECSchedulerConnector: ...

    @abstractmethod
    def worker_half(self, context: ECWorkerContext) -> ECWorkerConnector: ...
