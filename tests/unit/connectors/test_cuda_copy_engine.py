"""What the CUDA engine asks of the driver, and in which order, with a driver that only keeps a record.

That real copies are right is for ``tests/gpu/run.py``, on a real device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

import pytest
import torch

from ecotone.connectors.copy.cuda import CudaCopyEngine
from ecotone.connectors.copy.engine import CopyJob, Direction
from ecotone.errors import ResourceError

DEVICE = "cuda:0"


class FakeCuda:
    """Streams and events by number; an event has happened when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.happened: set[str] = set()
        self.refuse_registration = 0
        self.lost = False
        names = {kind: count(1) for kind in ("stream", "event")}
        outer = self

        class Stream:
            def __init__(self, device: object = None, name: str = "") -> None:
                self.name = name or f"stream{next(names['stream'])}"

            def wait_stream(self, other: Stream) -> None:
                outer.log.append(f"{self.name} waits for {other.name}")

            def wait_event(self, event: Event) -> None:
                outer.log.append(f"{self.name} waits for {event.name}")

            def synchronize(self) -> None:
                outer.log.append(f"synchronize {self.name}")

        class Event:
            def __init__(self, enable_timing: bool = False) -> None:
                self.name = f"event{next(names['event'])}"

            def record(self, stream: Stream) -> None:
                outer.log.append(f"record {self.name} on {stream.name}")

            def query(self) -> bool:
                if outer.lost:
                    raise RuntimeError("CUDA error: device lost")
                return self.name in outer.happened

            def elapsed_time(self, end: Event) -> float:
                return 250.0

        class Runtime:
            @staticmethod
            def cudaHostRegister(pointer: int, size: int, flags: int) -> int:
                outer.log.append(f"lock {size} bytes")
                return outer.refuse_registration

            @staticmethod
            def cudaHostUnregister(pointer: int) -> int:
                outer.log.append("unlock")
                return 0

        @contextmanager
        def use(what: object) -> Iterator[None]:
            yield

        compute = Stream(name="compute")
        fakes = {"Stream": Stream, "Event": Event, "cudart": Runtime, "device": use, "stream": use}
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: compute)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


def job_of(job_id: int, direction: Direction = Direction.SAVE) -> CopyJob:
    """A job over memory of the bytes 0 to 7 in two pieces, with rows of ones."""
    memory = memoryview(bytearray(range(8)))
    if direction is Direction.LOAD:
        memory = memory.toreadonly()
    return CopyJob(job_id, direction, [memory[:2], memory[2:]], torch.ones(2, 4, dtype=torch.uint8))


def test_a_copy_follows_the_compute_before_it_and_its_event_follows_the_copy(cuda: FakeCuda) -> None:
    engine = CudaCopyEngine(DEVICE, torch.zeros(64, dtype=torch.uint8))
    save, load = job_of(1), job_of(2, Direction.LOAD)
    engine.submit(save)
    engine.submit(load)
    assert cuda.log == [
        "lock 64 bytes",
        "stream1 waits for compute",
        "record event1 on stream1",
        "record event2 on stream1",
        "stream2 waits for compute",
        "record event3 on stream2",
        "record event4 on stream2",
    ]
    engine.fence(load)
    assert cuda.log[-1] == "compute waits for event4"
    assert engine.poll() == []
    cuda.happened.add("event4")
    (done,) = engine.poll()
    assert (done.job, done.error, done.seconds) == (load, None, 0.25)
    assert load.rows.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    engine.fence(load)  # over: there is nothing to wait for
    assert cuda.log[-1] == "compute waits for event4"
    cuda.happened.add("event2")
    assert [done.job for done in engine.poll()] == [save]
    assert b"".join(map(bytes, save.memory)) == b"\1" * 8


def test_close_waits_for_both_streams_before_the_memory_is_unlocked(cuda: FakeCuda) -> None:
    engine = CudaCopyEngine(DEVICE, torch.zeros(64, dtype=torch.uint8))
    engine.submit(job_of(1))
    engine.close()
    engine.close()
    assert cuda.log[-3:] == ["synchronize stream1", "synchronize stream2", "unlock"]
    cuda.happened.add("event2")
    assert [done.error for done in engine.poll()] == [None]
    engine.submit(job_of(2))
    assert [(done.job.job_id, done.error) for done in engine.poll()] == [(2, "closed")]


def test_a_copy_that_cannot_be_enqueued_is_an_error(cuda: FakeCuda) -> None:
    engine = CudaCopyEngine(DEVICE, torch.zeros(64, dtype=torch.uint8))
    engine.submit(CopyJob(1, Direction.LOAD, [memoryview(bytearray(3))], torch.zeros(2, dtype=torch.uint8)))
    assert cuda.log[-1] == "synchronize stream2"
    (done,) = engine.poll()
    assert "size of tensor" in (done.error or "")


def test_a_lost_device_ends_every_copy(cuda: FakeCuda) -> None:
    engine = CudaCopyEngine(DEVICE, torch.zeros(64, dtype=torch.uint8))
    engine.submit(job_of(1))
    engine.submit(job_of(2))
    cuda.lost = True
    assert ["device lost" in (done.error or "") for done in engine.poll()] == [True, True]
    assert engine.poll() == []


def test_memory_that_cannot_be_locked_is_refused(cuda: FakeCuda) -> None:
    cuda.refuse_registration = 2
    with pytest.raises(ResourceError, match="64 bytes of the region for cuda:0: CUDA error 2"):
        CudaCopyEngine(DEVICE, torch.zeros(64, dtype=torch.uint8))
