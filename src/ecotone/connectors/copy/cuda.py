"""The copy engine of a CUDA device: a stream for each direction, an event for each job."""

# torch.cuda has no annotations for most of what is called here.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import torch

from ecotone.connectors.copy.engine import CopyDone, CopyEngine, CopyJob, Direction, ended
from ecotone.connectors.rows import region_bytes
from ecotone.errors import ResourceError


class CudaCopyEngine(CopyEngine):
    """Copies between the device and host memory that it page-locks, so that the device's copy engines do it.

    Args:
        device: with its index, e.g. ``cuda:0``.
        host: uint8 ``[n]``: all the host memory that jobs name. It stays mapped until ``close`` returned.

    Raises:
        ResourceError: the driver refuses to page-lock ``host``.
    """

    def __init__(self, device: str, host: torch.Tensor) -> None:
        self._device = torch.device(device)
        self._host = host
        self._streams = {direction: torch.cuda.Stream(self._device) for direction in Direction}
        self._under_way: dict[CopyJob, tuple[torch.cuda.Event, torch.cuda.Event]] = {}
        self._done: list[CopyDone] = []
        self._closed = False
        with torch.cuda.device(self._device):
            code = int(torch.cuda.cudart().cudaHostRegister(host.data_ptr(), host.numel(), 0))
        if code != 0:
            raise ResourceError(
                f"cannot page-lock {host.numel()} bytes of the region for {device}: CUDA error {code}"
            )

    def submit(self, job: CopyJob) -> None:
        if self._closed:
            self._done.append(ended(job, "closed", 0.0))
            return
        stream = self._streams[job.direction]
        # A source was just computed, or a destination just allocated from memory that kernels before still use.
        stream.wait_stream(torch.cuda.current_stream(self._device))
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        try:
            with torch.inference_mode(), torch.cuda.stream(stream):
                begin.record(stream)
                _enqueue(job)
                end.record(stream)
        except RuntimeError as failure:
            stream.synchronize()  # copies of this job that were already enqueued
            self._done.append(ended(job, _describe(failure), 0.0))
            return
        self._under_way[job] = begin, end

    def fence(self, job: CopyJob) -> None:
        events = self._under_way.get(job)
        if events is not None:
            torch.cuda.current_stream(self._device).wait_event(events[1])

    def poll(self) -> list[CopyDone]:
        for job, (begin, end) in list(self._under_way.items()):
            try:
                if not end.query():
                    continue
                done = ended(job, None, begin.elapsed_time(end) / 1e3)
            except RuntimeError as failure:  # the device is lost: nothing runs on it any more
                done = ended(job, _describe(failure), 0.0)
            del self._under_way[job]
            self._done.append(done)
        done_now, self._done = self._done, []
        return done_now

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            for stream in self._streams.values():
                stream.synchronize()
        finally:
            with torch.cuda.device(self._device):
                torch.cuda.cudart().cudaHostUnregister(self._host.data_ptr())


def _enqueue(job: CopyJob) -> None:
    """Put the job's copies onto the current stream."""
    rows, position = job.rows.reshape(-1).view(torch.uint8), 0
    for piece in job.memory:
        inside, outside = region_bytes(piece), rows[position : position + len(piece)]
        if job.direction is Direction.SAVE:
            inside.copy_(outside, non_blocking=True)
        else:
            outside.copy_(inside, non_blocking=True)
        position += len(piece)


def _describe(failure: RuntimeError) -> str:
    return f"{type(failure).__name__}: {failure}"
