"""A scheduler's end of a shared node. It never blocks, and outlives the node."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from ecotone.errors import ConfigError, ShutDownError
from ecotone.node.exchange import (
    Abort,
    Acquire,
    AnyAnswer,
    AnyOp,
    Commit,
    Done,
    Lookup,
    Ready,
    Release,
    Settled,
    Ticket,
    Unreachable,
)
from ecotone.node.server.link import Link, LostError
from ecotone.node.server.listen import Address, check_place, shown
from ecotone.node.server.messages import MAX_BATCH_OPS, Answers, Batch, Hello, Keep, Leave, NodeMessage, Welcome

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0
# What keeps operations longer than this is not a busy node, but one that is stopped or gone.
ANSWER_TIMEOUT_S = 5.0
# Not yet taken by the kernel: a node that does not read so much is lost before its answers are late.
_MAX_UNSENT_BYTES = 8 * 2**20

COUNTERS = ("batches", "operations", "answers", "settled", "unreachable", "lost", "connects", "refused_connects")


class SharedNodeExchange:
    """See ``NodeExchange``. Operations are kept until ``flush``, so that a step is one message.

    While the node cannot be reached, questions are answered ``Unreachable`` and everything else ``Done`` without
    effect; it is looked for again in growing intervals, whenever somebody asks or polls.

    Args:
        address: the node's socket.
        hello: who this is.
        clock: monotonic seconds.
        answer_timeout_s: a node that keeps a message longer is given up.
        open_link: opens the connection.
    """

    def __init__(
        self,
        address: Address,
        hello: Hello,
        clock: Callable[[], float] = time.monotonic,
        answer_timeout_s: float = ANSWER_TIMEOUT_S,
        open_link: Callable[[Address, Hello], Link] = Link,
    ) -> None:
        self._address = address
        self._open_link = open_link
        self._hello = hello
        self._clock = clock
        self._answer_timeout_s = answer_timeout_s
        self._closed = False

        self._link: Link | None = None
        self._welcomed = False
        self._keeping = False  # a Keep was sent, and nothing shows yet that it arrived
        self._node_id = ""
        self._since = 0.0  # when the link was opened, or its oldest unanswered message sent
        self._pause_s = _FIRST_PAUSE_S
        self._try_at = clock()
        self._complained = False

        self._kept: list[AnyOp] = []
        self._sent: deque[tuple[float, tuple[AnyOp, ...]]] = deque()
        self._answers: list[AnyAnswer] = []
        self._held: set[int] = set()  # pins and transfers that the caller knows of, or will with its next poll
        self._counters = dict.fromkeys(COUNTERS, 0)

    def wait_until_connected(self, timeout_s: float) -> None:
        """Block until the node welcomed this client: for the start, when there is nothing to go on without it.

        Raises:
            ConfigError: it did not within ``timeout_s``, or nothing is at its path; the message says why.
        """
        deadline, why = time.monotonic() + timeout_s, "it did not answer"
        while not self._welcomed:
            left = deadline - time.monotonic()
            if left <= 0:
                raise ConfigError(f"no node at {shown(self._address)}: {why}; 'ecotone node' starts one")
            try:
                if self._link is None:
                    self._link, self._since = self._open_link(self._address, self._hello), self._clock()
                self._link.wait(left)
                self._read(self._link)
            except LostError as lost:
                why, self._link = str(lost), None
                if lost.final:
                    raise ConfigError(f"the node at {shown(self._address)}: {why}") from None
                if isinstance(self._address, Path):
                    check_place(self._address)
                time.sleep(min(_FIRST_PAUSE_S, left))

    @property
    def is_connected(self) -> bool:
        """Whether the node welcomed this client and is not known to be lost."""
        return self._welcomed

    def submit(self, ops: Sequence[AnyOp]) -> None:
        """See ``NodeExchange``."""
        self._refuse_closed()
        for op in ops:
            if isinstance(op, Commit | Abort):
                self._held.discard(op.transfer_id)
            elif isinstance(op, Release):
                self._held.discard(op.pin_id)
        self._advance()
        if self._welcomed:
            self._kept += ops
        else:
            self._give_up(ops)

    def flush(self) -> None:
        """See ``NodeExchange``."""
        self._refuse_closed()
        self._send()

    def poll(self) -> Sequence[AnyAnswer]:
        """See ``NodeExchange``."""
        self._refuse_closed()
        self._advance()
        answers, self._answers = self._answers, []
        return answers

    def wait(self, timeout_s: float) -> None:
        """See ``NodeExchange``. A node that is lost meanwhile has answered: everything is ``Unreachable``."""
        self._refuse_closed()
        deadline = time.monotonic() + timeout_s
        self._advance()
        while self._sent and self._link is not None and self._link.wait(deadline - time.monotonic()):
            self._advance()

    def statistics(self) -> dict[str, float]:
        """This end's own counters (``lost``: connections that ended without being closed here; ``unreachable``:
        operations that came to nothing for it) and gauges. The node's own are a question to the node."""
        return {
            **self._counters,
            "connected": int(self._welcomed),
            "messages_unanswered": len(self._sent),
            "held": len(self._held),
        }

    def close(self) -> None:
        """See ``NodeExchange``."""
        if self._closed:
            return
        self._send()
        self._closed = True
        if self._link is not None:
            if self._welcomed:
                self._link.send(Leave())
            self._link.close()
        self._welcomed = False

    # -- inside -----------------------------------------------------------------------------------------------

    def _refuse_closed(self) -> None:
        if self._closed:
            raise ShutDownError(f"this end of the node at {shown(self._address)} was closed")

    def _advance(self) -> None:
        """Take in what arrived; look for the node where it is time to; give it up where it is late."""
        if self._link is None:
            self._connect()
        if self._link is None or (self._welcomed and not self._sent and not self._keeping):
            return  # what is idle is not asked for news: that the node is gone shows when it is needed
        try:
            self._read(self._link)
            since = self._sent[0][0] if self._sent else self._since
            late = self._clock() - since > self._answer_timeout_s
            if (self._sent or not self._welcomed) and late:
                raise LostError(f"no answer in {self._answer_timeout_s} s")
        except LostError as lost:
            self._lose(str(lost))

    def _connect(self) -> None:
        now = self._clock()
        if now < self._try_at:
            return
        self._try_at = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        try:
            self._link, self._since = self._open_link(self._address, self._hello), now
            self._link.pump()
        except (LostError, ConfigError) as lost:
            self._counters["refused_connects"] += 1
            self._complain(str(lost))

    def _read(self, link: Link) -> None:
        for message in link.receive():
            self._take(link, message)

    def _take(self, link: Link, message: NodeMessage) -> None:
        match message:
            case Welcome(node_id=node_id) if not self._welcomed:
                self._welcomed = True
                self._counters["connects"] += 1
                self._pause_s = _FIRST_PAUSE_S
                if node_id == self._node_id:  # it knows us from before, and may have given what never arrived
                    link.send(Keep(frozenset(self._held)))
                    self._keeping = True
                else:  # another one: whatever the last one gave belongs to nobody
                    self._let_go([Settled(0, claim, committed=False) for claim in sorted(self._held)])
                self._node_id = node_id
                if self._complained:
                    logger.info("the node at %s is there again", shown(self._address))
                self._complained = False
            case Answers(answers=answers, settled=settled) if self._sent and len(answers) == len(self._sent[0][1]):
                self._keeping = False
                _, ops = self._sent.popleft()
                if any(a.seq != op.seq for a, op in zip(answers, ops, strict=True)):
                    raise LostError("its answers are to other questions")
                self._let_go(settled)  # before what the same message gives
                self._answers += answers
                self._held.update(a.pin_id for a in answers if isinstance(a, Ready))
                self._held.update(a.transfer_id for a in answers if isinstance(a, Ticket))
                self._counters["answers"] += len(answers)
            case _:
                raise LostError(f"it said {type(message).__name__} out of turn")

    def _let_go(self, settled: Sequence[Settled]) -> None:
        self._held.difference_update(news.claim for news in settled)
        self._answers += settled
        self._counters["settled"] += len(settled)

    def _send(self) -> None:
        if not self._kept or self._link is None:
            return
        kept, self._kept = self._kept, []
        now = self._clock()
        for start in range(0, len(kept), MAX_BATCH_OPS):
            ops = tuple(kept[start : start + MAX_BATCH_OPS])
            self._sent.append((now, ops))
            self._link.send(Batch(ops))
            self._counters["batches"] += 1
        self._counters["operations"] += len(kept)
        if self._link.unsent_bytes > _MAX_UNSENT_BYTES:
            self._lose("it does not read")

    def _lose(self, why: str) -> None:
        """The connection is gone: whatever was asked came to nothing."""
        if self._link is not None:
            self._link.close()
        self._link = None
        if self._welcomed:
            self._counters["lost"] += 1
            self._try_at = self._clock()  # the first try is at once: a node is restarted in no time
        self._welcomed = self._keeping = False
        unanswered = [op for _, ops in self._sent for op in ops] + self._kept
        self._sent.clear()
        self._kept = []
        self._give_up(unanswered)
        self._complain(why)

    def _give_up(self, ops: Sequence[AnyOp]) -> None:
        self._counters["unreachable"] += len(ops)
        self._answers += [
            Unreachable(op.seq) if isinstance(op, Acquire | Lookup) else Done(op.seq, effect=False) for op in ops
        ]

    def _complain(self, why: str) -> None:
        """Once per outage."""
        if not self._complained:
            self._complained = True
            logger.warning(
                "the node at %s cannot be reached (%s): what it holds is encoded again until it is back",
                shown(self._address),
                why,
            )
