"""One run: a plan carried out from its first event to an engine at rest, and what it broke."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path
from uuid import uuid4

import msgspec

from ecotone.engine.request import RequestStatus
from ecotone.protocol.outputs import ECConnectorWorkerMetadata
from ecotone.testing.kit.capabilities import Subject
from ecotone.testing.kit.engine import KitEngine
from ecotone.testing.kit.oracle import KitModel, Library
from ecotone.testing.kit.plan import (
    ITEMS,
    Abort,
    Ask,
    Delay,
    Event,
    FailLoad,
    Forget,
    Lose,
    LoseStored,
    MustFind,
    MustShare,
    Plan,
    Repeat,
    Reset,
    Rest,
    Restart,
    Setup,
    Step,
)
from ecotone.testing.kit.report import ViolationError

_ANSWERED = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH)


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a run.

    Attributes:
        rule, detail: what was broken; empty where nothing was.
        log: what happened.
        checks: by rule, how often something could have broken it.
        metadata: what the worker halves declare to report.
    """

    rule: str = ""
    detail: str = ""
    log: tuple[str, ...] = ()
    checks: dict[str, int] = {}
    metadata: frozenset[type[ECConnectorWorkerMetadata]] = frozenset()


def run_plan(subject: Subject, plan: Plan) -> Outcome:
    """Carry out ``plan`` with new halves of the subject."""
    checks: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="ecotone-kit-") as scratch, subject.beside(Path(scratch)):
        run = _Run(subject, plan, Path(scratch), checks)
        try:
            run.carry_out()
        except ViolationError as violation:
            checks[violation.rule] += 1
            run.abandon()
            return Outcome(rule=violation.rule, detail=violation.detail, log=tuple(run.log), checks=dict(checks))
    return Outcome(log=tuple(run.log), checks=dict(checks), metadata=run.metadata())


