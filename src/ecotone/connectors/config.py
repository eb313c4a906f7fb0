"""The options of the Ecotone connector."""

from __future__ import annotations

from math import inf
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from ecotone.config import parse_bytes, parse_config
from ecotone.errors import ConfigError
from ecotone.node.disk import DiskConfig, Fsync

EMBEDDED = "embedded"
_UNIX = "unix:"
EvictionKind = Literal["lru", "cost"]
LoadMode = Literal["auto", "view", "copy"]
_POLICIES: dict[EvictionKind, str] = {"lru": "lru", "cost": "gdsf"}
_CHOICES = {"eviction": get_args(EvictionKind), "load": get_args(LoadMode), "fsync": get_args(Fsync)}


class EcotoneOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the operator may say about the connector.

    Attributes:
        node: where encodings live. ``embedded``: in the engine's own scheduler process. ``unix:PATH``: in the node
            (``ecotone node``) that serves at this socket to every engine of the host.
        tenant: whose region of such a node.
        memory: size of the embedded node's region, e.g. ``"2GiB"`` or a number of bytes.
        eviction: which entry goes first when memory is short: ``lru`` the least recently used, ``cost`` the one
            that is cheapest to encode again for the bytes it holds.
        load: ``view`` reads the region in place (CPU only), ``copy`` copies out of it, ``auto`` takes the view
            where there is one. An entry in several pieces has no view and is copied in any case.
        pending_timeout_s: how long a request waits, over all its tries, for an encoding that somebody else is
            writing, before it encodes the item itself, in seconds. ``None``: ten times what the slowest of the
            latest encodings and saves took here, between 1 and 30 s; 10 s until one was measured.
        prefault: take the region's memory from the machine at the start, so that a lack of it shows then, and the
            first copies meet no page faults. Otherwise memory is taken as it is touched.
        disk: a directory for encodings that memory has no room for; what is in it is used again after a restart.
            One node uses it at a time.
        disk_size: bytes that files in ``disk`` may take.
        fsync: ``none`` leaves to the kernel when files reach the device: a crash of the machine may lose some of
            them, never serve wrong ones. ``data`` writes each one through.
    """

    node: str = "embedded"
    tenant: str = ""
    memory: str | int = "1GiB"
    eviction: EvictionKind = "lru"
    load: LoadMode = "auto"
    pending_timeout_s: float | None = None
    prefault: bool = True
    disk: str | None = None
    disk_size: str | int = "10GiB"
    fsync: Fsync = "none"

    @property
    def memory_bytes(self) -> int:
        """``memory`` in bytes."""
        return parse_bytes(self.memory, "memory")

    @property
    def disk_config(self) -> DiskConfig | None:
        """``disk``, ``disk_size`` and ``fsync`` for the node."""
        if self.disk is None:
            return None
        return DiskConfig(root=self.disk, budget=parse_bytes(self.disk_size, "disk_size"), fsync=self.fsync)

    @property
    def policy(self) -> str:
        """``eviction`` by the name that the node has for it."""
        return _POLICIES[self.eviction]

    @property
    def node_path(self) -> Path | None:
        """The socket of a shared node; ``None`` for an embedded one."""
        return None if self.node == EMBEDDED else Path(self.node.removeprefix(_UNIX))


def parse_options(options: dict[str, Any]) -> EcotoneOptions:
    """``options`` as the connector understands them.

    Raises:
        ConfigError: an unknown key or a value out of range; the message names it and what is allowed.
    """
    for name, allowed in _CHOICES.items():
        if name in options and options[name] not in allowed:
            raise ConfigError(f"{name}={options[name]!r} is not one of {', '.join(allowed)}")
    parsed = parse_config(EcotoneOptions, options, "options of EcotoneConnector")
    _ = parsed.memory_bytes, parsed.disk_config
    timeout_s = parsed.pending_timeout_s
    if timeout_s is not None and not 0 <= timeout_s < inf:
        raise ConfigError(f"pending_timeout_s={timeout_s!r} must be a number of seconds, 0 or more")
    _check_node(parsed, options)
    for name in ("disk_size", "fsync"):
        if name in options and parsed.disk is None:
            raise ConfigError(f"{name}={options[name]!r} is of a disk: say with 'disk' in which directory")
    return parsed


def _check_node(parsed: EcotoneOptions, given: dict[str, Any]) -> None:
    if parsed.node == EMBEDDED:
        if parsed.tenant:
            raise ConfigError(f"tenant={parsed.tenant!r}: an embedded node has one tenant; name a shared node")
        return
    if not parsed.node.startswith(_UNIX) or parsed.node == _UNIX:
        raise ConfigError(f"node={parsed.node!r} is neither {EMBEDDED!r} nor 'unix:PATH' of a node's socket")
    for name in ("memory", "eviction", "disk", "disk_size", "fsync"):
        if name in given:
            raise ConfigError(f"{name}={given[name]!r}: a shared node has its own; say it to 'ecotone node'")


def check_load_mode(options: EcotoneOptions, device: str) -> None:
    """Refuse views where the encoder cache is not in the region's kind of memory.

    Raises:
        ConfigError: ``load="view"`` with a device other than the CPU.
    """
    if options.load == "view" and device != "cpu":
        raise ConfigError(
            f"load='view' needs the encoder cache on the cpu, not on {device!r}: use 'auto' or 'copy'"
        )
