"""Requests, and a model whose answer depends on every position and encoding: its next token is a digest of them.
``expected_output`` gives the text that a request must get whatever happens on the way.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from ecotone.engine.admission import SchedulerLimits
from ecotone.engine.request import Request, RequestStatus
from ecotone.protocol.params import PoolingParams, SamplingParams
from ecotone.protocol.step import MultiModalItem

VOCAB = 50
EOS = 7
PLACEHOLDER = -1
BETWEEN = 8
Value = int | str
ROWS = {"t": 2, "w": 3, "x": 4, "y": 5, "z": 6}


def limits(**changes: int | bool) -> SchedulerLimits:
    values = {
        "max_num_batched_tokens": 64,
        "max_num_seqs": 8,
        "max_model_len": 64,
        "block_size": 4,
        "kv_blocks": 64,
        "encoder_cache_rows": 32,
        "encoder_budget_rows": 32,
    }
    return SchedulerLimits(**{**values, **changes})


def make_request(
    req_id: str,
    prompt: int | Iterable[int | str],
    *,
    rows: dict[str, int | tuple[int, ...]] | None = None,
    params: SamplingParams | PoolingParams | None = None,
    epoch: int = 0,
    **sampling: object,
) -> Request:
    """``prompt``: so many text tokens; or token ids, with item ids standing for all placeholders of an item.
    ``rows``: of each item; a tuple has its groups of placeholders, with a token of text between them."""
    tokens: list[int] = []
    items: list[MultiModalItem] = []
    for part in range(10, 10 + prompt) if isinstance(prompt, int) else prompt:
        if isinstance(part, str):
            given = (rows or {})[part]
            groups = (given,) if isinstance(given, int) else given
            span = [token for group in groups for token in (BETWEEN, *[PLACEHOLDER] * group)][1:]
            items.append(
                MultiModalItem(
                    modality="image", item_id=part, offset=len(tokens), num_rows=sum(groups), length=len(span)
                )
            )
            tokens += span
        else:
            tokens.append(part)
    return Request(
        req_id,
        tuple(tokens),
        params or SamplingParams(**{"ignore_eos": True, "max_tokens": 4, **sampling}),
        items=tuple(items),
        item_keys=keys_of(items, epoch),
        arrival_time=0.0,
    )


def keys_of(items: Iterable[MultiModalItem], epoch: int = 0) -> tuple[str, ...]:
    return tuple(f"{epoch}:{item.item_id}" for item in items)


def encoding(item: MultiModalItem) -> tuple[Value, ...]:
    return tuple(f"{item.item_id}/{row}" for row in range(item.num_rows))


def placeholders(item: MultiModalItem, prompt_token_ids: Sequence[int]) -> list[int]:
    return [p for p in range(item.offset, item.end) if prompt_token_ids[p] == PLACEHOLDER]


def next_token(values: Iterable[Value | None]) -> int:
    digest = hashlib.sha256(repr(list(values)).encode()).digest()
    return int.from_bytes(digest[:4], "big") % VOCAB


def prompt_values(request: Request) -> list[Value]:
    values: list[Value] = list(request.prompt_token_ids)
    for item in request.items:
        for position, row in zip(placeholders(item, request.prompt_token_ids), encoding(item), strict=True):
            values[position] = row
    return values


def expected_output(request: Request, bounds: SchedulerLimits) -> tuple[list[int], RequestStatus]:
    """What ``request`` generates whatever happens on the way, and how it ends."""
    values, output, params = prompt_values(request), [], request.params
    while True:
        token = next_token(values)
        values.append(token)
        output.append(token)
        if (token == EOS and not params.ignore_eos) or token in params.stop_token_ids:
            return output, RequestStatus.FINISHED_STOPPED
        if len(output) == params.max_tokens or len(values) == bounds.max_request_tokens:
            return output, RequestStatus.FINISHED_LENGTH


def ask(name: str, *parts: int | str, **sampling: object) -> Request:
    """A request for the items of ``ROWS`` and tokens in ``parts``."""
    return make_request(name, parts, rows=ROWS, **sampling)
