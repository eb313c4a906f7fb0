"""What was asked of the node about keys, and what has to go back to it when nobody uses the answer."""

from __future__ import annotations

from collections.abc import Callable

from ecotone.node.exchange import (
    Abort,
    Absent,
    Acquire,
    AnyAnswer,
    AnyOp,
    Lookup,
    NoRoom,
    Pending,
    Ready,
    Release,
    Ticket,
    Unreachable,
)

Verdict = Ready | Ticket | Pending | Absent | NoRoom | Unreachable


class Question:
    """One Acquire or Lookup.

    Attributes:
        answer: ``None`` until it arrives.
        claimed: what it holds belongs to a transfer.
        offered: whoever asks had a whole pass to take it, or was told it.
        over: what it holds was settled by the node meanwhile.
    """

    def __init__(self, op: Acquire | Lookup) -> None:
        self.op = op
        self.answer: Verdict | None = None
        self.claimed = False
        self.offered = False
        self.over = False

    @property
    def claim(self) -> int | None:
        """The number of the pin or ticket that the answer gives."""
        match self.answer:
            case Ready(pin_id=claim) | Ticket(transfer_id=claim):
                return claim
            case _:
                return None


class Questions:
    """At most one current question per key. An answer holds memory at the node (a pin or a ticket) from the
    moment the node gives it, so every answer is claimed by a transfer or given back.

    Args:
        next_seq: numbers the operations it returns.
    """

    def __init__(self, next_seq: Callable[[], int]) -> None:
        self._next_seq = next_seq
        self._current: dict[str, Question] = {}
        self._withdrawn: list[Question] = []
        self._outstanding: dict[int, Question] = {}

    @property
    def unsettled(self) -> bool:
        """Whether an answer is awaited, or one is here that was not given back yet."""
        return bool(self._current or self._withdrawn)

    @property
    def outstanding(self) -> int:
        """Questions without an answer."""
        return len(self._outstanding)

    def get(self, key: str) -> Question | None:
        """The current question about ``key``."""
        return self._current.get(key)

    def ask(self, op: Acquire | Lookup) -> Question:
        """Note that ``op`` is on its way to the node. There must be no current question about its key."""
        question = self._current[op.key] = self._outstanding[op.seq] = Question(op)
        return question

    def settle(self, answer: AnyAnswer) -> bool:
        """Take in an answer; False when no question awaits it."""
        question = self._outstanding.get(answer.seq)
        if question is None or not isinstance(answer, Verdict):
            return False
        del self._outstanding[answer.seq]
        question.answer = answer
        return True

    def end(self, claim: int) -> None:
        """The node settled this pin or ticket itself."""
        for question in (*self._current.values(), *self._withdrawn):
            question.over |= question.claim == claim

    def withdraw(self, is_stale: Callable[[str], bool]) -> None:
        """Forget the questions whose key ``is_stale``: whatever their answers say is given back, not used."""
        for key in [key for key in self._current if is_stale(key)]:
            self._withdrawn.append(self._current.pop(key))

    def give_back(self) -> list[AnyOp]:
        """End a pass: the operations that give back every answer that was offered and not claimed.

        An answer that arrived in the course of the pass is kept for the next one: were it given back, those who
        asked for it would ask again, and find it given back again, for ever. Not so where somebody who was told
        not to wait any more could take it all the same: what it holds belongs to one transfer, and no other.
        """
        used = {key: q for key, q in self._current.items() if q.answer is not None and (q.offered or q.claimed)}
        ended = [*(q for q in self._withdrawn if q.answer is not None), *used.values()]
        self._withdrawn = [q for q in self._withdrawn if q.answer is None]
        self._current = {key: q for key, q in self._current.items() if key not in used}
        for question in self._current.values():
            question.offered = question.answer is not None
        ops: list[AnyOp] = []
        for question in ended:
            if question.claimed or question.over:
                continue
            match question.answer:
                case Ready(pin_id=pin_id):
                    ops.append(Release(self._next_seq(), pin_id))
                case Ticket(transfer_id=transfer_id):
                    ops.append(Abort(self._next_seq(), transfer_id))
        return ops


def why_unsaved(answer: Verdict | None, is_about: bool) -> str:
    """Why what was encoded after this answer is not kept, for the statistics. ``is_about``: whether it answers a
    question about this very item."""
    if not is_about:
        return "ambiguous"
    match answer:
        case None:
            return "no_answer"
        case NoRoom():
            return "no_room"
        case Absent():
            return "consumer"
        case Unreachable():
            return "node_unreachable"
        case _:
            return "waited"
