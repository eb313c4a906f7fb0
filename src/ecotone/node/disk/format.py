"""The file of one entry: a safetensors file of one tensor, ``rows``, and what identifies it in its metadata.

Written by hand, since the bytes are written from the region and read into it, and since numpy knows no bfloat16.
The header's length depends on nothing but key and layout: the payload goes to its place first, hashed on the way,
and the header with the digest last.
"""

from __future__ import annotations

import re
from math import prod
from typing import Any

import msgspec

from ecotone.errors import DecodeError
from ecotone.node.exchange import Layout
from ecotone.node.keys import NAMESPACE_HEX, check_key
from ecotone.protocol.arrays import ITEM_SIZES

FORMAT = "ecotone-entry-1"
MAX_HEADER_BYTES = 16_384
SUFFIX = ".safetensors"
# The smallest file that could be one: its length field, and a header with a key and a digest in it.
MIN_FILE_BYTES = 8 + 256
# What a file of n bytes takes of the budget: file systems give out whole blocks.
BLOCK_BYTES = 4096

_DTYPES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64",
    "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
}  # fmt: skip
_NAMES = {code: dtype for dtype, code in _DTYPES.items()}
_NO_DIGEST = "0" * 64
_FILE_NAME = re.compile(r"([0-9a-f]{64})\.safetensors")


class Metadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``__metadata__`` of the header. ``digest`` is the SHA-256 of the tensor's bytes."""

    format: str
    namespace: str
    key: str
    dtype: str
    shape: str
    digest: str


class _Tensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class _Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    metadata: Metadata = msgspec.field(name="__metadata__")
    rows: _Tensor


class Parsed(msgspec.Struct, frozen=True):
    """A header: key and layout of the entry, the digest of its bytes (hex), and where in the file they begin."""

    key: str
    layout: Layout
    digest: str
    payload_offset: int

    @property
    def file_bytes(self) -> int:
        """Size of the whole file."""
        return self.payload_offset + self.layout.nbytes


def encode_header(key: str, layout: Layout, digest: str = _NO_DIGEST) -> bytes:
    """Length field and header. Its length is the same for every ``digest``, and a multiple of 8."""
    metadata = Metadata(
        format=FORMAT,
        namespace=key[:NAMESPACE_HEX],
        key=key,
        dtype=layout.dtype,
        shape=msgspec.json.encode(layout.shape).decode(),
        digest=digest,
    )
    tensor = _Tensor(_DTYPES[layout.dtype], layout.shape, (0, layout.nbytes))
    data = msgspec.json.encode(_Header(metadata, tensor))
    data += b" " * (-len(data) % 8)
    return len(data).to_bytes(8, "little") + data


def header_length(prefix: bytes) -> int:
    """Length of the header behind ``prefix``, the file's first 8 bytes.

    Raises:
        DecodeError: there are fewer, or it is longer than any header of ours.
    """
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or length > MAX_HEADER_BYTES:
        raise DecodeError(f"no header: its length is given as {length} bytes in {len(prefix)}")
    return length


def parse_header(data: bytes) -> Parsed:
    """What a header says, checked for all it can be checked for by itself.

    Raises:
        DecodeError: it is not the header of an entry, or of another version.
    """
    try:
        header = msgspec.json.decode(data, type=_Header)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DecodeError(f"not the header of an entry: {_version_of(data) or error}") from None
    meta, rows = header.metadata, header.rows
    if meta.format != FORMAT:
        raise DecodeError(f"format {meta.format[:40]!r} is not {FORMAT!r}")
    check_key(meta.key)
    layout = Layout(_NAMES.get(rows.dtype, rows.dtype), rows.shape)
    if re.fullmatch(r"[0-9a-f]{64}", meta.digest) is None or meta.namespace != meta.key[:NAMESPACE_HEX]:
        raise DecodeError("digest or namespace is not what an entry's are")
    if (meta.dtype, meta.shape) != (layout.dtype, msgspec.json.encode(layout.shape).decode()):
        raise DecodeError("the metadata describe another tensor than the header")
    nbytes = prod(rows.shape) * ITEM_SIZES[layout.dtype]
    if rows.data_offsets != (0, nbytes):
        raise DecodeError(f"data_offsets {rows.data_offsets} of a tensor of {nbytes} bytes")
    return Parsed(meta.key, layout, meta.digest, 8 + len(data))


def _version_of(data: bytes) -> str:
    """What to say of a header that does not decode, but names a format."""
    try:
        found: Any = msgspec.json.decode(data)["__metadata__"]["format"]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, LookupError, TypeError):
        return ""
    return "" if found == FORMAT else f"format {str(found)[:40]!r}, not {FORMAT!r}"


def file_bytes(key: str, layout: Layout) -> int:
    """How large the file of an entry is."""
    return len(encode_header(key, layout)) + layout.nbytes


def charged(nbytes: int) -> int:
    """What a file of ``nbytes`` counts for."""
    return -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES


def relative_path(key: str) -> str:
    """Where the file of an entry is, below the entries' directory: ``namespace/2 digits/digest.safetensors``.

    Raises:
        DecodeError: not a key. Nothing but digests ever becomes a name.
    """
    namespace, _, digest = check_key(key).partition(":")
    return f"{namespace}/{digest[:2]}/{digest}{SUFFIX}"


def key_of(namespace: str, fan: str, name: str) -> str | None:
    """The key of the file at this place; ``None`` where no entry has such a name."""
    match = _FILE_NAME.fullmatch(name)
    if match is None or match[1][:2] != fan:
        return None
    return f"{namespace}:{match[1]}"
