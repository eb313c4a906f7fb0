"""A tool's end of a shared node: it asks, and waits for the answer."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from types import TracebackType
from typing import TypeVar

from ecotone.errors import ResourceError
from ecotone.node.server.link import Link, LostError, await_message
from ecotone.node.server.listen import Address, shown
from ecotone.node.server.messages import (
    Clear,
    Describe,
    Description,
    EntryReport,
    Evict,
    Hello,
    List,
    Listing,
    NodeMessage,
    Outcome,
    ToolMessage,
    Verify,
    Welcome,
)

_M = TypeVar("_M", bound=NodeMessage)


class NodeTool:
    """One connection. Whatever keeps the node from answering is a ``ResourceError``.

    Args:
        address: the node's socket.
        tenant: whose entries are meant.
        timeout_s: how long an answer may take.

    Raises:
        ResourceError: no node serves there, or not this tenant, or in another version.
        ConfigError: the node belongs to another user.
    """

    def __init__(self, address: Address, tenant: str = "", timeout_s: float = 10.0) -> None:
        self._address = address
        self._timeout_s = timeout_s
        try:
            self._link = Link(address, Hello(f"tool-{os.getpid()}", "tool", tenant=tenant))
            await_message(self._link, Welcome, time.monotonic() + timeout_s)
        except LostError as lost:
            raise ResourceError(f"the node at {shown(address)}: {lost}") from None

    def describe(self) -> Description:
        """Everything that is counted."""
        return self._ask(Describe(), Description)

    def entries(self, namespace: str | None = None) -> Iterator[EntryReport]:
        """Every entry, in the order of the keys."""
        after, more = "", True
        while more:
            listing = self._ask(List(namespace, after), Listing)
            yield from listing.entries
            more = listing.more
            after = listing.entries[-1].key if listing.entries else ""

    def verify(self) -> Outcome:
        """Have the books checked."""
        return self._ask(Verify(), Outcome)

    def evict(self, nbytes: int = 0, key: str | None = None) -> Outcome:
        """Have ``nbytes`` freed, or one entry forgotten."""
        return self._ask(Evict(nbytes, key), Outcome)

    def clear(self, namespace: str | None = None) -> Outcome:
        """Have a namespace forgotten, or everything."""
        return self._ask(Clear(namespace), Outcome)

    def close(self) -> None:
        """Hang up. Idempotent."""
        self._link.close()

    def __enter__(self) -> NodeTool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ask(self, message: ToolMessage, kind: type[_M]) -> _M:
        try:
            self._link.send(message)
            return await_message(self._link, kind, time.monotonic() + self._timeout_s)
        except LostError as lost:
            raise ResourceError(f"the node at {shown(self._address)}: {lost}") from None
