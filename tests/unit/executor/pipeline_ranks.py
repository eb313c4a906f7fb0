"""Two pipeline stages that play what a step does, each in a process of its own. ``config.model`` is a FIFO by
which the second stage waits for the first, and ``engine_id`` the step in which it ends."""

from __future__ import annotations

import os
from typing import Any

from ecotone.executor.rank import Rank
from ecotone.protocol.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput
from ecotone.protocol.step import SchedulerOutput


class PlayedStage:
    """The second stage finishes step 1 only after the first stage began step 2. A pipeline that waits for the
    result of one step before it orders the next never gets there."""

    takes_part = False

    def __init__(self, fifo: str, rank: int, ends_in: int) -> None:
        self._fifo = fifo
        self._rank = rank
        self._ends_in = ends_in

    def call(self, method: str, *args: Any) -> Any:
        return self.execute_step(*args) if method == "execute_step" else None

    def execute_step(self, order: SchedulerOutput) -> ModelRunnerOutput:
        if self._rank == 0:
            if order.step == 2:
                os.close(os.open(self._fifo, os.O_WRONLY))  # each end waits for the other to be opened
            return EMPTY_MODEL_RUNNER_OUTPUT
        if order.step == 1:
            os.close(os.open(self._fifo, os.O_RDONLY))
        if order.step == self._ends_in:
            os._exit(9)
        return ModelRunnerOutput(
            req_ids=tuple(s.req_id for s in order.scheduled),
            sampled_token_ids=tuple((100 * order.step + i,) for i in range(len(order.scheduled))),
        )


def played_stage(config: Any, ec_factory: Any, engine_id: str, spec: Any, epoch: int, wakeup: Any) -> Rank:
    return PlayedStage(config.model, spec.rank, int(engine_id))
