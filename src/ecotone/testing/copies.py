"""A copy engine whose copies end when a test says so."""

from __future__ import annotations

from ecotone.connectors.copy.engine import CopyDone, CopyEngine, CopyJob, ended
from ecotone.connectors.copy.thread import copy_now


class ScriptedCopyEngine(CopyEngine):
    """Nothing is copied before ``complete``; so whoever looks at a destination, or reuses a source, too early
    finds the wrong bytes.

    Args:
        fence_error: makes every job that is fenced end with this error; ``None`` completes it.

    Attributes:
        jobs: the ids of the jobs that were submitted and have not ended, in order.
    """

    def __init__(self, fence_error: str | None = None) -> None:
        self.fence_error = fence_error
        self._jobs: dict[int, CopyJob] = {}
        self._done: list[CopyDone] = []
        self._closed = False

    @property
    def jobs(self) -> list[int]:
        return list(self._jobs)

    def complete(self, job_id: int, seconds: float = 0.0) -> None:
        """Copy the job's bytes now, and let ``poll`` say that it ended."""
        job = self._jobs.pop(job_id)
        copy_now(job)
        self._done.append(ended(job, None, seconds))

    def fail(self, job_id: int, error: str) -> None:
        """Let the job end without its bytes."""
        self._done.append(ended(self._jobs.pop(job_id), error, 0.0))

    def submit(self, job: CopyJob) -> None:
        self._jobs[job.job_id] = job
        if self._closed:
            self.fail(job.job_id, "closed")

    def fence(self, job: CopyJob) -> None:
        if job.job_id not in self._jobs:
            return
        if self.fence_error is None:
            self.complete(job.job_id)
        else:
            self.fail(job.job_id, self.fence_error)

    def poll(self) -> list[CopyDone]:
        done, self._done = self._done, []
        return done

    def close(self) -> None:
        self._closed = True
        for job_id in self.jobs:
            self.fail(job_id, "closed")
