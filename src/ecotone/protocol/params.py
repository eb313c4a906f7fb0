"""What a request asks of the output: sampling or pooling. Checked where it is built, wherever that is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import msgspec

from ecotone.errors import SamplingError
from ecotone.protocol.frozen import set_field

MAX_TOKEN_ID = 2**31 - 1
MAX_STOPS = 16
MAX_STOP_LENGTH = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGPROBS = 64

Test: TypeAlias = Callable[[Any], bool]


def _integer(low: int, high: int) -> Test:
    return lambda value: type(value) is int and low <= value <= high


def _optional(test: Test) -> Test:
    return lambda value: value is None or test(value)


def _is_stop(text: Any) -> bool:
    if type(text) is not str or not 0 < len(text) <= MAX_STOP_LENGTH:
        return False
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair: no tokenizer produces it and no message can carry it
        return False
    return True


def _tuple_of(test: Test, at_most: int) -> Test:
    return lambda values: type(values) is tuple and len(values) <= at_most and all(map(test, values))


def _number(value: Any) -> bool:
    return type(value) in (int, float)


# field, whether a value is allowed, what is allowed
_SAMPLING: tuple[tuple[str, Test, str], ...] = (
    ("max_tokens", _integer(1, MAX_TOKEN_ID), f"an integer from 1 to {MAX_TOKEN_ID}"),
    ("temperature", lambda value: _number(value) and 0 <= value <= 100, "a number from 0 to 100"),
    ("top_k", _integer(0, MAX_TOKEN_ID), f"an integer from 0 (off) to {MAX_TOKEN_ID}"),
    ("top_p", lambda value: _number(value) and 0 < value <= 1, "a number above 0, at most 1"),
    ("seed", _optional(_integer(0, 2**63 - 1)), "None or an integer from 0 to 2**63 - 1"),
    ("stop", _tuple_of(_is_stop, MAX_STOPS),
     f"at most {MAX_STOPS} strings of 1 to {MAX_STOP_LENGTH} valid characters"),
    ("stop_token_ids", _tuple_of(_integer(0, MAX_TOKEN_ID), MAX_STOP_TOKEN_IDS),
     f"at most {MAX_STOP_TOKEN_IDS} integers from 0 to {MAX_TOKEN_ID}"),
    ("ignore_eos", lambda value: type(value) is bool, "true or false"),
    ("logprobs", _optional(_integer(0, MAX_LOGPROBS)), f"None or an integer from 0 to {MAX_LOGPROBS}"),
)  # fmt: skip
_POOLING: tuple[tuple[str, Test, str], ...] = (
    ("pooling", lambda value: value in ("last", "mean"), "'last' or 'mean'"),
    ("normalize", lambda value: type(value) is bool, "true or false"),
)


def _check(params: msgspec.Struct, rules: tuple[tuple[str, Test, str], ...]) -> None:
    for name, is_allowed, allowed in rules:
        value = getattr(params, name)
        if not is_allowed(value):
            raise SamplingError(f"{name}={value!r}: must be {allowed}")


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, tag="sampling", forbid_unknown_fields=True):
    """How the next token is chosen, and when to stop.

    Attributes:
        max_tokens: tokens to generate at most, at least 1.
        temperature: 0 is greedy; otherwise logits are divided by it. In [0, 100].
        top_k: keep the k most probable tokens; 0 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches it, in (0, 1].
        seed: same seed, same prompt, same tokens, whatever else runs in the batch. ``None`` draws one.
        stop: strings that end the text; they are not part of it.
        stop_token_ids: token ids that end the text, besides the model's own end of sequence.
        ignore_eos: do not stop at the model's end of sequence.
        logprobs: also return the log probability of each token and of this many best ones; ``None`` is off.

    Raises:
        SamplingError: a value outside its range; the message names it.
    """

    max_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        for name in ("stop", "stop_token_ids"):
            if isinstance(getattr(self, name), list):
                set_field(self, name, tuple(getattr(self, name)))
        _check(self, _SAMPLING)


class PoolingParams(msgspec.Struct, frozen=True, kw_only=True, tag="pooling", forbid_unknown_fields=True):
    """How a prompt's hidden states become one vector.

    Attributes:
        pooling: ``last`` takes the last token's hidden state, ``mean`` the average over all tokens.
        normalize: scale to unit L2 length.

    Raises:
        SamplingError: a value that is not allowed; the message names it.
    """

    pooling: Literal["last", "mean"] = "last"
    normalize: bool = True

    def __post_init__(self) -> None:
        _check(self, _POOLING)
