"""Deliberate defects, each of a kind that broke a system in the field. Each patches classes for one test."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import msgspec
import pytest

from ecotone.connectors import transfers as transfers_module
from ecotone.connectors import worker as worker_module
from ecotone.connectors.messages import ReportKind
from ecotone.connectors.questions import Questions
from ecotone.connectors.scheduler import EcotoneSchedulerConnector
from ecotone.connectors.transfers import Transfers
from ecotone.connectors.worker import EcotoneWorkerConnector
from ecotone.engine.batching import Batcher
from ecotone.engine.encoder_cache_manager import EncoderCacheManager
from ecotone.engine.in_flight import StepsInFlight
from ecotone.engine.scheduler import Scheduler
from ecotone.node.disk.tier import DiskTier
from ecotone.node.exchange import Abort, Commit, Pending, Ready, Release, Ticket
from ecotone.node.index import Index
from ecotone.node.lifecycle import TRANSITIONS, Event, State
from ecotone.node.server import engines
from ecotone.node.server.tenants import Tenant
from ecotone.protocol.frozen import set_field
from ecotone.protocol.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput
from ecotone.testing.sim import engine as sim_engine
from ecotone.testing.sim.model import Library
from ecotone.testing.sim.steps import StepLine
from ecotone.worker.ec_connector import ActiveECConnector

Patch = pytest.MonkeyPatch
MUTANTS: dict[str, Callable[[Patch], None]] = {}


def mutant(make: Callable[[Patch], None]) -> Callable[[Patch], None]:
    MUTANTS[make.__name__] = make
    return make


# -- the barrier ----------------------------------------------------------------------------------------------


@mutant
def reports_are_counted_not_told_apart(patch: Patch) -> None:
    """A repeated report counts like another rank's."""

    def apply_to_save(self, save, report):
        save.writing.pop()
        save.failed |= report.kind is ReportKind.SAVE_FAILED
        if save.writing:
            return []
        del self._saves[report.transfer_id]
        return [Commit(self._next_seq(), save.ticket_id)]

    patch.setattr(Transfers, "_apply_to_save", apply_to_save)


@mutant
def committed_by_the_first_rank(patch: Patch) -> None:
    def apply_to_save(self, save, report):
        del self._saves[report.transfer_id]
        return [Commit(self._next_seq(), save.ticket_id)]

    patch.setattr(Transfers, "_apply_to_save", apply_to_save)


@mutant
def unpinned_by_the_first_report(patch: Patch) -> None:
    real = Transfers._apply_to_load

    def apply_to_load(self, load, report):
        if report.kind is ReportKind.RELEASED:
            load.reading &= {report.rank}
        return real(self, load, report)

    patch.setattr(Transfers, "_apply_to_load", apply_to_load)


@mutant
def a_failed_save_is_committed(patch: Patch) -> None:
    patch.setattr(transfers_module, "Abort", Commit)


@mutant
def transfer_ids_are_used_again(patch: Patch) -> None:
    """Late and repeated reports of an old transfer settle a newer one."""
    real = Transfers.__init__

    def init(self, ranks, next_seq):
        real(self, ranks, next_seq)
        numbers = count()
        self._next_id = lambda: next(numbers) % 3 + 1

    patch.setattr(Transfers, "__init__", init)


@mutant
def a_loaded_view_is_released_at_once(patch: Patch) -> None:
    """The rows are in the encoder cache: somebody takes that for the end of the read."""
    real = Transfers._apply_to_load

    def apply_to_load(self, load, report):
        if report.kind is ReportKind.LOADED:
            report = msgspec.structs.replace(report, kind=ReportKind.RELEASED)
        return real(self, load, report)

    patch.setattr(Transfers, "_apply_to_load", apply_to_load)


# -- the worker half ------------------------------------------------------------------------------------------


@mutant
def saved_is_reported_before_the_copy(patch: Patch) -> None:
    real = EcotoneWorkerConnector._submit

    def submit(self, order, job, engine):
        if job.direction is worker_module.Direction.SAVE:
            self._report(order.transfer_id, ReportKind.SAVED)
        real(self, order, job, engine)

    patch.setattr(EcotoneWorkerConnector, "_submit", submit)


