"""The disk behind a simulated node's memory: the tier is the real one, the files are in a dictionary."""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable, Sequence
from random import Random

import numpy as np
from numpy.typing import NDArray

from ecotone.node.disk.format import file_bytes
from ecotone.node.disk.jobs import (
    AllFound,
    Drop,
    Dropped,
    Found,
    Job,
    Loaded,
    Quarantined,
    Read,
    Reclaimed,
    Remove,
    Removed,
    Reopen,
    Reopened,
    Result,
    TierIO,
    Write,
    Written,
)
from ecotone.node.exchange import Layout
from ecotone.testing.sim.memory import access_of
from ecotone.testing.sim.model import Library, describe
from ecotone.testing.sim.plan import Weather
from ecotone.testing.sim.world import ViolationError, World

Files = dict[str, tuple[Layout, bytes]]
"""What outlives a node: key -> layout and bytes."""


class SimDiskIO(TierIO):
    """Does jobs one after the other, each in virtual time; some fail. See ``TierIO``.

    Args:
        files: what is on the disk already, and will be.
        notify: called when there are results, or when the tier wanted to be.
    """

    def __init__(
        self,
        world: World,
        weather: Weather,
        random: Random,
        files: Files,
        library: Library,
        notify: Callable[[], None],
    ) -> None:
        self._world = world
        self._weather = weather
        self._random = random
        self._files = files
        self._library = library
        self._notify = notify
        self._jobs: deque[Job] = deque()
        self._half: bytes | None = None  # of what is being written
        self._closed = False
        known = [(key, file_bytes(key, layout), 0) for key, (layout, _) in files.items()]
        self._done: list[Result] = [Found(known), AllFound(None), Reclaimed(None)]
        world.after(0.0, notify)

    def submit(self, job: Job) -> None:
        """See the contract."""
        if self._closed:
            return
        self._jobs.append(job)
        if len(self._jobs) == 1:
            self._begin()

    def results(self) -> Sequence[Result]:
        """See the contract."""
        done, self._done = self._done, []
        return done

    def wait(self, timeout_s: float) -> None:
        """Nobody blocks in virtual time."""

    def call_after(self, seconds: float) -> None:
        """See the contract."""
        self._world.after(seconds, self._notify)

    def close(self) -> None:
        """See the contract. The present job is the one that a killed process did not end: its file never gets its
        name."""
        self._closed = True
        self._jobs.clear()

    def _begin(self) -> None:
        first, second = (self._random.uniform(0, self._weather.disk_s) for _ in range(2))
        self._world.after(first, self._middle)
        self._world.after(first + second, self._end)

    def _middle(self) -> None:
        """Half of a write is done: what becomes of memory now is not in it."""
        if not self._closed and isinstance(job := self._jobs[0], Write):
            data = _bytes_of(job.views)
            self._half = data[: len(data) // 2]

    def _end(self) -> None:
        if self._closed:
            return
        self._done += self._do(self._jobs.popleft(), self._random.random() < self._weather.disk_lost)
        self._notify()
        if self._jobs:
            self._begin()

    def _do(self, job: Job, lost: bool) -> list[Result]:
        error = OSError(errno.EIO, "broken") if lost else None
        match job:
            case Write(key=key):
                if error is None:
                    self._write(job)
                return [Written(key, error)]
            case Read(number=number):
                return self._read(job) if error is None else [Loaded(number, "read_errors")]
            case Remove(key=key):
                if error is None:
                    self._files.pop(key, None)
                return [Removed(key, error)]
            case Drop(number=number, namespace=namespace):
                for key in [key for key in self._files if key.startswith(namespace)] if error is None else ():
                    del self._files[key]
                return [Dropped(number, namespace, error), Reclaimed(None)]
            case Reopen():
                return [Reopened(error, fresh=False)]

    def _write(self, job: Write) -> None:
        data = _bytes_of(job.views)
        data = (self._half or b"") + data[len(self._half or b"") :]
        encoding = self._library.of_key(job.key)
        if data != encoding.data:
            raise ViolationError("disk", f"the file of {encoding} has {describe(data)}")
        self._files[job.key] = job.layout, data
        self._world.say("disk: has {}", encoding)

    def _read(self, job: Read) -> list[Result]:
        layout, data = self._files.get(job.key, (None, b""))
        if layout != job.layout:
            return [Loaded(job.number, "missing" if layout is None else "other_layout")]
        damaged = self._random.random() < self._weather.disk_lost
        for view in job.views:
            part, data = data[: len(view)], data[len(view) :]
            # What turns out to be damaged was written to memory before that was known.
            access_of(view).write(0, _array(bytes(len(part)) if damaged else part))
        if damaged:
            del self._files[job.key]
            return [Loaded(job.number, "unverified"), Quarantined(1)]
        self._world.say("disk: read {}", self._library.of_key(job.key))
        return [Loaded(job.number, None)]


def _bytes_of(views: Sequence[memoryview]) -> bytes:
    return b"".join(bytes(view) for view in views)


def _array(data: bytes) -> NDArray[np.uint8]:
    return np.frombuffer(data, np.uint8)
