"""Several outputs for one prompt: each is a request of its own to the scheduler. They have their encodings in
common, as any requests with the same media have; keys and values each computes for itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import sha256

import msgspec

from ecotone.engine.outputs import RequestOutput
from ecotone.engine.request import Request
from ecotone.protocol.params import SamplingParams


def make_samples(request_id: str, seed: int, n: int, make: Callable[[str, int], Request]) -> list[Request]:
    """``n`` requests, made from an id and a seed each."""
    if n == 1:
        return [make(request_id, seed)]
    return [make(f"{request_id}/{index}", sample_seed(seed, index)) for index in range(n)]


def sample_seed(seed: int, index: int) -> int:
    """The seed of output ``index``. The first has the request's own: it is the output that ``n=1`` gives."""
    if index == 0:
        return seed
    return int.from_bytes(sha256(f"{seed}/{index}".encode()).digest()[:8]) >> 1


def num_samples(params: object) -> int:
    """How many outputs are asked for."""
    return params.n if isinstance(params, SamplingParams) else 1


def join_samples(outputs: Sequence[RequestOutput]) -> RequestOutput:
    """The first of a prompt's outputs, with all of them beside it where there are several."""
    first = outputs[0]
    return first if len(outputs) == 1 else msgspec.structs.replace(first, samples=tuple(outputs))
