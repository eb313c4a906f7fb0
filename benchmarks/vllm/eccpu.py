"""The worker half of vLLM's ``ECCPUConnector``, driven without an engine.

The CPU wheel lacks the operation that it copies with, and its stand-ins for streams and events lack two methods.
Here the copy is a ``memmove``, made before the call returns, and an event has always happened; rank and groups are
those of a single worker. So this is what the connector does on the host around its copies, not a GPU's copy.
"""

from __future__ import annotations

import ctypes
import os
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import ECTransferConfig
from vllm.distributed.ec_transfer.ec_connector.cpu import worker
from vllm.distributed.ec_transfer.ec_connector.cpu.common import ECCPUConnectorMetadata
from vllm.v1.worker.cpu import shm


class EccpuRank:
    """An ``ECCPUWorker`` with a region for entries of ``shape``, bfloat16."""

    def __init__(self, shape: tuple[int, int]) -> None:
        _stand_in()
        self._shape, self._blocks = shape, list(range(shape[0]))
        self._worker = worker.ECCPUWorker(_config(shape))
        self._transfer_id = 0

    def save(self, rows: torch.Tensor) -> None:
        """Store ``rows`` as the entry."""
        meta = ECCPUConnectorMetadata(saves={"entry": self._blocks})
        self._worker.save_caches({"entry": rows}, "entry", meta)
        self._worker.flush_saves()
        self._expect("completed_saves", ["entry"])

    def load(self) -> torch.Tensor:
        """The entry's rows."""
        self._transfer_id += 1
        loads = {"entry": (self._transfer_id, self._blocks, self._shape)}
        cache: dict[str, torch.Tensor] = {}
        self._worker.start_load_caches(cache, ECCPUConnectorMetadata(loads=loads))
        self._expect("completed_loads", [self._transfer_id])
        return cache["entry"]

    def _expect(self, name: str, expected: list[Any]) -> None:
        meta = self._worker.build_connector_worker_meta()
        if getattr(meta, name, None) != expected:
            raise RuntimeError(f"expected {name} {expected}, got {meta}")

    def close(self) -> None:
        """Remove the region."""
        self._worker.shutdown()


def _config(shape: tuple[int, int]) -> Any:
    rows, width = shape
    size = rows * width * 2
    return SimpleNamespace(
        ec_transfer_config=ECTransferConfig(
            ec_connector="ECCPUConnector", ec_role="ec_both", ec_connector_extra_config={"ec_cpu_bytes": size}
        ),
        model_config=SimpleNamespace(dtype=torch.bfloat16, get_inputs_embeds_size=lambda: width),
        parallel_config=SimpleNamespace(data_parallel_index=0),
        instance_id=f"bench{os.getpid()}",
    )


def _stand_in() -> None:
    worker.swap_blocks_batch = _memmove
    worker.get_tensor_model_parallel_rank = lambda: 0
    worker.get_pcp_group = lambda: SimpleNamespace(rank_in_group=0)
    shm._EventPlaceholder.query = lambda _: True
    shm._EventPlaceholder.elapsed_time = lambda _, __: 0.0


def _memmove(sources: Any, targets: Any, sizes: Any, **_: Any) -> None:
    for source, target, size in zip(sources.tolist(), targets.tolist(), sizes.tolist(), strict=True):
        ctypes.memmove(target, source, size)
