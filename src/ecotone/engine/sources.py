"""Encoded media from wherever they are: a file, bytes, a ``data:`` URL. Nothing is fetched from the network."""

from __future__ import annotations

import base64
import binascii
import os
import stat
from pathlib import Path
from typing import TypeAlias

from ecotone.errors import InvalidMediaError

Source: TypeAlias = str | os.PathLike[str] | bytes


def is_source(value: object) -> bool:
    """Whether ``value`` is a place to read from, and not media itself."""
    return isinstance(value, (str, os.PathLike, bytes, bytearray, memoryview))


def read_source(source: Source, *, kind: str, limit: int) -> tuple[bytes, str]:
    """The encoded bytes, at least one, and what to call them in an error. A relative path is one of the process.

    Args:
        source: a path, a ``data:`` URL or bytes.
        kind: ``image``, ``video`` or ``audio``; a ``data:`` URL must say the same.
        limit: more bytes are refused.

    Raises:
        InvalidMediaError: it cannot be read, is empty, too large, or a remote address.
    """
    data, name = _read(source, kind, limit)
    if not data:
        raise InvalidMediaError(f"{name} is empty")
    return data, name


def _read(source: Source, kind: str, limit: int) -> tuple[bytes, str]:
    if isinstance(source, (bytes, bytearray, memoryview)):
        return _bounded(bytes(source), limit, f"{kind} of {len(source)} bytes")
    if isinstance(source, str) and source[:5].lower() == "data:":
        return _bounded(_from_data_url(source, kind, limit), limit, f"{kind} in a data: URL")
    if isinstance(source, str) and "://" in source[:16]:
        raise InvalidMediaError(
            f"{kind} {source[:80]!r} is a remote address, and nothing is fetched from the network: "
            "give a path, bytes or a data: URL"
        )
    return _from_file(Path(source), kind, limit)


def _bounded(data: bytes, limit: int, name: str) -> tuple[bytes, str]:
    if len(data) > limit:
        raise InvalidMediaError(f"{name} has {len(data)} bytes; at most {limit} are allowed")
    return data, name


def _from_file(path: Path, kind: str, limit: int) -> tuple[bytes, str]:
    name = f"{kind} {str(path)!r}"
    try:
        # Without blocking: opening a named pipe would otherwise wait for its writer.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise InvalidMediaError(f"{name} is not a regular file")
            with open(fd, "rb", closefd=False) as file:
                return _bounded(file.read(limit + 1), limit, name)
        finally:
            os.close(fd)
    except InvalidMediaError:
        raise
    except (OSError, ValueError) as error:
        raise InvalidMediaError(f"{name} cannot be read: {error}") from None


def _from_data_url(url: str, kind: str, limit: int) -> bytes:
    # An animated image is a video, and what it is called does not tell.
    kinds = ("image", "video") if kind == "video" else (kind,)
    header, comma, payload = url[5:].partition(",")
    media_type, *options = header.split(";")
    if not comma or "base64" not in options:
        raise InvalidMediaError(f"data: URL {url[:40]!r} is not of the form data:{kind}/...;base64,...")
    if media_type and media_type.lower().partition("/")[0] not in kinds:
        raise InvalidMediaError(f"data: URL holds {media_type[:40]!r}; only {kind}/... is allowed")
    if len(payload) > limit * 4 // 3 + 4:
        raise InvalidMediaError(f"data: URL of {len(url)} characters; the {kind} may have {limit} bytes at most")
    try:
        return base64.b64decode(payload, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidMediaError(f"data: URL {url[:40]!r} is not valid base64: {error}") from None
