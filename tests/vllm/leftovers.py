"""What an engine's processes have of Ecotone's, and what is left of it when they are gone."""

from __future__ import annotations

import os
from pathlib import Path

from engine_process import ProcessTree

NAME = "ecotone"
_SHARED_MEMORY = Path("/dev/shm")


def socket_names() -> dict[str, str]:
    """inode -> name, of all Unix sockets with Ecotone's name in theirs, of whatever process."""
    names = {}
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if len(fields) > 7 and NAME in fields[7]:
            names[fields[6]] = fields[7]
    return names


def open_sockets(tree: ProcessTree) -> set[str]:
    """Names of those that processes of ``tree`` hold."""
    held = set()
    for member in tree.members():
        for number in os.listdir(f"/proc/{member.pid}/fd"):
            try:
                held.add(os.readlink(f"/proc/{member.pid}/fd/{number}"))
            except FileNotFoundError:
                continue
    return {name for inode, name in socket_names().items() if f"socket:[{inode}]" in held}


def files(*folders: Path) -> set[str]:
    """Paths with Ecotone's name in theirs, in ``folders`` and in shared memory."""
    found = set()
    for folder in (*folders, _SHARED_MEMORY):
        found |= {str(path) for path in folder.rglob("*") if NAME in path.name}
    return found
