"""Where a node serves: at a path of the file system, with a lock beside it that says who does, or at a name in the
abstract namespace, which is nowhere but in the kernel."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
from contextlib import suppress
from pathlib import Path

from ecotone.errors import ConfigError

# Of a node's socket: a path, or an abstract name, which begins with a NUL.
Address = Path | str
_MAX_PATH_BYTES = 107  # of a Unix socket's address
_BACKLOG = 4096


def shown(address: Address) -> str:
    """``address`` as people write it: an abstract name with an ``@``."""
    return repr(str(address).replace("\0", "@", 1))


def take_place(address: Address) -> Place | AbstractPlace:
    """Hold ``address`` for this process. Raises as the places do."""
    return Place(address) if isinstance(address, Path) else AbstractPlace(address)


def check_place(path: Path) -> None:
    """Refuse a path where no node can be about to answer.

    Raises:
        ConfigError: nothing is there, or something else is.
    """
    if not path.is_socket():
        what = "that is no socket" if path.exists() else "nothing is there"
        raise ConfigError(f"no node at {shown(path)}: {what}; 'ecotone node' starts one")


class AbstractPlace:
    """Holds a name in the abstract namespace until ``close``, or until the process ends. Who may connect is the
    server's to check: such a socket has no mode.

    Raises:
        ConfigError: the name is taken, or is none.
    """

    def __init__(self, address: str) -> None:
        if not address.startswith("\0"):
            raise ConfigError(f"{address!r} is no abstract name: it must begin with a NUL; a path is a Path")
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            self.listener.bind(address)
            self.listener.listen(_BACKLOG)
        except OSError as error:
            self.listener.close()
            what = "a node serves there" if error.errno == errno.EADDRINUSE else str(error)
            raise ConfigError(f"socket {shown(address)} cannot be made: {what}") from error

    def close(self) -> None:
        """Let others have the name."""
        self.listener.close()


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
