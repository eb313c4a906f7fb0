"""A rank's place among those that compute one model with it, and how it gets there."""

from __future__ import annotations

import logging
import os
import socket
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from ecotone.errors import ResourceError
from ecotone.worker.model import Model
from ecotone.worker.parallel.division import check_division
from ecotone.worker.parallel.encoder import DividedEncoder, Encode, ReplicatedEncoder
from ecotone.worker.parallel.group import DistributedGroup
from ecotone.worker.parallel.pipeline import DistributedStage, Stage, cut_stage
from ecotone.worker.parallel.tensor import shard
from ecotone.worker.ranks import RankSpec

logger = logging.getLogger(__name__)

# A rank that dies is noticed by its executor at once; this ends the wait for one that lives and does not answer.
TIMEOUT = timedelta(minutes=10)
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


class Place:
    """What a rank needs to compute its part of every step. Made by ``join``; ``leave`` ends it.

    Attributes:
        group: the ranks of its stage.
    """

    def __init__(self, spec: RankSpec, group: DistributedGroup) -> None:
        self._spec = spec
        self.group = group

    def divide(self, model: Any) -> None:
        """Take from a transformers model what other ranks hold.

        Raises:
            ConfigError: it cannot be divided among so many.
            UnsupportedModelError: there is no plan for it.
        """
        spec = self._spec
        check_division(model.config, tensor=spec.tp_size, stages=spec.pp_size)
        if spec.pp_size > 1:
            cut_stage(model, spec.pp_size, spec.pp_rank)
        if spec.tp_size > 1:
            shard(model, self.group)

    def encoder(self, tower: Encode, model: Model, mode: str) -> Encode:
        """How this rank's stage encodes, given how this rank does; ``mode`` is ``mm_encoder_tp_mode``."""
        if self._spec.tp_size == 1:
            return tower
        if mode == "data":
            return DividedEncoder(tower, self.group, model.info.encoder, model.device)
        if self._spec.rank == 0:
            logger.warning(
                "mm_encoder_tp_mode='weights': transformers has no tensor-parallel plan for the encoder of %s, so "
                "each rank holds and runs all of it; 'data' divides the work",
                model.info.architecture,
            )
        return ReplicatedEncoder(tower, self.group)

    def stage(self, model: Model) -> Stage:
        """The way to the neighbouring stages."""
        spec = self._spec
        before = spec.rank - spec.tp_size if spec.pp_rank > 0 else None
        behind = spec.rank + spec.tp_size if spec.pp_rank < spec.pp_size - 1 else None
        dtype = getattr(torch, model.info.encoder.dtype)
        return DistributedStage(before, behind, model.hidden_size, dtype, model.device)

    def leave(self) -> None:
        """Give up the connections to the other ranks. Idempotent."""
        if dist.is_initialized():
            dist.destroy_process_group()


def join(spec: RankSpec, device: torch.device) -> Place:
    """Meet the other ranks; returns when all are there. A process is in one place at a time.

    Args:
        spec: with an ``init_method``: ``file://<path of a file that does not exist>`` or ``tcp://<host>:<port>``.

    Raises:
        ResourceError: they do not come together.
    """
    url = urlsplit(spec.init_method)
    if url.scheme == "file" or url.hostname in _LOOPBACK:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # or it listens on the address of the host's name
    try:
        dist.init_process_group(
            "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl",
            store=_store(spec),
            rank=spec.rank,
            world_size=spec.world_size,
            timeout=TIMEOUT,
            device_id=None if device.type == "cpu" else device,
        )
        groups = [
            dist.new_group(range(first, first + spec.tp_size), timeout=TIMEOUT)
            for first in range(0, spec.world_size, spec.tp_size)
        ]
    except (RuntimeError, ValueError, OSError) as error:
        raise ResourceError(f"rank {spec.rank}: the ranks did not meet at {spec.init_method}: {error}") from error
    return Place(spec, DistributedGroup(groups[spec.pp_rank]))


def _store(spec: RankSpec) -> Any:
    url = urlsplit(spec.init_method)
    if url.scheme == "file":
        return dist.FileStore(url.path, spec.world_size)  # type: ignore[attr-defined]
    if url.scheme != "tcp" or not url.hostname or not url.port:
        raise ValueError("neither file://<path> nor tcp://<host>:<port>")
    if spec.rank > 0:
        return dist.TCPStore(url.hostname, url.port, spec.world_size, False, TIMEOUT)  # type: ignore[attr-defined]
    # Given a port alone, it would listen on every address there is.
    listener = socket.create_server((url.hostname, url.port))
    return dist.TCPStore(  # type: ignore[attr-defined]
        url.hostname,
        url.port,
        spec.world_size,
        True,
        TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
