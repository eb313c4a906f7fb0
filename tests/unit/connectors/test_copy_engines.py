"""The copier thread, the scripted engine, and what is refused where there is no CUDA device."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from ecotone.connectors.copy.engine import CopyEngine, CopyJob, Direction
from ecotone.connectors.copy.thread import ThreadCopyEngine
from ecotone.testing.copies import ScriptedCopyEngine


class Gate(torch.Tensor):
    """Rows whose copy waits until the test opens it."""

    opened: threading.Event
    begun: threading.Event

    @staticmethod
    def of(nbytes: int) -> Gate:
        gate = torch.ones(nbytes, dtype=torch.uint8).as_subclass(Gate)
        gate.opened, gate.begun = threading.Event(), threading.Event()
        return gate

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is torch.Tensor.view:
            args[0].begun.set()
            assert args[0].opened.wait(30)
        return super().__torch_function__(func, types, args, kwargs or {})


def job_of(job_id: int, rows: torch.Tensor | None = None, direction: Direction = Direction.SAVE) -> CopyJob:
    """A job whose bytes are all ``job_id``, over memory of zeros in two pieces."""
    rows = torch.full((4, 64), job_id, dtype=torch.uint8) if rows is None else rows
    memory = memoryview(bytearray(rows.nbytes))
    return CopyJob(job_id, direction, [memory[:64], memory[64:]], rows)


def arrived(job: CopyJob) -> bool:
    inside = b"".join(map(bytes, job.memory))
    return inside == bytes(job.rows.as_subclass(torch.Tensor).reshape(-1).tolist())


def test_a_copy_runs_beside_the_caller_and_says_when_it_ended() -> None:
    woken = threading.Event()
    engine = ThreadCopyEngine(woken.set)
    gate = Gate.of(64)
    job = job_of(1, gate)
    engine.submit(job)
    assert gate.begun.wait(30)
    assert engine.poll() == []
    assert not woken.is_set()
    gate.opened.set()
    assert woken.wait(30)
    (done,) = engine.poll()
    assert (done.job, done.error) == (job, None)
    assert done.seconds > 0
    assert arrived(job)
    assert engine.poll() == []
    engine.close()


def test_a_fence_does_not_queue_behind_the_copies_before_it() -> None:
    engine = ThreadCopyEngine(lambda: None)
    gate = Gate.of(64)
    slow, urgent = job_of(1, gate), job_of(2)
    engine.submit(slow)
    assert gate.begun.wait(30)
    engine.submit(urgent)
    engine.fence(urgent)
    assert arrived(urgent)
    assert [done.job for done in engine.poll()] == [urgent]
    gate.opened.set()
    engine.fence(slow)
    assert arrived(slow)
    assert [done.job for done in engine.poll()] == [slow]
    engine.fence(slow)  # long done
    assert engine.poll() == []
    engine.close()


def test_a_fence_waits_for_a_copy_that_has_begun() -> None:
    engine = ThreadCopyEngine(lambda: None)
    gate = Gate.of(64)
    job = job_of(1, gate)
    engine.submit(job)
    assert gate.begun.wait(30)
    opener = threading.Timer(0.01, gate.opened.set)
    opener.start()
    engine.fence(job)
    assert gate.opened.is_set()
    assert arrived(job)
    opener.join()
    engine.close()


def test_close_waits_for_the_running_copy_and_drops_the_rest() -> None:
    engine = ThreadCopyEngine(lambda: None)
    gate = Gate.of(64)
    running, queued = job_of(1, gate), job_of(2)
    engine.submit(running)
    assert gate.begun.wait(30)
    engine.submit(queued)
    closer = threading.Thread(target=engine.close)
    closer.start()
    gate.opened.set()
    closer.join(30)
    assert not closer.is_alive()
    done = {d.job.job_id: d.error for d in engine.poll()}
    assert done == {1: None, 2: "closed"}
    assert arrived(running)
    assert not arrived(queued)
    engine.submit(queued)
    assert [(d.job, d.error) for d in engine.poll()] == [(queued, "closed")]
    assert not arrived(queued)
    engine.close()


def test_close_without_any_job_is_nothing() -> None:
    engine = ThreadCopyEngine(lambda: None)
    engine.close()
    engine.close()
    assert engine.poll() == []


def test_a_copy_that_cannot_be_made_is_an_error_and_the_next_one_goes_on() -> None:
    woken = threading.Semaphore(0)
    engine = ThreadCopyEngine(woken.release)
    wrong = CopyJob(1, Direction.LOAD, [memoryview(b"abc")], torch.zeros(2, dtype=torch.uint8))
    right = job_of(2)
    engine.submit(wrong)
    engine.submit(right)
    assert woken.acquire(timeout=30)
    assert woken.acquire(timeout=30)
    first, second = engine.poll()
    assert "could not broadcast" in (first.error or "")
    assert second.error is None
    assert arrived(right)
    engine.close()


@pytest.mark.parametrize("make", [lambda: ThreadCopyEngine(lambda: None), ScriptedCopyEngine])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
def test_every_piece_is_copied_both_ways(make: Callable[[], CopyEngine], dtype: torch.dtype) -> None:
    engine = make()
    rows = torch.arange(6 * 32).view(6, 32).to(dtype)
    memory = memoryview(bytearray(rows.nbytes + 64))
    pieces = [memory[64:128], memory[0:64], memory[128 : rows.nbytes + 64]][: 3 if rows.nbytes > 128 else 2]
    pieces[-1] = pieces[-1][: rows.nbytes - sum(map(len, pieces[:-1]))]
    save = CopyJob(1, Direction.SAVE, pieces, rows)
    engine.submit(save)
    engine.fence(save)
    back = torch.zeros_like(rows)
    load = CopyJob(2, Direction.LOAD, [piece.toreadonly() for piece in pieces], back)
    engine.submit(load)
    engine.fence(load)
    assert torch.equal(back, rows)
    assert b"".join(map(bytes, pieces)) == rows.view(torch.uint8).numpy().tobytes()
    assert [(done.job, done.error) for done in engine.poll()] == [(save, None), (load, None)]
    engine.close()


def test_the_scripted_engine_copies_nothing_before_it_is_told() -> None:
    engine = ScriptedCopyEngine()
    jobs = {n: job_of(n) for n in (1, 2, 3)}
    for job in jobs.values():
        engine.submit(job)
    assert engine.jobs == [1, 2, 3]
    assert not any(arrived(job) for job in jobs.values())
    engine.complete(2, seconds=0.5)
    engine.fail(3, "broken")
    assert [(d.job.job_id, d.error, d.seconds) for d in engine.poll()] == [(2, None, 0.5), (3, "broken", 0.0)]
    assert [arrived(job) for job in jobs.values()] == [False, True, False]
    engine.fence(jobs[2])
    engine.close()
    assert [(d.job.job_id, d.error) for d in engine.poll()] == [(1, "closed")]
    engine.submit(jobs[3])
    assert [(d.job.job_id, d.error) for d in engine.poll()] == [(3, "closed")]
