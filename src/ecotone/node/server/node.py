"""The shared node: its regions, its place, and the loop that serves."""

from __future__ import annotations

import os
import resource
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType

from ecotone.errors import ConfigError
from ecotone.node.disk import DiskConfig
from ecotone.node.disk.folder import tenant_folder
from ecotone.node.extents import ALIGNMENT
from ecotone.node.region import Region
from ecotone.node.server.listen import Address, take_place
from ecotone.node.server.loop import Loop
from ecotone.node.server.service import Service
from ecotone.node.server.tenants import Tenant

# Descriptors that are not connections: regions, files, the standard ones.
_RESERVED_DESCRIPTORS = 64
_ENOUGH_DESCRIPTORS = 2**16


class SharedNode:
    """One region and index for each tenant, served on a Unix socket to the processes of one user.

    It serves while ``run`` runs, on the thread that calls it.

    Args:
        address: of the socket: a path, or an abstract name.
        tenants: bytes for encodings by name of the tenant; engines that name none are of ``""``.
        disk: a directory behind the regions; each tenant has a folder of its own in it, and of its budget the part
            that its memory is of all memory. ``None`` keeps encodings in memory alone.
        policy: a name from ``EVICTION_POLICIES``.
        prefault: provide the memory now, not as it is touched.
        clock: monotonic seconds.
        uid: the user who is served; ``None`` is the one this process runs as.
        max_connections: more are not held; ``None``: as many as this process can have descriptors, of which it
            takes all that it may.

    Raises:
        ConfigError: the socket is taken or cannot be made, an unknown policy, or a budget that is too small.
        ResourceError: more memory than the machine has.
    """

    def __init__(
        self,
        address: Address,
        tenants: Mapping[str, int],
        *,
        disk: DiskConfig | None = None,
        policy: str = "lru",
        prefault: bool = True,
        clock: Callable[[], float] = time.monotonic,
        uid: int | None = None,
        max_connections: int | None = None,
    ) -> None:
        for name, size in tenants.items():
            if size < ALIGNMENT:
                raise ConfigError(f"tenant {name!r} has {size} bytes; at least {ALIGNMENT} are needed")
        self.node_id = secrets.token_hex(8)
        self._stack = ExitStack()
        with self._stack:
            # First: who does not get the place takes no memory.
            place = take_place(address)
            self._stack.callback(place.close)
            self._tenants = {
                name: self._make_tenant(name, size, policy, prefault) for name, size in sorted(tenants.items())
            }
            self._service = Service(self.node_id, self._tenants)
            self._loop = Loop(
                place.listener,
                self._service,
                os.geteuid() if uid is None else uid,
                clock,
                _raise_descriptor_limit() - _RESERVED_DESCRIPTORS if max_connections is None else max_connections,
            )
            self._stack.callback(self._loop.close)
            if disk is not None:
                self._open_disk(disk, sum(tenants.values()), clock)
            self._stack = self._stack.pop_all()

    def _make_tenant(self, name: str, size: int, policy: str, prefault: bool) -> Tenant:
        region = Region.create(size, f"node-{self.node_id}-{name}", prefault=prefault)
        self._stack.callback(region.close)
        # Numbers of an earlier life must mean nothing in this one: clients of that one may still send them.
        return Tenant(name, region, policy, first_id=secrets.randbits(61))

    def _open_disk(self, disk: DiskConfig, memory: int, clock: Callable[[], float]) -> None:
        for name, tenant in self._tenants.items():
            root = tenant_folder(Path(disk.root), name)
            share = disk.budget * tenant.region.descriptor.size // memory
            with suppress(OSError):  # the tier says what is wrong with it, and the node goes on without it
                root.mkdir(parents=True, exist_ok=True)
            self._stack.callback(tenant.close_tier, clock, self._loop.lock)
            tenant.open_tier(DiskConfig(root=str(root), budget=share, fsync=disk.fsync), self._loop.wake, clock)

    def run(self) -> None:
        """Serve until ``stop``."""
        self._loop.run()

    def stop(self) -> None:
        """Make ``run`` return. Safe from any thread and from a signal handler."""
        self._loop.stop()

    def statistics(self) -> dict[str, float]:
        """Counters of connections and messages. Safe from any thread; also after ``close``."""
        with self._loop.lock:
            return {**self._loop.statistics(), **self._service.statistics()}

    def tenant_statistics(self, name: str = "") -> dict[str, float]:
        """A tenant's counters and gauges. Safe from any thread; also after ``close``."""
        with self._loop.lock:
            return self._tenants[name].statistics()

    def check_integrity(self) -> None:
        """Check the books of every tenant. Safe from any thread; also after ``close``.

        Raises:
            IntegrityError: the first thing that does not add up.
        """
        with self._loop.lock:
            self._service.check_integrity()

    def close(self) -> None:
        """Give up the place and the memory; who maps it keeps it as long as that. After ``run`` returned.
        Idempotent."""
        self._stack.close()

    def __enter__(self) -> SharedNode:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _raise_descriptor_limit() -> int:
    """As many descriptors as this process may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _ENOUGH_DESCRIPTORS
    if soft != hard:
        soft = _ENOUGH_DESCRIPTORS if hard == resource.RLIM_INFINITY else hard
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return soft
