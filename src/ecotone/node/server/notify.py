"""Telling a service manager how the node is: ``sd_notify``'s protocol, a datagram to a socket it names."""

from __future__ import annotations

import os
import socket
from contextlib import suppress


def notify(state: str) -> None:
    """Send ``state``, e.g. ``READY=1``, to who started this process, if it asked for that."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    # A manager that does not listen any more is no reason for the node not to serve.
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.sendto(state.encode(), address)
