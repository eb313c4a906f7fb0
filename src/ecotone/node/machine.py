"""How much memory this process can still get: the machine's, and its control group's."""

from __future__ import annotations

from pathlib import Path

# file of the limit, file of the usage, line of memory.stat with what the kernel takes back when it needs it
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = ("memory.max", "memory.current", "inactive_file")


def available_memory(root: Path = Path("/")) -> int | None:
    """Bytes the machine can give without swapping; ``None`` where the kernel does not say."""
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return None


def cgroup_headroom(root: Path = Path("/")) -> int | None:
    """Bytes this process's control groups (version 1 or 2) still allow, the tightest one; ``None``: no limit."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    found: list[int] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            found += _headrooms(root / "sys/fs/cgroup/memory", path, _V1)
        elif not controllers:
            found += _headrooms(root / "sys/fs/cgroup", path, _V2)
    return min(found, default=None)


def _headrooms(mount: Path, path: str, files: tuple[str, str, str]) -> list[int]:
    """What the group at ``path`` and each group above it still allows. Inside a container the path may name a
    group that is not visible there; the ones above it then are."""
    group = mount / path.lstrip("/")
    groups = [group, *(above for above in group.parents if above.is_relative_to(mount))]
    return [room for room in (_headroom(folder, *files) for folder in groups) if room is not None]


def _headroom(group: Path, limit_file: str, usage_file: str, reclaimable: str) -> int | None:
    try:
        limit = (group / limit_file).read_text().strip()
        if limit == "max":
            return None
        usage = int((group / usage_file).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except OSError:
        return None
    return max(0, int(limit) - usage + int(stat.get(reclaimable, 0)))
