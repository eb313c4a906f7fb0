"""The node's place in the file system: a socket at a path, and beside it a lock that says who serves there."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
from contextlib import suppress
from pathlib import Path

from ecotone.errors import ConfigError

_MAX_PATH_BYTES = 107  # of a Unix socket's address
_BACKLOG = 4096


class Place:
    """Holds ``path`` for this process, from the moment it is made until ``close``.

    The lock is the kernel's and ends with the process, however that ends: a socket that a dead node left behind is
    recognised and replaced, and of any number of nodes that start at the same time one gets the lock.

    Raises:
        ConfigError: another node serves there, something else is there, or no socket can be made there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if len(os.fsencode(path)) > _MAX_PATH_BYTES:
            raise ConfigError(f"socket {str(path)!r}: a Unix socket's path has at most {_MAX_PATH_BYTES} bytes")
        self._lock_path = path.with_name(path.name + ".lock")
        self._lock = self._take_lock()
        try:
            self.listener = self._listen()
        except BaseException:
            os.close(self._lock)
            raise

    def close(self) -> None:
        """Remove the socket and the lock, and let others have the place."""
        self.listener.close()
        with suppress(FileNotFoundError):
            self.path.unlink()
        with suppress(FileNotFoundError):
            self._lock_path.unlink()
        os.close(self._lock)

    def _take_lock(self) -> int:
        while True:
            try:
                lock = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            except OSError as error:
                what = "the folder is missing" if error.errno == errno.ENOENT else f"no lock beside it: {error}"
                raise ConfigError(f"socket {str(self.path)!r} cannot be made: {what}") from error
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                holder = os.pread(lock, 32, 0).decode("ascii", "replace").strip()
                os.close(lock)
                raise ConfigError(
                    f"socket {str(self.path)!r} is taken: a node serves there (process {holder or 'unknown'})"
                ) from None
            if self._is_current(lock):
                os.ftruncate(lock, 0)
                os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
                return lock
            os.close(lock)  # its holder ended between the two calls and took the file with it

    def _is_current(self, lock: int) -> bool:
        try:
            there = os.stat(self._lock_path, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return os.path.samestat(there, os.fstat(lock))

    def _listen(self) -> socket.socket:
        with suppress(FileNotFoundError):
            if not stat.S_ISSOCK(os.lstat(self.path).st_mode):
                raise ConfigError(f"socket {str(self.path)!r}: there is something else than a socket")
            self.path.unlink()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            listener.bind(str(self.path))
            self.path.chmod(0o600)
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            what = "the folder is missing" if error.errno == errno.ENOENT else str(error)
            raise ConfigError(f"socket {str(self.path)!r} cannot be made: {what}") from error
        return listener
