"""A connector that says how much work is pending, and counts the steps that settle it."""

from __future__ import annotations

import threading
from typing import Any, ClassVar

from ecotone.errors import ConfigError, IntegrityError
from ecotone.protocol.connector import (
    CacheLookup,
    ECConnectorFactory,
    ECItem,
    ECRole,
    ECSchedulerConnector,
    ECSchedulerContext,
    ECWorkerConnector,
    ECWorkerContext,
)


class PendingConnector(ECSchedulerConnector):
    """Each pass settles one of ``pending``; ``settled`` is set when somebody hears that none is left."""

    def __init__(self, context: ECSchedulerContext) -> None:
        super().__init__(context)
        self.context = context
        self.pending = 0
        self.passes = 0
        self.broken = False
        self.fault: Exception | None = None
        self.settled = threading.Event()
        self.log: list[str] = []

    def lookup(self, req_id: str, item: ECItem) -> CacheLookup:
        return CacheLookup.MISS

    def update_state_after_alloc(self, req_id: str, item: ECItem) -> None:
        pass

    def build_connector_meta(self) -> None:
        self.passes += 1
        self.pending = max(0, self.pending - 1)

    def has_pending_work(self) -> bool:
        if self.fault is not None:
            raise self.fault
        if not self.pending:
            self.settled.set()
        return self.pending > 0

    def reset_cache(self, namespace: str) -> None:
        self.log.append(f"reset {namespace}")

    def check_integrity(self) -> None:
        if self.broken:
            raise IntegrityError("broken")

    def statistics(self) -> dict[str, float]:
        return {"hits": 1, "node.entries": 2}

    def rank_statistics(self) -> dict[int, dict[str, float]]:
        return {0: {"saves": 3}}

    def shutdown(self) -> None:
        self.log.append("shutdown")


class PendingFactory(ECConnectorFactory):
    """Made by name, so the latest connector is found here."""

    latest: ClassVar[PendingConnector]

    def validate(self, role: ECRole, options: dict[str, Any]) -> None:
        if "refuse" in options:
            raise ConfigError("refused by validate")

    def scheduler_half(self, context: ECSchedulerContext) -> ECSchedulerConnector:
        if "fail" in context.options:
            raise ConfigError("refused by the scheduler half")
        PendingFactory.latest = PendingConnector(context)
        return PendingFactory.latest

    def worker_half(self, context: ECWorkerContext) -> ECWorkerConnector:
        raise NotImplementedError
