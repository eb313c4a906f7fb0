"""How a process that inherited nothing gets at a region: it asks the owner, by the engine's id.

The owner listens on two sockets in the abstract namespace (no file, gone with the process): one hands out a
writable descriptor, the other a read-only one. So a client need not send anything, and cannot stall the owner.
"""

from __future__ import annotations

import os
import select
import selectors
import socket
import struct
import threading
import time
from contextlib import suppress
from hashlib import sha256

import msgspec

from ecotone.errors import ConfigError, ContractError, EcotoneError, ResourceError
from ecotone.node.region import Region, RegionDescriptor

_MAX_MESSAGE = 4096
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.1


class Refusal(msgspec.Struct, frozen=True, tag="refusal", forbid_unknown_fields=True):
    """The owner's answer to whom it gives nothing."""

    reason: str


def region_address(engine_id: str, *, writable: bool) -> str:
    """The abstract socket address where the region of ``engine_id`` is handed out."""
    name = sha256(engine_id.encode("utf-8", "surrogatepass")).hexdigest()
    return f"\0ecotone-region/{name}/{'rw' if writable else 'ro'}"


class RegionServer:
    """Hands out a region to processes of one user, from a thread of its own, until it is closed.

    Args:
        engine_id: the name to ask for.
        region: what is handed out. Its memory stays while the server is open.
        uid: the user who may attach; ``None`` is the one this process runs as.

    Raises:
        ConfigError: the name is taken: an engine of this id runs already.
        ResourceError: no descriptor is left.
        ShutDownError: the region was closed.
    """

    def __init__(self, engine_id: str, region: Region, uid: int | None = None) -> None:
        self._uid = os.geteuid() if uid is None else uid
        self._message = msgspec.msgpack.encode(region.descriptor)
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._sockets = [self._wake, self._woken]
        self._fds: list[int] = []
        try:
            for writable in (True, False):
                fd = region.open_descriptor(writable=writable)
                self._fds.append(fd)
                listener = _listen(region_address(engine_id, writable=writable), engine_id)
                self._sockets.append(listener)
                self._selector.register(listener, selectors.EVENT_READ, (listener, fd))
        except EcotoneError:
            self._release()
            raise
        self._thread = threading.Thread(target=self._serve, name="ecotone-region-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop handing out; what was handed out stays valid. Idempotent."""
        if self._sockets:
            self._wake.send(b"x")
            self._thread.join()
            self._release()

    def _release(self) -> None:
        self._selector.close()
        while self._sockets:
            self._sockets.pop().close()
        _close_all(self._fds)

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.data is None:  # woken to end
                    return
                try:
                    self._answer(*key.data)
                except OSError:
                    # The client hung up, or the process is out of descriptors: then the listener stays readable,
                    # and without a pause this would spin until there are some again.
                    select.select([self._woken], [], [], _LONGEST_PAUSE_S)

    def _answer(self, listener: socket.socket, fd: int) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.setblocking(False)  # its buffer is empty: the one message fits
            uid = peer_uid(connection)
            if uid == self._uid:
                socket.send_fds(connection, [self._message], [fd])
            else:
                refusal = Refusal(f"it serves user {self._uid}, not user {uid}")
                connection.send(msgspec.msgpack.encode(refusal))


def attach_region(
    engine_id: str, timeout_s: float, *, writable: bool = True, prefault: bool = True, uid: int | None = None
) -> Region:
    """The region of ``engine_id``, mapped into this process. Waits until its owner is there.

    Args:
        timeout_s: seconds to wait for the owner.
        writable: ask for a writable mapping, or for a read-only one.
        prefault: fill in the page table now, so that the first copies meet no page faults.
        uid: the user who must own it; ``None`` is the one this process runs as.

    Raises:
        ResourceError: nobody handed it out in time, or it cannot be mapped.
        ConfigError: the owner serves another user, or belongs to another user.
        ContractError: what was handed out is not a region.
    """
    address = region_address(engine_id, writable=writable)
    owner = os.geteuid() if uid is None else uid
    deadline, pause = time.monotonic() + timeout_s, _FIRST_PAUSE_S
    while True:
        left = deadline - time.monotonic()
        with suppress(ConnectionError, TimeoutError, BlockingIOError):
            return _ask(address, max(left, _FIRST_PAUSE_S), engine_id, owner, prefault)
        if left <= 0:
            raise ResourceError(f"no engine {engine_id!r} on this host handed out its region in {timeout_s} s")
        time.sleep(min(pause, left))
        pause = min(2 * pause, _LONGEST_PAUSE_S)


def _ask(address: str, timeout_s: float, engine_id: str, owner: int, prefault: bool) -> Region:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(timeout_s)
        connection.connect(address)
        uid = peer_uid(connection)
        if uid != owner:
            raise ConfigError(f"engine {engine_id!r} belongs to user {uid}, not to user {owner}")
        data, fds, _, _ = socket.recv_fds(connection, _MAX_MESSAGE, 1, socket.MSG_CMSG_CLOEXEC)
    if not data:
        raise ConnectionResetError("the owner closed before it answered")
    try:
        answer = msgspec.msgpack.decode(data, type=RegionDescriptor | Refusal)
    except msgspec.DecodeError as error:
        _close_all(fds)
        raise ContractError(f"engine {engine_id!r} answered {data[:32]!r}: {error}") from None
    if isinstance(answer, Refusal):
        _close_all(fds)
        raise ConfigError(f"engine {engine_id!r} gives nothing: {answer.reason}")
    if len(fds) != 1:
        raise ContractError(f"engine {engine_id!r} described its region and sent no descriptor")
    return Region.attach(fds[0], answer, prefault=prefault)


def _listen(address: str, engine_id: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise ConfigError(f"engine id {engine_id!r} is taken on this host: {error}") from error
    listener.listen()
    return listener


def peer_uid(connection: socket.socket) -> int:
    """The user at the other end of a Unix socket, as the kernel knows it."""
    return _credentials(connection)[1]


def peer_pid(connection: socket.socket) -> int:
    """The process that connected a Unix socket, as the kernel knows it."""
    return _credentials(connection)[0]


def _credentials(connection: socket.socket) -> tuple[int, int, int]:
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, gid = struct.unpack("3i", data)
    return pid, uid, gid


def _close_all(fds: list[int]) -> None:
    while fds:
        os.close(fds.pop())
