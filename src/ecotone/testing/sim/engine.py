"""One engine of a simulation: the real scheduler and connector, a step loop in virtual time, and its ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ecotone.connectors.scheduler import EcotoneSchedulerConnector
from ecotone.engine.request import Request, RequestStatus
from ecotone.engine.scheduler import Scheduler
from ecotone.node.exchange import NodeExchange
from ecotone.node.server.client import SharedNodeExchange
from ecotone.node.server.messages import Hello
from ecotone.protocol.aggregate import ECOutputAggregator, fold_outputs
from ecotone.protocol.connector import ECSchedulerContext, Participant
from ecotone.protocol.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput
from ecotone.protocol.step import SchedulerOutput
from ecotone.testing.exchange import DelayedExchange
from ecotone.testing.sim.links import SimLink, link_opener
from ecotone.testing.sim.model import SPEC, Library
from ecotone.testing.sim.node import DirectExchange, SimNode, embedded_watch
from ecotone.testing.sim.plan import EnginePlan, Plan
from ecotone.testing.sim.process import RankProcess
from ecotone.testing.sim.rank import Bystander, report_only
from ecotone.testing.sim.reports import ReportDelays
from ecotone.testing.sim.steps import Said, StepLine
from ecotone.testing.sim.world import ViolationError, World
from ecotone.worker.ec_connector import NO_OP_EC_CONNECTOR

IDLE_S = 0.05
"""Between two steps without progress."""
ANSWER_TIMEOUT_S = 1.0
CONNECT_S = 2.0
EOS = -2  # no token is it


class SimEngine:
    """One start of an engine.

    Args:
        node: the shared one; ``None`` embeds one of its own.
        on_end: called for each request that ended: its id, how, and why.

    Attributes:
        engine_id: unique per start.
        alive: whether it takes requests.
        epoch: updates of the weights.
        watch: of the embedded node, or ``None``.
    """

    def __init__(
        self,
        world: World,
        plan: Plan,
        engine: EnginePlan,
        engine_id: str,
        library: Library,
        node: SimNode | None,
        on_end: Callable[[str, RequestStatus, str], None],
        on_tokens: Callable[[str, tuple[int, ...]], None],
    ) -> None:
        self.engine_id = engine_id
        self.alive = True
        self.epoch = 0
        self._world = world
        self._plan = engine
        self._library = library
        self._on_end = on_end
        self._on_tokens = on_tokens
        self._random = world.random(engine_id)
        self._links: list[SimLink] = []
        self.watch = embedded_watch(plan, engine_id, library) if node is None else None
        memory = None if self.watch is None else self.watch.memory
        self._node = node
        self._shared = self._connect(node) if node is not None else None
        self.connector = EcotoneSchedulerConnector(
            ECSchedulerContext(
                engine_id=engine_id,
                role=engine.role,
                options={},
                participants=tuple(Participant(rank, "host") for rank in range(engine.ranks)),
                encoder=SPEC,
                clock=world.clock,
            ),
            self._embedded(engine) if self._shared is None else self._shared,
            engine.pending_timeout_s,
        )
        self.scheduler = Scheduler(engine.limits, self.connector, (EOS,), world.clock)
        self.ranks = [
            RankProcess(world, plan, engine, engine_id, rank, library, memory, node, self.wake)
            for rank in range(engine.ranks)
        ]
        self._bystander = Bystander(NO_OP_EC_CONNECTOR) if engine.bystander else None
        self.reports = ReportDelays(plan.weather, self._random)
        self._requests: dict[str, Request] = {}
        self._steps = StepLine(world, self._random, plan.weather.step_s, self.ranks, self._take_in)
        self._ticking = False
        self._waiting = False  # for the result of the oldest step in flight
        self._forced = False
        self._resets = 0
        self._drops = False
        self._started = world.now

    def _connect(self, node: SimNode) -> SharedNodeExchange:
        hello = Hello(self.engine_id, "scheduler", ranks=tuple(range(self._plan.ranks)))
        opener = link_opener(node, self._random, self._links)
        return SharedNodeExchange(Path("node"), hello, self._world.clock, ANSWER_TIMEOUT_S, opener)

    def _embedded(self, engine: EnginePlan) -> NodeExchange:
        if self.watch is None:
            raise ViolationError("simulator", "an embedded node without an index")
        direct = DirectExchange(self.watch, self.engine_id, self._world.clock)
        if not engine.answer_polls:
            return direct
        return DelayedExchange(direct, lambda _answer: self._random.randint(0, engine.answer_polls))

    # -- what is done to it -----------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """A request arrives.

        Raises:
            RequestError: it could never run.
        """
        self.scheduler.add_request(request)
        self._requests[request.req_id] = request
        self.wake()

    def abort(self, req_id: str) -> None:
        """The caller is gone."""
        if self.alive and self.scheduler.finish_request(req_id, RequestStatus.FINISHED_ABORTED):
            self._world.say("{}: {} is aborted", self.engine_id, req_id)
            self._end(req_id, RequestStatus.FINISHED_ABORTED, "")
            self.scheduler.check_integrity()
            self.wake()

    def keys(self, request: Request) -> tuple[str, ...]:
        """The present keys of its items."""
        return tuple(self._library.encoding(int(item.item_id), self.epoch).key for item in request.items)

    def reset(self) -> None:
        """The weights change, as soon as no step is under way."""
        self._resets += 1
        self.wake()

    def step_anyhow(self) -> None:
        """A step without need for one, so that ranks report what they have to."""
        self._forced = True
        self.wake()

    def drop_caches(self) -> None:
        """The ranks lose their encoder caches, as soon as no step is under way."""
        self._drops = True
        self.wake()

    def clear_caches(self) -> None:
        """Empty every rank's encoder cache. Between steps only."""
        for rank in self.ranks:
            rank.cache.clear()

    def kill(self) -> None:
        """SIGKILL of the scheduler's process; its ranks notice a little later."""
        if not self.alive:
            return
        self._world.say("{}: killed", self.engine_id)
        self.alive = False
        for link in self._links:
            link.close()
        self._process_ends()
        for rank in self.ranks:
            self._world.after(self._random.uniform(0, 0.05), rank.kill)
        self._fail_requests("the engine was killed")

    def fail(self, reason: str) -> None:
        """A rank is gone: every request fails, the other ranks shut down, and the connector last."""
        if not self.alive:
            return
        self._world.say("{}: stops: {}", self.engine_id, reason)
        self.alive = False
        self._fail_requests(reason)
        self._close_ranks()

    def close(self) -> None:
        """An orderly end."""
        if self.alive:
            self.alive = False
            self._fail_requests("the engine was closed")
            for rank in self.ranks:
                rank.shutdown()
            self._last_words()

    def _process_ends(self) -> None:
        if self._node is not None:
            self._node.process_gone(self.engine_id)

    def _close_ranks(self) -> None:
        delay = 0.0
        for rank in self.ranks:
            delay += self._random.uniform(0, 0.02)
            self._world.after(delay, rank.shutdown)
        self._world.after(delay, self._last_words)

    def _last_words(self) -> None:
        self.connector.shutdown()
        self._process_ends()

    def _fail_requests(self, reason: str) -> None:
        for req_id in list(self._requests):
            self._end(req_id, RequestStatus.FINISHED_ERROR, reason)

    def _end(self, req_id: str, status: RequestStatus, error: str) -> None:
        del self._requests[req_id]
        self._on_end(req_id, status, error)

    # -- the step loop ----------------------------------------------------------------------------------------

    @property
    def is_resting(self) -> bool:
        """Whether no step is under way or due."""
        return not self._steps and not self._ticking

    def wake(self) -> None:
        """There may be something to do."""
        self._tick_in(0.0)

    def _tick_in(self, delay_s: float) -> None:
        if self.alive and not self._ticking and not self._waiting:
            self._ticking = True
            self._world.after(delay_s, self._tick)

    def _tick(self) -> None:
        self._ticking = False
        if not self.alive:
            return
        if self._shared is not None and not self._shared.is_connected and not self.scheduler.statistics()["steps"]:
            self._shared.poll()
            if not self._shared.is_connected and self._world.now < self._started + CONNECT_S:
                self._tick_in(IDLE_S)
                return
        if self._is_disturbed and not self._steps:
            self._disturb()
        if not (self.scheduler.has_work() or self._forced):
            return
        if not self._is_disturbed:
            self._submit()
        self._waiting = True
        self._take_in()

    def _submit(self) -> None:
        """Keep as many steps in flight as there is work for."""
        if not self._steps:
            self._forced = False
            self._send(self.scheduler.schedule())
        while (ahead := self.scheduler.schedule_ahead()) is not None:
            self._send(ahead)

    def _send(self, order: SchedulerOutput) -> None:
        self._world.say("{}: {}", self.engine_id, Said(order, self._library))
        self._steps.submit(order)

    @property
    def _is_disturbed(self) -> bool:
        """Whether something is to be done while no step is in flight."""
        return self._resets > 0 or self._drops

    def _disturb(self) -> None:
        while self._resets:
            self._resets -= 1
            self._reset_now()
        if self._drops:
            self._drops = False
            self.scheduler.reset_encoder_cache(self.keys)
            self.clear_caches()

    def _reset_now(self) -> None:
        self._world.say("{}: the weights change", self.engine_id)
        before = self._library.namespace(self.epoch)
        self.epoch += 1
        self.connector.reset_cache(before.digest)
        self.scheduler.reset_encoder_cache(self.keys)
        self.clear_caches()
        for rank in self.ranks:
            rank.sim.epoch = self.epoch

    def _take_in(self) -> None:
        """The result of the oldest step, if it is awaited and there."""
        if not (self.alive and self._waiting):
            return
        answered = self._steps.take()
        if answered is not None:
            self._waiting = False
            self._finish(*answered)

    def _finish(self, order: SchedulerOutput, answers: list[ModelRunnerOutput]) -> None:
        outputs = [self.reports.pass_on(rank, answer) for rank, answer in enumerate(answers)]
        if self._bystander is None:
            outputs = [outputs[0], *map(report_only, outputs[1:])]
            output_rank = 0
        else:
            first = ModelRunnerOutput.with_ec_conn_output(outputs[0], None)
            outputs = [*map(report_only, outputs), self._bystander.execute(order, first)]
            output_rank = len(outputs) - 1
        folded = fold_outputs(outputs, output_rank, (ECOutputAggregator(),))
        if folded is None:
            raise ViolationError("fold", "a step of which every rank answered came to nothing")
        deltas = self.scheduler.update_from_output(order, folded)
        for delta in deltas:
            self._on_tokens(delta.req_id, delta.new_token_ids)
            if delta.finished is not None:
                self._end(delta.req_id, delta.finished, delta.error)
        self.scheduler.check_integrity()
        if EMPTY_MODEL_RUNNER_OUTPUT != _NOTHING:
            raise ViolationError("shared output", "something was written through the shared empty output")
        self._tick_in(0.0 if order.scheduled or deltas else IDLE_S)

    # -- at the end -------------------------------------------------------------------------------------------

    def check_rest(self) -> None:
        """Nothing is in flight, and nobody holds anything.

        Raises:
            ViolationError: naming what is left.
        """
        said = self.scheduler.statistics()
        limits = self._plan.limits
        wanted = {
            "requests_waiting": 0,
            "requests_running": 0,
            "kv_blocks_free": limits.kv_blocks,
            "encoder_cache_rows_available": limits.encoder_cache_rows,
        }
        held = {name: said[name] for name, value in wanted.items() if said[name] != value}
        if held or self._requests:
            raise ViolationError("rest", f"{self.engine_id} still has {held or sorted(self._requests)}")
        if self.scheduler.has_work():
            raise ViolationError("progress", f"{self.engine_id} still steps, and nothing comes of it")
        connector = self.connector.statistics()
        left = {
            name: connector[name]
            for name in ("saves_in_flight", "pins_held", "answers_awaited")
            if connector[name]
        }
        if left:
            raise ViolationError("rest", f"the connector of {self.engine_id} still has {left}")
        for rank in self.ranks:
            if rank.sim.known:
                raise ViolationError("rest", f"{rank.name} was not told that {sorted(rank.sim.known)} ended")
        self.scheduler.check_integrity()
        self.connector.check_integrity()


_NOTHING = ModelRunnerOutput()
