"""A worker's end of a shared node: its mapping of the region, and what it tells the node itself."""

from __future__ import annotations

import logging
import time
from queue import Empty, SimpleQueue
from threading import Lock, Thread

from ecotone.errors import ResourceError
from ecotone.node.region import Region
from ecotone.node.server.link import Link, LostError, await_message
from ecotone.node.server.listen import Address, shown
from ecotone.node.server.messages import MAX_BATCH_OPS, Attach, Attached, Fact, Facts, Hello, Welcome

logger = logging.getLogger(__name__)

ATTACH_TIMEOUT_S = 5.0
_PATIENCE_S = 0.05  # between looks for room in a socket that is full


class WorkerNode:
    """The connection that says to the node, and to the kernel, that this process may touch the region.

    It is opened with the first ``attach`` and stays open, also past ``close``, for as long as something in this
    process reads the region in place: to the node the end of the connection is the end of the process.

    ``tell`` may be called from anywhere, also from a finalizer; a thread of this object does the talking.

    Args:
        address: the node's socket.
        hello: who this is: a worker.
        timeout_s: how long an attach may take.
    """

    def __init__(self, address: Address, hello: Hello, timeout_s: float = ATTACH_TIMEOUT_S) -> None:
        self._address = address
        self._hello = hello
        self._timeout_s = timeout_s
        self._lock = Lock()  # held while the link is used or exchanged
        self._link: Link | None = None
        self._stale: list[Link] = []
        self._facts: SimpleQueue[Fact | None] = SimpleQueue()
        self._reading: set[int] = set()  # pins under views; a set's own operations need no lock
        self._thread: Thread | None = None
        self._closed = False

    def attach(self, writable: bool, prefault: bool) -> Region:
        """The region of the node that serves now, mapped.

        Raises:
            ResourceError: no node is there or it refused, or the region cannot be mapped.
            ConfigError: the node belongs to another user.
            ContractError: what was handed out is not a region.
        """
        deadline = time.monotonic() + self._timeout_s
        with self._lock:
            if self._closed:
                raise ResourceError(f"this end of the node at {shown(self._address)} was closed")
            try:
                attached, descriptor = self._ask(writable, deadline)
            except LostError as lost:
                raise ResourceError(f"no region from the node at {shown(self._address)}: {lost}") from None
            if self._thread is None:
                self._thread = Thread(target=self._talk, name="ecotone-node-worker", daemon=True)
                self._thread.start()
        return Region.attach(descriptor, attached.region, prefault=prefault)

    def tell(self, fact: Fact) -> None:
        """Tell the node, soon. Never blocks and takes no lock; nothing comes of it where no node is there."""
        if fact.kind == "released":
            self._reading.discard(fact.claim)
        self._facts.put(fact)

    def reads_in_place(self, claim: int) -> None:
        """A view of the region under this pin begins; it ends when ``released`` is told."""
        self._reading.add(claim)

    def close(self) -> None:
        """Tell what is left to tell and hang up, now or when the last view is dead. Idempotent."""
        with self._lock:
            self._closed = True
            thread = self._thread
        self._facts.put(None)
        if thread is not None and not self._reading:
            thread.join()

    # -- inside -----------------------------------------------------------------------------------------------

    def _ask(self, writable: bool, deadline: float) -> tuple[Attached, int]:
        """Over the connection there is, or where its node is gone, over a new one."""
        if self._link is not None:
            try:
                return self._ask_over(self._link, writable, deadline)
            except LostError:
                # Of no use, and kept open until there is another one: a node that was merely slow would take its
                # end for the end of this process.
                self._stale.append(self._link)
                self._link = None
        link = Link(self._address, self._hello)
        try:
            await_message(link, Welcome, deadline)
            answer = self._ask_over(link, writable, deadline)
        except LostError:
            link.close()
            raise
        self._link = link
        self._close_stale()
        return answer

    def _close_stale(self) -> None:
        while self._stale:
            self._stale.pop().close()

    def _ask_over(self, link: Link, writable: bool, deadline: float) -> tuple[Attached, int]:
        link.send(Attach(writable))
        attached = await_message(link, Attached, deadline)
        if len(link.descriptors) != 1:
            raise LostError(f"it sent {len(link.descriptors)} descriptors with its region")
        return attached, link.descriptors.pop()

    def _talk(self) -> None:
        ending = False
        while not (ending and not self._reading and self._facts.empty()):
            batch = []
            fact = self._facts.get()
            while True:
                ending |= fact is None
                if fact is not None:
                    batch.append(fact)
                if len(batch) == MAX_BATCH_OPS:
                    break
                try:
                    fact = self._facts.get_nowait()
                except Empty:
                    break
            if batch:
                self._say(batch)
        with self._lock:
            if self._link is not None:
                self._link.close()
                self._link = None
            self._close_stale()

    def _say(self, facts: list[Fact]) -> None:
        with self._lock:
            link = self._link
            if link is None:
                return  # there is no node that would care
            link.send(Facts(tuple(facts)))
        while True:
            with self._lock:
                if link is not self._link or not link.unsent_bytes:
                    return
                link.pump()
            time.sleep(_PATIENCE_S)
