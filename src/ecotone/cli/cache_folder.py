"""``ecotone cache`` on the directory of a disk cache that no node uses."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from ecotone.config import parse_bytes
from ecotone.errors import ResourceError
from ecotone.node.disk.folder import DiskFolder, StoredEntry, open_folder
from ecotone.node.keys import namespace_of
from ecotone.node.server.messages import Outcome

T = TypeVar("T")


def entries_of(root: Path, namespace: str | None) -> list[StoredEntry]:
    """What is in the directory. Raises ``ConfigError`` (no such directory, or in use)."""
    return _with(root, lambda folder: folder.entries(namespace))


def by_namespace(entries: Iterable[StoredEntry]) -> dict[str, dict[str, float]]:
    """Entries, bytes and the oldest age by namespace."""
    found: dict[str, dict[str, float]] = defaultdict(lambda: {"entries": 0, "bytes": 0, "oldest_s": 0.0})
    for entry in entries:
        row = found[namespace_of(entry.key)]
        row["entries"] += 1
        row["bytes"] += entry.nbytes
        row["oldest_s"] = max(row["oldest_s"], entry.age_s)
    return dict(found)


def verify(root: Path) -> Outcome:
    """Read everything and compare it with its digest. Raises ``ConfigError``."""
    checked = _with(root, lambda folder: list(folder.verify()))
    bad = [f"{entry.key}: {entry.problem}" for entry in checked if entry.problem]
    return _outcome(checked, "; ".join(bad))


def evict(root: Path, free: str | None, key: str | None) -> Outcome:
    """Delete one entry, or the oldest until ``free`` bytes were given back. Raises ``ConfigError``."""

    def act(folder: DiskFolder) -> list[StoredEntry]:
        entries = folder.entries()
        if key is not None:
            gone = [entry for entry in entries if entry.key == key]
            folder.remove([entry.key for entry in gone])
            return gone
        return folder.give_back(parse_bytes(free or 0, "free"))

    return _outcome(_with(root, act))


def clear(root: Path, namespace: str | None) -> Outcome:
    """Delete a namespace, or everything. Raises ``ConfigError``."""
    return _outcome(_with(root, lambda folder: folder.clear(namespace)))


def _with(root: Path, act: Callable[[DiskFolder], T]) -> T:
    try:
        with open_folder(root) as folder:
            return act(folder)
    except OSError as error:
        raise ResourceError(f"{str(root)!r}: {error}") from error


def _outcome(entries: list[StoredEntry], problem: str = "") -> Outcome:
    return Outcome(len(entries), sum(entry.nbytes for entry in entries), problem=problem)
