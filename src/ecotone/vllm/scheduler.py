"""The scheduler's side: answers vLLM's questions about items out of Ecotone's scheduler half.

vLLM asks twice. ``ensure_available``, with the request, may put the request off; ``has_item``, with nothing but an
item's identifier, must be answered at once, and after True there is no way back: an item that is then not loaded
ends the engine. So the first one asks the node, waits a moment for the answers, and puts the request off where
somebody is still writing; the second one repeats what was said, and says True only of what is pinned.

A consumer's request may name an item without bringing it. Such an item can only be loaded: where it is not stored
(any more), the request fails, alone.
"""

from __future__ import annotations

import logging
import socket
import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from ecotone.connectors.messages import EcotoneStepMetadata
from ecotone.connectors.scheduler import EcotoneSchedulerConnector
from ecotone.errors import ContractError
from ecotone.node.keys import Namespace
from ecotone.protocol.connector import CacheLookup, ECItem
from ecotone.vllm.messages import NO_ORDERS, VllmStepMetadata, VllmWorkerMetadata

logger = logging.getLogger(__name__)

PATIENCE_S = 0.002
"""How long the node is waited for with a request: putting it off costs vLLM an empty step, and more time. Once the
node was late in a pass, the rest of the pass does not wait: every request would, for a node that is stopped."""


class Feature(Protocol):
    """vLLM's ``MultiModalFeatureSpec``: an item of a request."""

    modality: str
    identifier: str
    data: Mapping[str, Any] | None
    mm_position: Any


class Request(Protocol):
    """vLLM's ``Request``."""

    request_id: str
    mm_features: list[Feature]


def media_test(metadata_fields: Callable[[str], set[str]]) -> Callable[[Feature], bool]:
    """Whether an item came with more than its size.

    Args:
        metadata_fields: for a modality, the processed fields that tell an item's size and nothing else; empty
            where an item cannot be named without being brought.
    """

    def brings_media(feature: Feature) -> bool:
        fields = metadata_fields(feature.modality)
        return not fields or feature.data is None or not fields.issuperset(feature.data)

    return brings_media


