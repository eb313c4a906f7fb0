"""A node on a thread, and short words for its clients."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

from ecotone.errors import ResourceError
from ecotone.node import AnyAnswer, AnyOp, Layout, Settled
from ecotone.node.server.client import SharedNodeExchange
from ecotone.node.server.messages import Hello
from ecotone.node.server.node import SharedNode
from ecotone.node.server.tool import NodeTool

PATIENCE_S = 30.0
UNIT = Layout("uint8", (64,))
NAMESPACE = "0" * 32


def key(name: str, namespace: str = NAMESPACE) -> str:
    return f"{namespace}:{sha256(name.encode()).hexdigest()}"


class Running:
    """A node that serves on a thread of the test's process."""

    def __init__(self, path: Path, size: int = 64 * 64, **options: object) -> None:
        tenants = options.pop("tenants", {"": size})
        self.path = path
        self.node = SharedNode(path, tenants, prefault=False, **options)  # type: ignore[arg-type]
        self.thread = threading.Thread(target=self.node.run)
        self.thread.start()

    def stop(self) -> None:
        """End it; its books must be right."""
        if self.thread.is_alive():
            self.node.stop()
            self.thread.join()
            self.node.check_integrity()
        self.node.close()

    def scheduler(
        self, name: str = "engine", ranks: tuple[int, ...] = (0,), **options: object
    ) -> SharedNodeExchange:
        exchange = SharedNodeExchange(self.path, Hello(name, "scheduler", ranks=ranks), **options)  # type: ignore
        exchange.wait_until_connected(PATIENCE_S)
        return exchange

    def facts(self, engine_id: str = "engine") -> float:
        """How many facts of an engine's workers it heard."""
        with NodeTool(self.path) as tool:
            counters = {engine.engine_id: engine.counters for engine in tool.describe().engines}
        return counters[engine_id].get("facts", 0)

    def statistics(self, tenant: str = "") -> dict[str, float]:
        with NodeTool(self.path) as tool:
            return tool.describe().tenants[tenant]


def ask(exchange: SharedNodeExchange, *ops: AnyOp) -> list[AnyAnswer]:
    """Hand over, and wait for the answers; not the news that come along."""
    return heard(exchange, *ops)[0]


def heard(exchange: SharedNodeExchange, *ops: AnyOp) -> tuple[list[AnyAnswer], list[Settled]]:
    """Hand over, and wait for the answers; with the news that came along."""
    exchange.submit(ops)
    exchange.flush()
    answers: list[AnyAnswer] = []
    news: list[Settled] = []

    def poll() -> None:
        for answer in exchange.poll():
            if isinstance(answer, Settled):
                news.append(answer)
            else:
                answers.append(answer)

    wait_for(lambda: len(answers) >= len(ops), poll)
    return answers, news


def wait_for(condition: Callable[[], object], meanwhile: Callable[[], object] = lambda: None) -> object:
    """What ``condition`` gives as soon as that is something."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        meanwhile()
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline
        time.sleep(0.001)


def is_refused(make: Callable[[], object]) -> str:
    """The error's text."""
    try:
        make()
    except ResourceError as error:
        return str(error)
    raise AssertionError("it was not refused")
