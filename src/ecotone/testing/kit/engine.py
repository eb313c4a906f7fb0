"""The kit's engine: a real scheduler, real model runners, the connector under observation, and virtual time."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ecotone.engine.admission import SchedulerLimits
from ecotone.engine.request import Request, RequestStatus
from ecotone.engine.scheduler import Scheduler
from ecotone.errors import EcotoneError
from ecotone.protocol.connector import ECSchedulerContext, ECWorkerContext, Participant
from ecotone.protocol.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput
from ecotone.protocol.params import PoolingParams, SamplingParams
from ecotone.protocol.step import SchedulerOutput
from ecotone.protocol.wire import decode, encode
from ecotone.testing.kit.capabilities import Capabilities, Subject
from ecotone.testing.kit.ledger import Ledger
from ecotone.testing.kit.oracle import KitModel, Library
from ecotone.testing.kit.plan import ITEMS, Setup
from ecotone.testing.kit.rank import BLOCK_SIZE, KV_BLOCKS, KitRank, WatchedCache
from ecotone.testing.kit.report import ViolationError
from ecotone.testing.kit.rim import Rim
from ecotone.testing.kit.watched import WatchedScheduler, WatchedWorker, guarded, watch_worker
from ecotone.testing.models import PLACEHOLDER, tiny_item
from ecotone.worker.ec_connector import ActiveECConnector

STEP_S, IDLE_S = 0.01, 0.5  # virtual; a step that did nothing lasts longer, so that what waits for time gets it
MAX_IDLE_STEPS = 150
_WAIT_S = 0.002  # real
_MAX_TOKENS = 3
_LONGEST = 160  # characters of a report in the log
_HOST = "kit"


class KitEngine:
    """One start of an engine.

    Args:
        subject: the connector; ``None`` runs without one.
        scratch: the run's directory.
        library: what belongs under which key.
        checks: counts, by rule, what was checked.

    Attributes:
        log: what happened, a line for each step.
        ended: request -> how it ended.
        tokens: request -> what was generated.
    """

    def __init__(
        self,
        subject: Subject | None,
        setup: Setup,
        engine_id: str,
        scratch: Path,
        library: Library,
        models: list[KitModel],
        checks: Counter[str],
    ) -> None:
        self.log: list[str] = []
        self.ended: dict[str, RequestStatus] = {}
        self.tokens: dict[str, list[int]] = {}
        self.requests: dict[str, Request] = {}
        self.encoded: list[str] = []
        self.ledger = Ledger(setup.ranks, checks)
        self.rim = Rim(self.ledger)
        self.loads = 0
        self._setup = setup
        self._library = library
        self._models = models
        self._now = 0.0
        self._news = threading.Event()
        self._background = subject is not None and subject.capabilities.background
        can = Capabilities() if subject is None else subject.capabilities
        self._patience_s, self._answers_within_s = can.patience_s, can.answers_within_s
        self._idle_since: float | None = None  # real
        self._must_load = subject is not None and not subject.capabilities.hears_failed_loads
        self._subject = subject
        self._scratch = scratch
        self.connector: WatchedScheduler | None = None
        self.workers: list[WatchedWorker] = []
        encoder = models[0].info.encoder
        self.caches = [WatchedCache(encoder, rank, self.ledger, library) for rank in range(setup.ranks)]
        hooks = self._connect(subject, engine_id) if subject is not None else [None] * setup.ranks
        self._ranks = [
            KitRank(rank, models[rank], cache, hook, setup.task, self.ledger)
            for rank, (cache, hook) in enumerate(zip(self.caches, hooks, strict=True))
        ]
        self._scheduler = Scheduler(
            _limits(setup), self.connector, models[0].info.eos_token_ids, lambda: self._now
        )

    def _connect(self, subject: Subject, engine_id: str) -> list[ActiveECConnector]:
        options: dict[str, Any] = subject.options_in(self._scratch)
        factory, setup, encoder = subject.factory, self._setup, self._models[0].info.encoder
        guarded("errors-are-reports", "validate", lambda: factory.validate(setup.role, options))
        guarded("errors-are-reports", "check_machine", lambda: factory.check_machine(setup.role, options))
        context = ECSchedulerContext(
            engine_id=engine_id,
            role=setup.role,
            options=options,
            participants=tuple(Participant(rank, _HOST) for rank in range(setup.ranks)),
            encoder=encoder,
            clock=lambda: self._now,
        )
        half = guarded("errors-are-reports", "scheduler_half", lambda: factory.scheduler_half(context))
        self.connector = WatchedScheduler(
            context,
            half,
            self.ledger,
            self._library,
            reports_decide=subject.capabilities.reports_decide,
        )
        for rank in range(setup.ranks):
            self.workers.append(self._worker(subject, engine_id, rank, options))
        return [
            guarded("reports-cross-the-wire", "worker_metadata_type", lambda w=w, c=c: ActiveECConnector(w, c))  # type: ignore[misc]
            for w, c in zip(self.workers, self.caches, strict=True)
        ]

    def _worker(self, subject: Subject, engine_id: str, rank: int, options: Mapping[str, Any]) -> WatchedWorker:
        context = ECWorkerContext(
            engine_id=engine_id,
            role=self._setup.role,
            options=dict(options),
            rank=rank,
            epoch=0,
            encoder=self._models[rank].info.encoder,
            device="cpu",
            wakeup=self._news.set,
        )
        half = guarded("errors-are-reports", "worker_half", lambda: subject.factory.worker_half(context))
        return watch_worker(context, half, self.ledger, must_load=self._must_load)

    # -- what comes from outside ------------------------------------------------------------------------------

    def ask(self, name: str, items: tuple[str, ...]) -> None:
        """A request arrives."""
        prompt, media = _prompt(items)
        request = Request(
            name,
            prompt,
            PoolingParams()
            if self._setup.task == "embed"
            else SamplingParams(max_tokens=_MAX_TOKENS, ignore_eos=True),
            items=media,
            item_keys=tuple(self._library.key(item) for item in items),
            arrival_time=self._now,
        )
        self.requests[name] = request
        self.tokens[name] = []
        self._scheduler.add_request(request)

    def abort(self, name: str) -> None:
        """A request is no longer wanted."""
        if self._scheduler.finish_request(name, RequestStatus.FINISHED_ABORTED):
            self.ended[name] = RequestStatus.FINISHED_ABORTED

    def forget(self) -> None:
        """Empty the ranks' encoder caches, with the next step."""
        self._scheduler.reset_encoder_cache(lambda request: request.item_keys)

    def reset(self) -> None:
        """The weights change."""
        before = self._library.namespace(self._library.epoch)
        self._library.epoch += 1
        for model in self._models:
            model.epoch = self._library.epoch
        if self.connector is not None:
            self.connector.reset_cache(before)
        self._scheduler.reset_encoder_cache(
            lambda request: tuple(self._library.key(item.item_id) for item in request.items)
        )
        for rank in self._ranks:
            rank.clear()

    # -- steps ------------------------------------------------------------------------------------------------

    @property
    def has_unfinished(self) -> bool:
        """Whether a request is in flight."""
        return self._scheduler.has_unfinished()

    def step(self, lose_stored: bool = False) -> bool:
        """One step, whether there is work or not; whether it did something.

        Args:
            lose_stored: the store loses everything between schedule and execution.
        """
        self.ledger.step += 1
        if self.connector is not None:
            self.connector.check_stale()
        scheduler_output = self._schedule()
        if lose_stored and self._subject is not None and self._subject.lose is not None:
            self._subject.lose(self._scratch)
        outputs = self._execute(scheduler_output)
        folded = self.rim.fold(outputs)
        self._say(scheduler_output, folded)
        report = folded.ec_connector_output
        if report is not None:
            self._hear(report.failed_loads)
        deltas = self._scheduler.update_from_output(scheduler_output, folded)
        for delta in deltas:
            self.tokens[delta.req_id] += delta.new_token_ids
            if delta.finished is not None:
                self.ended[delta.req_id] = delta.finished
        if self.connector is not None:
            self.connector.check_integrity()
        did = bool(scheduler_output.scheduled or deltas)
        self._pass_time(did)
        return did

    def _pass_time(self, did: bool) -> None:
        began, self._idle_since = self._idle_since, None
        if did:
            self._now += STEP_S
            return
        self._idle_since = time.monotonic() if began is None else began
        waits = time.monotonic() < self._idle_since + self._answers_within_s
        self._now += _WAIT_S if waits else IDLE_S

    def rest(self) -> None:
        """Step until there is no work. Once a report was lost, what the connector waits for is none.

        Raises:
            ViolationError: it does not come to that.
        """
        idle, began = 0, time.monotonic()
        while self.has_unfinished if self.rim.lost else self._scheduler.has_work():
            if self.step():
                idle, began = 0, time.monotonic()
                continue
            idle += 1
            if self._background:
                self._news.wait(_WAIT_S)
                self._news.clear()
            if idle > MAX_IDLE_STEPS and not (self._background and time.monotonic() < began + self._patience_s):
                self._fail_to_rest(idle)
        self.ledger.check("every-request-ends")

    def _hear(self, failed_loads: frozenset[str]) -> None:
        if self._must_load and failed_loads:
            names = ", ".join(sorted(repr(self._library.name(key)) for key in failed_loads))
            raise ViolationError("ready-is-loaded", f"a step orders to load {names}, and it is not there")
        self.ledger.failed(failed_loads)

    def _fail_to_rest(self, idle: int) -> None:
        if self.has_unfinished:
            names = sorted(set(self.requests) - set(self.ended))
            raise ViolationError(
                "every-request-ends",
                f"{', '.join(names)}: nothing ran in {idle} steps, {idle * IDLE_S:g} s of its clock",
            )
        raise ViolationError(
            "rests-when-done",
            f"no request is left, no report is on its way, and {idle} steps later work is pending",
        )

    def _schedule(self) -> SchedulerOutput:
        scheduler_output = self._scheduler.schedule()
        loads = sum(len(r.load) for r in scheduler_output.scheduled)
        self.loads += loads
        if loads and self._must_load:
            self.ledger.check("ready-is-loaded")
        if scheduler_output.ec_connector_metadata is None:
            return scheduler_output
        self.ledger.check("orders-cross-the-wire")
        try:
            received = decode(encode(scheduler_output), SchedulerOutput)
        except EcotoneError as error:
            raise ViolationError("orders-cross-the-wire", str(error)) from error
        if received.ec_connector_metadata != scheduler_output.ec_connector_metadata:
            raise ViolationError(
                "orders-cross-the-wire",
                f"sent {scheduler_output.ec_connector_metadata}, received {received.ec_connector_metadata}",
            )
        return received

    def _execute(self, scheduler_output: SchedulerOutput) -> list[ModelRunnerOutput]:
        self.encoded += [r.item_keys[i] for r in scheduler_output.scheduled for i in r.encode]
        begun = [rank.execute(scheduler_output) for rank in self._ranks]
        outputs = [
            rank.finish() if output is None else output for rank, output in zip(self._ranks, begun, strict=True)
        ]
        return outputs + [EMPTY_MODEL_RUNNER_OUTPUT] * self._setup.bare

    def _say(self, scheduler_output: SchedulerOutput, folded: ModelRunnerOutput) -> None:
        name = self._library.name
        done = [
            f"{r.req_id}: "
            + " ".join(
                [f"{r.num_tokens} tokens"]
                + [f"encode {name(r.item_keys[i])}" for i in r.encode]
                + [f"load {name(r.item_keys[i])}" for i in r.load]
            )
            for r in scheduler_output.scheduled
        ]
        report = folded.ec_connector_output
        heard = []
        if report is not None:
            heard += [f"failed load of {name(key)}" for key in sorted(report.failed_loads)]
            heard += (
                []
                if report.ec_connector_worker_meta is None
                else [f"heard {_short(report.ec_connector_worker_meta)}"]
            )
        said = "; ".join([*done, *heard])
        if said:
            self.log.append(f"step {self.ledger.step}: {said}")

    # -- the end ----------------------------------------------------------------------------------------------

    def shutdown(self, scheduler_first: bool) -> None:
        """Close both halves, twice."""
        for _ in range(2):
            if scheduler_first and self.connector is not None:
                self.connector.shutdown()
            for rank, worker in zip(self._ranks, self.workers, strict=False):
                rank.clear()
                worker.shutdown()
            if not scheduler_first and self.connector is not None:
                self.connector.shutdown()


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= _LONGEST else text[:_LONGEST] + "..."


def _limits(setup: Setup) -> SchedulerLimits:
    return SchedulerLimits(
        max_num_batched_tokens=16,
        max_num_seqs=4,
        max_model_len=KV_BLOCKS * BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        kv_blocks=KV_BLOCKS,
        encoder_cache_rows=setup.encoder_rows,
        encoder_budget_rows=setup.encoder_rows,
    )


def _prompt(items: tuple[str, ...]) -> tuple[tuple[int, ...], tuple[Any, ...]]:
    tokens, media = [5], []
    for item in items:
        media.append(tiny_item(item, len(tokens), ITEMS[item]))
        tokens += [PLACEHOLDER] * ITEMS[item] + [6]
    return tuple(tokens), tuple(media)
