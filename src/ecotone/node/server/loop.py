"""The node's sockets: one thread, one epoll, and bounds on what any one client can take of it."""

from __future__ import annotations

import errno
import os
import select
import signal
import socket
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from ecotone.errors import EcotoneError, WireError
from ecotone.node.attach import peer_pid, peer_uid
from ecotone.node.embedded import RESET_TIMEOUT_S
from ecotone.node.server.messages import (
    PREAMBLE,
    VERSION,
    FrameReader,
    NodeMessage,
    Refusal,
    client_message,
    framed,
)
from ecotone.node.server.service import Reply, Service

READ_BYTES = 2**16  # of a client in one turn: then it is the others' turn
ACCEPTS_PER_TURN = 64
MAX_OUTPUT_BYTES = 4 * 2**20  # a client that leaves more than this unread is dropped
HELLO_TIMEOUT_S = 10.0
_PAUSE_S = 0.1  # before accepting again when there is no descriptor left

_READ, _WRITE = select.EPOLLIN, select.EPOLLOUT
_HANGUP = select.EPOLLHUP | select.EPOLLERR


class _Connection:
    """One client's socket, what arrived of its next message, and what it has not read yet."""

    __slots__ = ("accepted", "held", "muted", "output", "output_bytes", "pidfd", "reader", "socket", "wants_write")

    def __init__(self, connection: socket.socket, accepted: float) -> None:
        self.socket = connection
        self.accepted = accepted
        self.reader = FrameReader()
        self.output: deque[tuple[bytes, int | None]] = deque()  # with the descriptor to pass
        self.output_bytes = 0
        self.pidfd: int | None = None  # of a scheduler's process
        self.held: deque[tuple[float, Reply]] = deque()  # with the time until which it may wait
        self.muted = False
        self.wants_write = False


