"""The directory of a disk tier. Every call blocks, and is made by one thread.

::

    lock                     held while a node uses the directory
    entries/NS/XX/DIGEST.safetensors
    tmp/                     being written; emptied at the start
    trash/                   dropped namespaces, deleted when there is time
    quarantine/              what was found and is not an entry, bounded

Everything is opened relative to the directory's own descriptor, and no link is followed: should the directory be
removed and another one put in its place, nothing of it is touched before it was locked.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import stat
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path

from ecotone.errors import ConfigError, DecodeError
from ecotone.node.disk.files import chunks, empty, listing, read_all, read_header, write_all
from ecotone.node.disk.format import MIN_FILE_BYTES, encode_header, key_of, relative_path
from ecotone.node.disk.jobs import Read, Write
from ecotone.node.keys import NAMESPACE_HEX, check_namespace

log = logging.getLogger("ecotone.node.disk")

MAX_QUARANTINED = 64
MAX_QUARANTINED_BYTES = 256 << 20
_FOUND_AT_ONCE = 1024
_FOLDERS = ("entries", "tmp", "trash", "quarantine")
_FILE = os.O_CLOEXEC | os.O_NOFOLLOW
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class DiskStore:
    """See the module.

    Args:
        root: the directory; made, with its parents, where it is not there.
        fsync: write every entry through to the device before it gets its name. Without, a crash of the machine may
            lose entries; the length and the digest are checked in any case.

    Attributes:
        quarantined: files put aside since the start.
    """

    def __init__(self, root: Path, *, fsync: bool = False) -> None:
        self.root = root
        self.quarantined = 0
        self._fsync = fsync
        self._fd = -1
        self._lock_fd = -1
        self._number = 0
        self._aside: deque[tuple[str, int]] = deque()
        self._emptying: Iterator[None] | None = None

    # -- its own life -----------------------------------------------------------------------------------------

    def open(self) -> None:
        """Make what is missing, and lock it.

        Raises:
            ConfigError: another node uses it, or it is no directory.
            OSError: it cannot be used now.
        """
        self.close()
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._fd = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except (FileExistsError, NotADirectoryError):
            raise ConfigError(f"disk={str(self.root)!r} is not a directory") from None
        try:
            self._take_lock()
            self._make_folders()
            self._clean()
        except (ConfigError, OSError):
            self.close()
            raise

    def reopen(self) -> bool:
        """Whether it is another directory than before; checked to be writable.

        Raises:
            OSError: it cannot be used now.
        """
        if not self._is_ours():
            try:
                self.open()
            except ConfigError as error:
                raise OSError(errno.EBUSY, str(error)) from None
            return True
        self._make_folders()
        with self._temporary() as (fd, name):
            write_all(fd, bytes(65536), 0)
            os.fsync(fd)
            os.unlink(name, dir_fd=self._fd)
        return False

    def close(self) -> None:
        """Unlock it. Idempotent."""
        for fd in (self._lock_fd, self._fd):
            if fd >= 0:
                os.close(fd)
        self._lock_fd = self._fd = -1
        self._emptying = None

    def _take_lock(self) -> None:
        while True:
            fd = os.open("lock", os.O_RDWR | os.O_CREAT | _FILE, 0o600, dir_fd=self._fd)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip()
                os.close(fd)
                raise ConfigError(
                    f"disk={str(self.root)!r} is in use by another node (process {holder or 'unknown'}): "
                    "each node needs a directory of its own"
                ) from None
            except OSError:
                os.close(fd)
                raise
            if _same(os.stat("lock", dir_fd=self._fd, follow_symlinks=False), os.fstat(fd)):
                break
            os.close(fd)  # it was removed before it was locked
        self._lock_fd = fd
        with suppress(OSError):  # a full disk can still be read
            os.ftruncate(fd, 0)
            os.pwrite(fd, b"%d\n" % os.getpid(), 0)

    def _is_ours(self) -> bool:
        """Whether the path leads to the lock that is held."""
        if self._lock_fd < 0:
            return False
        try:
            there = os.stat(self.root / "lock", follow_symlinks=False)
        except FileNotFoundError:
            return False
        return _same(there, os.fstat(self._lock_fd))

    def _make_folders(self) -> None:
        for name in _FOLDERS:
            with suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=self._fd)

    def _clean(self) -> None:
        with self._folder("tmp") as fd:
            for _ in empty(fd):
                pass
        with self._folder("quarantine") as fd, os.scandir(fd) as found:
            sizes = [(e.name, e.stat(follow_symlinks=False).st_size) for e in found]
        self._aside = deque((f"quarantine/{name}", size) for name, size in sorted(sizes))

    # -- entries ----------------------------------------------------------------------------------------------

    def write(self, job: Write) -> None:
        """Write an entry's file.

        Raises:
            OSError: it could not be written; nothing of it is left.
        """
        place = relative_path(job.key)
        header = encode_header(job.key, job.layout)
        with self._temporary() as (fd, name):
            digest, offset = sha256(), len(header)
            for chunk in chunks(job.views):
                write_all(fd, chunk, offset)
                digest.update(chunk)
                offset += len(chunk)
            write_all(fd, encode_header(job.key, job.layout, digest.hexdigest()), 0)
            if self._fsync:
                os.fsync(fd)
            self._rename(name, place)
        if self._fsync:
            self._sync_folder(place.rpartition("/")[0])

    def read(self, job: Read) -> str | None:
        """Read an entry's file into ``job.views``. ``None``: the bytes are those that were written; else
        as in ``Loaded``, and the views hold anything."""
        place = relative_path(job.key)
        try:
            fd = os.open(f"entries/{place}", os.O_RDONLY | os.O_NONBLOCK | _FILE, dir_fd=self._fd)
            try:
                return self._read(fd, job)
            finally:
                os.close(fd)
        except FileNotFoundError:
            return "missing"
        except DecodeError as reason:
            self.quarantine(f"entries/{place}", str(reason))
            return "unverified"
        except OSError as error:
            if error.errno == errno.ELOOP:
                self.quarantine(f"entries/{place}", "a symbolic link")
                return "unverified"
            log.warning("disk cache: %s cannot be read: %s", place, error)
            return "read_errors"

    def _read(self, fd: int, job: Read) -> str | None:
        parsed, size = read_header(fd)
        if parsed.key != job.key:
            raise DecodeError(f"it is the file of {parsed.key}")
        if size != parsed.file_bytes:
            raise DecodeError(f"{size} bytes long instead of {parsed.file_bytes}")
        if parsed.layout != job.layout:
            return "other_layout"
        digest, offset = sha256(), parsed.payload_offset
        for chunk in chunks(job.views):
            read_all(fd, chunk, offset)
            digest.update(chunk)
            offset += len(chunk)
        if digest.hexdigest() != parsed.digest:
            raise DecodeError("its bytes do not have the digest in its header")
        return None

    def remove(self, key: str) -> None:
        """Delete an entry's file, if it is there.

        Raises:
            OSError: it could not be deleted.
        """
        with suppress(FileNotFoundError):
            os.unlink(f"entries/{relative_path(key)}", dir_fd=self._fd)

    def drop(self, namespace: str) -> None:
        """Make a namespace's files unreachable, all at once, for every later life too, whatever ``fsync`` says.

        Raises:
            OSError: they may still be there.
        """
        self._number += 1
        aside = f"trash/{check_namespace(namespace)}.{time.time_ns()}.{self._number}"
        with suppress(FileNotFoundError):
            self._try_rename(f"entries/{namespace}", aside)
            for folder in ("trash", "entries"):
                with self._folder(folder) as fd:
                    os.fsync(fd)

    # -- at leisure -------------------------------------------------------------------------------------------

    def scan(self) -> Iterator[list[tuple[str, int, int]]]:
        """The files there are (key, size, time of change in ns), by name and size alone; what cannot be one of an
        entry is put aside.

        Raises:
            OSError: the directory cannot be gone through.
        """
        batch: list[tuple[str, int, int]] = []
        for namespace, fan in self._fans():
            with suppress(FileNotFoundError), self._folder(f"entries/{namespace}/{fan}") as fd:
                kept = len(batch)
                for name, size, changed, is_file in listing(fd):
                    key = key_of(namespace, fan, name)
                    if key is None or not is_file or size < MIN_FILE_BYTES:
                        why = "no name of an entry" if key is None else "no file, or too short"
                        self.quarantine(f"entries/{namespace}/{fan}/{name}", why)
                    else:
                        batch.append((key, size, changed))
                if kept == len(batch):
                    with suppress(OSError):  # not empty, after all
                        os.rmdir(f"entries/{namespace}/{fan}", dir_fd=self._fd)
            if len(batch) >= _FOUND_AT_ONCE:
                yield batch
                batch = []
        yield batch

    def _fans(self) -> Iterator[tuple[str, str]]:
        for namespace in self._subfolders("entries", NAMESPACE_HEX):
            path = f"entries/{namespace}"
            fans = self._subfolders(path, 2)
            yield from ((namespace, fan) for fan in fans)
            if not fans:
                with suppress(OSError):
                    os.rmdir(path, dir_fd=self._fd)

    def _subfolders(self, path: str, digits: int) -> list[str]:
        """The folders of ``path`` with names of so many hex digits; everything else is put aside."""
        try:
            with self._folder(path) as fd, os.scandir(fd) as found:
                listed = [(e.name, e.is_dir(follow_symlinks=False)) for e in found]
        except FileNotFoundError:
            return []
        good = {name for name, is_dir in listed if is_dir and re.fullmatch(f"[0-9a-f]{{{digits}}}", name)}
        for name, _ in listed:
            if name not in good:
                self.quarantine(f"{path}/{name}", "not of this cache")
        return sorted(good)

    def reclaim(self, steps: int) -> bool:
        """Delete up to ``steps`` dropped files; whether nothing is left.

        Raises:
            OSError: something cannot be deleted.
        """
        if self._emptying is None:
            self._emptying = self._empty_trash()
        try:
            for _ in range(steps):
                next(self._emptying)
        except StopIteration:
            self._emptying = None
            return True
        except OSError:
            self._emptying = None
            raise
        return False

    def _empty_trash(self) -> Iterator[None]:
        with self._folder("trash") as fd:
            yield from empty(fd)

    def quarantine(self, path: str, why: str) -> None:
        """Put a file (or whatever it is) aside, where it is not found any more; one line in the log."""
        self.quarantined += 1
        self._number += 1
        aside = f"quarantine/{time.time_ns()}.{self._number}"
        log.warning("disk cache: %r is put aside as %s: %s", path, aside, why)
        try:
            size = os.stat(path, dir_fd=self._fd, follow_symlinks=False).st_size
            self._try_rename(path, aside)
            self._aside.append((aside, size))
            while len(self._aside) > MAX_QUARANTINED or sum(n for _, n in self._aside) > MAX_QUARANTINED_BYTES:
                self._delete(self._aside.popleft()[0])
        except OSError as error:
            log.warning("disk cache: %r cannot be put aside: %s", path, error)

    def _delete(self, path: str) -> None:
        with suppress(FileNotFoundError):
            if stat.S_ISDIR(os.stat(path, dir_fd=self._fd, follow_symlinks=False).st_mode):
                self._try_rename(path, f"trash/{path.rpartition('/')[2]}")
            else:
                os.unlink(path, dir_fd=self._fd)

    # -- parts ------------------------------------------------------------------------------------------------

    @contextmanager
    def _temporary(self) -> Iterator[tuple[int, str]]:
        """A new file in ``tmp``; removed where the block fails."""
        self._number += 1
        name = f"tmp/{self._number}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | _FILE
        try:
            fd = os.open(name, flags, 0o600, dir_fd=self._fd)
        except FileNotFoundError:
            self._make_folders()
            fd = os.open(name, flags, 0o600, dir_fd=self._fd)
        try:
            yield fd, name
        except BaseException:
            with suppress(OSError):
                os.unlink(name, dir_fd=self._fd)
            raise
        finally:
            os.close(fd)

    @contextmanager
    def _folder(self, path: str) -> Iterator[int]:
        fd = os.open(path, _FOLDER, dir_fd=self._fd)
        try:
            yield fd
        finally:
            os.close(fd)

    def _rename(self, source: str, place: str) -> None:
        """Move a file to its place among the entries, making the folders on the way."""
        try:
            self._try_rename(source, f"entries/{place}")
        except FileNotFoundError:
            self._make_folders()
            namespace, fan, _ = place.split("/")
            for folder in (f"entries/{namespace}", f"entries/{namespace}/{fan}"):
                with suppress(FileExistsError):
                    os.mkdir(folder, 0o700, dir_fd=self._fd)
            self._try_rename(source, f"entries/{place}")

    def _try_rename(self, source: str, target: str) -> None:
        os.rename(source, target, src_dir_fd=self._fd, dst_dir_fd=self._fd)

    def _sync_folder(self, below: str) -> None:
        """Write names through to the device, up to the entries' directory."""
        path = f"entries/{below}"
        while path:
            with self._folder(path) as fd:
                os.fsync(fd)
            path = path.rpartition("/")[0]


def make_root(root: Path) -> None:
    """Make the directory of a disk cache where there is none.

    Raises:
        ConfigError: it cannot be made, is no directory, or nobody may write there.
    """
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise ConfigError(f"disk={str(root)!r} is not a directory") from None
    except OSError as error:
        raise ConfigError(f"disk={str(root)!r} cannot be made: {error.strerror}") from error
    if not os.access(root, os.W_OK | os.X_OK):
        raise ConfigError(f"disk={str(root)!r}: this process may not write there")


def _same(one: os.stat_result, other: os.stat_result) -> bool:
    return (one.st_dev, one.st_ino) == (other.st_dev, other.st_ino)
