"""Look into a disk tier's directory that no node uses, and take things out of it. Every call locks it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

import msgspec

from ecotone.errors import ConfigError, DecodeError
from ecotone.node.disk.files import CHUNK_BYTES, read_header
from ecotone.node.disk.format import charged, relative_path
from ecotone.node.disk.store import DiskStore
from ecotone.node.keys import NAMESPACE_HEX, check_namespace


class StoredEntry(msgspec.Struct, frozen=True):
    """One file: its entry's key, the file's size, and the seconds since it was written. ``problem`` says why it is
    no entry's file, where it was looked into and is none."""

    key: str
    nbytes: int
    age_s: float
    problem: str = ""


class DiskFolder:
    """See the module. Made by ``open_folder``."""

    def __init__(self, store: DiskStore) -> None:
        self._store = store

    def entries(self, namespace: str | None = None) -> list[StoredEntry]:
        """What is there, by name and size; the oldest first. Strangers among the entries are put aside."""
        now = time.time_ns()
        found = [file for batch in self._store.scan() for file in batch]
        return [
            StoredEntry(key, size, round(max(0, now - changed) / 1e9, 1))
            for key, size, changed in sorted(found, key=lambda file: file[2])
            if namespace is None or key.startswith(check_namespace(namespace))
        ]

    def verify(self, namespace: str | None = None) -> Iterator[StoredEntry]:
        """As ``entries``, each read and compared with its digest. Nothing is moved."""
        for entry in self.entries(namespace):
            yield msgspec.structs.replace(entry, problem=self._problem(entry.key))

    def _problem(self, key: str) -> str:
        try:
            fd = os.open(
                self._store.root / "entries" / relative_path(key), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
            )
            try:
                parsed, size = read_header(fd)
                if parsed.key != key or parsed.file_bytes != size:
                    return f"the file of {parsed.key}, {parsed.file_bytes} bytes, has {size} bytes here"
                return "" if _digest(fd, parsed.payload_offset) == parsed.digest else "not the bytes of its digest"
            finally:
                os.close(fd)
        except (DecodeError, OSError) as error:
            return str(error)

    def remove(self, keys: list[str]) -> None:
        """Delete entries."""
        for key in keys:
            self._store.remove(key)

    def give_back(self, nbytes: int) -> list[StoredEntry]:
        """Delete the oldest until the disk has at least ``nbytes`` more, or none is left; what was deleted."""
        gone: list[StoredEntry] = []
        for entry in self.entries():
            if nbytes <= 0:
                break
            self._store.remove(entry.key)
            nbytes -= charged(entry.nbytes)
            gone.append(entry)
        return gone

    def clear(self, namespace: str | None = None) -> list[StoredEntry]:
        """Delete a namespace, or everything; what was deleted."""
        entries = self.entries(namespace)
        for name in sorted({entry.key[:NAMESPACE_HEX] for entry in entries}):
            self._store.drop(name)
        while not self._store.reclaim(1024):
            pass
        return entries


def tenant_folder(root: Path, tenant: str) -> Path:
    """Where in a shared node's directory the files of a tenant are."""
    return root / sha256(tenant.encode()).hexdigest()[:32]


@contextmanager
def open_folder(root: Path) -> Iterator[DiskFolder]:
    """The directory of a disk tier, locked meanwhile.

    Raises:
        ConfigError: it is none, or a node uses it.
        OSError: it cannot be read.
    """
    if not (root / "entries").is_dir():
        raise ConfigError(f"{str(root)!r} is not the directory of a disk cache: there is no 'entries' in it")
    store = DiskStore(root)
    try:
        store.open()
    except ConfigError as error:
        raise ConfigError(f"{error}; what a running node has is asked at its socket") from None
    try:
        yield DiskFolder(store)
    finally:
        store.close()


def _digest(fd: int, offset: int) -> str:
    digest = sha256()
    while data := os.pread(fd, CHUNK_BYTES, offset):
        digest.update(data)
        offset += len(data)
    return digest.hexdigest()
