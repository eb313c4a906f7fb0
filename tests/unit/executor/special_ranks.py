"""Ranks that do what ranks should not, made by name in processes of their own."""

from __future__ import annotations

import os
import signal
from functools import partial
from typing import Any

from ecotone.connectors.factory import ATTACH_TIMEOUT_S, EcotoneConnectorFactory
from ecotone.connectors.worker import EcotoneWorkerConnector
from ecotone.executor.rank import Rank
from ecotone.node.attach import attach_region
from ecotone.protocol.connector import ECWorkerConnector, ECWorkerContext
from ecotone.testing.copies import ScriptedCopyEngine


def ends_at_once(config: Any, ec_factory: Any, engine_id: str, spec: Any, epoch: int, wakeup: Any) -> Rank:
    """Rank 1 ends as it begins; rank 0 is held up in the meantime, as in a collective."""
    if spec.rank == 1:
        os._exit(7)
    signal.pause()
    raise AssertionError


class Chatty:
    """Answers ``statistics`` with more than fits into a socket's buffer a few times over, and a lot of it."""

    takes_part = False

    def call(self, method: str, *args: Any) -> Any:
        return {f"{'x' * 60}{number}": 1.0 for number in range(1700)} if method == "statistics" else None


def chatty(*_: Any) -> Rank:
    return Chatty()


class StalledFactory(EcotoneConnectorFactory):
    """The Ecotone connector; the copies of rank 1 begin and never end."""

    def worker_half(self, context: ECWorkerContext) -> ECWorkerConnector:
        if context.rank != 1:
            return super().worker_half(context)
        return EcotoneWorkerConnector(
            context,
            views=False,
            one_mapping=False,
            attach=lambda writable: attach_region(context.engine_id, ATTACH_TIMEOUT_S, writable=writable),
            make_engine=partial(lambda _: ScriptedCopyEngine()),
        )
