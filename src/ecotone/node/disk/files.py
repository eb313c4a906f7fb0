"""Bytes to and from open files and folders."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence

from ecotone.errors import DecodeError
from ecotone.node.disk.format import Parsed, header_length, parse_header

# What is hashed while it is still in the processor's cache.
CHUNK_BYTES = 1 << 20


def chunks(views: Sequence[memoryview]) -> Iterator[memoryview]:
    """The bytes of ``views``, in order, ``CHUNK_BYTES`` at a time or fewer."""
    for view in views:
        for start in range(0, len(view), CHUNK_BYTES):
            yield view[start : start + CHUNK_BYTES]


def write_all(fd: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of ``data`` at ``offset``. Raises ``OSError``."""
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written


def read_all(fd: int, into: memoryview, offset: int) -> None:
    """Fill ``into`` from ``offset``.

    Raises:
        DecodeError: the file ends before.
        OSError: it cannot be read.
    """
    while into:
        count = os.preadv(fd, [into], offset)
        if count == 0:
            raise DecodeError(f"it ends at byte {offset}")
        into, offset = into[count:], offset + count


def read_header(fd: int) -> tuple[Parsed, int]:
    """The header of an open file, and the file's size.

    Raises:
        DecodeError: it is not the file of an entry.
        OSError: it cannot be read.
    """
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise DecodeError("not a file")
    length = header_length(os.pread(fd, 8, 0))
    return parse_header(os.pread(fd, length, 8)), status.st_size


def listing(folder_fd: int) -> list[tuple[str, int, int, bool]]:
    """Name, size, time of change (ns) of what is in a folder, and whether it is a regular file."""
    found = []
    with os.scandir(folder_fd) as entries:
        for entry in entries:
            status = entry.stat(follow_symlinks=False)
            found.append((entry.name, status.st_size, status.st_mtime_ns, stat.S_ISREG(status.st_mode)))
    return found


def empty(folder_fd: int) -> Iterator[None]:
    """Delete what is in a folder, following no link; yields after each deletion. Raises ``OSError``."""
    with os.scandir(folder_fd) as found:
        inside = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in found]
    for name, is_folder in inside:
        if is_folder:
            fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder_fd)
            try:
                yield from empty(fd)
            finally:
                os.close(fd)
            os.rmdir(name, dir_fd=folder_fd)
        else:
            os.unlink(name, dir_fd=folder_fd)
        yield