@mutant
def a_load_is_used_before_it_arrived(patch: Patch) -> None:
    def wait_for_loads(self, encoder_cache):
        arrived, self._arriving = self._arriving, {}
        for order, rows, job in arrived.values():
            encoder_cache[order.key] = rows
            if job is None:
                self._report(order.transfer_id, ReportKind.LOADED)

    patch.setattr(EcotoneWorkerConnector, "wait_for_loads", wait_for_loads)


@mutant
def a_save_that_was_not_begun_is_never_reported(patch: Patch) -> None:
    def abandon(self):
        self._saves = {}

    patch.setattr(EcotoneWorkerConnector, "_abandon_saves", abandon)


@mutant
def views_are_released_when_ordered_freed(patch: Patch) -> None:
    """The scheduler half lets the pin of a load fall with the step after it, as if views ended with their step."""
    real = EcotoneSchedulerConnector.build_connector_meta

    def build(self):
        before = [(i, load) for i, load in self._transfers._loads.items() if not load.under_way]
        ops = []
        for transfer_id, load in before:
            del self._transfers._loads[transfer_id]
            ops.append(Release(self._next_seq(), load.pin_id))
        self._tell(ops)
        return real(self)

    patch.setattr(EcotoneSchedulerConnector, "build_connector_meta", build)


