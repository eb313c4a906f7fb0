"""Clients' ends of a ``SimNode``: a scheduler's connection, and a rank's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random

from ecotone.errors import ResourceError
from ecotone.node.region import Region
from ecotone.node.server.link import Link, LostError
from ecotone.node.server.listen import Address
from ecotone.node.server.messages import Attach, ClientMessage, Fact, Facts, Hello, NodeMessage, Refusal
from ecotone.testing.sim.memory import SimRegion
from ecotone.testing.sim.node import Connection, SimNode


class SimLink(Link):
    """A scheduler's connection to a ``SimNode``. See ``Link``."""

    def __init__(self, node: SimNode, random: Random, hello: Hello) -> None:
        self._node = node
        self._connection = node.connect(random)
        self.descriptors = []
        node.send(self._connection, hello)

    @property
    def unsent_bytes(self) -> int:
        """Nothing: a simulated kernel takes everything."""
        return 0

    def send(self, message: ClientMessage) -> None:
        """See ``Link``."""
        self._node.send(self._connection, message)

    def pump(self) -> None:
        """Nothing is kept."""

    def wait(self, timeout_s: float) -> bool:  # noqa: ARG002 - time stands still while somebody runs
        """See ``Link``."""
        return bool(self._connection.inbox) or self._connection.hung_up

    def receive(self) -> Iterator[NodeMessage]:
        """See ``Link``."""
        connection = self._connection
        while connection.inbox:
            message = connection.inbox.popleft()
            if isinstance(message, Refusal):
                self.close()
                raise LostError(f"it refused: {message.reason}", final=True)
            yield message
        if connection.hung_up:
            self.close()
            raise LostError("the node hung up")

    def close(self) -> None:
        """See ``Link``."""
        self._node.hang_up(self._connection)


def link_opener(node: SimNode, random: Random, opened: list[SimLink]) -> Callable[[Address, Hello], Link]:
    """Opens links to ``node`` wherever the address leads; the present one is the last of ``opened``."""

    def open_link(_address: Address, hello: Hello) -> Link:
        opened.append(SimLink(node, random, hello))
        del opened[:-1]
        return opened[-1]

    return open_link


class SimWorkerNode:
    """A rank's end of a ``SimNode``; what ``WorkerNode`` is, without its thread."""

    def __init__(self, node: SimNode, random: Random, hello: Hello, owner: str) -> None:
        self._node = node
        self._random = random
        self._hello = hello
        self._owner = owner
        self._connection: Connection | None = None
        self._reading: set[int] = set()
        self._closed = False
        self._dead = False

    def attach(self, writable: bool) -> Region:
        """See ``WorkerNode``."""
        if self._closed or not self._node.is_answering:
            raise ResourceError("no region: the node does not answer")
        old = self._connection
        if old is not None and not old.hung_up:
            self._ask(old, Attach(writable))
            return SimRegion(self._node.memory, self._owner, writable=writable)
        new = self._node.connect(self._random)
        try:
            self._ask(new, self._hello)
            self._ask(new, Attach(writable))
        except ResourceError:
            self._node.hang_up(new)
            raise
        self._connection = new
        if old is not None:
            self._node.hang_up(old)
        return SimRegion(self._node.memory, self._owner, writable=writable)

    def tell(self, fact: Fact) -> None:
        """See ``WorkerNode``."""
        if fact.kind == "released":
            self._reading.discard(fact.claim)
        if self._dead or self._connection is None:
            return
        self._node.send(self._connection, Facts((fact,)))
        self._leave_if_done()

    def reads_in_place(self, claim: int) -> None:
        """See ``WorkerNode``."""
        self._reading.add(claim)

    def close(self) -> None:
        """See ``WorkerNode``."""
        self._closed = True
        self._leave_if_done()

    def kill(self) -> None:
        """The process is gone: the kernel hangs up."""
        self._dead = True
        if self._connection is not None:
            self._node.hang_up(self._connection)

    def _leave_if_done(self) -> None:
        if self._closed and not self._reading and self._connection is not None:
            self._node.hang_up(self._connection)

    def _ask(self, connection: Connection, message: ClientMessage) -> None:
        answer = self._node.ask_now(connection, message)
        if isinstance(answer, Refusal):
            raise ResourceError(f"no region: it refused: {answer.reason}")
