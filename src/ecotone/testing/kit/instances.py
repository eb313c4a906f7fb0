"""Values of a metadata type, made from its annotations."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any, TypeVar

import msgspec

S = TypeVar("S")

_TEXTS = ("", "a", "b", "ns:cat", "\u00fc")
_DEPTH = 4  # nested structs below this are left at their defaults, where they have any
_TRIES = 50


def make_instances(kind: type[S], count: int, draw: Random) -> list[S]:
    """``count`` values of ``kind`` (a struct or a dataclass), the first one of its defaults where all fields have
    one. Values are drawn from small ranges, so that two of them often have something in common.

    Raises:
        TypeError: its constructor refuses nearly everything that its annotations allow.
    """
    info = msgspec.inspect.type_info(kind)
    made: list[S] = []
    refusal: Exception | None = None
    for _ in range(count * _TRIES):
        try:
            made.append(_struct(info, draw, 0) if made or _requires(info) else kind())
        except Exception as error:  # noqa: BLE001 - a type's own checks may raise anything
            refusal = error
        if len(made) == count:
            return made
    raise TypeError(f"{kind.__name__}: nearly all values that its annotations allow are refused: {refusal}")


def _requires(info: Any) -> bool:
    """Whether a field has no default."""
    return any(field.required for field in info.fields)


def _struct(info: Any, draw: Random, depth: int) -> Any:
    return info.cls(
        **{
            field.name: _value(field.type, draw, depth + 1)
            for field in info.fields
            if field.required or depth < _DEPTH
        }
    )


def _value(info: msgspec.inspect.Type, draw: Random, depth: int) -> Any:
    make = _MAKERS.get(type(info))
    if make is None:
        raise TypeError(f"no value can be made for {info}")
    return make(info, draw, depth)


def _int(info: Any, draw: Random, depth: int) -> int:  # noqa: ARG001
    low = info.ge if info.ge is not None else (info.gt + 1 if info.gt is not None else 0)
    high = info.le if info.le is not None else (info.lt - 1 if info.lt is not None else low + 3)
    return draw.randint(int(low), int(max(low, min(high, low + 3))))


def _many(info: Any, draw: Random, depth: int) -> list[Any]:
    low = info.min_length or 0
    high = info.max_length if info.max_length is not None else low + 3
    return [_value(info.item_type, draw, depth) for _ in range(draw.randint(low, min(high, low + 3)))]


def _choice(get: Callable[[Any], Any]) -> Callable[[Any, Random, int], Any]:
    return lambda info, draw, depth: draw.choice(list(get(info)))  # noqa: ARG005


_MAKERS: dict[type, Callable[[Any, Random, int], Any]] = {
    msgspec.inspect.NoneType: lambda info, draw, depth: None,  # noqa: ARG005
    msgspec.inspect.BoolType: lambda info, draw, depth: draw.random() < 0.5,  # noqa: ARG005
    msgspec.inspect.IntType: _int,
    msgspec.inspect.FloatType: lambda info, draw, depth: float(_int(info, draw, depth)),
    msgspec.inspect.StrType: _choice(lambda info: _TEXTS),  # noqa: ARG005
    msgspec.inspect.BytesType: _choice(lambda info: (b"", b"a", b"\xff")),  # noqa: ARG005
    msgspec.inspect.EnumType: _choice(lambda info: info.cls),
    msgspec.inspect.LiteralType: _choice(lambda info: info.values),
    msgspec.inspect.UnionType: lambda info, draw, depth: _value(draw.choice(info.types), draw, depth),
    msgspec.inspect.ListType: _many,
    msgspec.inspect.VarTupleType: lambda info, draw, depth: tuple(_many(info, draw, depth)),
    msgspec.inspect.SetType: lambda info, draw, depth: set(_many(info, draw, depth)),
    msgspec.inspect.FrozenSetType: lambda info, draw, depth: frozenset(_many(info, draw, depth)),
    msgspec.inspect.TupleType: lambda info, draw, depth: tuple(_value(t, draw, depth) for t in info.item_types),
    msgspec.inspect.DictType: lambda info, draw, depth: {
        _value(info.key_type, draw, depth): _value(info.value_type, draw, depth) for _ in range(draw.randint(0, 3))
    },
    msgspec.inspect.StructType: _struct,
    msgspec.inspect.DataclassType: _struct,
}
