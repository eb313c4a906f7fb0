"""The node of a simulation: the real server without its sockets, which clients reach over simulated links."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from random import Random

from ecotone.node.disk.tier import DiskTier
from ecotone.node.eviction import make_policy
from ecotone.node.exchange import AnyAnswer, AnyOp
from ecotone.node.index import Index
from ecotone.node.region import RegionDescriptor
from ecotone.node.server.link import LostError
from ecotone.node.server.messages import (
    Answers,
    Batch,
    ClientMessage,
    Hello,
    NodeMessage,
    Refusal,
)
from ecotone.node.server.service import Reply, Service
from ecotone.node.server.tenants import Tenant
from ecotone.testing.sim.disk import Files, SimDiskIO
from ecotone.testing.sim.memory import NODE, Memory, SimRegion
from ecotone.testing.sim.model import Library
from ecotone.testing.sim.plan import Plan
from ecotone.testing.sim.watch import Watch
from ecotone.testing.sim.world import World

_IDS_PER_LIFE = 1_000_000


class DirectExchange:
    """One client's end of an index in the same process. See ``NodeExchange``."""

    def __init__(self, watch: Watch, client: str, clock: Callable[[], float]) -> None:
        self._watch = watch
        self._client = client
        self._clock = clock
        self._answers: list[AnyAnswer] = []

    def submit(self, ops: Sequence[AnyOp]) -> None:
        """See the contract."""
        answers = self._watch.index.apply(self._client, ops, self._clock())
        self._answers += answers
        self._watch.after(ops, answers)

    def flush(self) -> None:
        """Nothing is ever kept back."""

    def poll(self) -> Sequence[AnyAnswer]:
        """See the contract."""
        answers, self._answers = self._answers, []
        return answers

    def wait(self, timeout_s: float) -> None:
        """Every answer is there at once."""

    def statistics(self) -> dict[str, float]:
        """See the contract."""
        return self._watch.index.statistics()

    def close(self) -> None:
        """See the contract."""
        self._watch.index.close_client(self._client)
        self._watch.after()


def embedded_watch(plan: Plan, engine_id: str, library: Library) -> Watch:
    """Index and memory of a node inside an engine."""
    memory = Memory(RegionDescriptor(engine_id, 1, plan.capacity))
    index = Index(plan.capacity, engine_id, 1, make_policy(plan.policy))
    return Watch(index, memory, library)


class Connection:
    """A client's connection as the node sees it; ``deliver`` takes what the node says to it."""

    def __init__(self, number: int, life: int, random: Random) -> None:
        self.number = number
        self.life = life
        self.random = random
        self.inbox: deque[NodeMessage] = deque()
        self.unread: deque[ClientMessage | None] = deque()  # None is the end
        self.hung_up = False
        self.closed = False
        self.sent_until = 0.0
        self.told_until = 0.0


