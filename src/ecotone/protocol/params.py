"""What a request asks of the output: sampling or pooling. Checked where it is built, wherever that is."""

from __future__ import annotations

from typing import Literal

import msgspec

from ecotone.errors import SamplingError


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
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
        ranges = (
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("temperature", 0.0 <= self.temperature <= 100.0, "from 0 to 100"),
            ("top_k", self.top_k >= 0, "0 (off) or more"),
            ("top_p", 0.0 < self.top_p <= 1.0, "above 0, at most 1"),
            ("seed", self.seed is None or 0 <= self.seed < 2**63, "from 0 to 2**63 - 1"),
            ("stop", "" not in self.stop and len(self.stop) <= 16, "at most 16 strings, none empty"),
            ("logprobs", self.logprobs is None or 0 <= self.logprobs <= 64, "from 0 to 64"),
        )
        for name, ok, allowed in ranges:
            if not ok:
                raise SamplingError(f"{name}={getattr(self, name)!r}: must be {allowed}")


class PoolingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a prompt's hidden states become one vector.

    Attributes:
        pooling: ``last`` takes the last token's hidden state, ``mean`` the average over all tokens.
        normalize: scale to unit L2 length.
    """

    pooling: Literal["last", "mean"] = "last"
    normalize: bool = True
