"""A rank's process: its encoder cache, worker half and copies, and what becomes of them when it ends."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ecotone.connectors.copy.engine import CopyEngine
from ecotone.connectors.worker import EcotoneWorkerConnector
from ecotone.node.region import Region
from ecotone.node.server.messages import Hello
from ecotone.protocol.connector import ECWorkerContext
from ecotone.testing.sim.copies import SimCopyEngine
from ecotone.testing.sim.links import SimWorkerNode
from ecotone.testing.sim.memory import Memory, SimRegion
from ecotone.testing.sim.model import SPEC, Library
from ecotone.testing.sim.node import SimNode
from ecotone.testing.sim.plan import EnginePlan, Plan
from ecotone.testing.sim.rank import SimRank
from ecotone.testing.sim.world import World
from ecotone.worker.ec_connector import ActiveECConnector
from ecotone.worker.encoder_cache import RankEncoderCache

_CPU = torch.device("cpu")


class RankProcess:
    """See the module.

    Args:
        memory: of an embedded node; ``None`` where ``node`` is shared.
        wakeup: called when a report became available.

    Attributes:
        alive: whether it takes orders.
    """

    def __init__(
        self,
        world: World,
        plan: Plan,
        engine: EnginePlan,
        engine_id: str,
        rank: int,
        library: Library,
        memory: Memory | None,
        node: SimNode | None,
        wakeup: Callable[[], None],
    ) -> None:
        self.name = f"{engine_id}/{rank}"
        self.rank = rank
        self.alive = True
        self._world = world
        self._plan = plan
        self._memory = memory
        self._node = node
        self._wakeup = wakeup
        self._copies: SimCopyEngine | None = None
        self._random = world.random(self.name)
        self._memories: list[Memory] = [] if memory is None else [memory]
        self._worker_node: SimWorkerNode | None = None
        if node is not None:
            hello = Hello(
                engine_id, "worker", access="read" if engine.role == "ec_consumer" else "write", rank=rank
            )
            self._worker_node = SimWorkerNode(node, self._random, hello, self.name)
        context = ECWorkerContext(
            engine_id=engine_id,
            role=engine.role,
            options={},
            rank=rank,
            epoch=1,
            encoder=SPEC,
            device="cpu",
            wakeup=wakeup,
        )
        self.connector = EcotoneWorkerConnector(
            context,
            views=engine.views,
            one_mapping=False,
            attach=self._attach,
            make_engine=self._make_engine,
            node=self._worker_node,
        )
        self.cache = RankEncoderCache(SPEC, _CPU)
        self.hook = ActiveECConnector(self.connector, self.cache)
        limits = engine.limits
        self.sim = SimRank(self.name, self.hook, self.cache, library, limits.encoder_cache_rows, limits.block_size)

    def kill(self) -> None:
        """SIGKILL: nothing more is said or copied, and the kernel takes the memory."""
        if not self.alive:
            return
        self._world.say("{}: killed", self.name)
        self.alive = False
        if self._worker_node is not None:
            self._worker_node.kill()
        if self._copies is not None:
            self._copies.kill()
        for memory in self._memories:
            memory.end_owner(self.name)
        self.cache.clear()

    def shutdown(self) -> None:
        """An orderly end."""
        if not self.alive:
            return
        self._world.say("{}: shuts down", self.name)
        self.hook.shutdown()
        self.alive = False
        self.cache.clear()
        for memory in self._memories:
            memory.end_owner(self.name)

    def _attach(self, writable: bool) -> Region:
        if self._worker_node is None:
            return SimRegion(self._memories[0], self.name, writable=writable)
        region = self._worker_node.attach(writable)
        if self._node is not None and self._node.memory not in self._memories:
            self._memories.append(self._node.memory)
        return region

    def _make_engine(self, _region: Region) -> CopyEngine:
        self._copies = SimCopyEngine(self._world, self._plan.weather, self._random, self.name, self._wakeup)
        return self._copies
