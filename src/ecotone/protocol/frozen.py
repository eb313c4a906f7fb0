"""Containers inside frozen messages are frozen too: normalised once, when the message is built."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec

K = TypeVar("K")
V = TypeVar("V")

EMPTY_MAP: Mapping[Any, Any] = MappingProxyType({})


def frozen_map(value: Mapping[K, V]) -> Mapping[K, V]:
    """A read-only copy of ``value``.

    It is always a copy: a proxy cannot say whether somebody still holds the dictionary behind it, so being one
    is no proof of being frozen. What must not pay for the copy twice (the copy-on-write helpers, joins) keeps
    the whole frozen message instead.
    """
    return MappingProxyType(dict(value)) if value else EMPTY_MAP


def freeze(struct: msgspec.Struct, kind: type[tuple[Any, ...]] | type[frozenset[Any]], *names: str) -> None:
    """Make these fields of ``struct`` exact ``kind``s. Free for those that are, as after decoding.

    Raises:
        TypeError: a string or bytes, which would fall apart into characters.
    """
    for name in names:
        value = getattr(struct, name)
        if type(value) is not kind:
            if isinstance(value, str | bytes):
                raise TypeError(f"{type(struct).__name__}.{name}={value!r}: expected a collection")
            set_field(struct, name, kind(value))


def freeze_rows(struct: msgspec.Struct, name: str) -> None:
    """Make this field of ``struct`` a tuple of tuples."""
    rows: Iterable[Iterable[Any]] = getattr(struct, name)
    if type(rows) is not tuple or not {tuple}.issuperset(map(type, rows)):
        set_field(struct, name, tuple(tuple(row) for row in rows))


def set_field(struct: msgspec.Struct, name: str, value: object) -> None:
    """Replace a field of a frozen struct that nobody else holds yet: in ``__post_init__``, or of a fresh copy."""
    msgspec.structs.force_setattr(struct, name, value)
