"""A copy engine in virtual time: copies take as long as they take, in two parts, and some fail half way."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from ecotone.connectors.copy.engine import CopyDone, CopyEngine, CopyJob, Direction, ended
from ecotone.testing.sim.memory import access_of
from ecotone.testing.sim.plan import Weather
from ecotone.testing.sim.world import World


class _Copy:
    """A job under way: how many of its bytes were copied, and whether it will fail."""

    def __init__(self, job: CopyJob, lost: bool) -> None:
        self.job = job
        self.lost = lost
        self.copied = 0
        self.size = job.rows.nbytes


class SimCopyEngine(CopyEngine):
    """See the module.

    Args:
        name: of the process, for the timeline.
        wakeup: called after each copy that ended by itself.
    """

    def __init__(
        self, world: World, weather: Weather, random: Random, name: str, wakeup: Callable[[], None]
    ) -> None:
        self._world = world
        self._weather = weather
        self._random = random
        self._name = name
        self._wakeup = wakeup
        self._copies: dict[int, _Copy] = {}
        self._done: list[CopyDone] = []
        self._closed = False

    def submit(self, job: CopyJob) -> None:
        """See the contract."""
        for piece in job.memory:
            access_of(piece).what = f"{job.direction.value} ({job.job_id})"
        copy = self._copies[job.job_id] = _Copy(job, self._random.random() < self._weather.copies_lost)
        self._world.say("{}: {} {} begins", self._name, job.direction.value, job.job_id)
        if self._closed:
            self._end(copy, "closed")
            return
        first, second = (self._random.uniform(0, self._weather.copy_s) for _ in range(2))
        self._world.after(first, lambda: self._advance(copy, copy.size // 2))
        self._world.after(first + second, lambda: self._finish(copy))

    def fence(self, job: CopyJob) -> None:
        """See the contract."""
        copy = self._copies.get(job.job_id)
        if copy is not None and copy.job is job:
            self._complete(copy)

    def poll(self) -> list[CopyDone]:
        """See the contract."""
        done, self._done = self._done, []
        return done

    def close(self) -> None:
        """See the contract."""
        self._closed = True
        for copy in list(self._copies.values()):
            self._end(copy, "closed")

    def kill(self) -> None:
        """The process is gone: every copy stops where it is."""
        self._closed = True
        self._copies.clear()

    def _finish(self, copy: _Copy) -> None:
        if self._copies.get(copy.job.job_id) is copy:
            self._complete(copy)
            self._wakeup()

    def _complete(self, copy: _Copy) -> None:
        if copy.lost:
            self._advance(copy, copy.size // 2)
            self._end(copy, "lost")
            return
        self._advance(copy, copy.size)
        self._end(copy, None)

    def _end(self, copy: _Copy, error: str | None) -> None:
        del self._copies[copy.job.job_id]
        for piece in copy.job.memory:
            access_of(piece).end()
        self._world.say("{}: {} {} {}", self._name, copy.job.direction.value, copy.job.job_id, error or "done")
        self._done.append(ended(copy.job, error, 0.0))

    def _advance(self, copy: _Copy, until: int) -> None:
        """Copy the bytes from where it is to ``until``."""
        job = copy.job
        if self._copies.get(job.job_id) is not copy:
            return
        rows = job.rows.view(-1).numpy().view("uint8")
        position = 0
        for piece in job.memory:
            start, stop = max(copy.copied - position, 0), min(until - position, len(piece))
            if start < stop:
                outside = rows[position + start : position + stop]
                access = access_of(piece)
                if job.direction is Direction.SAVE:
                    access.write(start, outside)
                else:
                    outside[:] = access.read(start, stop)
            position += len(piece)
        copy.copied = max(copy.copied, until)