@mutant
def every_rank_writes_from_the_first_row(patch: Patch) -> None:
    def share(num_rows, ranks, rank):
        return range(num_rows // len(ranks)) if rank != ranks[0] else range(num_rows)

    patch.setattr(worker_module, "share_of_rows", share)


# -- the hook -------------------------------------------------------------------------------------------------


@mutant
def a_step_without_tokens_drops_its_report(patch: Patch) -> None:
    real = ActiveECConnector.no_forward

    def no_forward(self, scheduler_output):
        real(self, scheduler_output)
        return EMPTY_MODEL_RUNNER_OUTPUT

    patch.setattr(ActiveECConnector, "no_forward", no_forward)


@mutant
def reports_are_written_through_the_shared_output(patch: Patch) -> None:
    real = EMPTY_MODEL_RUNNER_OUTPUT.ec_connector_output

    def only(ec):
        set_field(EMPTY_MODEL_RUNNER_OUTPUT, "ec_connector_output", ec)
        return EMPTY_MODEL_RUNNER_OUTPUT

    patch.setattr(ModelRunnerOutput, "with_ec_conn_output_only", staticmethod(only))
    patch.setattr(_Restore, "undo", lambda: set_field(EMPTY_MODEL_RUNNER_OUTPUT, "ec_connector_output", real))


class _Restore:
    @staticmethod
    def undo() -> None:
        """Nothing was written."""


def restore() -> None:
    """Undo what a mutant wrote into objects that are shared; before its patches are undone."""
    _Restore.undo()


@mutant
def failed_loads_are_not_listed(patch: Patch) -> None:
    real = ActiveECConnector.step

    def collect(step):
        output = step.collect()
        return None if output is None else msgspec.structs.replace(output, failed_loads=frozenset())

    class Wrapped:
        def __init__(self, inner):
            self.save, self.settle, self.fail, self.is_failed = (
                inner.save,
                inner.settle,
                inner.fail,
                inner.is_failed,
            )
            self.collect = lambda: collect(inner)

    class Manager:
        def __init__(self, inner):
            self.inner = inner

        def __enter__(self):
            return Wrapped(self.inner.__enter__())

        def __exit__(self, *error):
            return self.inner.__exit__(*error)

    patch.setattr(ActiveECConnector, "step", lambda self, order, loads: Manager(real(self, order, loads)))


# -- the scheduler --------------------------------------------------------------------------------------------


@mutant
def eviction_notices_are_stale(patch: Patch) -> None:
    """They come one pass late, and name what was encoded or loaded again meanwhile."""
    real = EncoderCacheManager.get_freed_keys
    late: dict[int, tuple[str, ...]] = {}

    def get_freed_keys(self):
        before, late[id(self)] = late.get(id(self), ()), real(self)
        return before

    patch.setattr(EncoderCacheManager, "get_freed_keys", get_freed_keys)


@mutant
def a_failed_load_stays_in_the_books(patch: Patch) -> None:
    def apply(self, ec, gone):
        if ec is not None and self._connector is not None:
            self._connector.update_connector_output(ec)

    patch.setattr(Scheduler, "_apply_ec_output", apply)


@mutant
def pending_is_answered_as_ready(patch: Patch) -> None:
    """In the index: whoever asks for an entry that is being written is given it."""
    real = Index._acquire

    def acquire(self, holder, op, now):
        answer = real(self, holder, op, now)
        if isinstance(answer, Pending):
            return Ready(op.seq, next(self._ids), self.entries[op.key].extents)
        return answer

    patch.setattr(Index, "_acquire", acquire)


@mutant
def answers_nobody_used_are_kept(patch: Patch) -> None:
    """Tickets and pins of requests that did not run stay taken."""

    def give_back(self):
        self._withdrawn = []
        self._current = {key: q for key, q in self._current.items() if q.answer is None}
        return []

    patch.setattr(Questions, "give_back", give_back)


@mutant
def the_weights_epoch_is_not_in_the_key(patch: Patch) -> None:
    """What was stored under the old weights is served under the new ones."""
    real = Library.namespace
    patch.setattr(Library, "namespace", lambda self, epoch: real(self, 0))
    patch.setattr(EcotoneSchedulerConnector, "reset_cache", lambda self, namespace: None)


# -- the node -------------------------------------------------------------------------------------------------


@mutant
def nothing_ends_with_a_dead_engine(patch: Patch) -> None:
    """Its tickets and pins stay: no abort on death."""
    patch.setattr(Index, "_end", lambda self, holder: None)


@mutant
def memory_of_a_lost_scheduler_is_free_at_once(patch: Patch) -> None:
    """Although its ranks still write and read."""
    real = Index.close_client
    patch.setattr(Index, "close_client", lambda self, client, *, may_still_touch=False: real(self, client))


@mutant
def forgotten_while_written_is_free_at_once(patch: Patch) -> None:
    patch.setitem(TRANSITIONS, (State.WRITING, Event.FORGET), State.ABSENT)
    patch.setitem(TRANSITIONS, (State.ABSENT, Event.COMMIT), State.ABSENT)
    patch.setitem(TRANSITIONS, (State.ABSENT, Event.ABORT), State.ABSENT)


@mutant
def pinned_entries_are_evicted(patch: Patch) -> None:
    patch.setitem(TRANSITIONS, (State.READY, Event.PIN), State.READY)
    patch.setitem(TRANSITIONS, (State.READY, Event.UNPIN), State.READY)
    patch.setitem(TRANSITIONS, (State.READY, Event.LAST_UNPIN), State.READY)
    patch.setitem(TRANSITIONS, (State.ABSENT, Event.UNPIN), State.ABSENT)
    patch.setitem(TRANSITIONS, (State.ABSENT, Event.LAST_UNPIN), State.ABSENT)


@mutant
def facts_of_one_rank_speak_for_all(patch: Patch) -> None:
    """The node takes what one rank tells for the whole engine's word."""
    real = Tenant.hear

    def hear(self, engine_id, facts, now):
        real(self, engine_id, [msgspec.structs.replace(fact, of=(fact.rank,)) for fact in facts], now)

    patch.setattr(Tenant, "hear", hear)


@mutant
def a_dead_rank_counts_as_done(patch: Patch) -> None:
    """What it had not written is committed when the others have written theirs."""
    patch.setattr(engines, "Abort", Commit)


@mutant
def only_the_first_rank_is_heard(patch: Patch) -> None:
    """An executor that returns the output rank's answer alone."""
    patch.setattr(sim_engine, "report_only", lambda output: EMPTY_MODEL_RUNNER_OUTPUT)


@mutant
def a_rank_without_an_encoder_is_waited_for(patch: Patch) -> None:
    """Every report is awaited from one more rank than takes part."""
    real = Transfers.__init__
    patch.setattr(Transfers, "__init__", lambda self, ranks, next_seq: real(self, (*ranks, len(ranks)), next_seq))


@mutant
def reports_heard_twice_are_an_error(patch: Patch) -> None:
    real = Transfers.apply

    def apply(self, report):
        if report.transfer_id not in self._saves and report.transfer_id not in self._loads:
            raise KeyError(report.transfer_id)
        return real(self, report)

    patch.setattr(Transfers, "apply", apply)


@mutant
def a_ticket_is_used_twice(patch: Patch) -> None:
    """Found by the simulator: a claimed answer stayed current where it had come after the wait was given up."""

    def give_back(self):
        ended = [q for q in self._withdrawn if q.answer is not None]
        ended += [q for q in self._current.values() if q.answer is not None and q.offered]
        self._withdrawn = [q for q in self._withdrawn if q.answer is None]
        self._current = {key: q for key, q in self._current.items() if q.answer is None or not q.offered}
        for question in self._current.values():
            question.offered = question.answer is not None
        ends = {Ready: lambda a: Release(self._next_seq(), a.pin_id), Ticket: _abort(self)}
        return [ends[type(q.answer)](q.answer) for q in ended if type(q.answer) in ends and not q.claimed]

    patch.setattr(Questions, "give_back", give_back)


def _abort(questions: Questions) -> Callable[[Ticket], Abort]:
    return lambda answer: Abort(questions._next_seq(), answer.transfer_id)


# -- steps in flight ------------------------------------------------------------------------------------------


@mutant
def what_a_step_in_flight_encodes_counts_as_held(patch: Patch) -> None:
    """Found only where it fails: whoever was ordered to gather it is told of rows that do not exist."""
    patch.setattr(StepsInFlight, "keys", frozenset())


@mutant
def a_request_is_in_two_steps_at_once(patch: Patch) -> None:
    """Its tokens are computed before the result that they build on is known."""
    real = StepsInFlight.begin

    def begin(self, order, requests):
        real(self, order, requests)
        for scheduled in order.scheduled:
            requests[scheduled.req_id].in_flight = False

    patch.setattr(StepsInFlight, "begin", begin)


@mutant
def a_step_ahead_that_came_to_nothing_takes_announcements_along(patch: Patch) -> None:
    """No step tells the ranks which requests ended, and they keep what they know of them."""
    real = Scheduler.schedule_ahead

    def schedule_ahead(self):
        order = real(self)
        if order is None and len(self._in_flight) < self.limits.max_concurrent_steps:
            self._pool.take_announcements()
        return order

    patch.setattr(Scheduler, "schedule_ahead", schedule_ahead)


@mutant
def blocks_of_a_step_in_flight_are_taken_by_preemption(patch: Patch) -> None:
    """Slots are given to others while a result that counts them as computed is on its way."""
    real = Batcher._take_blocks

    def take_blocks(self, request, num_tokens, batch):
        flying = [r for r in self._pool.running if r.in_flight]
        for other in flying:
            other.in_flight = False
        try:
            return real(self, request, num_tokens, batch)
        finally:
            for other in flying:
                other.in_flight = True

    patch.setattr(Batcher, "_take_blocks", take_blocks)


@mutant
def a_rank_does_not_keep_the_order_of_steps(patch: Patch) -> None:
    """Freed room is given to a step that begins before the step that still uses it."""

    def behind(self, _until, _rank):
        return self._world.now + self._random.uniform(0, self._step_s)

    patch.setattr(StepLine, "_behind", behind)


@mutant
def a_save_counts_as_done_two_steps_later(patch: Patch) -> None:
    """Readiness inferred from how many steps were ordered since."""
    real = EcotoneSchedulerConnector.build_connector_meta

    def build(self):
        meta = real(self)
        ops = []
        for transfer_id, save in list(self._transfers._saves.items()):
            save.age = getattr(save, "age", 0) + 1
            if save.age > 2:
                del self._transfers._saves[transfer_id]
                ops.append(Commit(self._next_seq(), save.ticket_id))
        self._tell(ops)
        return meta

    patch.setattr(EcotoneSchedulerConnector, "build_connector_meta", build)


# -- the disk -------------------------------------------------------------------------------------------------


@mutant
def what_is_read_from_disk_is_ready_at_once(patch: Patch) -> None:
    real = DiskTier.promote

    def promote(self, key, layout, transfer_id, extents):
        real(self, key, layout, transfer_id, extents)
        self._index.end_promotion(transfer_id, verified=True)

    patch.setattr(DiskTier, "promote", promote)


@mutant
def what_did_not_verify_is_served(patch: Patch) -> None:
    real = Index.end_promotion
    patch.setattr(Index, "end_promotion", lambda self, number, *, verified: real(self, number, verified=True))


@mutant
def an_entry_is_evicted_while_it_is_written_out(patch: Patch) -> None:
    """The tier reads memory that it does not hold."""

    def pin_for_tier(self, key):
        entry = self.entries.get(key)
        return None if entry is None or entry.state is State.WRITING else (0, entry)

    patch.setattr(Index, "pin_for_tier", pin_for_tier)
    patch.setattr(Index, "unpin_for_tier", lambda self, pin_id: None)
