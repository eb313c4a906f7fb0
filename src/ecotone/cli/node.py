"""``ecotone node``: serve until somebody ends it."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path

from ecotone.cli.console import err
from ecotone.config import parse_bytes
from ecotone.errors import ConfigError
from ecotone.node.disk import DiskConfig
from ecotone.node.server.node import SharedNode
from ecotone.node.server.notify import notify

_POLICIES = {"lru": "lru", "cost": "gdsf"}


def parse_tenants(memory: str, tenants: list[str]) -> dict[str, int]:
    """Budgets in bytes by tenant.

    Raises:
        ConfigError: no ``NAME=SIZE``, a name twice, or no size.
    """
    budgets = {"": parse_bytes(memory, "memory")}
    for text in tenants:
        name, equals, size = text.partition("=")
        if not (name and equals):
            raise ConfigError(f"--tenant {text!r}: write NAME=SIZE, e.g. blue=2GiB")
        if name in budgets:
            raise ConfigError(f"--tenant {text!r}: {name!r} has a budget already")
        budgets[name] = parse_bytes(size, f"tenant {name}")
    return budgets


def run(path: Path, tenants: Mapping[str, int], eviction: str, *, disk: DiskConfig | None, prefault: bool) -> None:
    """Serve at ``path`` until SIGTERM or SIGINT, then end in order.

    Raises:
        ConfigError: the socket is taken, or a budget or policy cannot work.
        ResourceError: the machine does not have the memory.
    """
    if eviction not in _POLICIES:
        raise ConfigError(f"--eviction {eviction!r} is not one of {', '.join(_POLICIES)}")
    with SharedNode(path, tenants, disk=disk, policy=_POLICIES[eviction], prefault=prefault) as node:
        before = {number: signal.signal(number, lambda *_: node.stop()) for number in _SIGNALS}
        try:
            notify("READY=1")
            err.print(f"serving {sum(tenants.values()):,} bytes at {path}", markup=False, soft_wrap=True)
            node.run()
            notify("STOPPING=1")
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


_SIGNALS = (signal.SIGTERM, signal.SIGINT)
