"""The books of the disk tier, told what happens: who is written, who goes, what is never found again."""

from __future__ import annotations

import pytest
from disk_bench import LAYOUT, NS

from ecotone.errors import IntegrityError
from ecotone.node.disk.format import charged, file_bytes
from ecotone.node.disk.jobs import Drop, Remove, Reopen
from ecotone.node.disk.ledger import FIRST_RETRY_S, LAST_RETRY_S, Ledger
from ecotone.node.exchange import Layout

OTHER = NS.next_epoch("life")
A, B, C, D = (NS.key(item) for item in "abcd")
X = OTHER.key("x")
ONE = charged(file_bytes(A, LAYOUT))


def ready(budget: int = 100 * ONE) -> Ledger:
    """A ledger that knows its empty directory."""
    ledger = Ledger(budget)
    ledger.all_found()
    ledger.reclaimed(False, 0.0)
    return ledger


def taken(ledger: Ledger) -> list[object]:
    jobs = list(ledger.jobs)
    ledger.jobs.clear()
    return jobs


def write(ledger: Ledger, *keys: str) -> None:
    for key in keys:
        ledger.committed(key)
        assert ledger.next_write() == key
        assert ledger.begin_write(key, LAYOUT)
        ledger.written(LAYOUT.nbytes, False, True, 0.0)
    ledger.check_integrity()


def test_one_is_written_at_a_time_in_the_order_of_the_commits() -> None:
    ledger = ready()
    for key in (A, B):
        ledger.committed(key)
    assert ledger.next_write() == A
    assert ledger.begin_write(A, LAYOUT)
    assert ledger.next_write() is None
    assert not ledger.holds(A, LAYOUT)
    ledger.written(LAYOUT.nbytes, False, True, 0.0)
    assert ledger.holds(A, LAYOUT)
    assert ledger.next_write() == B
    assert not ledger.begin_write(B, None)  # not in memory any more
    assert ledger.next_write() is None
    assert ledger.is_settled


def test_forgotten_while_it_is_written() -> None:
    ledger = ready()
    ledger.committed(A)
    ledger.begin_write(A, LAYOUT)
    ledger.forget(A)
    ledger.committed(A)  # other bytes, under the same key
    ledger.written(LAYOUT.nbytes, False, False, 0.0)
    assert not ledger.holds(A, LAYOUT)
    assert taken(ledger) == [Remove(A)]
    assert not ledger.is_settled
    assert ledger.next_write() == A
    ledger.check_integrity()


def test_reset_while_it_is_written() -> None:
    ledger = ready()
    ledger.committed(A)
    ledger.begin_write(A, LAYOUT)
    ledger.forget_all(NS.digest)
    ledger.written(LAYOUT.nbytes, False, False, 0.0)
    assert not ledger.holds(A, LAYOUT)
    assert taken(ledger) == [Drop(1, NS.digest), Remove(A)]


def test_a_write_that_failed_is_tried_again_first_if_there_is_something_to_write() -> None:
    ledger = ready()
    for key in (A, B):
        ledger.committed(key)
    ledger.begin_write(A, LAYOUT)
    ledger.written(LAYOUT.nbytes, True, True, 0.0)
    assert list(ledger.unwritten) == [A, B]
    ledger.reopened(False, False, 1.0)
    ledger.begin_write(A, LAYOUT)
    ledger.forget(A)
    ledger.written(LAYOUT.nbytes, True, False, 2.0)
    assert list(ledger.unwritten) == [B]
    assert ledger.used == 0
    assert taken(ledger) == []


def test_nothing_is_written_while_nobody_knows_what_is_on_the_disk() -> None:
    ledger = Ledger(100 * ONE)
    ledger.committed(A)
    assert ledger.next_write() is None
    ledger.all_found()
    assert ledger.next_write() is None  # what an earlier life dropped may still be there
    ledger.reclaimed(False, 0.0)
    assert ledger.next_write() == A
    ledger.forget_all(OTHER.digest)
    assert ledger.next_write() is None
    ledger.reclaimed(False, 0.0)  # of before the drop
    assert ledger.next_write() is None
    ledger.dropped(1, False, 0.0)
    assert ledger.next_write() is None
    ledger.reclaimed(False, 0.0)
    assert ledger.next_write() == A


def test_what_was_forgotten_before_it_was_found_is_not_adopted() -> None:
    ledger = Ledger(100 * ONE)
    ledger.forget(A)
    ledger.forget_all(OTHER.digest)
    assert taken(ledger) == [Remove(A), Drop(1, OTHER.digest)]
    ledger.found([(A, 500, 1), (X, 500, 2), (B, 500, 3)])
    assert [ledger.holds(key, LAYOUT) for key in (A, X, B)] == [False, False, True]
    assert ledger.counters["adopted"] == 1
    ledger.all_found()
    ledger.check_integrity()