class SimNode:
    """A shared node that can be restarted, stopped for a while, and lose connections.

    Attributes:
        is_up: whether anybody can connect.
    """

    def __init__(self, world: World, plan: Plan, library: Library) -> None:
        self.is_up = False
        self._world = world
        self._plan = plan
        self._library = library
        self._life = 0
        self._files: Files = {}
        self._disk: SimDiskIO | None = None
        self._stalled_until = 0.0
        self._numbers = 0
        self._connections: dict[int, Connection] = {}
        self._lingering: dict[str, Callable[[], None]] = {}  # engine -> what to do when its scheduler is gone
        self._dead: set[str] = set()  # engines whose scheduler's process is gone
        self._hellos: dict[int, Hello] = {}
        self.start()

    @property
    def is_answering(self) -> bool:
        """Whether who asks it now is answered at once."""
        return self.is_up and self._world.now >= self._stalled_until

    def start(self) -> None:
        """Begin a life: nothing is known of any before."""
        self._life += 1
        self.is_up = True
        descriptor = RegionDescriptor("node", self._life, self._plan.capacity)
        self.memory = Memory(descriptor)
        region = SimRegion(self.memory, NODE, writable=True)
        tenant = Tenant("", region, self._plan.policy, self._life * _IDS_PER_LIFE)
        self.watch = Watch(tenant.index, self.memory, self._library)
        self.tenant = tenant
        if self._plan.disk:
            self._open_disk(region)
        self._service = Service(f"life-{self._life}", {"": tenant})
        self._world.say("node: life {} begins", self._life)

    def _open_disk(self, region: SimRegion) -> None:
        tenant, life = self.tenant, self._life

        def notify() -> None:
            self._world.after(0.0, lambda: self._pump(life))

        random = self._world.random(f"disk-{life}")
        self._disk = SimDiskIO(self._world, self._plan.weather, random, self._files, self._library, notify)
        tier = DiskTier(tenant.index, region, self._plan.disk, self._disk, self._world.clock)
        tenant.index.tier = tenant.tier = tier

    def _pump(self, life: int) -> None:
        """The disk has news for the life that it is of, as soon as that goes on."""
        if not self.is_up or life != self._life:
            return
        if self._world.now < self._stalled_until:
            self._world.at(self._stalled_until, lambda: self._pump(life))
            return
        self._turn_ends()

    def _turn_ends(self) -> None:
        """After each turn the node lets in what its disk did, and orders what is next."""
        self._service.pump(self._world.now)
        self.watch.after()

    def restart(self, down_s: float) -> None:
        """It is killed, and another one is there after ``down_s``."""
        if not self.is_up:
            return
        self._world.say("node: killed")
        self.is_up = False
        if self._disk is not None:
            self._disk.close()
        for connection in self._connections.values():
            connection.hung_up = True
        self._connections.clear()
        self._lingering.clear()
        self._world.after(down_s, self.start)

    def stall(self, seconds: float) -> None:
        """It is stopped: what arrives waits."""
        self._world.say("node: stopped for {} s", seconds)
        self._stalled_until = max(self._stalled_until, self._world.now + seconds)

    def drop(self, engine_id: str) -> None:
        """The connection of an engine's scheduler breaks."""
        for connection in list(self._connections.values()):
            hello = self._hellos.get(connection.number)
            if hello is not None and hello.part == "scheduler" and hello.engine_id == engine_id:
                self._world.say("node: drops the connection of {}", engine_id)
                self._end(connection)

    def process_gone(self, engine_id: str) -> None:
        """The process of an engine's scheduler ended, however it did."""
        self._dead.add(engine_id)
        self._let_go(engine_id)

    # -- connections ------------------------------------------------------------------------------------------

    def connect(self, random: Random) -> Connection:
        """A new connection.

        Raises:
            LostError: nobody serves.
        """
        if not self.is_up:
            raise LostError("Connection refused")
        self._numbers += 1
        connection = Connection(self._numbers, self._life, random)
        self._connections[connection.number] = connection
        return connection

    def send(self, connection: Connection, message: ClientMessage) -> None:
        """``message`` is on its way to the node, behind what was sent before it."""
        at = max(connection.sent_until, self._world.now + connection.random.uniform(0, self._plan.weather.net_s))
        connection.sent_until = at
        self._world.at(at, lambda: self._arrive(connection, message))

    def hang_up(self, connection: Connection) -> None:
        """The client's end is closed; the node learns of it after what was sent."""
        if connection.closed:
            return
        connection.closed = True
        at = max(connection.sent_until, self._world.now + connection.random.uniform(0, self._plan.weather.net_s))
        self._world.at(at, lambda: self._arrive(connection, None))

    def ask_now(self, connection: Connection, message: ClientMessage) -> NodeMessage | None:
        """Send ``message`` and wait for the answer, in no time."""
        reply = self._handle(connection, message)
        return None if reply is None else reply.message

    # -- inside -----------------------------------------------------------------------------------------------

    def _is_open(self, connection: Connection) -> bool:
        return self._connections.get(connection.number) is connection

    def _arrive(self, connection: Connection, message: ClientMessage | None) -> None:
        connection.unread.append(message)
        self._read(connection)

    def _read(self, connection: Connection) -> None:
        """Everything that arrived, in order, unless the node is stopped: then as soon as it goes on."""
        while connection.unread and self._is_open(connection):
            if self._world.now < self._stalled_until:
                self._world.at(self._stalled_until, lambda: self._read(connection))
                return
            message = connection.unread.popleft()
            if message is None:
                self._end(connection)
            else:
                self._answer(connection, message)

    def _answer(self, connection: Connection, message: ClientMessage) -> None:
        reply = self._handle(connection, message)
        if reply is None:
            return
        at = max(connection.told_until, self._world.now + connection.random.uniform(0, self._plan.weather.net_s))
        connection.told_until = at
        self._world.at(at, lambda: connection.inbox.append(reply.message))
        if isinstance(reply.message, Refusal):
            self._world.say("node: refuses {}: {}", connection.number, reply.message.reason)
            if not self._service.maps_region(connection.number):
                self._end(connection)

    def _handle(self, connection: Connection, message: ClientMessage) -> Reply | None:
        reply = self._service.handle(connection.number, message, self._world.now)
        if isinstance(message, Hello) and reply is not None and not isinstance(reply.message, Refusal):
            self._hellos[connection.number] = message
        if reply is not None and reply.replaced is not None:
            self._end(self._connections[reply.replaced])
        ops = message.ops if isinstance(message, Batch) else ()
        answers = reply.message.answers if reply is not None and isinstance(reply.message, Answers) else ()
        self.watch.after(ops if answers else (), answers)
        self._turn_ends()
        return reply

    def _end(self, connection: Connection) -> None:
        del self._connections[connection.number]
        hello = self._hellos.pop(connection.number, None)
        connection.hung_up = True
        when_process_gone = self._service.gone(connection.number, self._world.now)
        if hello is not None and when_process_gone is not None:
            self._lingering[hello.engine_id] = when_process_gone
            if hello.engine_id in self._dead:
                self._let_go(hello.engine_id)
        self.watch.after()

    def _let_go(self, engine_id: str) -> None:
        when_process_gone = self._lingering.pop(engine_id, None)
        if when_process_gone is not None:
            self._world.say("node: the process of {} is gone", engine_id)
            when_process_gone()
            self.watch.after()