class Loop:
    """Accepts clients, and carries messages between them and the service.

    Args:
        listener: bound and listening, non-blocking.
        service: what answers.
        uid: the user whose processes are served.
        clock: monotonic seconds.
        max_connections: more are not held: who has not said Hello goes first, then newcomers are refused.

    Attributes:
        lock: held while something is done to the books, never while waiting.
    """

    def __init__(
        self,
        listener: socket.socket,
        service: Service,
        uid: int,
        clock: Callable[[], float],
        max_connections: int,
    ) -> None:
        self.lock = threading.Lock()
        self._listener = listener
        self._service = service
        self._uid = uid
        self._clock = clock
        self._max_connections = max_connections
        self._connections: dict[int, _Connection] = {}
        self._ungreeted: OrderedDict[int, None] = OrderedDict()  # in the order they came
        self._waiting: set[int] = set()  # connections with answers that wait for a disk
        self._lingering: dict[int, Callable[[], None]] = {}  # pidfd -> what to do when that process is gone
        self._listen_again: float | None = None
        self._stopped = False
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._epoll = select.epoll()
        self._epoll.register(self._woken, _READ)
        self._epoll.register(listener, _READ)
        self._count = dict.fromkeys(("accepted", "refused", "dropped", "malformed", "messages", "silent"), 0)

    def stop(self) -> None:
        """Make ``run`` return. Safe from any thread and from a signal handler."""
        self._stopped = True
        self.wake()

    def wake(self) -> None:
        """Make ``run`` go round once: a disk has news. Safe from any thread."""
        with suppress(OSError):  # it is awake already, or closed
            self._wake.send(b"x")

    def run(self) -> None:
        """Serve until ``stop``; then close everything."""
        try:
            with self._woken_by_signals():
                while not self._stopped:
                    self._go_round()
        finally:
            with self.lock:
                self.close()

    def statistics(self) -> dict[str, float]:
        """Counters of connections and messages."""
        return {**self._count, "connections": len(self._connections)}

    def _go_round(self) -> None:
        news = self._epoll.poll(self._timeout())
        with self.lock:
            for fd, events in news:
                self._turn(fd, events)
            self._service.pump(self._clock())
            self._release()
            self._end_silent()

    @contextmanager
    def _woken_by_signals(self) -> Iterator[None]:
        """A signal that arrives just before the loop begins to wait would be handled only after the wait, so it
        has to leave something to read. Only the main thread handles signals."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(before)

    # -- turns ------------------------------------------------------------------------------------------------

    def _turn(self, fd: int, events: int) -> None:
        if fd == self._listener.fileno():
            self._accept()
            return
        if fd == self._woken.fileno():
            self._woken.recv(READ_BYTES)
            return
        if fd in self._lingering:
            self._process_gone(fd)
            return
        connection = self._connections.get(fd)
        if connection is None:  # ended earlier in this round
            return
        if connection.muted:
            if events & _HANGUP:
                self._end(fd)
            return
        if events & _WRITE:
            self._send(fd, connection)
        if fd in self._connections and events & (_READ | _HANGUP):
            self._receive(fd, connection)

    def _accept(self) -> None:
        for _ in range(ACCEPTS_PER_TURN):
            try:
                accepted, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS):
                    continue  # that client is gone again
                self._pause_accepting()
                return
            self._take(accepted)

    def _take(self, accepted: socket.socket) -> None:
        if peer_uid(accepted) != self._uid or not self._has_place():
            self._count["refused"] += 1
            accepted.close()
            return
        accepted.setblocking(False)
        fd = accepted.fileno()
        self._connections[fd] = _Connection(accepted, self._clock())
        self._ungreeted[fd] = None
        self._epoll.register(fd, _READ)
        self._count["accepted"] += 1

    def _has_place(self) -> bool:
        if len(self._connections) < self._max_connections:
            return True
        if not self._ungreeted:
            return False
        self._count["dropped"] += 1
        self._end(next(iter(self._ungreeted)))
        return True

    def _pause_accepting(self) -> None:
        """Out of descriptors: the listener stays readable, and would keep the loop spinning."""
        if self._ungreeted:
            self._count["dropped"] += 1
            self._end(next(iter(self._ungreeted)))
            return
        self._epoll.modify(self._listener, 0)
        self._listen_again = self._clock() + _PAUSE_S

    def _receive(self, fd: int, connection: _Connection) -> None:
        try:
            data = connection.socket.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._end(fd)
            return
        try:
            for frame in connection.reader.feed(data):
                self._handle(fd, connection, frame)
                if connection.muted or fd not in self._connections:
                    return
            if connection.reader.version not in (None, VERSION):
                connection.output.append((PREAMBLE, None))
                self._refuse(fd, connection, None)
                return
        except WireError as error:
            self._count["malformed"] += 1
            self._refuse(fd, connection, Refusal(str(error)[:500]))
            return
        self._send(fd, connection)

    def _handle(self, fd: int, connection: _Connection, frame: bytes) -> None:
        self._count["messages"] += 1
        reply = self._service.handle(fd, client_message(frame), self._clock())
        if reply is None:
            return
        if isinstance(reply.message, Refusal):
            self._count["refused"] += 1
            self._refuse(fd, connection, reply.message)
            return
        if fd in self._ungreeted:
            del self._ungreeted[fd]
            connection.output.append((PREAMBLE, None))
            self._watch_scheduler(fd, connection)
        if reply.replaced is not None:
            self._end(reply.replaced)
        if connection.held or not reply.is_due:
            connection.held.append((self._clock() + RESET_TIMEOUT_S, reply))
            self._waiting.add(fd)
            return
        try:
            self._queue(connection, reply)
        except EcotoneError as error:  # no descriptor left, or an answer that is too long
            self._refuse(fd, connection, Refusal(str(error)))
            return
        if connection.output_bytes > MAX_OUTPUT_BYTES:
            self._count["dropped"] += 1
            self._drop(fd, connection)

    def _release(self) -> None:
        """Send the answers that waited for a disk, in their order."""
        for fd in list(self._waiting):
            connection = self._connections[fd]
            while connection.held and (connection.held[0][1].is_due or connection.held[0][0] <= self._clock()):
                self._queue(connection, connection.held.popleft()[1])
            if not connection.held:
                self._waiting.discard(fd)
            self._send(fd, connection)

    def _queue(self, connection: _Connection, reply: Reply) -> None:
        data = framed(reply.message)
        descriptor = None
        if reply.tenant is not None and reply.writable is not None:
            descriptor = reply.tenant.region.open_descriptor(writable=reply.writable)
        connection.output.append((data, descriptor))
        connection.output_bytes += len(data)

    def _send(self, fd: int, connection: _Connection) -> None:
        output = connection.output
        try:
            while output:
                data, descriptor = output[0]
                if descriptor is None:
                    sent = connection.socket.send(data)
                else:
                    sent = socket.send_fds(connection.socket, [data], [descriptor])
                    os.close(descriptor)
                connection.output_bytes -= sent
                if sent == len(data):
                    output.popleft()
                else:
                    output[0] = data[sent:], None
        except BlockingIOError:
            pass
        except OSError:
            self._end(fd)
            return
        if bool(output) is not connection.wants_write:
            connection.wants_write = bool(output)
            self._epoll.modify(fd, _READ | (_WRITE if output else 0))

    # -- ends -------------------------------------------------------------------------------------------------

    def _refuse(self, fd: int, connection: _Connection, refusal: NodeMessage | None) -> None:
        """Say why, if there is room for it, and hang up: what the kernel took can still be read."""
        if refusal is not None:
            if fd in self._ungreeted:
                connection.output.append((PREAMBLE, None))
            connection.output.append((framed(refusal), None))
        self._send(fd, connection)
        if fd in self._connections:
            self._drop(fd, connection)

    def _drop(self, fd: int, connection: _Connection) -> None:
        """Have nothing more to do with a client. Where its process maps the region the connection stays open
        unread: that the kernel closes it is how the node learns that nobody there touches the memory any more."""
        if not self._service.maps_region(fd):
            self._end(fd)
            return
        connection.muted = True
        connection.held.clear()
        self._waiting.discard(fd)
        _close_descriptors(connection)
        with suppress(OSError):
            connection.socket.shutdown(socket.SHUT_RD)
        self._epoll.modify(fd, 0)

    def _end(self, fd: int) -> None:
        connection = self._connections.pop(fd)
        self._waiting.discard(fd)
        self._ungreeted.pop(fd, None)
        self._epoll.unregister(fd)
        _close_descriptors(connection)
        connection.socket.close()
        when_process_gone = self._service.gone(fd, self._clock())
        if connection.pidfd is None:
            if when_process_gone is not None:
                when_process_gone()
        elif when_process_gone is None:
            os.close(connection.pidfd)
        else:
            self._lingering[connection.pidfd] = when_process_gone
            self._epoll.register(connection.pidfd, _READ)

    def _watch_scheduler(self, fd: int, connection: _Connection) -> None:
        """A scheduler whose connection breaks may live on: its process is what tells. One that is gone already
        has no ``pidfd``."""
        if self._service.is_scheduler(fd):
            with suppress(ProcessLookupError):
                connection.pidfd = os.pidfd_open(peer_pid(connection.socket))

    def _process_gone(self, pidfd: int) -> None:
        self._epoll.unregister(pidfd)
        os.close(pidfd)
        self._lingering.pop(pidfd)()

    def _timeout(self) -> float | None:
        deadlines = [] if self._listen_again is None else [self._listen_again]
        deadlines += [self._connections[fd].held[0][0] for fd in self._waiting]
        if self._ungreeted:
            first = self._connections[next(iter(self._ungreeted))]
            deadlines.append(first.accepted + HELLO_TIMEOUT_S)
        return max(0.0, min(deadlines) - self._clock()) if deadlines else None

    def _end_silent(self) -> None:
        """Whoever connected and said nothing makes place."""
        now = self._clock()
        if self._listen_again is not None and now >= self._listen_again:
            self._listen_again = None
            self._epoll.modify(self._listener, _READ)
        while self._ungreeted:
            fd = next(iter(self._ungreeted))
            if now < self._connections[fd].accepted + HELLO_TIMEOUT_S:
                return
            self._count["silent"] += 1
            self._end(fd)

    def close(self) -> None:
        """Hang up on every client. Idempotent; not while ``run`` runs."""
        for fd in list(self._connections):
            self._end(fd)
        for pidfd in self._lingering:
            os.close(pidfd)
        self._lingering.clear()
        self._epoll.close()
        self._wake.close()
        self._woken.close()
        self._listener.close()


def _close_descriptors(connection: _Connection) -> None:
    for _, descriptor in connection.output:
        if descriptor is not None:
            os.close(descriptor)
    connection.output.clear()
    connection.output_bytes = 0
