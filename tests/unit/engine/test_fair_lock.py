"""First come, first served; and one that gives up does not hold up the others."""

from __future__ import annotations

import threading
import time

import pytest

from ecotone.engine.fair_lock import FairLock


def wait_for_queue(lock: FairLock, length: int) -> None:
    """Until so many hold or want the lock: entering the queue notifies nobody, so look again."""
    deadline = time.monotonic() + 30
    while len(lock._queue) < length:
        assert time.monotonic() < deadline


def test_the_order_is_that_of_asking() -> None:
    lock, order, threads = FairLock(), [], []

    def take(number: int) -> None:
        with lock:
            order.append(number)

    with lock:
        for number in range(5):
            threads.append(threading.Thread(target=take, args=(number,)))
            threads[-1].start()
            wait_for_queue(lock, number + 2)
    for thread in threads:
        thread.join()
    assert order == list(range(5))


def test_a_thread_that_takes_it_again_and_again_lets_others_in() -> None:
    lock, inside = FairLock(), threading.Event()

    def take() -> None:
        with lock:
            inside.set()

    thread = threading.Thread(target=take)
    with lock:
        thread.start()
        wait_for_queue(lock, 2)
    with lock:
        assert inside.is_set()
    thread.join()


def test_an_error_inside_gives_it_back() -> None:
    lock = FairLock()
    with pytest.raises(ValueError, match="inside"), lock:
        raise ValueError("inside")
    with lock:
        pass


def test_an_interrupt_while_waiting_leaves_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    lock, left = FairLock(), []

    def interrupted(_: object) -> bool:
        raise KeyboardInterrupt

    def give_up() -> None:
        with pytest.raises(KeyboardInterrupt):
            lock.__enter__()
        left.append(True)

    with lock:
        monkeypatch.setattr(lock._turn, "wait_for", interrupted)
        thread = threading.Thread(target=give_up)
        thread.start()
        thread.join()
        monkeypatch.undo()
        assert left == [True]
        assert lock.num_waiting == 0
    with lock:
        pass


def test_a_thread_interrupted_while_it_gave_it_back_does_not_wait_for_itself() -> None:
    lock, inside = FairLock(), threading.Event()

    def take() -> None:
        with lock:
            inside.set()

    lock.__enter__()  # and never given back
    thread = threading.Thread(target=take)
    thread.start()
    wait_for_queue(lock, 2)
    with lock:
        assert inside.is_set()  # it came first
    thread.join()
