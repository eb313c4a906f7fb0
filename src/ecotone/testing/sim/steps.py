"""The steps in flight of an engine: on their way to the ranks, and back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from random import Random

from ecotone.protocol.outputs import ModelRunnerOutput
from ecotone.protocol.step import SchedulerOutput
from ecotone.testing.sim.model import Library
from ecotone.testing.sim.process import RankProcess
from ecotone.testing.sim.world import World


class StepLine:
    """Each rank carries out the steps in order, at a pace of its own; what it answers arrives in order.

    Args:
        step_s: the longest way to a rank, and back.
        on_answer: called when a rank has answered.
    """

    def __init__(
        self,
        world: World,
        random: Random,
        step_s: float,
        ranks: Sequence[RankProcess],
        on_answer: Callable[[], None],
    ) -> None:
        self._world = world
        self._random = random
        self._step_s = step_s
        self._ranks = ranks
        self._on_answer = on_answer
        self._steps: deque[_Step] = deque()
        self._sent_until = [0.0] * len(ranks)
        self._told_until = [0.0] * len(ranks)

    def __len__(self) -> int:
        return len(self._steps)

    def submit(self, order: SchedulerOutput) -> None:
        """Send ``order`` to every rank."""
        step = _Step(order)
        self._steps.append(step)
        for rank in self._ranks:
            self._world.at(self._behind(self._sent_until, rank), partial(self._execute, rank, step))

    def take(self) -> tuple[SchedulerOutput, list[ModelRunnerOutput]] | None:
        """The oldest step and each rank's answer to it, once all have answered."""
        if not self._steps or len(self._steps[0].outputs) < len(self._ranks):
            return None
        step = self._steps.popleft()
        return step.order, [step.outputs[rank] for rank in range(len(self._ranks))]

    def _behind(self, until: list[float], rank: RankProcess) -> float:
        """When something that is sent now arrives: not before what was sent earlier."""
        at = until[rank.rank] = max(until[rank.rank], self._world.now + self._random.uniform(0, self._step_s))
        return at

    def _execute(self, rank: RankProcess, step: _Step) -> None:
        if not rank.alive:
            return
        output = rank.sim.execute(step.order)
        self._world.at(self._behind(self._told_until, rank), lambda: self._answered(rank, step, output))

    def _answered(self, rank: RankProcess, step: _Step, output: ModelRunnerOutput) -> None:
        step.outputs[rank.rank] = output
        self._on_answer()


class _Step:
    """An order, and what the ranks answered so far."""

    def __init__(self, order: SchedulerOutput) -> None:
        self.order = order
        self.outputs: dict[int, ModelRunnerOutput] = {}


class Said:
    """An order in a line, made only where somebody reads it."""

    def __init__(self, order: SchedulerOutput, library: Library) -> None:
        self._order = order
        self._library = library

    def __format__(self, _spec: str) -> str:
        order = self._order
        parts = []
        for s in order.scheduled:
            did = [f"{s.req_id} {s.num_computed_tokens}+{s.num_tokens}"]
            for name, indices in (("encode", s.encode), ("load", s.load)):
                if indices:
                    did.append(f"{name} " + ", ".join(str(self._library.of_key(s.item_keys[i])) for i in indices))
            parts.append(" ".join(did))
        if order.free_encoder_keys:
            parts.append("free " + ", ".join(str(self._library.of_key(key)) for key in order.free_encoder_keys))
        return f"step {order.step}: " + ("; ".join(parts) or "nothing to compute")
