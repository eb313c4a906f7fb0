"""``ecotone node`` in a process of its own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

from engine_process import ProcessTree

READY_S = 60.0


class NodeProcess(ProcessTree):
    """A node of 16 MiB at ``folder/node.sock``, which serves when this returns."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "node.sock"
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ready:
            ready.bind(f"\0{os.getpid()}-{self.path}-ready"[:100])
            ready.settimeout(READY_S)
            env = {**os.environ, "NOTIFY_SOCKET": ready.getsockname().decode().replace("\0", "@")}
            command = [sys.executable, "-m", "ecotone", "node", "--socket", str(self.path), "--memory", "16MiB"]
            super().__init__(command, env, folder / "node-log.txt", stdout=subprocess.DEVNULL)
            assert ready.recv(64) == b"READY=1"

    @property
    def option(self) -> str:
        """What engines call it."""
        return f"unix:{self.path}"

    def of_tenant(self, counter: str) -> int:
        """What ``ecotone cache stat`` says of the only tenant."""
        return int(json.loads(self._tool("stat", "--json"))["tenants"][""][counter])

    def check_integrity(self) -> None:
        """What ``ecotone cache verify`` says."""
        self._tool("verify")

    def close(self) -> None:
        """SIGTERM."""
        self.process.terminate()
        self.wait_until_gone()

    def _tool(self, command: str, *options: str) -> str:
        arguments = [sys.executable, "-m", "ecotone", "cache", command, str(self.path), *options]
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout
