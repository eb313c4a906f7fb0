"""The connector with saves that can be held: ``"ec_connector_module_path": "late_connector"``."""

from __future__ import annotations

from typing import Any

from late_saves import LateCopyEngine

from ecotone.connectors import factory
from ecotone.vllm.connector import EcotoneConnector


class LateConnector(EcotoneConnector):  # type: ignore[misc]
    """In a process that made one, saves go through ``late_saves.GATE``."""

    def __init__(self, *args: Any) -> None:
        factory.ThreadCopyEngine = LateCopyEngine  # type: ignore[misc]
        super().__init__(*args)
