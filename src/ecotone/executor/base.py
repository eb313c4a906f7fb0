"""How a step reaches the ranks and how their answers come back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from ecotone.protocol.connector import Participant
from ecotone.protocol.outputs import ModelRunnerOutput
from ecotone.protocol.step import SchedulerOutput


class Executor(ABC):
    """Drives every rank of one engine. Not thread-safe: one caller at a time."""

    @abstractmethod
    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        """Run one step on every rank.

        Returns the output rank's result with every rank's reports folded onto it, or ``None`` when the step
        goes on in ``sample_tokens``.
        """

    @abstractmethod
    def sample_tokens(self) -> ModelRunnerOutput:
        """Finish the step that ``execute_model`` answered with ``None``."""

    @abstractmethod
    def collective_rpc(self, method: str, *args: Any) -> Sequence[Any]:
        """Call ``method`` by name on every rank; the results in rank order."""

    @abstractmethod
    def participants(self) -> tuple[Participant, ...]:
        """The ranks that take part in EC transfers, by identity."""

    @abstractmethod
    def init_ec_output_aggregator(self) -> None:
        """Fold EC reports from now on; called only when an EC connector is configured."""

    @abstractmethod
    def init_kv_output_aggregator(self, expected_finished_count: int) -> None:
        """Fold KV reports from now on; called only when a KV connector is configured."""

    @abstractmethod
    def wait_for_progress(self, timeout_s: float) -> None:
        """Block until some rank has something to report outside a step, or ``timeout_s`` went by."""

    @abstractmethod
    def check_health(self) -> None:
        """Raise what is wrong with a rank, if anything."""

    @abstractmethod
    def shutdown(self) -> None:
        """End every rank and give back what they held. Idempotent."""
