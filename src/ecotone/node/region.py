"""A region: anonymous memory that several processes map. Nothing of it outlives the last of them."""

from __future__ import annotations

import fcntl
import mmap
import os
import time

import msgspec

from ecotone.errors import ConfigError, ContractError, ResourceError, ShutDownError
from ecotone.node.exchange import Extent
from ecotone.node.machine import available_memory, cgroup_headroom

# A file that shrinks under a mapping kills who reads there (SIGBUS). Sealed, nobody can shrink it.
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class RegionDescriptor(msgspec.Struct, frozen=True, tag="region", forbid_unknown_fields=True):
    """Names a region to those who attach.

    Attributes:
        region_id: who owns it.
        generation: which of the owner's regions it is, in the course of its restarts.
        size: bytes, a multiple of the page size.
    """

    region_id: str
    generation: int
    size: int


class Region:
    """A mapping of a region's memory in this process; made by ``create`` or ``attach``.

    Views may outlive it: ``close`` ends the access through this object, and the memory is unmapped when the last
    view is gone.
    """

    def __init__(self, fd: int, descriptor: RegionDescriptor, mapping: mmap.mmap, writable: bool) -> None:
        self.descriptor = descriptor
        self.writable = writable
        self._fd = fd
        self._mapping: mmap.mmap | None = mapping

    @classmethod
    def create(cls, size: int, region_id: str, *, prefault: bool = True) -> Region:
        """A new region of ``size`` bytes, rounded up to whole pages, all zero.

        With ``prefault`` the machine provides the memory now and the first copies meet no page faults; without,
        as it is touched.

        Raises:
            ConfigError: ``size`` is not above 0.
            ResourceError: the machine, or the control group, does not have that much.
        """
        if size <= 0:
            raise ConfigError(f"a region of {size} bytes is too small: it must be above 0")
        size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        check_room(size)
        fd = -1
        try:
            fd = os.memfd_create("ecotone-region", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(fd, size)
            if prefault:
                os.posix_fallocate(fd, 0, size)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            mapping = _map(fd, size, writable=True, prefault=prefault)
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            raise ResourceError(f"no region of {size} bytes: {error}") from error
        # The time of its creation tells a region from all earlier ones of the same id.
        return cls(fd, RegionDescriptor(region_id, time.time_ns(), size), mapping, writable=True)

    @classmethod
    def attach(cls, fd: int, descriptor: RegionDescriptor, *, prefault: bool = True) -> Region:
        """Map the region behind ``fd``, which is the region's from now on; writable if the descriptor is.

        Raises:
            ContractError: the memory behind ``fd`` is not the one described, or could shrink.
            ResourceError: it cannot be mapped.
        """
        try:
            _refuse_other_memory(fd, descriptor)
            writable = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR
            mapping = _map(fd, descriptor.size, writable, prefault)
        except OSError as error:
            os.close(fd)
            raise ResourceError(f"region {descriptor.region_id!r} cannot be mapped: {error}") from error
        except ContractError:
            os.close(fd)
            raise
        return cls(fd, descriptor, mapping, writable)

    def view(self, extent: Extent, *, writable: bool = False) -> memoryview:
        """The bytes of ``extent`` as unsigned bytes ``[length]``, in place. It stays valid after ``close``.

        Raises:
            ContractError: the extent is of another region or generation, or not inside it; or a writable view of
                a region that was attached read-only.
            ShutDownError: the region was closed.
        """
        mapping = self._mapping
        if mapping is None:
            raise ShutDownError(f"region {self.descriptor.region_id!r} was closed")
        own, end = self.descriptor, extent.offset + extent.length
        if (extent.region_id, extent.generation) != (own.region_id, own.generation):
            raise ContractError(f"{extent} is not of region {own.region_id!r}, generation {own.generation}")
        if not 0 <= extent.offset <= end <= own.size:
            raise ContractError(f"{extent} is not inside the region's {own.size} bytes")
        if writable and not self.writable:
            raise ContractError(f"region {own.region_id!r} was attached read-only")
        view = memoryview(mapping)[extent.offset : end]
        return view if writable else view.toreadonly()

    def open_descriptor(self, *, writable: bool) -> int:
        """A new file descriptor of the region's memory, for another process; the caller closes it.

        Raises:
            ShutDownError: the region was closed.
            ResourceError: the process has no descriptor left.
        """
        if self._mapping is None:
            raise ShutDownError(f"region {self.descriptor.region_id!r} was closed")
        mode = os.O_RDWR if writable else os.O_RDONLY
        # Through /proc, since a duplicate would share the access mode of the original.
        try:
            return os.open(f"/proc/self/fd/{self._fd}", mode | os.O_CLOEXEC)
        except OSError as error:
            raise ResourceError(f"region {self.descriptor.region_id!r} cannot be handed out: {error}") from error

    def close(self) -> None:
        """End the access. Idempotent, and safe while views are alive: the last one unmaps the memory."""
        if self._mapping is not None:
            # Dropped, not closed: closing a mapping under a view is refused, and the view keeps it alive.
            self._mapping = None
            os.close(self._fd)


def _map(fd: int, size: int, writable: bool, prefault: bool) -> mmap.mmap:
    flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if prefault else 0)
    return mmap.mmap(fd, size, flags=flags, prot=mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0))


def check_room(size: int) -> None:
    """Refuse a region that the machine, or this process's control group, has no room for now.

    Raises:
        ResourceError: naming the bytes that there are.
    """
    machine, group = available_memory(), cgroup_headroom()
    if size > min((room for room in (machine, group) if room is not None), default=size):
        unlimited = group is None or group >= 2**60  # version 1 says "no limit" with a number near 2**63
        raise ResourceError(
            f"a region of {size} bytes does not fit: the machine has {machine} bytes available, and the "
            f"control group allows {'any number' if unlimited else group}"
        )


def _refuse_other_memory(fd: int, descriptor: RegionDescriptor) -> None:
    size = os.fstat(fd).st_size
    if size != descriptor.size:
        raise ContractError(f"the memory of {descriptor} has {size} bytes")
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:  # not such a file at all
        seals = 0
    if not seals & fcntl.F_SEAL_SHRINK:
        raise ContractError(f"the memory of {descriptor} could shrink while it is read")