def test_what_is_found_need_not_be_written() -> None:
    ledger = Ledger(100 * ONE)
    ledger.committed(A)
    ledger.found([(A, 500, 1)])
    ledger.found([(A, 500, 1)])
    ledger.all_found()
    ledger.reclaimed(False, 0.0)
    assert ledger.next_write() is None
    assert ledger.used == charged(500)


def test_a_reset_that_never_reached_a_disk_holds_for_the_one_that_comes() -> None:
    ledger = ready()
    write(ledger, A, X)
    ledger.forget_all(NS.digest)
    ledger.dropped(1, True, 0.0)
    ledger.reopened(False, True, 10.0)  # another directory, perhaps an old copy
    assert ledger.used == 0
    ledger.found([(A, 500, 1), (X, 500, 2)])
    assert [ledger.holds(key, LAYOUT) for key in (A, X)] == [False, True]
    assert Drop(1, NS.digest) in taken(ledger)
    assert ledger.drops == {1: NS.digest}
    ledger.dropped(1, False, 10.0)
    assert ledger.drops == {}


def test_the_least_recently_used_go_first() -> None:
    ledger = ready(3 * ONE)
    write(ledger, A, B, C)
    ledger.evicted(A)  # until now it was in memory
    write(ledger, D)
    assert taken(ledger) == [Remove(B)]
    ledger.committed(C)  # read back
    write(ledger, X)
    assert taken(ledger) == [Remove(A)]
    assert ledger.counters["evictions"] == 2
    assert ledger.counters["bytes_evicted"] == 2 * ONE


def test_evicted_before_its_turn() -> None:
    ledger = ready()
    ledger.committed(A)
    ledger.evicted(A)
    assert ledger.next_write() is None
    assert ledger.counters["dropped_unwritten"] == 1
    ledger.evicted(B)  # never heard of


@pytest.mark.parametrize(
    ("problem", "jobs"),
    [("missing", []), ("unverified", []), ("other_layout", [Remove(A)]), ("read_errors", [Remove(A)])],
)
def test_what_could_not_be_read_is_not_found_again(problem: str, jobs: list[object]) -> None:
    ledger = ready()
    write(ledger, A)
    ledger.loaded(A, LAYOUT, problem, LAYOUT.nbytes)
    assert not ledger.holds(A, LAYOUT)
    assert taken(ledger) == jobs
    assert ledger.counters[problem] == 1
    assert ledger.used == 0


def test_the_layout_is_known_once_it_was_read() -> None:
    ledger = Ledger(100 * ONE)
    ledger.found([(A, 500, 1), (B, 500, 2)])
    assert ledger.holds(A, Layout("uint8", (1,)))
    ledger.loaded(A, LAYOUT, None, LAYOUT.nbytes)
    assert ledger.holds(A, LAYOUT)
    assert not ledger.holds(A, Layout("uint8", (1,)))
    assert not ledger.holds(A, LAYOUT)
    ledger.loaded(C, LAYOUT, None, LAYOUT.nbytes)  # gone meanwhile
    assert not ledger.holds(C, LAYOUT)


def test_the_disk_is_left_alone_longer_each_time() -> None:
    ledger, now, waits = ready(), 0.0, []
    ledger.fail(now)
    for _ in range(9):
        assert ledger.failing
        assert ledger.retry_at is not None
        waits.append(ledger.retry_at - now)
        ledger.tick(ledger.retry_at - 0.01)
        assert taken(ledger) == []
        now = ledger.retry_at
        ledger.tick(now)
        ledger.tick(now)
        assert taken(ledger) == [Reopen()]
        assert ledger.retry_at is None
        ledger.reopened(True, False, now)
    assert waits == [min(FIRST_RETRY_S * 2**i, LAST_RETRY_S) for i in range(9)]
    assert ledger.counters["outages"] == 1
    ledger.reopened(False, False, now)
    assert not ledger.failing
    write(ledger, A)
    ledger.fail(now)
    assert ledger.retry_at == now + FIRST_RETRY_S


def test_what_could_not_be_deleted_is_tried_again_unless_the_directory_is_another() -> None:
    ledger = ready()
    write(ledger, A)
    ledger.forget(A)
    assert taken(ledger) == [Remove(A)]
    ledger.removed(A, True, 0.0)
    ledger.reopened(False, False, 1.0)
    assert taken(ledger) == [Remove(A)]
    ledger.removed(A, True, 2.0)
    ledger.reopened(False, True, 3.0)
    assert taken(ledger) == []


def test_books_that_do_not_add_up_are_noticed() -> None:
    ledger = ready(ONE)
    write(ledger, A)
    ledger.used += 1
    with pytest.raises(IntegrityError, match="take"):
        ledger.check_integrity()
    ledger.used -= 1
    ledger.budget = 1
    with pytest.raises(IntegrityError, match="of 1"):
        ledger.check_integrity()
    ledger.budget = ONE
    ledger.unwritten[A] = None
    with pytest.raises(IntegrityError, match="to be written"):
        ledger.check_integrity()
    with pytest.raises(IntegrityError, match="not begun"):
        ledger.written(0, False, False, 0.0)
