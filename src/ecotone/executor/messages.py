"""What passes between an executor and a rank outside its process, and what a rank does with it."""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Callable
from typing import Any

import msgspec

from ecotone import errors
from ecotone.config import EngineConfig
from ecotone.connectors.factory import create_factory
from ecotone.errors import ConfigError, ContractError, EcotoneError, RankFailedError
from ecotone.executor.methods import decode_args, encode_result
from ecotone.executor.rank import Rank, import_rank_factory
from ecotone.protocol.wire import decode, encode
from ecotone.worker.ranks import RankSpec

_MAX_TEXT, _MAX_TRACE = 2000, 8000


class Start(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="start", forbid_unknown_fields=True):
    """The first message. ``config`` is an ``EngineConfig`` in msgpack; ``make_rank`` is ``module:attribute``."""

    config: bytes
    engine_id: str
    spec: RankSpec
    epoch: int
    make_rank: str


class Started(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The answer to ``Start``."""

    pid: int
    host: str
    takes_part: bool


class Call(msgspec.Struct, frozen=True, array_like=True, tag="call", forbid_unknown_fields=True):
    """A call on every rank. ``reply_rank``: the one that answers; ``None`` is every rank."""

    seq: int
    method: str
    args: tuple[bytes, ...] = ()
    reply_rank: int | None = None


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a rank raised: name of the type, text, traceback, and the method that was called."""

    kind: str
    text: str
    trace: str
    method: str


class Reply(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """An answer: the encoded ``result``, or the ``fault``."""

    seq: int
    result: bytes | None = None
    fault: Fault | None = None


def encode_config(config: EngineConfig) -> bytes:
    """A configuration as it travels. (Its options are free-form, which the typed codec refuses.)

    Raises:
        ConfigError: it would arrive as another one.
    """
    try:
        data = msgspec.msgpack.encode(config)
        received = decode_config(data)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"the configuration cannot be sent to the ranks: {error}") from error
    if received != config:
        raise ConfigError(f"the configuration would reach the ranks as another one: {received}, not {config}")
    return data


def decode_config(data: bytes) -> EngineConfig:
    """A configuration as it arrives."""
    return msgspec.msgpack.decode(data, type=EngineConfig)


class ServedRank:
    """A rank behind messages, in whatever process it lives. After its shutdown the process may start another one.

    Args:
        wakeup: see ``Worker``.
    """

    def __init__(self, wakeup: Callable[[], None]) -> None:
        self._wakeup = wakeup
        self._rank: Rank | None = None
        self._number = -1

    def answer(self, message: bytes | memoryview) -> bytes | None:
        """Carry out a ``Start`` or a ``Call``; the ``Reply``, or ``None`` where none is asked for and nothing went
        wrong.

        Raises:
            WireError: it is neither.
        """
        asked = decode(message, Start | Call)
        return self._start(asked) if isinstance(asked, Start) else self._carry_out(asked)

    def _start(self, start: Start) -> bytes:
        try:
            self._number = start.spec.rank
            config = decode_config(start.config)
            ec_factory = None if config.ec is None else create_factory(config.ec)
            make_rank = import_rank_factory(start.make_rank)
            self._rank = make_rank(config, ec_factory, start.engine_id, start.spec, start.epoch, self._wakeup)
            started = Started(os.getpid(), socket.gethostname(), self._rank.takes_part)
            return encode(Reply(0, encode(started)))
        # A rim: whatever a model, a connector or a device raises goes to who asked for the rank.
        except Exception as error:  # noqa: BLE001
            return encode(Reply(0, None, _fault(error, "start")))

    def _carry_out(self, call: Call) -> bytes | None:
        try:
            result = self._call(call.method, decode_args(call.method, call.args))
            if call.reply_rank is not None and call.reply_rank != self._number:
                return None
            return encode(Reply(call.seq, encode_result(result)))
        except Exception as error:  # noqa: BLE001 - as above
            return encode(Reply(call.seq, None, _fault(error, call.method)))

    def close(self) -> None:
        """Shut the rank down, if there is one. Idempotent."""
        rank, self._rank = self._rank, None
        if rank is not None:
            rank.call("shutdown")

    def _call(self, method: str, args: list[Any]) -> Any:
        if method == "shutdown":
            return self.close()
        if self._rank is None:
            raise ContractError(f"{method}: the rank was not started, or was shut down")
        return self._rank.call(method, *args)


def _fault(error: Exception, method: str) -> Fault:
    trace = "".join(traceback.format_exception(error))
    text = str(error).encode("utf-8", "replace").decode()  # an error may quote what is not text
    trace = trace.encode("utf-8", "replace").decode()
    return Fault(type(error).__name__, text[:_MAX_TEXT], trace[-_MAX_TRACE:], method)


def to_error(fault: Fault, rank: int) -> EcotoneError:
    """What the caller of an executor gets to see: Ecotone's own errors as they were, others as
    ``RankFailedError``; all of them name the rank."""
    kind = getattr(errors, fault.kind, None)
    error: EcotoneError
    if isinstance(kind, type) and issubclass(kind, EcotoneError) and _takes_a_message_alone(kind):
        error = kind(f"rank {rank}: {fault.text}")
    else:
        error = RankFailedError(f"rank {rank} raised {fault.kind} in {fault.method}: {fault.text}", rank)
    error.add_note(f"on rank {rank}:\n{fault.trace}")
    return error


def _takes_a_message_alone(kind: type[EcotoneError]) -> bool:
    return not any("__init__" in vars(base) for base in kind.__mro__ if base.__module__ == errors.__name__)
