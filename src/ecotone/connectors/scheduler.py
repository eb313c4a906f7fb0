"""The scheduler half: decides what each step loads and saves, and when memory may be trusted or reused.

It is pure: the node, the clock and the end of the node's life are given to it, and it has no thread. One pass of
the engine's scheduler is a few ``lookup`` calls, ``update_state_after_alloc`` for what runs, and
``build_connector_meta``; what the ranks did with it comes back through ``update_connector_output``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from itertools import count

from ecotone.connectors.budget import Patience
from ecotone.connectors.messages import EcotoneStepMetadata, EcotoneWorkerMetadata, Order, Report
from ecotone.connectors.participants import check_participants
from ecotone.connectors.questions import Question, Questions, why_unsaved
from ecotone.connectors.transfers import Transfers
from ecotone.errors import ContractError
from ecotone.node.embedded import RESET_TIMEOUT_S
from ecotone.node.exchange import (
    Abort,
    Acquire,
    AnyOp,
    Commit,
    Done,
    Forget,
    ForgetAll,
    Layout,
    Lookup,
    NodeExchange,
    Pending,
    Ready,
    Settled,
    Ticket,
)
from ecotone.node.keys import namespace_of
from ecotone.protocol.connector import (
    CacheLookup,
    ECItem,
    ECSchedulerConnector,
    ECSchedulerContext,
)
from ecotone.protocol.outputs import ECConnectorOutput, ECConnectorStats

# The node itself answers a reset that its disk is slow with after so long.
_RESET_WAIT_S = RESET_TIMEOUT_S + 1.0


class EcotoneSchedulerConnector(ECSchedulerConnector):
    """See the module.

    Args:
        context: role, participants, what an encoding looks like, clock.
        exchange: this engine's end of the node.
        pending_timeout_s: how long a request waits for an item, all its tries together; ``None`` derives it from
            what encodings take.
        on_shutdown: ends what lives as long as this half (an embedded node); called once.
        check_node: checks the books of such a node.
        node_statistics: its counters, where the exchange only has those of this end.

    Raises:
        ConfigError: participants that cannot share a region.
    """

    def __init__(
        self,
        context: ECSchedulerContext,
        exchange: NodeExchange,
        pending_timeout_s: float | None,
        on_shutdown: Callable[[], None] = lambda: None,
        check_node: Callable[[], None] = lambda: None,
        node_statistics: Callable[[], dict[str, float]] = dict,
    ) -> None:
        super().__init__(context)
        self._ranks = check_participants(context.participants)
        self._encoder = context.encoder
        self._clock = context.clock
        self._exchange = exchange
        self._patience = Patience(pending_timeout_s)
        self._on_shutdown = on_shutdown
        self._check_node = check_node
        self._node_statistics = node_statistics
        self._closed = False

        next_seq = count(1).__next__
        self._next_seq = next_seq
        self._questions = Questions(next_seq)
        self._transfers = Transfers(self._ranks, next_seq)
        self._notices: set[int] = set()  # seqs of operations whose Done is awaited

        # This pass: what was said about (req_id, key), what is loaded or encoded, and the orders that follow.
        self._given: dict[tuple[str, str], tuple[CacheLookup, Question]] = {}
        self._allocated: set[str] = set()
        self._loads: list[Order] = []
        self._saves: list[Order] = []

        self._counters: Counter[str] = Counter()
        self._rank_stats = ECConnectorStats()

    # -- a scheduling pass ------------------------------------------------------------------------------------

    def prepare(self, items: Iterable[ECItem], patience_s: float) -> bool:
        """Ask the node, in one message, about the items that this pass will look up, and wait for its answers, but
        no longer than ``patience_s``: then ``lookup`` finds them within this pass. Whether all are there.

        For engines that cannot cheaply come back to a request later. Who can must not wait here: without this, the
        node is asked by ``lookup``, and a request whose answer is not there is deferred.
        """
        self._poll()
        wanted = {item.key: item for item in items}
        missing = [item for key, item in wanted.items() if self._questions.get(key) is None]
        if missing:
            self._exchange.submit([self._questions.ask(self._question(item)).op for item in missing])
        questions = [question for key in wanted if (question := self._questions.get(key)) is not None]
        if any(question.answer is None for question in questions):
            self._exchange.flush()
            self._exchange.wait(patience_s)
            self._poll()
        for question in questions:  # this pass is the whole one in which an answer can be taken
            question.offered = question.answer is not None
        return all(question.offered for question in questions)

    def lookup(self, req_id: str, item: ECItem) -> CacheLookup:
        """See the contract. A producer that does not consume hears READY where the item is known to be stored:
        then there is nothing to do for it, neither a load nor an encode."""
        given = self._given.get((req_id, item.key))
        if given is not None:
            return given[0]
        self._poll()
        question = self._questions.get(item.key) or self._ask(item)
        said = self._judge(req_id, item, question)
        self._given[req_id, item.key] = said, question
        return said

    def update_state_after_alloc(self, req_id: str, item: ECItem) -> None:
        """See the contract.

        Raises:
            ContractError: the item was not answered READY or MISS in this pass.
        """
        said, question = self._given.get((req_id, item.key), (None, None))
        if question is None or said is CacheLookup.PENDING:
            raise ContractError(f"request {req_id!r} allocated item {item.key!r}, which was answered {said}")
        if item.key in self._allocated:
            return
        self._allocated.add(item.key)
        match said, question.answer:
            case CacheLookup.READY, Ready() as ready:
                self._counters["hits"] += 1
                if self.is_consumer:
                    question.claimed = True
                    transfer_id = self._transfers.dispatch_load(item.key, ready.pin_id)
                    if question.over:  # since the lookup, which promised it: the ranks will say that it cannot be
                        self._drop(ready.pin_id)
                    self._loads.append(
                        Order(item.key, transfer_id, self._layout(item), ready.extents, ready.pin_id)
                    )
            case _, Ticket() as ticket if not question.over and self._is_about(question, item):
                self._counters["misses"] += 1
                question.claimed = True
                transfer_id = self._transfers.dispatch_save(ticket.transfer_id, item.num_rows)
                self._patience.began(transfer_id, self._clock())
                self._saves.append(
                    Order(item.key, transfer_id, self._layout(item), ticket.extents, ticket.transfer_id)
                )
            case _, answer:
                why = "settled" if question.over else why_unsaved(answer, self._is_about(question, item))
                self._counters["misses"] += 1
                self._counters[f"unsaved.{why}"] += 1

    def build_connector_meta(self) -> EcotoneStepMetadata | None:
        """See the contract. ``None`` when the step neither loads nor saves."""
        self._poll()
        if not (self._given or self._notices or self._questions.unsettled):
            return None  # most steps: nobody asked, and nothing is on its way to the node or from it
        self._tell(self._questions.give_back())
        self._exchange.flush()
        loads, saves = tuple(self._loads), tuple(self._saves)
        self._given.clear()
        self._allocated.clear()
        self._loads.clear()
        self._saves.clear()
        self._poll()
        return EcotoneStepMetadata(self._ranks, loads, saves) if loads or saves else None

    def _ask(self, item: ECItem) -> Question:
        question = self._questions.ask(self._question(item))
        self._exchange.submit([question.op])
        self._poll()
        return question

    def _question(self, item: ECItem) -> Acquire | Lookup:
        # Who never writes must not become the writer: its ticket would keep everybody else waiting.
        kind = Acquire if self.is_producer else Lookup
        return kind(self._next_seq(), item.key, self._layout(item))

    def _judge(self, req_id: str, item: ECItem, question: Question) -> CacheLookup:
        question.offered = question.answer is not None
        if not self._is_about(question, item):
            return CacheLookup.MISS
        match question.answer:
            case Ready() if not question.over:
                return CacheLookup.READY
            case None | Pending():
                is_over = self._patience.is_over(req_id, item.key, self._clock())
                return CacheLookup.MISS if is_over else CacheLookup.PENDING
            case _:
                return CacheLookup.MISS

    def _is_about(self, question: Question, item: ECItem) -> bool:
        """Keys may be what clients make them: then two items of different sizes have one, and what was asked about
        the first is no answer for the second."""
        return question.op.layout == self._layout(item)

    def _layout(self, item: ECItem) -> Layout:
        width = self._encoder.width if item.width is None else item.width
        return Layout(self._encoder.dtype, (item.num_rows, width))

    # -- what came of it --------------------------------------------------------------------------------------

    def update_connector_output(self, output: ECConnectorOutput) -> None:
        """See the contract.

        Raises:
            ContractError: the metadata is of another connector.
        """
        if output.ec_connector_stats is not None:
            self._rank_stats = self._rank_stats.aggregate(output.ec_connector_stats)
        ops: list[AnyOp] = [Forget(self._next_seq(), key) for key in sorted(output.failed_loads)]
        meta = output.ec_connector_worker_meta
        if meta is not None:
            if not isinstance(meta, EcotoneWorkerMetadata):
                raise ContractError(f"worker metadata of type {type(meta).__name__} is not this connector's")
            # In an order: who was written last is the last to be evicted, and that must not depend on hashes.
            for report in sorted(meta.reports, key=_place):
                ended = self._transfers.apply(report)
                if any(isinstance(op, Commit | Abort) for op in ended):
                    saved = isinstance(ended[0], Commit)
                    self._patience.ended(report.transfer_id, self._clock() if saved else None)
                ops += ended
        self._tell(ops)
        self._poll()

    def request_finished(self, req_id: str) -> None:
        """See the contract."""
        self._patience.request_finished(req_id)

    def has_pending_work(self) -> bool:
        """Whether a transfer is under way or the node owes an answer. Views that ranks hold are no work."""
        if self._closed:
            return False
        self._poll()
        return self._transfers.unfinished or self._questions.unsettled or bool(self._notices)

    def reset_cache(self, namespace: str) -> None:
        """See the contract. Transfers of the namespace go on until they are settled; their entries are gone.

        When it returns, the node has done it, and its disk, too; unless the node cannot be reached or is too slow.
        This is no step, so it may wait for that; an engine that rests would send nothing by itself.
        """

        def is_stale(key: str) -> bool:
            return namespace_of(key) == namespace

        self._questions.withdraw(is_stale)
        self._given = {asked: given for asked, given in self._given.items() if not is_stale(asked[1])}
        self._tell([ForgetAll(self._next_seq(), namespace)])
        self._exchange.flush()
        self._exchange.wait(_RESET_WAIT_S)
        self._poll()

    def statistics(self) -> dict[str, float]:
        """``hits``, ``misses`` and ``unsaved.<reason>`` count items that were scheduled; ``ranks.*`` are the
        ranks' own counters, summed; ``node.*`` are the node's."""
        return {
            **self.own_statistics(),
            **{f"node.{name}": value for name, value in self._exchange.statistics().items()},
            **{f"node.{name}": value for name, value in self._node_statistics().items()},
        }

    def own_statistics(self) -> dict[str, float]:
        """``statistics`` without the node's, which may be at work on another thread: cheap enough for a step."""
        return {
            "hits": 0,
            "misses": 0,
            **self._counters,
            **self._transfers.gauges(),
            "pending_budget_s": self._patience.budget_s,
            "answers_awaited": self._questions.outstanding + len(self._notices),
            **{f"ranks.{name}": value for name, value in self._rank_stats.total().items()},
        }

    def rank_statistics(self) -> dict[int, dict[str, float]]:
        """See the contract. Of the rank's present start."""
        latest = {entry.rank: entry for entry in self._rank_stats.ranks}  # they are in the order of their epochs
        return {rank: dict(entry.counters) for rank, entry in latest.items()}

    def check_integrity(self) -> None:
        """See the contract."""
        self._check_node()

    def shutdown(self) -> None:
        """Leave the node, and end it where it lives in here. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._exchange.close()
        self._on_shutdown()

    # -- the node ---------------------------------------------------------------------------------------------

    def _tell(self, ops: list[AnyOp]) -> None:
        if not ops:
            return
        for op in ops:
            self._counters[f"told.{type(op).__name__.lower()}"] += 1
        self._notices.update(op.seq for op in ops)
        self._exchange.submit(ops)

    def _poll(self) -> None:
        for answer in self._exchange.poll():
            match answer:
                case Done(seq=seq, effect=effect):
                    self._notices.discard(seq)
                    self._counters["without_effect"] += not effect
                case Settled(claim=claim, committed=committed, age_s=age_s):
                    self._questions.end(claim)
                    self._drop(claim, age_s if committed else None)
                case _:
                    self._questions.settle(answer)

    def _drop(self, claim: int, committed_s: float | None = None) -> None:
        """The node settled it, having heard it from the ranks; a save was committed so many seconds ago."""
        transfer_id = self._transfers.drop(claim)
        if transfer_id is not None:
            self._patience.ended(transfer_id, None if committed_s is None else self._clock() - committed_s)


def _place(report: Report) -> tuple[int, int, str]:
    return report.transfer_id, report.rank, report.kind