class _Run:
    def __init__(self, subject: Subject, plan: Plan, scratch: Path, checks: Counter[str]) -> None:
        self.log: list[str] = []
        self._subject = subject
        self._plan = plan
        self._scratch = scratch
        self._checks = checks
        self._models = [KitModel() for _ in range(plan.setup.ranks)]
        self._library = Library(uuid4().hex, self._models[0].info.encoder)
        self._engine: KitEngine | None = None
        self._lose_stored = False

    def carry_out(self) -> None:
        """All events, and the way to rest.

        Raises:
            ViolationError: a rule was broken.
        """
        engine = self._start()
        for event in self._plan.events:
            self.log.append(f"-- {event}")
            if isinstance(event, Restart):
                engine = self._restart(engine)
            else:
                self._do(engine, event)
        self._end(engine)

    def abandon(self) -> None:
        """Close what a broken run left open."""
        engine = self._engine
        if engine is None:
            return
        for half in (*engine.workers, *((engine.connector,) if engine.connector is not None else ())):
            try:
                half.shutdown()
            except ViolationError:
                continue  # one violation of a run is enough

    def metadata(self) -> frozenset[type[ECConnectorWorkerMetadata]]:
        """What the worker halves declare to report."""
        workers = [] if self._engine is None else self._engine.workers
        kinds = (worker.worker_metadata_type for worker in workers)
        return frozenset(kind for kind in kinds if kind is not None)

    def _start(self) -> KitEngine:
        engine = KitEngine(
            self._subject,
            self._plan.setup,
            f"kit-{uuid4().hex}",
            self._scratch,
            self._library,
            self._models,
            self._checks,
        )
        engine.log = self.log
        self._engine = engine
        return engine

    def _do(self, engine: KitEngine, event: Event) -> None:
        match event:
            case Ask(name, items):
                engine.ask(name, items)
            case Step(times):
                for _ in range(times):
                    self._step(engine)
            case Rest():
                self._step(engine)
                self._rest(engine)
            case Abort(name):
                engine.abort(name)
            case Delay(rank, steps):
                engine.rim.delay(rank, steps)
            case Repeat(rank, back):
                engine.rim.repeat(rank, back)
            case Lose(rank):
                engine.rim.lose(rank)
            case FailLoad(rank):
                engine.caches[rank].failing += 1
            case LoseStored():
                self._lose_stored = True
            case Forget():
                engine.forget()
            case Reset():
                engine.reset()
            case MustFind(item, rule):
                self._find(engine, item, rule)
            case MustShare(item):
                self._share(engine, item)

    def _find(self, engine: KitEngine, item: str, rule: str) -> None:
        key = self._library.key(item)
        before = engine.encoded.count(key)
        self._load(engine, item)
        engine.ledger.check(rule)
        if engine.encoded.count(key) > before:
            raise ViolationError(rule, f"{item!r} was saved, every rank reported it, and it was encoded again")

    def _share(self, engine: KitEngine, item: str) -> None:
        key = self._library.key(item)
        held = []
        for _ in range(2):
            self._load(engine, item)
            held.append(engine.caches[0].get(key))
        engine.ledger.check("loads-share-memory")
        first, second = held
        if first is None or second is None or first.data_ptr() != second.data_ptr():
            raise ViolationError("loads-share-memory", f"two loads of {item!r} are at different addresses")

    def _load(self, engine: KitEngine, item: str) -> None:
        """Let a request need ``item``, with empty encoder caches."""
        engine.forget()
        engine.ask(f"needs-{item}-{len(engine.requests)}", (item,))
        self._rest(engine)

    def _step(self, engine: KitEngine) -> None:
        loads = engine.loads
        lose, self._lose_stored = self._lose_stored, False
        engine.step(lose)
        if lose and engine.loads > loads:
            engine.ledger.check("loss-is-a-failed-load")
        if lose:
            # Whatever is said of keys stored before, it is not wrong for want of a save: loads tell.
            engine.ledger.carried.clear()

    def _rest(self, engine: KitEngine) -> None:
        engine.rest()
        if engine.rim.lost or not self._subject.capabilities.reports_decide or engine.loads:
            return
        late = [(key, rank) for key, rank in engine.ledger.unsettled() if self._is_late(engine, key, rank)]
        engine.ledger.check("rests-when-done")
        if engine.rim.holds_reports or engine.ledger.settled():
            engine.ledger.check("awake-while-pending")
        if late:
            key, rank = late[0]
            raise ViolationError(
                "awake-while-pending",
                f"has_pending_work() is False, and rank {rank}'s report of the save of "
                f"{self._library.name(key)!r} is still on its way",
            )

    def _is_late(self, engine: KitEngine, key: str, rank: int) -> bool:
        small = not self._library.is_stale(key) and ITEMS[self._library.item(key)] < ITEMS["large"]
        return small and engine.rim.late_of(rank, 0)

    def _restart(self, engine: KitEngine) -> KitEngine:
        stored = engine.ledger.settled() | engine.ledger.carried
        engine.shutdown(scheduler_first=True)
        started = self._start()
        if self._subject.capabilities.durable:
            started.ledger.carried |= stored
        return started

    def _end(self, engine: KitEngine) -> None:
        self.log.append("-- the end: everything comes to rest")
        self._rest(engine)
        self._check_answers(engine)
        engine.forget()
        engine.step()
        self._rest(engine)
        engine.shutdown(scheduler_first=False)

    def _check_answers(self, engine: KitEngine) -> None:
        if self._library.epoch or engine.connector is None or engine.connector.is_encode_only:
            return
        for name, request in engine.requests.items():
            if engine.ended.get(name) not in _ANSWERED:
                continue
            engine.ledger.check("same-tokens")
            expected = expected_tokens(self._plan.setup, tuple(item.item_id for item in request.items))
            if engine.tokens[name] != expected:
                raise ViolationError(
                    "same-tokens", f"{name}: {engine.tokens[name]}; encoded alone it is {expected}"
                )


_expected: dict[tuple[str, tuple[str, ...]], list[int]] = {}


def expected_tokens(setup: Setup, items: tuple[str, ...]) -> list[int]:
    """The answer of an engine without a connector."""
    known = _expected.get((setup.task, items))
    if known is None:
        model = KitModel()
        library = Library("expected", model.info.encoder)
        alone = Setup(task=setup.task)
        engine = KitEngine(None, alone, "alone", Path(), library, [model], Counter())
        engine.ask("alone", items)
        engine.rest()
        known = _expected[setup.task, items] = engine.tokens["alone"]
    return known
