"""What the node does with each message. Pure: connections are numbers, and the time is given."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ecotone.errors import IntegrityError
from ecotone.node.exchange import ForgetAll
from ecotone.node.server.messages import (
    MAX_BATCH_OPS,
    VERSION,
    Answers,
    Attach,
    Attached,
    Batch,
    Clear,
    ClientMessage,
    Describe,
    Description,
    Evict,
    Facts,
    Hello,
    Keep,
    Leave,
    List,
    Listing,
    NodeMessage,
    Outcome,
    Refusal,
    Verify,
    Welcome,
)
from ecotone.node.server.tenants import Tenant


@dataclass(frozen=True, slots=True)
class Reply:
    """What goes back: a message, and with it a descriptor of the region, writable or not.

    An answer with a ``barrier`` waits, for a bounded time, until a reset would survive a crash.

    ``replaced`` is a connection that this one took the place of: nothing it says counts any more.
    """

    message: NodeMessage
    tenant: Tenant | None = None
    writable: bool | None = None
    replaced: int | None = None
    barrier: int | None = None

    @property
    def is_due(self) -> bool:
        """Whether the disk has what the answer says."""
        tier = None if self.tenant is None else self.tenant.tier
        return self.barrier is None or tier is None or tier.is_durable(self.barrier)


class Service:
    """The node without its sockets.

    Args:
        node_id: of this life of the node.
        tenants: by name.
    """

    def __init__(self, node_id: str, tenants: Mapping[str, Tenant]) -> None:
        self._node_id = node_id
        self._tenants = tenants
        self._sessions: dict[int, Hello] = {}
        self._replaced: set[int] = set()

    def is_greeted(self, connection: int) -> bool:
        """Whether it said who it is, and was welcomed."""
        return connection in self._sessions

    def maps_region(self, connection: int) -> bool:
        """Whether the process at its other end was given the region."""
        hello = self._sessions.get(connection)
        if hello is None or hello.part != "worker":
            return False
        engine = self._tenants[hello.tenant].engines.get(hello.engine_id)
        return engine is not None and connection in engine.attached

    def handle(self, connection: int, message: ClientMessage, now: float) -> Reply | None:
        """The answer to a message. After a ``Refusal`` the connection is of no use."""
        hello = self._sessions.get(connection)
        if hello is None:
            return self._greet(connection, message)
        if connection in self._replaced:
            return Reply(Refusal(f"engine {hello.engine_id!r} has a newer connection"))
        tenant = self._tenants[hello.tenant]
        match hello.part, message:
            case "scheduler", Batch(ops=ops):
                settled = tenant.take_settled(hello.engine_id, now)
                answers = Answers(tuple(tenant.apply(hello.engine_id, ops, now)), settled)
                if tenant.tier is None or not any(isinstance(op, ForgetAll) for op in ops):
                    return Reply(answers)
                return Reply(answers, tenant, barrier=tenant.tier.barrier())
            case "scheduler", Keep(ids=ids):
                tenant.keep(hello.engine_id, ids, now)
                return None
            case "scheduler", Leave():
                tenant.scheduler_left(hello.engine_id)
                return None
            case "worker", Facts(facts=facts):
                tenant.hear(hello.engine_id, facts, now)
                return None
            case "worker", Attach(writable=writable):
                return self._attach(connection, hello, tenant, writable)
            case "tool", Clear(namespace=namespace):
                outcome = tenant.clear(namespace, now)
                return Reply(outcome, tenant, barrier=tenant.tier.barrier() if tenant.tier is not None else None)
            case "tool", Describe() | List() | Verify() | Evict():
                return Reply(self._serve_tool(tenant, message, now))
        return Reply(Refusal(f"a {hello.part} may not send a {type(message).__name__}"))

    def is_scheduler(self, connection: int) -> bool:
        """Whether an engine's scheduler is at its other end."""
        hello = self._sessions.get(connection)
        return hello is not None and hello.part == "scheduler"

    def gone(self, connection: int, now: float) -> Callable[[], None] | None:
        """The process at its other end let go of it, or is gone.

        The result, if any, is to be called once that process is gone: until then the node keeps what it was given.
        """
        hello = self._sessions.pop(connection, None)
        if hello is None or hello.part == "tool":
            return None
        tenant = self._tenants[hello.tenant]
        if hello.part == "worker":
            tenant.worker_went(hello.engine_id, connection, now)
        elif connection in self._replaced:
            self._replaced.discard(connection)
        else:
            return tenant.scheduler_went(hello.engine_id, connection)
        return None

    def pump(self, now: float) -> None:
        """Let what the disks did into the books, and order what is next."""
        for tenant in self._tenants.values():
            if tenant.tier is not None:
                tenant.tier.pump(now)

    def statistics(self) -> dict[str, float]:
        """Connections by part."""
        parts = [hello.part for hello in self._sessions.values()]
        return {f"{part}s": parts.count(part) for part in ("scheduler", "worker", "tool")}

    def check_integrity(self) -> None:
        """Check the books of every tenant.

        Raises:
            IntegrityError: the first thing that does not add up.
        """
        for tenant in self._tenants.values():
            tenant.check_integrity()

    # -- inside -----------------------------------------------------------------------------------------------

    def _greet(self, connection: int, message: ClientMessage) -> Reply:
        if not isinstance(message, Hello):
            return Reply(Refusal(f"the first message must be a Hello, not a {type(message).__name__}"))
        tenant = self._tenants.get(message.tenant)
        if tenant is None:
            known = ", ".join(map(repr, sorted(self._tenants)))
            return Reply(Refusal(f"there is no tenant {message.tenant!r}; there are {known}"))
        replaced = None
        if message.part == "scheduler":
            replaced = tenant.scheduler_came(message.engine_id, connection, message.ranks)
            if replaced is not None:
                self._replaced.add(replaced)
        elif message.part == "worker" and not tenant.worker_came(message.engine_id, connection, message.rank):
            return Reply(Refusal(f"the scheduler of engine {message.engine_id!r} is not connected"))
        self._sessions[connection] = message
        return Reply(Welcome(self._node_id, os.getpid(), tenant.region.descriptor), replaced=replaced)

    def _attach(self, connection: int, hello: Hello, tenant: Tenant, writable: bool) -> Reply:
        if writable and hello.access != "write":
            return Reply(Refusal(f"engine {hello.engine_id!r} only reads: it is given no writable region"))
        if not tenant.worker_attaches(hello.engine_id, connection):
            return Reply(Refusal(f"the scheduler of engine {hello.engine_id!r} is not connected"))
        return Reply(Attached(tenant.region.descriptor), tenant, writable)

    def _serve_tool(self, tenant: Tenant, message: Describe | List | Verify | Evict, now: float) -> NodeMessage:
        match message:
            case Describe():
                return self._describe()
            case List(namespace=namespace, after=after, limit=limit):
                entries, more = tenant.entries(namespace, after, min(limit, MAX_BATCH_OPS), now)
                return Listing(tuple(entries), more)
            case Verify():
                return self._verify(tenant)
            case Evict(nbytes=nbytes, key=key):
                if key is not None:
                    return tenant.forget(key, now)
                before = tenant.index.statistics()["evictions"]
                evicted = tenant.index.evict(nbytes)
                return Outcome(int(tenant.index.statistics()["evictions"] - before), evicted)

    def _describe(self) -> Description:
        return Description(
            version=VERSION,
            node={**self.statistics(), "pid": os.getpid()},
            tenants={tenant.name: tenant.statistics() for tenant in self._tenants.values()},
            engines=tuple(report for tenant in self._tenants.values() for report in tenant.reports()),
        )

    def _verify(self, tenant: Tenant) -> Outcome:
        try:
            self.check_integrity()
        except IntegrityError as error:
            return Outcome(problem=str(error))
        index = tenant.index
        return Outcome(len(index.entries), sum(entry.nbytes for entry in index.entries.values()))
