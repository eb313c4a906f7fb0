"""One rank of ``test_barrier_processes``: ``python barrier_rank.py ENGINE_ID RANK``. Steps come on stdin, reports
go to stdout; both with their length before them. The rows of a key are its first byte plus the row's number."""

from __future__ import annotations

import os
import struct
import sys
from typing import Any, BinaryIO

import torch

from ecotone.config import ECConfig
from ecotone.connectors.factory import create_factory
from ecotone.connectors.messages import EcotoneStepMetadata
from ecotone.protocol.connector import ECWorkerContext, EncoderSpec
from ecotone.protocol.outputs import ECConnectorOutput
from ecotone.protocol.step import SchedulerOutput
from ecotone.protocol.wire import decode, encode

SPEC = EncoderSpec(hidden_size=8, levels=1, dtype="float32")


def rows_of(key: str, num_rows: int) -> torch.Tensor:
    value = int(key.partition(":")[2][:2], 16) + torch.arange(num_rows, dtype=torch.float32)
    return value[:, None].expand(num_rows, SPEC.width).contiguous()


def send(stream: BinaryIO, data: bytes) -> None:
    stream.write(struct.pack("<I", len(data)) + data)
    stream.flush()


def receive(stream: BinaryIO) -> bytes | None:
    head = stream.read(4)
    return stream.read(struct.unpack("<I", head)[0]) if len(head) == 4 else None


def step(worker: Any, cache: dict[str, torch.Tensor], output: SchedulerOutput) -> ECConnectorOutput:
    """One step: loads are checked byte by byte, what is to be saved is encoded first."""
    cache.clear()
    meta = output.ec_connector_metadata
    failed = set()
    if isinstance(meta, EcotoneStepMetadata):
        worker.bind_connector_metadata(meta)
        worker.start_load_caches(cache)
        worker.wait_for_loads(cache)
        for order in meta.loads:
            rows = cache.get(order.key)
            if rows is None or not torch.equal(rows, rows_of(order.key, order.layout.shape[0])):
                failed.add(order.key)
        rows = None
        for order in meta.saves:
            cache[order.key] = rows_of(order.key, order.layout.shape[0])
            worker.save_caches(cache, order.key)
        worker.clear_connector_metadata()
    return ECConnectorOutput(
        failed_loads=failed,
        ec_connector_worker_meta=worker.build_connector_worker_meta(),
        ec_connector_stats=worker.get_ec_connector_stats(),
    )


def main(engine_id: str, rank: int) -> None:
    config = ECConfig(options={"memory": 1 << 16, "prefault": False})
    context = ECWorkerContext(
        engine_id=engine_id,
        role=config.role,
        options=config.options,
        rank=rank,
        epoch=os.getpid(),
        encoder=SPEC,
        device="cpu",
        wakeup=lambda: None,
    )
    worker = create_factory(config).worker_half(context)
    cache: dict[str, torch.Tensor] = {}
    send(sys.stdout.buffer, b"ready")
    while (data := receive(sys.stdin.buffer)) is not None:
        send(sys.stdout.buffer, encode(step(worker, cache, decode(data, SchedulerOutput))))
    cache.clear()
    worker.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