class SchedulerSide:
    """What vLLM's scheduler drives. A pass is questions, allocations, and ``build_orders``.

    Args:
        half: Ecotone's scheduler half.
        namespace: what identifiers are read in.
        widths: elements in a row, by modality. Items of others are not cached.
        reach: how many tokens a pass schedules of one request at most.
        brings_media: whether vLLM could encode this item, or was only told its size.
    """

    def __init__(
        self,
        half: EcotoneSchedulerConnector,
        namespace: Namespace,
        widths: Mapping[str, int],
        reach: int,
        brings_media: Callable[[Feature], bool],
    ) -> None:
        self._half = half
        self._namespace = namespace
        self._widths = widths
        self._reach = reach
        self._brings_media = brings_media
        # Of the namespaces after a weight update. Not the engine's id, which an operator may give to the next one.
        self._life = uuid.uuid4().hex
        self._host = socket.gethostname()
        self._key: Callable[[str], str] = namespace.key
        # What vLLM's own encoder cache holds: it is asked before the connector, so nothing is asked about these.
        self._local: set[str] = set()
        self._unavailable: set[str] = set()  # requests that cannot be served
        # This pass.
        self._names: dict[str, str] = {}  # key -> identifier, of what was asked about
        self._allocated: set[str] = set()
        self._patience_s = PATIENCE_S
        # The request that vLLM schedules just now: it asks and allocates before it comes to the next one.
        self._req_id = ""
        self._wanted: dict[str, ECItem] = {}
        self._bare: set[str] = set()  # of these, those without media
        self._said: dict[str, CacheLookup] = {}

    # -- a scheduling pass ------------------------------------------------------------------------------------

    def ensure_available(self, request: Request, num_computed_tokens: int, *, is_running: bool = False) -> bool:
        """Whether ``request`` may be scheduled now. False while an item that it comes to next is being written,
        and where one is neither stored nor brought by the request, which then cannot be served at all.

        Args:
            is_running: its tokens so far were computed by steps of its own, not found in vLLM's prefix cache.
        """
        self._req_id = request.request_id
        self._bare = set()
        self._wanted = dict(self._ahead(request, num_computed_tokens, is_running))
        self._said = {}
        if not self._wanted:
            return True
        self._ask([name for name in self._wanted if not self._is_held(name)])
        if any(self._said.get(name) is CacheLookup.MISS for name in self._bare):
            self._unavailable.add(request.request_id)
            return False
        return CacheLookup.PENDING not in self._said.values()

    def take_unavailable(self) -> set[str]:
        """The requests, since the last call, that wait for what is not there and what they did not bring."""
        taken, self._unavailable = self._unavailable, set()
        return taken

    def has_item(self, identifier: str) -> bool:
        """Whether the item is loaded (True), or encoded by vLLM (False)."""
        if identifier in self._wanted and identifier not in self._said:
            # vLLM had it, and has made room since the pass began.
            self._ask([identifier])
        return self._said.get(identifier) is CacheLookup.READY

    def allocated(self, identifier: str) -> None:
        """vLLM's encoder cache has room for the item, which is loaded or encoded in this step."""
        self._allocated.add(identifier)
        said = self._said.get(identifier)
        if said is CacheLookup.READY or said is CacheLookup.MISS:
            self._half.update_state_after_alloc(self._req_id, self._wanted[identifier])

    def build_orders(self, evicted: Iterable[str]) -> VllmStepMetadata:
        """End the pass. ``evicted``: what vLLM's encoder cache does not hold any more, by identifier."""
        orders = self._half.build_connector_meta()
        metadata = NO_ORDERS if orders is None else self._named(orders)
        if self._allocated:
            self._local |= self._allocated
            self._allocated.clear()
        # Afterwards: what a request was given that was then preempted may be evicted in the same pass.
        self._local.difference_update(evicted)
        if self._wanted or self._names:
            self._names.clear()
            self._wanted = {}
            self._said = {}
            self._patience_s = PATIENCE_S
        return metadata

    def _ahead(self, request: Request, num_computed_tokens: int, is_running: bool) -> Iterable[tuple[str, ECItem]]:
        """The items whose rows this pass may need, once each."""
        end = num_computed_tokens + self._reach
        seen = set()
        for feature in request.mm_features:
            place = feature.mm_position
            if place.offset >= end:
                break
            width = self._widths.get(feature.modality)
            if place.offset + place.length <= num_computed_tokens or width is None or feature.identifier in seen:
                continue
            num_rows = place.get_num_embeds()
            if num_rows:
                seen.add(feature.identifier)
                # One that the request computed in part is vLLM's until it is computed whole, unless a reset took
                # it. Where the prefix cache had the first part, vLLM needs the rows of the other.
                is_begun = is_running and place.offset < num_computed_tokens
                if not (is_begun and feature.identifier in self._local) and not self._brings_media(feature):
                    self._bare.add(feature.identifier)
                yield feature.identifier, ECItem(self._key(feature.identifier), num_rows, width)

    def _is_held(self, identifier: str) -> bool:
        """Whether vLLM will find it in its own cache. That may still make room for another item of the request:
        one without media could not be had any more then, so it is asked about all the same."""
        return identifier in self._allocated or (identifier in self._local and identifier not in self._bare)

    def _ask(self, identifiers: list[str]) -> None:
        if not identifiers:
            return
        items = [self._wanted[identifier] for identifier in identifiers]
        if not self._half.prepare(items, self._patience_s):
            self._patience_s = 0.0
        for identifier, item in zip(identifiers, items, strict=True):
            self._names[item.key] = identifier
            self._said[identifier] = self._half.lookup(self._req_id, item)

    def _named(self, orders: EcotoneStepMetadata) -> VllmStepMetadata:
        ordered = {order.key for order in (*orders.loads, *orders.saves)}
        return VllmStepMetadata(orders, {key: self._names[key] for key in ordered}, self._host)

    # -- what came of it --------------------------------------------------------------------------------------

    def take_in(self, metadata: VllmWorkerMetadata) -> None:
        """What all ranks reported, folded.

        Raises:
            ContractError: it is another connector's.
        """
        if not isinstance(metadata, VllmWorkerMetadata):
            raise ContractError(f"worker metadata of type {type(metadata).__name__} is not this connector's")
        self._half.update_connector_output(metadata.report)

    def request_finished(self, req_id: str) -> None:
        """``req_id`` ended, in whichever way."""
        self._half.request_finished(req_id)
        self._unavailable.discard(req_id)

    def reset(self) -> None:
        """The weights changed, or somebody says so: nothing stored before is found again."""
        stale = self._namespace
        self._namespace = stale.next_epoch(self._life)
        self._key = self._namespace.key
        self._half.reset_cache(stale.digest)
        self._local.clear()
        self._names.clear()
        self._wanted = {}
        self._said = {}
        logger.info("the encodings of epoch %d are forgotten", stale.epoch)

    def statistics(self) -> dict[str, float]:
        """The scheduler half's own."""
        return self._half.own_statistics()

    def shutdown(self) -> None:
        """Leave the node, and end it where it lives in here. Idempotent."""
        self._half.shutdown()
