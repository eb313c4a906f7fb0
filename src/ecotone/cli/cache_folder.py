"""``ecotone cache`` on the directory of a disk cache that no node uses.

Everything here raises ``ConfigError`` where it is none, or a node uses it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from ecotone.config import parse_bytes
from ecotone.errors import ConfigError, ResourceError
from ecotone.node.disk.folder import DiskFolder, StoredEntry, open_folder, tenant_folder
from ecotone.node.keys import check_key, namespace_of
from ecotone.node.server.messages import Outcome

T = TypeVar("T")


def find(root: Path, tenant: str) -> Path:
    """The folder that is meant: in a shared node's directory, the tenant's."""
    folder = tenant_folder(root, tenant)
    if (folder / "entries").is_dir():
        return folder
    if tenant:
        raise ConfigError(f"tenant {tenant!r} has no folder in {str(root)!r}")
    return root


def entries_of(root: Path, namespace: str | None) -> list[StoredEntry]:
    """What is in the directory."""
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
    """Read everything and compare it with its digest."""
    checked = _with(root, lambda folder: list(folder.verify()))
    bad = [f"{entry.key}: {entry.problem}" for entry in checked if entry.problem]
    return _outcome(checked, "; ".join(bad))


def evict(root: Path, free: str | None, key: str | None) -> Outcome:
    """Delete one entry, or the oldest until ``free`` bytes were given back."""

    def act(folder: DiskFolder) -> list[StoredEntry]:
        if key is None:
            return folder.give_back(parse_bytes(free or 0, "free"))
        gone = [entry for entry in folder.entries() if entry.key == check_key(key)]
        folder.remove([entry.key for entry in gone])
        return gone

    return _outcome(_with(root, act))


def clear(root: Path, namespace: str | None) -> Outcome:
    """Delete a namespace, or everything."""
    return _outcome(_with(root, lambda folder: folder.clear(namespace)))


def _with(root: Path, act: Callable[[DiskFolder], T]) -> T:
    try:
        with open_folder(root) as folder:
            return act(folder)
    except OSError as error:
        raise ResourceError(f"{str(root)!r}: {error}") from error


def _outcome(entries: list[StoredEntry], problem: str = "") -> Outcome:
    return Outcome(len(entries), sum(entry.nbytes for entry in entries), problem=problem)
