"""Ranks as Ray actors. Ray places them, calls them and tells of their ends; what travels is Ecotone's own bytes.

Ray is imported in ``ray_cluster``; the factory imports this module when a configuration asks for Ray.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, ClassVar, NamedTuple, TypeAlias

from ecotone.errors import ResourceError
from ecotone.executor.base import Delivers
from ecotone.executor.channel import INLINE_BYTES, read_memory, write_memory
from ecotone.executor.messages import ServedRank
from ecotone.executor.ranked import RankedExecutor
from ecotone.executor.ray_cluster import enter_cluster, leave_cluster, ray
from ecotone.executor.transport import Answered, Died, Event, Interrupted, Signalled, Transport

PLACEMENT_TIMEOUT_S = 60.0
_INTERRUPT_S = 0.25  # Ray's waits cannot be ended from another thread; this long until one looks
_END_S = 10.0  # between the order to end a process and its end
_MAX_CAUSE = 600

# A large message on the same machine: (pid, descriptor, size) of memory in the sender's process. Ray's object
# store never sees it.
Borrowed: TypeAlias = tuple[int, int, int]
Letter: TypeAlias = bytes | Borrowed


class RayExecutorV2(RankedExecutor):
    """See ``RankedExecutor``. Every rank is an actor in a placement group on one machine.

    Survives what Ray survives without losing a rank's state; a rank is not restarted, since its state would be
    gone: its end fails the executor, with Ray's account of the cause.
    """

    delivers: ClassVar[Delivers] = Delivers(all_ranks=True, steps_in_flight=16)

    def _open_transport(self) -> Transport:
        return RayTransport(self._world_size, self._config.device)


class RayExecutor(RayExecutorV2):
    """Fetches the output rank's answers to steps and nothing else. What the other ranks report is lost, so it
    refuses connectors where there is more than one rank."""

    delivers: ClassVar[Delivers] = Delivers(all_ranks=False, steps_in_flight=16)


class RankActor:
    """A rank's process, as Ray sees it."""

    def __init__(self) -> None:
        self._signalled = threading.Event()
        self._faults: list[bytes] = []
        self._rank = ServedRank(self._signalled.set)
        self._lent: set[int] = set()
        self._near = False

    def reaches(self, probe: Borrowed, token: bytes, paths: Sequence[str]) -> tuple[int, bool]:
        """Its pid, and whether it can read the caller's memory, as on the same machine. Then it finds modules
        where the caller does, in ``paths``."""
        with suppress(OSError):
            pid, fd, size = probe
            with open(f"/proc/{pid}/fd/{fd}", "rb") as memory:
                self._near = memory.read(size) == token
        if self._near:
            sys.path += [path for path in paths if path not in sys.path]
        return os.getpid(), self._near

    def free_address(self) -> str:
        """Where ranks on several machines can find each other."""
        host = ray.util.get_node_ip_address()
        with socket.create_server((host, 0)) as server:
            return f"tcp://{host}:{server.getsockname()[1]}"

    def answer(self, letter: Letter, returned: Sequence[int], expected: bool) -> Letter | None:
        """See ``ServedRank``. ``returned``: descriptors of earlier answers that were read. A fault that nobody
        expects an answer from goes the way of signals."""
        for fd in returned:
            self._lent.discard(fd)
            os.close(fd)
        reply = self._rank.answer(_open(letter))
        if reply is None or expected:
            return None if reply is None else self._lend(reply)
        self._faults.append(reply)
        self._signalled.set()
        return None

    @ray.method(concurrency_group="signals")  # type: ignore[untyped-decorator]
    def wait_for_signal(self) -> list[bytes]:
        """Block until the rank has something to report; the faults among it."""
        self._signalled.wait()
        self._signalled.clear()
        faults, self._faults = self._faults, []
        return faults

    def _lend(self, message: bytes) -> Letter:
        if not self._near or len(message) <= INLINE_BYTES:
            return message
        fd = write_memory(message)
        self._lent.add(fd)
        return os.getpid(), fd, len(message)


