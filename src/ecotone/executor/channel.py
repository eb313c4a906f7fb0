"""Messages between two processes of a machine: a socket that keeps them apart, shared memory for large ones.

A message of up to ``INLINE_BYTES`` is one packet. A larger one is written to anonymous memory, once however many
receivers it has, and the packet carries its length and the memory's descriptor. So what lies in a socket's buffer
is always small, whatever is sent, and the two ends cannot block each other with half-written messages.
"""

from __future__ import annotations

import array
import fcntl
import mmap
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from ecotone.errors import DecodeError
from ecotone.protocol.wire import MAX_MESSAGE_BYTES

INLINE_BYTES = 64 * 1024
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
_LENGTH = 8


class Packet(NamedTuple):
    """A message ready to be sent: its packet, and the descriptor that goes with a large one."""

    data: bytes
    fd: int | None


@contextmanager
def packed(message: bytes) -> Iterator[Packet]:
    """``message`` as a packet, for any number of receivers, while the context lasts."""
    if len(message) <= INLINE_BYTES:
        yield Packet(message, None)
        return
    fd = write_memory(message)
    try:
        yield Packet(len(message).to_bytes(_LENGTH, "little"), fd)
    finally:
        os.close(fd)


class Channel:
    """One end of a connection. Messages are at least one byte long.

    Args:
        connection: a connected socket of type SOCK_SEQPACKET; the channel's from now on.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    def fileno(self) -> int:
        """For ``select``."""
        return self._socket.fileno()

    def send(self, packet: Packet) -> None:
        """Send a packet.

        Raises:
            BlockingIOError: the socket does not block, and its buffer is full.
            ConnectionError: the other end is gone.
        """
        if packet.fd is None:
            self._socket.send(packet.data)
        else:
            rights = array.array("i", [packet.fd])
            self._socket.sendmsg([packet.data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])

    def receive(self) -> bytes | memoryview | None:
        """The next message, in place where it is a large one; ``None`` when the other end is gone.

        Raises:
            BlockingIOError: the socket does not block, and there is none.
            DecodeError: what came is no message.
        """
        try:
            data, fds, flags, _ = socket.recv_fds(self._socket, INLINE_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
        except ConnectionError:
            return None
        if not fds:
            if flags & socket.MSG_TRUNC:
                raise DecodeError(f"a packet of more than {INLINE_BYTES} bytes")
            return data or None
        try:
            return read_memory(fds[0], int.from_bytes(data[:_LENGTH], "little"))
        finally:
            for fd in fds:
                os.close(fd)

    def close(self) -> None:
        """Close this end; the other one finds out. Idempotent."""
        with suppress(OSError):
            self._socket.close()


def channel_pair() -> tuple[Channel, socket.socket]:
    """A channel that does not block, and the socket of its other end, which does."""
    own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    own.setblocking(False)
    return Channel(own), other


def write_memory(message: bytes) -> int:
    """A descriptor of anonymous memory that holds ``message``. Nobody can change it, or take the memory from under
    a reader."""
    fd = os.memfd_create("ecotone-message", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, len(message))
    rest = memoryview(message)
    while rest:
        rest = rest[os.write(fd, rest) :]
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    return fd


def read_memory(fd: int, size: int) -> memoryview:
    """The ``size`` bytes that ``write_memory`` wrote, in place.

    Raises:
        DecodeError: the descriptor is not of such memory.
    """
    found = os.fstat(fd).st_size
    if not INLINE_BYTES < size <= MAX_MESSAGE_BYTES or found != size:
        raise DecodeError(f"a descriptor of {found} bytes for a message of {size}")
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:  # not such a file at all
        seals = 0
    if seals & _SEALS != _SEALS:
        raise DecodeError("the memory of a message could change while it is read")
    return memoryview(mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ))
