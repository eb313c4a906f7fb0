"""One simulation from its plan to its end."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import msgspec

from ecotone.engine.request import Request, RequestStatus
from ecotone.errors import RequestError
from ecotone.protocol.params import SamplingParams
from ecotone.testing.sim.engine import SimEngine
from ecotone.testing.sim.model import Library, expected_tokens, prompt_of
from ecotone.testing.sim.node import SimNode
from ecotone.testing.sim.plan import Fault, Plan, RequestPlan
from ecotone.testing.sim.world import ViolationError, World

REST_S = 60.0
"""After the last event of a plan: by then every request ended and every engine rests."""
_SETTLE_S = 10.0
_DETECT_S = 0.05
_DONE = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH)


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a simulation.

    Attributes:
        rule, detail: of the rule that was broken; empty where none was.
        timeline: (seconds, text), where it was asked for.
        events: how many happened.
        seconds: of virtual time.
        counts: of what happened, by name.
    """

    seed: int
    rule: str = ""
    detail: str = ""
    timeline: tuple[tuple[float, str], ...] = ()
    events: int = 0
    seconds: float = 0.0
    counts: dict[str, int] = {}

    @property
    def failed(self) -> bool:
        """Whether a rule was broken."""
        return bool(self.rule)


class _Asked:
    """A request and what it was answered."""

    def __init__(self, plan: RequestPlan, expected: list[int]) -> None:
        self.plan = plan
        self.expected = expected
        self.output: list[int] = []
        self.engine: SimEngine | None = None
        self.status: RequestStatus | None = None
        self.excused = False


