"""Cache keys: what an encoding depends on, and nothing else, in one full digest.

A key is text, ``<32 hex>:<64 hex>``: the namespace's digest, for grouping only, and the SHA-256 of the whole
namespace and the item id, which is the identity. Ids are data: they are hashed, never used as a name or a path.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

import msgspec

from ecotone.errors import ConfigError, DecodeError
from ecotone.protocol.arrays import ITEM_SIZES

NAMESPACE_HEX = 32
_KEY = re.compile(rf"[0-9a-f]{{{NAMESPACE_HEX}}}:[0-9a-f]{{64}}")
_NAMESPACE = re.compile(rf"[0-9a-f]{{{NAMESPACE_HEX}}}")
# Hashed along with everything else: a change of the scheme changes every key.
_SCHEME = b"ecotone-key-2"


class Namespace(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that changes the bytes of an encoding besides the item itself.

    Attributes:
        model: names the model.
        revision: names its weights: a digest of the checkpoint files, or what the operator calls them.
        epoch: counts weight updates since the start of a process.
        life: names that process where there were updates. Who counts to the same number elsewhere, or after a
            restart, has other weights, and stores outlive a process.
        dtype: element type of the rows, a key of ``ITEM_SIZES``.
        width: elements in a row.
        processor: digest of the processor's options (``options_digest``).
        adapter: digest of the adapter's content; empty without one.
        tenant: parties that must not share have different ones.

    Raises:
        ConfigError: unknown dtype, a width below 1, or an epoch below 0.
    """

    model: str
    revision: str
    dtype: str
    width: int
    processor: str
    epoch: int = 0
    life: str = ""
    adapter: str = ""
    tenant: str = ""

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_SIZES:
            raise ConfigError(f"dtype {self.dtype!r} is not one of {', '.join(ITEM_SIZES)}")
        if self.width < 1 or self.epoch < 0:
            raise ConfigError(f"width={self.width} must be at least 1, and epoch={self.epoch} at least 0")

    @property
    def digest(self) -> str:
        """32 hex digits that group the keys of this namespace (as ``ForgetAll`` does)."""
        return sha256(self._encoded()).hexdigest()[:NAMESPACE_HEX]

    def key(self, item_id: str) -> str:
        """The cache key of an item: equal only if the namespace and the item id are."""
        encoded = self._encoded()
        group = sha256(encoded).hexdigest()[:NAMESPACE_HEX]
        return f"{group}:{sha256(_unambiguous(encoded, _raw(item_id))).hexdigest()}"

    def next_epoch(self, life: str) -> Namespace:
        """The namespace after the weights were updated by the process that ``life`` names: it shares no key with
        any earlier one, nor with one of any other process."""
        return msgspec.structs.replace(self, epoch=self.epoch + 1, life=life)

    def _encoded(self) -> bytes:
        texts = (self.model, self.revision, self.dtype, self.processor, self.adapter, self.tenant, self.life)
        return _unambiguous(_SCHEME, self.width, self.epoch, *map(_raw, texts))


def options_digest(options: Mapping[str, Any]) -> str:
    """A digest of processor options: equal for equal options, in whatever order they are given.

    Raises:
        ConfigError: a value that JSON cannot express.
    """
    try:
        return sha256(msgspec.json.encode(options, order="deterministic")).hexdigest()
    except (TypeError, ValueError) as error:
        raise ConfigError(f"processor options {options!r} cannot be written as JSON: {error}") from None


def check_key(key: str) -> str:
    """``key`` itself.

    Raises:
        DecodeError: it is not the text of a key.
    """
    if _KEY.fullmatch(key) is None:
        raise DecodeError(f"{key[:120]!r} is not a cache key: 32 hex digits, ':', 64 hex digits")
    return key


def check_namespace(digest: str) -> str:
    """``digest`` itself.

    Raises:
        DecodeError: it is not the digest of a namespace.
    """
    if _NAMESPACE.fullmatch(digest) is None:
        raise DecodeError(f"{digest[:120]!r} is not a namespace digest: 32 hex digits")
    return digest


def namespace_of(key: str) -> str:
    """The digest of the namespace that ``key`` is in.

    Raises:
        DecodeError: it is not the text of a key.
    """
    return check_key(key)[:NAMESPACE_HEX]


def _unambiguous(*parts: bytes | int) -> bytes:
    """``parts`` in an encoding that no other parts have: MessagePack states the length of each."""
    return msgspec.msgpack.encode(parts)


def _raw(text: str) -> bytes:
    """``text`` as bytes. Ids come from outside, and JSON may carry lone surrogates."""
    return text.encode("utf-8", "surrogatepass")
