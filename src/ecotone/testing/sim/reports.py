"""Reports that come late, or twice."""

from __future__ import annotations

from random import Random

import msgspec

from ecotone.protocol.outputs import ECConnectorOutput, ECConnectorWorkerMetadata, ModelRunnerOutput
from ecotone.testing.sim.plan import Weather

_LONGEST_STEPS = 3


class ReportDelays:
    """Between a rank's answer and the fold: keeps worker metadata back for some steps, and repeats some of it."""

    def __init__(self, weather: Weather, random: Random) -> None:
        self._weather = weather
        self._random = random
        self._step = 0
        self._kept: list[tuple[int, int, ECConnectorWorkerMetadata]] = []  # due at step, rank
        self.is_calm = False

    @property
    def pending(self) -> int:
        """Reports that are kept back."""
        return len(self._kept)

    def pass_on(self, rank: int, output: ModelRunnerOutput) -> ModelRunnerOutput:
        """What the fold gets to hear of ``rank`` in this step."""
        self._step += rank == 0
        ec = output.ec_connector_output
        meta = None if ec is None else ec.ec_connector_worker_meta
        heard = []
        if meta is not None and self._happens(self._weather.reports_late):
            self._keep(rank, meta)
        elif meta is not None:
            heard.append(meta)
        if meta is not None and self._happens(self._weather.reports_repeated):
            self._keep(rank, meta)
        due = [kept for kept in self._kept if kept[1] == rank and (kept[0] <= self._step or self.is_calm)]
        self._kept = [kept for kept in self._kept if kept not in due]
        heard += [kept[2] for kept in due]
        joined = type(heard[0]).aggregate_all(heard) if heard else None
        if joined is meta:
            return output
        base = ec if ec is not None else ECConnectorOutput()
        return ModelRunnerOutput.with_ec_conn_output(
            output, msgspec.structs.replace(base, ec_connector_worker_meta=joined)
        )

    def _happens(self, chance: float) -> bool:
        return chance > 0 and not self.is_calm and self._random.random() < chance

    def _keep(self, rank: int, meta: ECConnectorWorkerMetadata) -> None:
        self._kept.append((self._step + self._random.randint(1, _LONGEST_STEPS), rank, meta))
