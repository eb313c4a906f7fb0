"""The wire format: typed, bounded msgpack. Never pickle.

A field that holds any concrete type of an abstract base (``polymorphic``) travels as ``[type tag, bytes]``. The
bytes are the value, encoded by its own type; the tag is looked up among the registered types and never imported.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from copy import copy
from functools import cache
from types import MappingProxyType
from typing import Any, TypeVar, overload

import msgspec

from ecotone.errors import ContractError, DecodeError, RoundTripError, UnknownTypeError, WireError
from ecotone.protocol.frozen import set_field
from ecotone.protocol.polymorphic import MetadataMeta, Polymorphic, is_stand_in
from ecotone.protocol.roundtrip import check_round_trip, classes_in, field_hints, is_struct, type_name

T = TypeVar("T")
S = TypeVar("S", bound=msgspec.Struct)

MAX_MESSAGE_BYTES = 256 * 2**20
MAX_TAG_LENGTH = 256
_MAX_REASON = 500  # of an error's text, which may quote what came from elsewhere

_types: dict[str, type[msgspec.Struct]] = {}
_tags: dict[type[msgspec.Struct], str] = {}


def register(kind: type[S], tag: str | None = None) -> type[S]:
    """Make ``kind`` known to the codec; returns it, so that it also serves as a decorator.

    Every process that sends or receives it registers it, best where it is defined. Doing it again, or without a
    tag, changes nothing.

    Args:
        kind: a concrete metadata type (of ``ECConnectorWorkerMetadata`` or ``ECConnectorMetadata``).
        tag: its name on the wire, at most ``MAX_TAG_LENGTH`` characters; by default ``module:qualname``, which a
            type of a script or of a function does not have in every process.

    Raises:
        RoundTripError: values of ``kind`` would not survive the wire (the field is named), or would nest further
            metadata, of which each level would copy all that lie below it.
        ContractError: no such type, not frozen, or type or tag are already registered otherwise.
    """
    if tag is None:
        tag = _tags.get(kind) or _default_tag(kind)
    if not _is_concrete_metadata(kind):
        raise ContractError(f"{kind.__qualname__} is not a concrete metadata type")
    if not kind.__struct_config__.frozen:
        raise ContractError(f"{kind.__qualname__} is not frozen; declare it with frozen=True")
    if not 0 < len(tag) <= MAX_TAG_LENGTH:
        raise ContractError(f"type tag {tag[:80]!r} must have 1 to {MAX_TAG_LENGTH} characters")
    if _types.get(tag, kind) is not kind:
        raise ContractError(f"type tag {tag!r} already stands for another type, {_types[tag]!r}")
    if _tags.get(kind, tag) != tag:
        raise ContractError(f"{kind.__qualname__} is already registered, as {_tags[kind]!r}")
    check_round_trip(kind)
    if _carriers(kind):
        raise RoundTripError(f"{kind.__qualname__}.{_carriers(kind)[0]} holds further metadata; write it flat")
    _types[tag], _tags[kind] = kind, tag
    return kind


def encode(message: Any, max_bytes: int = MAX_MESSAGE_BYTES) -> bytes:
    """``message`` (a struct, or a list or tuple of structs) as bytes.

    Raises:
        RoundTripError: it would not come back: its type is refused by ``check_round_trip``, a metadata type in it
            is not registered, an integer has more than 64 bits, a string is not valid Unicode, or it is larger
            than ``max_bytes``.
    """
    name = type(message).__name__
    try:
        data = _encode(message)
    except (TypeError, OverflowError, UnicodeError, RecursionError) as error:
        raise RoundTripError(f"{name} cannot be encoded: {error}") from error
    if len(data) > max_bytes:
        raise RoundTripError(f"{name} takes {len(data)} bytes, more than the {max_bytes} a receiver accepts")
    return data


@overload
def decode(data: bytes | bytearray | memoryview, kind: type[T], max_bytes: int = ...) -> T: ...
@overload
def decode(data: bytes | bytearray | memoryview, kind: Any, max_bytes: int = ...) -> Any: ...
def decode(data: bytes | bytearray | memoryview, kind: Any, max_bytes: int = MAX_MESSAGE_BYTES) -> Any:
    """The ``kind`` (a struct type, or a container or union of such) that ``data`` encodes.

    Time and memory are bounded by the size of ``data``, whatever it claims about itself. (Time is linear in it,
    but for integers chosen to collide in a set: senders are configured peers, and text hashes are salted.)

    Raises:
        DecodeError: larger than ``max_bytes``, malformed, nested too deeply, of another shape, or with values
            that the type refuses.
        UnknownTypeError: metadata of a type that is not registered here.
        RoundTripError: ``kind`` itself is not a type that can be received.
    """
    size = memoryview(data).nbytes
    if size > max_bytes:
        raise DecodeError(f"a message of {size} bytes; at most {max_bytes} are accepted")
    decoder = _decoder(kind)
    try:
        return decoder.decode(data)
    except WireError:
        raise
    except Exception as error:  # the rim: whatever a type's own checks raise, the bytes are at fault
        raise DecodeError(f"not a {type_name(kind)}: {str(error)[:_MAX_REASON]}") from error


def _default_tag(kind: type[msgspec.Struct]) -> str:
    if kind.__module__ in ("__main__", "__mp_main__") or "<locals>" in kind.__qualname__:
        raise ContractError(f"{kind.__qualname__} of {kind.__module__} has another name elsewhere: give it a tag")
    return f"{kind.__module__}:{kind.__qualname__}"


def _is_concrete_metadata(kind: object) -> bool:
    return isinstance(kind, MetadataMeta) and not inspect.isabstract(kind)


def _encode(message: Any) -> bytes:
    if isinstance(message, msgspec.Struct):
        _encodable(type(message))
        return _ENCODER.encode(_lower_fields(message))
    return _ENCODER.encode(_lower(message))


def _lower_fields(struct: msgspec.Struct) -> msgspec.Struct:
    """``struct``, or where it holds polymorphic values a copy with those in their wire form."""
    lowered = struct
    for name in _carriers(type(struct)):
        value = getattr(struct, name)
        wire_form = _lower(value)
        if wire_form is not value:
            lowered = copy(struct) if lowered is struct else lowered
            set_field(lowered, name, wire_form)
    return lowered


def _lower(value: Any) -> Any:
    if isinstance(value, msgspec.Struct):
        return _envelope(value) if isinstance(type(value), MetadataMeta) else _lower_fields(value)
    if isinstance(value, tuple | list | set | frozenset):
        return [_lower(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _lower(item) for key, item in value.items()}
    return value


def _envelope(value: msgspec.Struct) -> tuple[str, bytes]:
    tag = _tags.get(type(value))
    if tag is None:
        raise RoundTripError(f"{type(value).__qualname__} is not registered: no receiver could decode it")
    return tag, _ENCODER.encode(value)


def _open_envelope(stand_in: type[Polymorphic], envelope: object) -> Any:
    match envelope:
        case [str(tag), bytes(data)]:
            pass
        case _:
            raise DecodeError(f"{type_name(stand_in)}: expected a type tag and bytes")
    kind = _types.get(tag)
    if kind is None:
        raise UnknownTypeError(f"no type is registered as {tag[:MAX_TAG_LENGTH]!r}")
    decoder = _decoder(kind)
    if not issubclass(kind, stand_in):
        raise DecodeError(f"{tag!r} is not allowed as {type_name(stand_in)}")
    return decoder.decode(data)


@cache
def _carriers(kind: type[msgspec.Struct]) -> tuple[str, ...]:
    """The fields of ``kind`` in which, at any depth, a polymorphic value may sit."""
    return tuple(name for name, hint in field_hints(kind).items() if _reaches_polymorphic(hint))


def _reaches_polymorphic(hint: Any) -> bool:
    reached: set[type] = set()
    ahead = list(classes_in(hint))
    while ahead:
        kind = ahead.pop()
        if kind not in reached:
            reached.add(kind)
            if is_struct(kind):
                ahead.extend(found for inner in field_hints(kind).values() for found in classes_in(inner))
    return any(map(is_stand_in, reached))


@cache
def _encodable(kind: type[msgspec.Struct]) -> None:
    check_round_trip(kind)


@cache
def _decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    check_round_trip(kind)
    return msgspec.msgpack.Decoder(kind, dec_hook=_open_envelope)


def _plain(value: object) -> object:
    if isinstance(value, MappingProxyType):
        return dict(value)
    raise TypeError(f"a {type(value).__name__} has no wire form")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_plain)
