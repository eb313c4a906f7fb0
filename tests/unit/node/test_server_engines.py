"""The join of what an engine's ranks report: a fact heard twice is heard once, and a dead rank's part is over."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ecotone.node.exchange import Abort, Commit, Release
from ecotone.node.server.engines import Engine
from ecotone.node.server.messages import Fact

RANKS = (0, 1, 2)


def engine(ranks: tuple[int, ...] = RANKS) -> Engine:
    made = Engine("e", "")
    made.scheduler_came(1, ranks)
    for rank in ranks:
        made.worker_came(100 + rank, rank)
    return made


def saved(rank: int, of: tuple[int, ...] = RANKS, kind: str = "saved") -> Fact:
    return Fact(7, rank, of, kind)  # type: ignore[arg-type]


@given(st.permutations([saved(rank) for rank in RANKS for _ in range(3)]))
def test_a_save_is_settled_once_when_every_rank_said_so(facts: list[Fact]) -> None:
    made, seen = engine(), set()
    for number, fact in enumerate(facts):
        before = len(seen)
        seen.add(fact.rank)
        ended = made.hear(fact)
        if ended:
            assert ended == [Commit(0, 7)]
            assert (before, len(seen)) == (2, 3)
            rest = facts[number + 1 :]
            assert all(made.hear(saved(f.rank)) == [] or f for f in rest)
            return
    raise AssertionError("never settled")


@given(st.permutations(RANKS), st.sampled_from(RANKS))
def test_one_failure_aborts_and_only_when_nobody_writes_any_more(order: list[int], failing: int) -> None:
    made = engine()
    ended = [made.hear(saved(rank, kind="failed" if rank == failing else "saved")) for rank in order]
    assert ended == [[], [], [Abort(0, 7)]]


def test_a_rank_without_a_part_is_not_waited_for_and_not_heard() -> None:
    made = engine()
    assert made.hear(saved(2, of=(0, 1), kind="failed")) == []
    assert made.hear(saved(0, of=(0, 1))) == []
    assert made.hear(saved(1, of=(0, 1))) == [Commit(0, 7)]


def test_a_dead_ranks_share_has_failed_and_its_reading_is_over() -> None:
    made = engine()
    assert made.hear(saved(0)) == []
    assert made.hear(saved(2)) == []
    assert made.hear(Fact(8, 0, RANKS, "released")) == []
    assert made.hear(Fact(8, 2, RANKS, "released")) == []
    assert made.worker_went(101, transfers=[7], pins=[8]) == [Abort(0, 7), Release(0, 8)]


def test_what_a_dead_rank_had_saved_is_saved() -> None:
    made = engine((0, 1))
    assert made.hear(saved(1, of=(0, 1))) == []
    assert made.worker_went(101, transfers=[7], pins=[]) == []
    assert made.hear(saved(0, of=(0, 1))) == [Commit(0, 7)]


def test_a_share_ordered_to_a_dead_rank_fails_when_the_others_are_through() -> None:
    made = engine((0, 1))
    made.worker_went(101, transfers=[], pins=[])
    assert made.hear(saved(0, of=(0, 1))) == [Abort(0, 7)]


def test_a_rank_with_a_newer_connection_is_not_dead() -> None:
    made = engine((0,))
    made.worker_came(200, 0)
    assert made.worker_went(100, transfers=[7], pins=[8]) == []
    assert made.worker_went(200, transfers=[7], pins=[8]) == [Abort(0, 7), Release(0, 8)]


def test_what_the_scheduler_settled_is_forgotten() -> None:
    made = engine((0, 1))
    assert made.hear(saved(0, of=(0, 1))) == []
    made.forget_claim(7)
    assert made.hear(saved(1, of=(0, 1))) == []
