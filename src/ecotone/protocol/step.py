"""What the scheduler orders for one step. One message for every rank."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from ecotone.config import Positive
from ecotone.errors import ContractError
from ecotone.protocol.arrays import Array
from ecotone.protocol.connector import AnyConnectorMetadata
from ecotone.protocol.frozen import EMPTY_MAP, freeze, frozen_map, set_field
from ecotone.protocol.outputs import NonNegative
from ecotone.protocol.params import PoolingParams, SamplingParams


class MultiModalItem(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One image (video, clip) of a request, preprocessed.

    Attributes:
        modality: ``image``, ``video`` or ``audio``.
        item_id: digest of the content and of every processor option that changes the encoder's input (hex).
        offset: index of its first placeholder in the prompt.
        num_rows: encoder rows it has; as many placeholders it fills.
        length: prompt tokens from its first placeholder to its last. More than ``num_rows`` where a family writes
            other tokens between them (tiles, frames); left at 0, it becomes ``num_rows``.
        inputs: the processor's tensors of this item alone, by the encoder's argument names.

    Raises:
        ContractError: a ``length`` below ``num_rows``.
    """

    modality: str
    item_id: str
    offset: NonNegative
    num_rows: Positive
    length: NonNegative = 0
    inputs: Mapping[str, Array] = EMPTY_MAP

    def __post_init__(self) -> None:
        set_field(self, "inputs", frozen_map(self.inputs))
        if self.length == 0:
            set_field(self, "length", self.num_rows)
        elif self.length < self.num_rows:
            raise ContractError(f"an item of {self.num_rows} encoder rows within {self.length} tokens")

    @property
    def end(self) -> int:
        """Index after its last placeholder."""
        return self.offset + self.length


class NewRequestData(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A request a rank sees for the first time, or again after it was preempted.

    Attributes:
        req_id: unique among the requests in flight.
        prompt_token_ids: the prompt, placeholders expanded to one per encoder row.
        items: in prompt order.
        item_keys: parallel to ``items``: the keys under which the encoder cache holds them.
        params: what is asked of the output.
        seed: of the random numbers of this request; meaningless for pooling.

    Raises:
        ContractError: not one key for each item.
    """

    req_id: str
    prompt_token_ids: tuple[int, ...]
    items: tuple[MultiModalItem, ...] = ()
    item_keys: tuple[str, ...] = ()
    params: SamplingParams | PoolingParams
    seed: int = 0

    def __post_init__(self) -> None:
        freeze(self, tuple, "prompt_token_ids", "items", "item_keys")
        if len(self.items) != len(self.item_keys):
            raise ContractError(f"request {self.req_id}: {len(self.item_keys)} keys for {len(self.items)} items")


class ScheduledRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One request's share of a step. It says all of the request's changing state: ranks remember none of it,
    so a step whose result was discarded is simply ordered again.

    Attributes:
        req_id: of a request that was announced in this step's or an earlier ``new_requests``.
        num_computed_tokens: tokens whose keys and values are stored before this step.
        num_tokens: tokens to compute in this step, at least 1.
        num_known_tokens: prompt and output tokens known before this step. The step samples a token when
            ``num_computed_tokens + num_tokens == num_known_tokens``.
        output_token_ids: all tokens generated so far (they follow the prompt).
        block_ids: the request's KV blocks, in order, enough for ``num_computed_tokens + num_tokens``.
        item_keys: the request's present keys (they change when the encoder cache is reset).
        encode: indices of items to encode in this step.
        load: indices of items that the EC connector loads in this step.
    """

    req_id: str
    num_computed_tokens: NonNegative
    num_tokens: Positive
    num_known_tokens: Positive
    output_token_ids: tuple[int, ...] = ()
    block_ids: tuple[int, ...] = ()
    item_keys: tuple[str, ...] = ()
    encode: tuple[NonNegative, ...] = ()
    load: tuple[NonNegative, ...] = ()

    def __post_init__(self) -> None:
        freeze(self, tuple, "output_token_ids", "block_ids", "item_keys", "encode", "load")


class SchedulerOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One step.

    Attributes:
        step: number of the step, from 1, never reused.
        new_requests: announced before anything of the step runs.
        scheduled: what runs; an empty tuple is a step without tokens, which still runs the connector.
        finished_req_ids: requests the ranks forget (finished, aborted, preempted).
        free_encoder_keys: keys the ranks drop from their encoder cache before the step's loads and encodes.
        ec_connector_metadata: the EC connector's orders; ``None`` when it has none.
    """

    step: Positive
    new_requests: tuple[NewRequestData, ...] = ()
    scheduled: tuple[ScheduledRequest, ...] = ()
    finished_req_ids: frozenset[str] = frozenset()
    free_encoder_keys: tuple[str, ...] = ()
    ec_connector_metadata: AnyConnectorMetadata | None = None

    def __post_init__(self) -> None:
        freeze(self, tuple, "new_requests", "scheduled", "free_encoder_keys")
        freeze(self, frozenset, "finished_req_ids")

    @property
    def total_num_scheduled_tokens(self) -> int:
        """Tokens computed in this step, over all requests."""
        return sum(r.num_tokens for r in self.scheduled)
