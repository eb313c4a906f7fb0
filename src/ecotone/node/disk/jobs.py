"""What the tier's core asks of the disk, and what the disk says. One thread does the jobs, in order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from ecotone.node.exchange import Layout


class Write(NamedTuple):
    """Write an entry from ``views``, contiguous bytes in order, beside its place, and rename it."""

    key: str
    layout: Layout
    views: Sequence[memoryview]


class Read(NamedTuple):
    """Read an entry into ``views`` (writable), and verify it: header, length, digest."""

    number: int
    key: str
    layout: Layout
    views: Sequence[memoryview]


class Remove(NamedTuple):
    """Delete the file of an entry, if there is one."""

    key: str


class Drop(NamedTuple):
    """Make all files of a namespace unreachable at once, durably; they are deleted when there is time."""

    number: int
    namespace: str


class Reopen(NamedTuple):
    """After a failure: is the directory there, ours and writable?"""


Job = Write | Read | Remove | Drop | Reopen


class Written(NamedTuple):
    """Of a ``Write``: ``error`` is ``None`` where the file is in place."""

    key: str
    error: OSError | None


class Loaded(NamedTuple):
    """Of a ``Read``. ``problem``: ``None``, or ``missing``, ``unverified`` (it was quarantined), ``other_layout``
    (an entry of that key, but not the one asked for), or ``read_errors``."""

    number: int
    problem: str | None


class Removed(NamedTuple):
    """Of a ``Remove``."""

    key: str
    error: OSError | None


class Dropped(NamedTuple):
    """Of a ``Drop``."""

    number: int
    namespace: str
    error: OSError | None


class Reopened(NamedTuple):
    """Of a ``Reopen``. ``fresh``: the directory is another one, and empty as far as is known."""

    error: OSError | None
    fresh: bool


class Found(NamedTuple):
    """Files that were there at the start: key, size in bytes, time of the last change (ns)."""

    files: Sequence[tuple[str, int, int]]


class AllFound(NamedTuple):
    """The directory was gone through. ``error``: as far as it could be."""

    error: OSError | None


class Reclaimed(NamedTuple):
    """Nothing dropped is left on the disk, but for what came since; ``error``: or it could not be deleted."""

    error: OSError | None


class Quarantined(NamedTuple):
    """So many more files were put aside."""

    files: int


Result = Written | Loaded | Removed | Dropped | Reopened | Found | AllFound | Reclaimed | Quarantined


class TierIO(Protocol):
    """Does jobs in order, elsewhere; between them, looks for files (at the start) and deletes what was dropped."""

    def submit(self, job: Job) -> None:
        """Hand over a job. Never blocks."""
        ...

    def results(self) -> Sequence[Result]:
        """What has been done since the last call. Never blocks."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Return when there have been results since the last call, or after so many seconds. One thread waits."""
        ...

    def call_after(self, seconds: float) -> None:
        """Call the owner back after so many seconds, even without results; the latest request counts."""
        ...

    def close(self) -> None:
        """End after the present job; what was handed over and not begun is not done. Idempotent."""
        ...
