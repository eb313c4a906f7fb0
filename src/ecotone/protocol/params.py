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
MAX_OUTPUTS = 128

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
    ("min_p", lambda value: _number(value) and 0 <= value <= 1, "a number from 0 (off) to 1"),
    ("repetition_penalty", lambda value: _number(value) and 0.01 <= value <= 100, "a number from 0.01 to 100"),
    ("presence_penalty", lambda value: _number(value) and -2 <= value <= 2, "a number from -2 to 2"),
    ("frequency_penalty", lambda value: _number(value) and -2 <= value <= 2, "a number from -2 to 2"),
    ("n", _integer(1, MAX_OUTPUTS), f"an integer from 1 to {MAX_OUTPUTS}"),
    ("min_tokens", _integer(0, MAX_TOKEN_ID), f"an integer from 0 to {MAX_TOKEN_ID}"),
    ("seed", _optional(_integer(0, 2**63 - 1)), "None or an integer from 0 to 2**63 - 1"),
    ("stop", _tuple_of(_is_stop, MAX_STOPS),
     f"at most {MAX_STOPS} strings of 1 to {MAX_STOP_LENGTH} valid characters"),
    ("stop_token_ids", _tuple_of(_integer(0, MAX_TOKEN_ID), MAX_STOP_TOKEN_IDS),
     f"at most {MAX_STOP_TOKEN_IDS} integers from 0 to {MAX_TOKEN_ID}"),
    ("ignore_eos", lambda value: type(value) is bool, "true or false"),
    ("logprobs", _optional(_integer(0, MAX_LOGPROBS)), f"None or an integer from 0 to {MAX_LOGPROBS}"),
)  # fmt: skip
_POOLING: tuple[tuple[str, Test, str], ...] = (
    ("pooling", lambda value: value in ("last", "mean", "token"), "'last', 'mean' or 'token'"),
    ("normalize", lambda value: type(value) is bool, "true or false"),
)


def _check(params: msgspec.Struct, rules: tuple[tuple[str, Test, str], ...]) -> None:
    for name, is_allowed, allowed in rules:
        value = getattr(params, name)
        if not is_allowed(value):
            raise SamplingError(f"{name}={value!r}: must be {allowed}")


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, tag="sampling", forbid_unknown_fields=True):
    """How the next token is chosen, and when to stop.

    In this order: tokens that would stop too early are ruled out, penalties, temperature, min_p, top_k, top_p.

    Attributes:
        n: how many outputs to give for the prompt. The first is that of ``n=1``; each has a seed of its own.
        max_tokens: tokens to generate at most, at least 1.
        min_tokens: before as many tokens nothing ends the text: end of sequence and ``stop_token_ids`` are not
            generated (with ``ignore_eos`` the end of sequence is a token like any other), ``stop`` is not
            looked for. At most ``max_tokens``.
        temperature: 0 is greedy; otherwise logits are divided by it. In [0, 100].
        top_k: keep the k most probable tokens; 0 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches it, in (0, 1].
        min_p: keep tokens at least this times as probable as the most probable one, in [0, 1]; 0 keeps all.
        repetition_penalty: divides the positive and multiplies the negative logits of every token of the prompt
            and the output, in [0.01, 100]; 1 changes nothing, more discourages.
        presence_penalty: subtracted from the logit of every token of the output, in [-2, 2].
        frequency_penalty: subtracted for each time the token is in the output, in [-2, 2].
        seed: same seed, same prompt, same tokens, whatever else runs in the batch. ``None`` draws one.
        stop: strings that end the text; they are not part of it.
        stop_token_ids: token ids that end the text, besides the model's own end of sequence.
        ignore_eos: do not stop at the model's end of sequence.
        logprobs: also return the log probability of each token and of this many best ones; ``None`` is off.

    Raises:
        SamplingError: a value outside its range; the message names it.
    """

    n: int = 1
    max_tokens: int = 64
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
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
        if self.min_tokens > self.max_tokens:
            raise SamplingError(
                f"min_tokens={self.min_tokens}: must be at most max_tokens, which is {self.max_tokens}"
            )

    @property
    def has_penalties(self) -> bool:
        """Whether the choice of a token depends on the tokens before it."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


class PoolingParams(msgspec.Struct, frozen=True, kw_only=True, tag="pooling", forbid_unknown_fields=True):
    """How a prompt's hidden states become one vector, or one for each token.

    Attributes:
        pooling: ``last`` takes the last token's hidden state, ``mean`` the average over all tokens, ``token``
            each token's own.
        normalize: scale each vector to unit L2 length.

    Raises:
        SamplingError: a value that is not allowed; the message names it.
    """

    pooling: Literal["last", "mean", "token"] = "last"
    normalize: bool = True

    def __post_init__(self) -> None:
        _check(self, _POOLING)
