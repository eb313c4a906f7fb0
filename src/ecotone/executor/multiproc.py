"""Ranks in processes of their own, on this machine."""

from __future__ import annotations

import os
import selectors
import threading
import time
from collections.abc import Sequence
from typing import ClassVar

from ecotone.errors import DecodeError
from ecotone.executor.base import Delivers
from ecotone.executor.channel import Packet, packed
from ecotone.executor.process import RankProcess, rank_environment
from ecotone.executor.ranked import RankedExecutor
from ecotone.executor.transport import Answered, Died, Event, Interrupted, Signalled, Transport

_WAKEUP, _INTERRUPT = -1, -2  # what a selector key stands for, beside the number of a rank


class MultiprocExecutor(RankedExecutor):
    """See ``RankedExecutor``. Messages are typed msgpack over local sockets. A rank's end is an event of the
    kernel's, noticed also in the middle of a call. Ranks end with this process, however it ends."""

    delivers: ClassVar[Delivers] = Delivers(all_ranks=True, steps_in_flight=16)

    def _open_transport(self) -> Transport:
        return ProcessTransport(self._world_size)


class ProcessTransport(Transport):
    """Starts ``world_size`` processes.

    Attributes:
        init_method: anonymous memory of this process where the ranks can find each other: no port, no file, and
            gone with the process.

    Raises:
        ResourceError: the machine has no process or descriptor left; nothing is left of those that were started.
    """

    def __init__(self, world_size: int) -> None:
        self._closing = threading.Lock()
        self._rendezvous_fd = os.memfd_create("ecotone-rendezvous", os.MFD_CLOEXEC)
        self._wakeup_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._interrupt_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._fds = [self._rendezvous_fd, self._wakeup_fd, self._interrupt_fd]
        self.init_method = f"file:///proc/{os.getpid()}/fd/{self._rendezvous_fd}"
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wakeup_fd, selectors.EVENT_READ, _WAKEUP)
        self._selector.register(self._interrupt_fd, selectors.EVENT_READ, _INTERRUPT)
        self._all: list[RankProcess] = []
        self._alive: dict[int, RankProcess] = {}
        self._backlog: list[Event] = []
        try:
            environment = rank_environment(world_size)
            for rank in range(world_size):
                self._add(rank, RankProcess(self._wakeup_fd, environment))
        except BaseException:
            self.close(b"", 0.0)
            raise

    def _add(self, rank: int, process: RankProcess) -> None:
        self._all.append(process)
        self._alive[rank] = process
        self._selector.register(process.channel, selectors.EVENT_READ, rank)
        self._selector.register(process.pidfd, selectors.EVENT_READ, rank)

    def send_starts(self, messages: Sequence[bytes]) -> None:
        """See ``Transport``."""
        for rank, message in enumerate(messages):
            with packed(message) as packet:
                self._send_to(rank, packet)

    def send(self, message: bytes, reply_rank: int | None) -> None:  # noqa: ARG002 - the call says so too
        """See ``Transport``. Waits where a rank has that much to read already."""
        with packed(message) as packet:
            for rank in list(self._alive):
                self._send_to(rank, packet)

    def wait(self, timeout: float | None) -> list[Event]:
        """See ``Transport``."""
        if not self._backlog:
            return self._select(timeout)
        backlog, self._backlog = self._backlog, []
        return backlog

    def interrupt(self) -> None:
        """See ``Transport``."""
        with self._closing:
            if self._fds:
                os.eventfd_write(self._interrupt_fd, 1)

    def close(self, last_message: bytes, grace_s: float) -> None:
        """See ``Transport``."""
        deadline = time.monotonic() + grace_s
        if last_message:
            with packed(last_message) as packet:
                for process in self._alive.values():
                    try:
                        process.channel.send(packet)
                    except (BlockingIOError, ConnectionError):
                        continue  # it finds out when the connection closes
        for process in self._all:
            process.channel.close()
        for process in self._all:
            if not process.wait(deadline - time.monotonic()):
                process.kill()
            process.close()
        self._selector.close()
        with self._closing:
            while self._fds:
                os.close(self._fds.pop())

    def _send_to(self, rank: int, packet: Packet) -> None:
        while (process := self._alive.get(rank)) is not None:
            try:
                process.channel.send(packet)
                return
            except ConnectionError:
                return  # ``wait`` says how it ended
            except BlockingIOError:
                # It may be waiting in its turn for its answers to be read.
                self._selector.modify(process.channel, selectors.EVENT_READ | selectors.EVENT_WRITE, rank)
                self._backlog += self._select(None)
                if rank in self._alive:
                    self._selector.modify(process.channel, selectors.EVENT_READ, rank)
                if any(isinstance(event, Interrupted) for event in self._backlog):
                    return

    def _select(self, timeout: float | None) -> list[Event]:
        events: list[Event] = []
        for key, mask in self._selector.select(timeout):
            if key.data == _WAKEUP:
                os.eventfd_read(self._wakeup_fd)
                events.append(Signalled())
            elif key.data == _INTERRUPT:
                os.eventfd_read(self._interrupt_fd)
                events.append(Interrupted())
            elif mask & selectors.EVENT_READ and key.data in self._alive:
                events += self._read(key.data, ended=key.fd == self._alive[key.data].pidfd)
        return events

    def _read(self, rank: int, *, ended: bool) -> list[Event]:
        """One message of ``rank``, or all that there are when it ``ended``."""
        process = self._alive[rank]
        events: list[Event] = []
        while True:
            try:
                message = process.channel.receive()
            except BlockingIOError:
                return [*events, self._remove(rank)] if ended else events
            except DecodeError as error:
                process.kill()
                return [*events, self._remove(rank, f"sent what is no message ({error})")]
            if message is None:
                return [*events, self._remove(rank)]
            events.append(Answered(rank, message))
            if not ended:
                return events

    def _remove(self, rank: int, cause: str | None = None) -> Died:
        process = self._alive.pop(rank)
        self._selector.unregister(process.channel)
        self._selector.unregister(process.pidfd)
        return Died(rank, cause or process.cause_of_end())
