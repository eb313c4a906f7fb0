"""One rank's process, as its executor sees it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping

from ecotone.errors import ResourceError
from ecotone.executor.channel import channel_pair

_END_S = 5.0  # between the end of a rank's connection and that of its process


class RankProcess:
    """A process started from nothing: it inherits its end of the connection and the wakeup counter, and its
    arguments say which they are.

    Attributes:
        channel: the connection; it does not block.
        pidfd: readable once the process ended.

    Args:
        wakeup_fd: an eventfd the rank adds to when it has something to report outside a step.
        environment: added to this process's own.

    Raises:
        ResourceError: the machine has no process or descriptor left.
    """

    def __init__(self, wakeup_fd: int, environment: Mapping[str, str]) -> None:
        try:
            self.channel, other = channel_pair()
        except OSError as error:
            raise ResourceError(f"no connection for a rank: {error}") from error
        try:
            with other:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "ecotone.executor.rank_main", str(other.fileno()), str(wakeup_fd)],
                    pass_fds=(other.fileno(), wakeup_fd),
                    stdin=subprocess.DEVNULL,
                    stdout=2,  # what a library prints must not get between the lines of this process's output
                    env={**os.environ, **environment},
                )
            self.pidfd = os.pidfd_open(self._process.pid)
        except OSError as error:
            self.channel.close()
            raise ResourceError(f"no process for a rank: {error}") from error
        self.pid = self._process.pid

    def cause_of_end(self) -> str:
        """How it ended, after it closed its connection or its ``pidfd`` said so."""
        try:
            code = self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.kill()
            return f"(pid {self.pid}) closed its connection and was still there {_END_S:g} s later"
        if code >= 0:
            return f"(pid {self.pid}) ended with exit code {code}"
        name = signal.Signals(-code).name
        hint = ", as a process is when the machine's memory runs out" if name == "SIGKILL" else ""
        return f"(pid {self.pid}) was killed by {name}{hint}"

    def wait(self, timeout_s: float) -> bool:
        """Whether it ended, after at most ``timeout_s`` seconds."""
        try:
            self._process.wait(max(timeout_s, 0))
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        """End it now, whatever it does."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Give back the descriptors."""
        self.channel.close()
        os.close(self.pidfd)


def rank_environment(world_size: int) -> dict[str, str]:
    """What a rank's process must find in its environment: where this one found its modules, and a share of the
    CPUs (unless the operator said how many threads to use), since every rank would take all of them."""
    paths = [path or os.getcwd() for path in sys.path]
    found = {"PYTHONPATH": os.pathsep.join(paths)}
    if "OMP_NUM_THREADS" not in os.environ:
        found["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // world_size))
    return found
