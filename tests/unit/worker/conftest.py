from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from ecotone.protocol.connector import ECWorkerContext
from ecotone.protocol.outputs import ModelRunnerOutput
from ecotone.protocol.params import PoolingParams, SamplingParams
from ecotone.protocol.step import SchedulerOutput
from ecotone.testing.connectors import RecordingOptions, RecordingWorkerConnector
from ecotone.testing.models import TinyModel
from ecotone.testing.steps import Steps
from ecotone.worker.ec_connector import NO_OP_EC_CONNECTOR, ActiveECConnector
from ecotone.worker.encoder_cache import RankEncoderCache
from ecotone.worker.kv_cache import PagedKVCache
from ecotone.worker.model_runner import ModelRunner


class Rank(NamedTuple):
    """A runner over the tiny model, and what is around it. ``run`` carries out a step."""

    runner: ModelRunner
    model: TinyModel
    cache: RankEncoderCache
    connector: RecordingWorkerConnector
    run: Callable[[SchedulerOutput], ModelRunnerOutput]
    steps: Steps


@pytest.fixture(scope="session")
def make_rank() -> Callable[..., Rank]:
    def make(role: str | None = "ec_both", *, pooling: bool = False, **script: Any) -> Rank:
        model = TinyModel()
        cache = RankEncoderCache(model.info.encoder, model.device)
        context = ECWorkerContext(
            engine_id="engine",
            role=role or "ec_both",
            options={},
            rank=0,
            epoch=3,
            encoder=model.info.encoder,
            device="cpu",
            wakeup=lambda: None,
        )
        connector = RecordingWorkerConnector(context, RecordingOptions(**script))
        hook = NO_OP_EC_CONNECTOR if role is None else ActiveECConnector(connector, cache)
        params = PoolingParams if pooling else SamplingParams
        runner = ModelRunner(model, hook, cache, PagedKVCache(1, 64, 4), params)

        def run(scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
            output = runner.execute_model(scheduler_output)
            if output is not None:
                return output
            return runner.pool() if pooling else runner.sample_tokens()

        return Rank(runner, model, cache, connector, run, Steps(run))

    return make