def _open(letter: Letter) -> bytes | memoryview:
    if isinstance(letter, bytes):
        return letter
    pid, number, size = letter
    fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return read_memory(fd, size)
    finally:
        os.close(fd)


class _Awaited(NamedTuple):
    """Whose result it is, and whether that of ``wait_for_signal`` or an answer."""

    rank: int
    is_signal: bool


class RayTransport(Transport):
    """Starts ``world_size`` actors.

    Raises:
        ResourceError: Ray cannot be used, or has no room for the ranks; nothing is left of those that started.
    """

    def __init__(self, world_size: int, device: str) -> None:
        self._interrupted = threading.Event()
        self._actors: list[Any] = []
        self._waiting: dict[Any, _Awaited] = {}
        self._returned: dict[int, list[int]] = {}
        self._lent: list[tuple[int, list[Any]]] = []
        self._group: Any = None
        self._rendezvous_fd: int | None = None
        self.pids: tuple[int, ...] = ()
        self._dead: set[int] = set()
        self._near = False
        self._cluster = enter_cluster()
        try:
            self._place(world_size, on_gpu=device.startswith("cuda"))
            self._probe()
            self.init_method = self._init_method()
            for rank, actor in enumerate(self._actors):
                self._waiting[actor.wait_for_signal.remote()] = _Awaited(rank, True)
        except BaseException:
            self._end()
            raise

    # -- starting ---------------------------------------------------------------------------------------------

    def _place(self, world_size: int, *, on_gpu: bool) -> None:
        bundle = {"CPU": self._cluster.cpus_per_rank, **({"GPU": 1} if on_gpu else {})}
        self._group = ray.util.placement_group([bundle] * world_size, strategy="STRICT_PACK")
        try:
            ray.get(self._group.ready(), timeout=PLACEMENT_TIMEOUT_S)
        except ray.exceptions.GetTimeoutError:
            raise ResourceError(
                f"Ray has no machine with room for {world_size} ranks of {bundle} within {PLACEMENT_TIMEOUT_S:g} s"
            ) from None
        # Ranks choose their device by their number, so that each must see all of them.
        environment = {"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}} if on_gpu else None
        kind = ray.remote(concurrency_groups={"signals": 1})(RankActor)
        for index in range(world_size):
            options = kind.options(
                num_cpus=self._cluster.cpus_per_rank,
                num_gpus=1 if on_gpu else 0,
                max_restarts=0,
                max_task_retries=0,
                runtime_env=environment,
                scheduling_strategy=ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
                    placement_group=self._group, placement_group_bundle_index=index
                ),
            )
            self._actors.append(options.remote())

    def _probe(self) -> None:
        token = os.urandom(32)
        fd = os.memfd_create("ecotone-probe", os.MFD_CLOEXEC)
        try:
            os.write(fd, token)
            probe = (os.getpid(), fd, len(token))
            paths = [path or os.getcwd() for path in sys.path]
            found = ray.get([actor.reaches.remote(probe, token, paths) for actor in self._actors])
        except ray.exceptions.RayError as error:
            raise ResourceError(f"a rank's actor cannot be started: {_cause(error)}") from error
        finally:
            os.close(fd)
        self.pids = tuple(pid for pid, _ in found)
        self._near = all(near for _, near in found)

    def _init_method(self) -> str:
        if not self._near:
            address: str = ray.get(self._actors[0].free_address.remote())
            return address
        self._rendezvous_fd = os.memfd_create("ecotone-rendezvous", os.MFD_CLOEXEC)
        return f"file:///proc/{os.getpid()}/fd/{self._rendezvous_fd}"

    # -- the contract -----------------------------------------------------------------------------------------

    def send_starts(self, messages: Sequence[bytes]) -> None:
        """See ``Transport``."""
        for rank, (actor, message) in enumerate(zip(self._actors, messages, strict=True)):
            self._waiting[actor.answer.remote(message, [], True)] = _Awaited(rank, False)

    def send(self, message: bytes, reply_rank: int | None) -> None:
        """See ``Transport``. The result of a rank that is not asked is not even waited for."""
        self._take_back()
        letter: Letter = message
        if self._near and len(message) > INLINE_BYTES:
            letter = os.getpid(), write_memory(message), len(message)
        refs = []
        for rank, actor in enumerate(self._actors):
            if rank in self._dead:
                continue
            expected = reply_rank is None or rank == reply_rank
            ref = actor.answer.remote(letter, self._returned.pop(rank, []), expected)
            refs.append(ref)
            if expected:
                self._waiting[ref] = _Awaited(rank, False)
        if not isinstance(letter, bytes):
            self._lent.append((letter[1], refs))

    def wait(self, timeout: float | None) -> list[Event]:
        """See ``Transport``."""
        limit = _INTERRUPT_S if timeout is None else min(timeout, _INTERRUPT_S)
        if self._interrupted.is_set():
            self._interrupted.clear()
            return [Interrupted()]
        refs = list(self._waiting)
        ready, _ = ray.wait(refs, num_returns=1, timeout=limit) if refs else ([], [])
        if ready and len(refs) > 1:
            ready, _ = ray.wait(refs, num_returns=len(refs), timeout=0)
        # Answers first: what a rank said before it died counts.
        ready.sort(key=lambda ref: self._waiting[ref].is_signal)
        return [event for ref in ready for event in self._take_in(ref)]

    def interrupt(self) -> None:
        """See ``Transport``."""
        self._interrupted.set()

    def close(self, last_message: bytes, grace_s: float) -> None:
        """See ``Transport``."""
        last = [
            actor.answer.remote(last_message, [], True)
            for rank, actor in enumerate(self._actors)
            if rank not in self._dead
        ]
        if last:
            ray.wait(last, num_returns=len(last), timeout=grace_s)
        self._end()

    # -- inside -----------------------------------------------------------------------------------------------

    def _take_in(self, ref: Any) -> Iterable[Event]:
        rank, is_signal = self._waiting.pop(ref)
        try:
            value = ray.get(ref)
        except ray.exceptions.RayActorError as error:
            if rank in self._dead:
                return
            self._dead.add(rank)
            yield Died(rank, f"(pid {self.pids[rank]}) died: {_cause(error)}")
            return
        except ray.exceptions.RayError as error:
            self._dead.add(rank)
            yield Died(rank, f"(pid {self.pids[rank]}) was given up by Ray: {_cause(error)}")
            return
        if is_signal:
            self._waiting[self._actors[rank].wait_for_signal.remote()] = _Awaited(rank, True)
            yield from (Answered(rank, fault) for fault in value)
            yield Signalled()
        elif value is not None:
            yield Answered(rank, _open(value))
            if not isinstance(value, bytes):
                self._returned.setdefault(rank, []).append(value[1])

    def _take_back(self) -> None:
        """Close what every rank has read."""
        kept = []
        for fd, refs in self._lent:
            if len(ray.wait(refs, num_returns=len(refs), timeout=0)[0]) == len(refs):
                os.close(fd)
            else:
                kept.append((fd, refs))
        self._lent = kept

    def _end(self) -> None:
        for actor in self._actors:
            ray.kill(actor, no_restart=True)
        self._wait_for_the_end()
        if self._group is not None:
            ray.util.remove_placement_group(self._group)
        self._waiting.clear()
        for fd, _ in self._lent:
            os.close(fd)
        self._lent = []
        if self._rendezvous_fd is not None:
            os.close(self._rendezvous_fd)
        self._actors = []
        leave_cluster()

    def _wait_for_the_end(self) -> None:
        """``ray.kill`` returns before the process is gone, and a rank that runs may still write to a region."""
        for pid in self.pids if self._near else ():
            with suppress(ProcessLookupError):
                pidfd = os.pidfd_open(pid)
                ended = select.poll()
                ended.register(pidfd, select.POLLIN)
                if not ended.poll(_END_S * 1000):
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                    ended.poll()
                os.close(pidfd)


def _cause(error: BaseException) -> str:
    return " ".join(str(error).split())[:_MAX_CAUSE]