class Simulation:
    """See the module."""

    def __init__(self, plan: Plan, *, tracing: bool = False) -> None:
        self.plan = plan
        self.world = World(plan.seed, tracing=tracing)
        self._library = Library(plan)
        self._node = SimNode(self.world, plan, self._library) if plan.shared else None
        self._starts = [0] * len(plan.engines)
        self._engines = [self._start(number) for number in range(len(plan.engines))]
        self._asked: dict[str, _Asked] = {}

    def run(self) -> dict[str, int]:
        """Run it to its end; counts of what happened.

        Raises:
            ViolationError: a rule was broken.
        """
        for request in self.plan.requests:
            self.world.after(request.at, partial(self._arrive, request))
        for fault in self.plan.faults:
            self.world.after(fault.at, partial(self._strike, fault))
        self.world.run(self.plan.last_event_s + REST_S)
        self.world.guard(self._check_end)
        return self._counts()

    # -- what the plan says -----------------------------------------------------------------------------------

    def _start(self, number: int) -> SimEngine:
        self._starts[number] += 1
        return SimEngine(
            self.world,
            self.plan,
            self.plan.engines[number],
            f"e{number}.{self._starts[number]}",
            self._library,
            self._node,
            self._ended,
            self._answered,
        )

    def _restart(self, number: int) -> None:
        if not self._engines[number].alive:
            self._engines[number] = self._start(number)
            self.world.say("e{}: starts again", number)

    def _arrive(self, plan: RequestPlan) -> None:
        tokens, items = prompt_of(plan, self.plan.items)
        limits = self.plan.engines[plan.engine].limits
        max_tokens = min(plan.max_tokens, limits.max_request_tokens - len(tokens))
        asked = self._asked[plan.name] = _Asked(plan, expected_tokens(tokens, items, max_tokens))
        engine = self._engines[plan.engine]
        if not engine.alive:
            asked.status = RequestStatus.FINISHED_ERROR
            return
        request = Request(
            plan.name,
            tokens,
            SamplingParams(max_tokens=plan.max_tokens, ignore_eos=True),
            items=items,
            arrival_time=self.world.now,
        )
        request.item_keys = engine.keys(request)
        asked.engine = engine
        self.world.say("{}: {} arrives: {}", engine.engine_id, plan.name, plan.parts)
        try:
            engine.add(request)
        except RequestError:
            asked.status = RequestStatus.FINISHED_ERROR

    def _strike(self, fault: Fault) -> None:
        engine, node = self._engines[fault.engine], self._node
        match fault.kind:
            case "abort":
                asked = self._asked.get(fault.request)
                if asked is not None and asked.status is None and asked.engine is not None:
                    asked.excused = True
                    asked.engine.abort(fault.request)
            case "reset":
                engine.reset()
            case "drop_caches":
                engine.drop_caches()
            case "kill_engine":
                engine.kill()
                self._restart_later(fault)
            case "kill_rank":
                engine.ranks[fault.rank].kill()
                self.world.after(_DETECT_S, lambda: engine.fail("a rank is gone"))
                self._restart_later(fault)
            case "restart_node" if node is not None:
                node.restart(fault.seconds)
            case "stall_node" if node is not None:
                node.stall(fault.seconds)
            case "drop_link" if node is not None:
                node.drop(engine.engine_id)

    def _restart_later(self, fault: Fault) -> None:
        self.world.after(_DETECT_S + fault.seconds, lambda: self._restart(fault.engine))

    # -- what came of it --------------------------------------------------------------------------------------

    def _answered(self, req_id: str, tokens: tuple[int, ...]) -> None:
        self._asked[req_id].output += tokens

    def _ended(self, req_id: str, status: RequestStatus, error: str) -> None:
        asked = self._asked[req_id]
        if asked.status is not None:
            raise ViolationError("answer", f"{req_id} ends twice: {asked.status}, then {status}")
        asked.status = status
        self.world.say("{}: {} {}", req_id, status, error)
        engine = asked.engine
        if status in _DONE:
            encode_only = engine is not None and engine.connector.is_encode_only
            if not encode_only and asked.output != asked.expected:
                raise ViolationError("answer", f"{req_id} says {asked.output} and should say {asked.expected}")
        broken = any(self._library.is_broken(-1 - part) for part in asked.plan.parts if part < 0)
        failed = status is RequestStatus.FINISHED_ERROR and engine is not None and engine.alive
        if failed and not broken:
            raise ViolationError("answer", f"{req_id} failed, and nothing of it is broken: {error}")

    def _check_end(self) -> None:
        """Every request ended; nothing is held but what encoder caches hold, and without them nothing at all."""
        for name, asked in self._asked.items():
            if asked.status is None:
                raise ViolationError("bounded", f"{name} has no answer {REST_S} s after everything else")
        for engine in self._engines:
            engine.reports.is_calm = True
            if engine.alive and not engine.is_resting:
                raise ViolationError(
                    "progress", f"{engine.engine_id} still steps {REST_S} s after everything else"
                )
            engine.clear_caches()
        for _ in range(2):
            for engine in self._engines:
                engine.step_anyhow()
            self.world.run(self.world.now + _SETTLE_S)
        for engine in self._engines:
            if engine.alive:
                engine.check_rest()
                if engine.watch is not None:
                    engine.watch.check_rest()
        if self._node is not None:
            self._node.watch.check_rest()
        self._check_closed()

    def _check_closed(self) -> None:
        """Nor is anything left when all engines are gone."""
        for engine in self._engines:
            engine.close()
        self.world.run(self.world.now + _SETTLE_S)
        if self._node is not None:
            self._node.watch.check_rest()
            if self._node.tenant.engines or self._node.tenant.index.holders:
                raise ViolationError("rest", f"the node still knows {sorted(self._node.tenant.engines)}")

    def _counts(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for asked in self._asked.values():
            counts[f"requests.{asked.status}"] = counts.get(f"requests.{asked.status}", 0) + 1
        for engine in self._engines:
            said = {**engine.scheduler.statistics(), **engine.connector.statistics()}
            for name in _COUNTED:
                counts[name] = counts.get(name, 0) + int(said.get(name, 0))
        if self._node is not None:
            said = self._node.tenant.statistics()
            counts |= {name: int(said.get(name, 0)) for name in _COUNTED_BY_NODE}
        return counts


_COUNTED = (
    "steps", "steps_ahead", "hits", "misses", "rollbacks", "preemptions", "deferrals", "loads_ordered",
    "encodes_ordered", "unsaved.no_room", "unsaved.node_unreachable", "unsaved.waited", "without_effect",
)  # fmt: skip


_COUNTED_BY_NODE = (
    "disk_writes",
    "disk_reads",
    "disk_adopted",
    "disk_evictions",
    "disk_unverified",
    "disk_outages",
)


def simulate(plan: Plan, *, tracing: bool = False) -> Outcome:
    """Run ``plan``; never raises for what it finds."""
    with _quiet():
        simulation = Simulation(plan, tracing=tracing)
        world = simulation.world
        counts: dict[str, int] = {}
        rule = detail = ""
        try:
            counts = simulation.run()
        except ViolationError as violation:
            rule, detail = violation.rule, violation.detail
            world.say("VIOLATION {}: {}", rule, detail)
        return Outcome(
            seed=plan.seed,
            rule=rule,
            detail=detail,
            timeline=tuple(world.timeline),
            events=world.events,
            seconds=world.now,
            counts=counts,
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """Components warn of what goes wrong; here that is what was ordered. Collections would end views at a time
    that depends on what ran before."""
    logger = logging.getLogger("ecotone")
    level, collecting = logger.level, gc.isenabled()
    logger.setLevel(logging.CRITICAL)
    gc.disable()
    try:
        yield
    finally:
        logger.setLevel(level)
        if collecting:
            gc.enable()
