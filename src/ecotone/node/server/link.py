"""A client's connection to a node: opened, written and read without ever blocking."""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Iterator
from typing import TypeVar

from ecotone.errors import ConfigError, WireError
from ecotone.node.attach import peer_uid
from ecotone.node.server.listen import Address, shown
from ecotone.node.server.messages import (
    PREAMBLE,
    VERSION,
    ClientMessage,
    FrameReader,
    Hello,
    NodeMessage,
    Refusal,
    framed,
    node_message,
)

_READ_BYTES = 2**18
_M = TypeVar("_M", bound=NodeMessage)


class LostError(Exception):
    """The connection is of no use any more; the text says why. ``final``: nor would another one be. Never leaves
    this package."""

    def __init__(self, why: str, *, final: bool = False) -> None:
        super().__init__(why)
        self.final = final


class Link:
    """One connection. Whatever goes wrong with it is a ``LostError``, after which it is closed.

    Args:
        address: the node's socket.
        hello: the first message.

    Raises:
        LostError: nobody serves there.
        ConfigError: somebody else's process serves there.
    """

    def __init__(self, address: Address, hello: Hello) -> None:
        self._reader = FrameReader()
        self._output = bytearray(PREAMBLE + framed(hello))
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self.descriptors: list[int] = []
        try:
            self._socket.connect(str(address))
            uid = peer_uid(self._socket)
        except OSError as error:
            self._socket.close()
            raise LostError(error.strerror or str(error)) from None
        if uid != os.geteuid():
            self._socket.close()
            raise ConfigError(f"the node at {shown(address)} belongs to user {uid}, not to user {os.geteuid()}")

    def wait(self, timeout_s: float) -> bool:
        """Block until something arrived, or for ``timeout_s``; whether there is a reason to look."""
        deadline = time.monotonic() + timeout_s
        waiting = select.poll()
        while True:
            self.pump()
            waiting.register(self._socket, select.POLLIN | (select.POLLOUT if self._output else 0))
            events = waiting.poll(max(0.0, deadline - time.monotonic()) * 1000)
            if not events or events[0][1] != select.POLLOUT:
                return bool(events)

    @property
    def unsent_bytes(self) -> int:
        """What the kernel has not taken yet."""
        return len(self._output)

    def send(self, message: ClientMessage) -> None:
        """Put ``message`` behind what is not sent yet, and send what the kernel takes."""
        self._output += framed(message)
        self.pump()

    def pump(self) -> None:
        """Send what the kernel takes."""
        try:
            while self._output:
                del self._output[: self._socket.send(self._output)]
        except BlockingIOError:
            pass
        except OSError:
            # A node that hung up may have said why: whoever reads finds that, and then the end.
            self._output.clear()

    def receive(self) -> Iterator[NodeMessage]:
        """The messages that have arrived. Descriptors that came with them are in ``descriptors``.

        Raises:
            LostError: the node hung up, refused, or talks nonsense.
        """
        self.pump()
        yield from self._messages(b"")  # what the last caller left
        while True:
            try:
                data, descriptors, _, _ = socket.recv_fds(self._socket, _READ_BYTES, 4, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                return
            except OSError as error:
                raise self._lost(error.strerror or str(error)) from None
            self.descriptors += descriptors
            if not data:
                raise self._lost("the node hung up")
            yield from self._messages(data)

    def close(self) -> None:
        """Hang up. Idempotent. What the kernel took is still read by the node."""
        self._socket.close()
        while self.descriptors:
            os.close(self.descriptors.pop())

    def _messages(self, data: bytes) -> Iterator[NodeMessage]:
        try:
            for frame in self._reader.feed(data):
                message = node_message(frame)
                if isinstance(message, Refusal):
                    raise self._lost(f"it refused: {message.reason}", final=True)
                yield message
            if self._reader.version not in (None, VERSION):
                why = f"it speaks version {self._reader.version} of the protocol, and this is version {VERSION}"
                raise self._lost(why, final=True)
        except WireError as error:
            raise self._lost(str(error)) from None

    def _lost(self, why: str, *, final: bool = False) -> LostError:
        self.close()
        return LostError(why, final=final)


def await_message(link: Link, kind: type[_M], deadline: float) -> _M:
    """Wait for the next message, which must be a ``kind``.

    Raises:
        LostError: it is another one, the ``deadline`` (of ``time.monotonic``) passed, or as of ``Link.receive``.
    """
    while True:
        for message in link.receive():
            if isinstance(message, kind):
                return message
            raise LostError(f"it said {type(message).__name__} instead of {kind.__name__}")
        left = deadline - time.monotonic()
        if left <= 0:
            raise LostError("it did not answer in time")
        link.wait(left)
