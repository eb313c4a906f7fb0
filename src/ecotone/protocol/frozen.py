"""Containers inside frozen messages are frozen too: normalised once, when the message is built."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec

K = TypeVar("K")
V = TypeVar("V")

EMPTY_MAP: Mapping[Any, Any] = MappingProxyType({})


def frozen_map(value: Mapping[K, V]) -> Mapping[K, V]:
    """A read-only copy of ``value`` (the copy makes later writes through the original invisible)."""
    return value if value is EMPTY_MAP else MappingProxyType(dict(value))


def set_field(struct: msgspec.Struct, name: str, value: object) -> None:
    """Replace a field of a frozen struct. Only for ``__post_init__``, before anyone else holds the struct."""
    msgspec.structs.force_setattr(struct, name, value)
