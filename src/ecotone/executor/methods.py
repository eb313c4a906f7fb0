"""What can be called on a rank, with the types that travel, and which rank answers in which phase.

=====================  =============  ===============  =========================================================
method                 phase          no aggregator    with an aggregator: every rank, folded onto the output's
=====================  =============  ===============  =========================================================
execute_model          step begins    the output rank  ``None`` from all when the step goes on, or an output
                                                       from all
sample_tokens          step ends      the output rank  an output from all; a rank that samples nothing gives its
                                                       report alone, or the empty output
execute_step           a whole step   the output rank  an output from all: ``execute_model``, and ``sample_tokens``
                                                       where the step goes on in it
model_info             between steps  every rank       -
statistics             between steps  every rank       -
reset_encoder_cache    between steps  every rank       -
shutdown               the last call  every rank       -
=====================  =============  ===============  =========================================================

A rank that is not asked for an answer still answers when it raises.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ecotone.errors import ContractError
from ecotone.protocol.model import ModelInfo
from ecotone.protocol.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput
from ecotone.protocol.step import SchedulerOutput
from ecotone.protocol.wire import decode, encode


class Method(NamedTuple):
    """``arguments``: name -> type, in order; ``is_step``: a rank that raises in it is of no more use."""

    arguments: Mapping[str, Any]
    result: Any
    is_step: bool = False


METHODS: dict[str, Method] = {
    "model_info": Method({}, ModelInfo),
    "execute_model": Method({"scheduler_output": SchedulerOutput}, ModelRunnerOutput | None, is_step=True),
    "sample_tokens": Method({}, ModelRunnerOutput, is_step=True),
    "execute_step": Method({"scheduler_output": SchedulerOutput}, ModelRunnerOutput, is_step=True),
    "reset_encoder_cache": Method({}, None),
    "statistics": Method({}, dict[str, float]),
    "shutdown": Method({}, None),
}
SHUTDOWN = "shutdown"
_EMPTY_OUTPUT = encode(EMPTY_MODEL_RUNNER_OUTPUT)


def find_method(name: str) -> Method:
    """The method of that name.

    Raises:
        ContractError: a rank has no such method.
    """
    method = METHODS.get(name)
    if method is None:
        raise ContractError(f"a rank has no method {name!r}; it has {', '.join(METHODS)}")
    return method


def bind(name: str, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> tuple[Any, ...]:
    """The arguments of a call, by position.

    Raises:
        ContractError: there is no such method, or it takes other arguments.
    """
    known = tuple(find_method(name).arguments)
    given = dict(zip(known, args, strict=False))
    if len(args) > len(known) or (kwargs and given.keys() & kwargs.keys()):
        raise ContractError(f"{name} takes ({', '.join(known)}); it was given too much")
    given.update(kwargs or {})
    if given.keys() != set(known):
        raise ContractError(f"{name} takes ({', '.join(known)}), not ({', '.join(given)})")
    return tuple(given[argument] for argument in known)


def encode_args(args: Sequence[Any]) -> tuple[bytes, ...]:
    """Arguments as they travel."""
    return tuple(encode(arg) for arg in args)


def decode_args(name: str, data: Sequence[bytes]) -> list[Any]:
    """Arguments as they arrive.

    Raises:
        ContractError: there is no such method, or it takes a different number of arguments.
        WireError: the bytes are none of what it takes.
    """
    kinds = find_method(name).arguments
    if len(kinds) != len(data):
        raise ContractError(f"{name} takes {len(kinds)} arguments, not {len(data)}")
    return [decode(each, kind) for each, kind in zip(data, kinds.values(), strict=True)]


def encode_result(result: Any) -> bytes:
    """A result as it travels."""
    return _EMPTY_OUTPUT if result is EMPTY_MODEL_RUNNER_OUTPUT else encode(result)


def decode_result(name: str, data: bytes) -> Any:
    """A result as it arrives. A rank with nothing to say, in every step, costs a comparison.

    Raises:
        WireError: the bytes are no result of the method.
    """
    if data == _EMPTY_OUTPUT and METHODS[name].is_step:
        return EMPTY_MODEL_RUNNER_OUTPUT
    return decode(data, METHODS[name].result)
