"""What a step and a request may take, and the refusal of requests that could never be scheduled."""

from __future__ import annotations

import msgspec

from ecotone.config import EngineConfig, Positive
from ecotone.engine.request import Request
from ecotone.errors import ConfigError, ItemTooLargeError, PlaceholderError, PromptTooLongError, RequestError
from ecotone.protocol.model import ModelInfo
from ecotone.protocol.params import SamplingParams


class SchedulerLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What there is to share out.

    Attributes:
        max_num_batched_tokens: token budget of a step.
        max_num_seqs: requests that run at the same time.
        max_model_len: longest prompt plus output, tokens.
        block_size: tokens in a KV block.
        kv_blocks: KV blocks there are.
        encoder_cache_rows: capacity of a rank's encoder cache, encoder rows.
        encoder_budget_rows: encoder rows computed in a step.
        atomic_items: a chunk of a prompt must not end within an item.
        max_concurrent_steps: steps in flight at the same time.
    """

    max_num_batched_tokens: Positive
    max_num_seqs: Positive
    max_model_len: Positive
    block_size: Positive
    kv_blocks: Positive
    encoder_cache_rows: Positive
    encoder_budget_rows: Positive
    atomic_items: bool = False
    max_concurrent_steps: Positive = 1

    @classmethod
    def from_config(cls, config: EngineConfig, model: ModelInfo, max_concurrent_steps: int = 1) -> SchedulerLimits:
        """The limits that ``config`` sets for ``model``.

        Raises:
            ConfigError: ``max_model_len`` is above the model's own.
        """
        if config.max_model_len is not None and config.max_model_len > model.max_model_len:
            raise ConfigError(
                f"max_model_len={config.max_model_len}: {model.architecture} has positions for "
                f"{model.max_model_len} tokens; give at most that, or leave it out"
            )
        return cls(
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_seqs=config.max_num_seqs,
            max_model_len=config.max_model_len or model.max_model_len,
            block_size=config.block_size,
            kv_blocks=config.kv_blocks,
            encoder_cache_rows=config.encoder_cache_rows,
            encoder_budget_rows=config.encoder_budget_rows or config.encoder_cache_rows,
            atomic_items=model.atomic_items,
            max_concurrent_steps=max_concurrent_steps,
        )

    @property
    def kv_tokens(self) -> int:
        """Tokens the whole KV store holds."""
        return self.block_size * self.kv_blocks

    @property
    def max_request_tokens(self) -> int:
        """Tokens, prompt and output, at which a request ends: no request outgrows the KV store it runs in."""
        return min(self.max_model_len, self.kv_tokens)

    @property
    def max_item_rows(self) -> int:
        """Rows of the largest item that can be encoded and held."""
        return min(self.encoder_budget_rows, self.encoder_cache_rows)


def check_request(request: Request, limits: SchedulerLimits, *, encode_only: bool) -> None:
    """Refuse a request that could never run, even alone.

    Raises:
        PlaceholderError: items and prompt do not fit each other.
        ItemTooLargeError: an item exceeds the encoder budget, the encoder cache, or a step where it must not be
            cut.
        PromptTooLongError: prompt and one output token exceed the model's length or the KV store.
        RequestError: an empty prompt.
    """
    if not request.prompt_token_ids:
        raise RequestError(f"request {request.req_id!r}: the prompt is empty; it needs at least one token")
    _check_items(request, limits)
    if encode_only:  # no token is computed: no length matters
        return
    _check_lengths(request, limits)
    needed = request.num_prompt_tokens + isinstance(request.params, SamplingParams)
    if needed > limits.max_request_tokens:
        raise PromptTooLongError(
            f"request {request.req_id!r}: a prompt of {request.num_prompt_tokens} tokens needs room for {needed}; "
            f"max_model_len is {limits.max_model_len} and the KV store holds {limits.kv_tokens} tokens"
        )


def _check_items(request: Request, limits: SchedulerLimits) -> None:
    if len(request.items) != len(request.item_keys):
        raise PlaceholderError(
            f"request {request.req_id!r}: {len(request.items)} items with {len(request.item_keys)} keys"
        )
    end = 0
    for index, item in enumerate(request.items):
        if item.num_rows > limits.max_item_rows:
            raise ItemTooLargeError(
                f"request {request.req_id!r}: {item.modality} {index} has {item.num_rows} encoder rows; a step "
                f"encodes at most {limits.encoder_budget_rows}, and the encoder cache holds "
                f"{limits.encoder_cache_rows}"
            )
        if item.num_rows < 1 or item.offset < end or item.end > request.num_prompt_tokens:
            raise PlaceholderError(
                f"request {request.req_id!r}: {item.modality} {index} claims {item.length} positions from "
                f"{item.offset}; allowed are at least 1, from {end} to {request.num_prompt_tokens}"
            )
        end = item.end


def _check_lengths(request: Request, limits: SchedulerLimits) -> None:
    for index, item in enumerate(request.items if limits.atomic_items else ()):
        if item.length > limits.max_num_batched_tokens:
            raise ItemTooLargeError(
                f"request {request.req_id!r}: {item.modality} {index} spans {item.length} tokens, which this "
                f"model must see in one step; max_num_batched_tokens is {limits.max_num_batched_tokens}"
            )
