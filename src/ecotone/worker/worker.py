"""One rank: a model on a device, its runner and its half of the EC connector."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from ecotone.config import EngineConfig
from ecotone.errors import ConfigError, ContractError, RoundTripError
from ecotone.protocol.connector import ECConnectorFactory, ECWorkerContext
from ecotone.protocol.model import ModelInfo
from ecotone.protocol.outputs import ModelRunnerOutput
from ecotone.protocol.params import PoolingParams, SamplingParams
from ecotone.protocol.step import SchedulerOutput
from ecotone.worker.ec_connector import NO_OP_EC_CONNECTOR, ActiveECConnector, ECHook
from ecotone.worker.encoder_cache import RankEncoderCache
from ecotone.worker.kv_cache import PagedKVCache
from ecotone.worker.model import Model, ModelLoader
from ecotone.worker.model_runner import ModelRunner
from ecotone.worker.models.loading import load_model
from ecotone.worker.parallel.encoder import Encode, Tower
from ecotone.worker.parallel.pipeline import ONLY_STAGE
from ecotone.worker.parallel.place import Place, join
from ecotone.worker.ranks import RankSpec, output_rank


class Worker:
    """One rank of an engine.

    Args:
        config: the engine's.
        ec_factory: builds the rank's half of the EC connector; used when ``config.ec`` is set, and on the first
            pipeline stage only: the others have no encoder.
        engine_id: of this start of the engine.
        spec: which rank it is; on CUDA its number is also that of its device, unless the configuration names one.
        epoch: distinguishes this start of the rank from earlier ones.
        wakeup: called from any thread when the connector has something to report outside a step.
        load: reads the model.

    Raises:
        ConfigError: a device that is not there; ``config.ec`` without a factory; a model that cannot be divided
            among the ranks.
        ModelError: the model cannot be loaded.
        ResourceError: the other ranks are not there.
    """

    def __init__(
        self,
        config: EngineConfig,
        ec_factory: ECConnectorFactory | None,
        engine_id: str,
        spec: RankSpec,
        epoch: int,
        wakeup: Callable[[], None],
        *,
        load: ModelLoader = load_model,
    ) -> None:
        self.rank = spec.rank
        self.device = name_device(config.device, spec.rank)
        self._task = config.task
        with ExitStack() as stack:
            self._place: Place | None = None
            if spec.world_size > 1 and spec.init_method:
                self._place = join(spec, self.device)
                stack.callback(self._place.leave)
            model = self._load(config, load)
            self._model_info = model.info
            cache = RankEncoderCache(model.info.encoder, self.device)
            kv_cache = PagedKVCache(model.num_layers, config.kv_blocks, config.block_size)
            # The connector comes last: nothing after it can fail and leave its half open.
            self._ec_connector = NO_OP_EC_CONNECTOR
            if spec.pp_rank == 0:
                self._ec_connector = self._connect(config, ec_factory, engine_id, epoch, wakeup, cache)
            stack.pop_all()
        self._tower = Tower(model.encode)
        encode: Encode = self._tower
        if self._place is not None:
            encode = self._place.encoder(self._tower, model, config.mm_encoder_tp_mode)
        self._runner = ModelRunner(
            model,
            self._ec_connector,
            cache,
            kv_cache,
            PoolingParams if config.task == "embed" else SamplingParams,
            encode=encode,
            stage=ONLY_STAGE if self._place is None else self._place.stage(model),
            is_output_rank=self._place is None or spec.rank == output_rank(config),
        )
        self._methods: dict[str, Callable[..., Any]] = {
            "model_info": self.model_info,
            "execute_model": self.execute_model,
            "sample_tokens": self.sample_tokens,
            "execute_step": self.execute_step,
            "reset_encoder_cache": self.reset_encoder_cache,
            "statistics": self.statistics,
            "shutdown": self.shutdown,
        }

    def _load(self, config: EngineConfig, load: ModelLoader) -> Model:
        dtype = None if config.dtype == "auto" else getattr(torch, config.dtype)
        options: dict[str, Any] = {} if self._place is None else {"divide": self._place.divide}
        return load(config.model, device=self.device, dtype=dtype, max_model_len=config.max_model_len, **options)

    def _connect(
        self,
        config: EngineConfig,
        ec_factory: ECConnectorFactory | None,
        engine_id: str,
        epoch: int,
        wakeup: Callable[[], None],
        cache: RankEncoderCache,
    ) -> ECHook:
        if config.ec is None:
            return NO_OP_EC_CONNECTOR
        if ec_factory is None:
            raise ConfigError(f"connector {config.ec.connector!r} is configured and there is no factory for it")
        context = ECWorkerContext(
            engine_id=engine_id,
            role=config.ec.role,
            options=config.ec.options,
            rank=self.rank,
            epoch=epoch,
            encoder=cache.encoder,
            device=str(self.device),
            wakeup=wakeup,
        )
        connector = ec_factory.worker_half(context)
        try:
            return ActiveECConnector(connector, cache)
        except RoundTripError:
            connector.shutdown()
            raise

    @property
    def takes_part(self) -> bool:
        """Whether this rank takes part in EC transfers."""
        return self._ec_connector is not NO_OP_EC_CONNECTOR

    def call(self, method: str, *args: Any) -> Any:
        """Call ``method`` by name.

        Raises:
            ContractError: a rank has no such method.
        """
        function = self._methods.get(method)
        if function is None:
            raise ContractError(f"a rank has no method {method!r}; it has {', '.join(self._methods)}")
        return function(*args)

    def model_info(self) -> ModelInfo:
        """Facts about the model."""
        return self._model_info

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        """Run a step; ``None`` when ``sample_tokens`` finishes it. Pooling needs no second call."""
        output = self._runner.execute_model(scheduler_output)
        return self._runner.pool() if output is None and self._task == "embed" else output

    def sample_tokens(self) -> ModelRunnerOutput:
        """Finish the step."""
        return self._runner.sample_tokens()

    def execute_step(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Run a step to its end. Who orders steps ahead cannot know which of them ``sample_tokens`` finishes."""
        output = self.execute_model(scheduler_output)
        return self.sample_tokens() if output is None else output

    def reset_encoder_cache(self) -> None:
        """Drop every encoding this rank holds."""
        self._runner.reset_encoder_cache()

    def statistics(self) -> dict[str, float]:
        """The runner's counters and gauges, what its own tower did, and who it is (``rank``, ``pid``)."""
        figures = {**self._runner.statistics(), **self._tower.statistics()}
        return {**figures, "rank": self.rank, "pid": os.getpid()}

    def shutdown(self) -> None:
        """Close the connector's half, drop the encodings (views of its memory among them), and leave the other
        ranks. Idempotent."""
        self._runner.reset_encoder_cache()
        self._ec_connector.shutdown()
        if self._place is not None:
            self._place.leave()


def name_device(device: str, rank: int) -> torch.device:
    """The device of ``rank``, with its index: without one every rank would land on the first.

    Raises:
        ConfigError: no such device on this machine.
    """
    count = torch.cuda.device_count()
    if device == "auto":
        device = "cuda" if count else "cpu"
    try:
        named = torch.device(device)
    except RuntimeError:
        raise ConfigError(f"device={device!r} is none: use auto, cpu, cuda or cuda:<index>") from None
    if named.type == "cpu":
        return torch.device("cpu")
    if named.type != "cuda":
        raise ConfigError(f"device={device!r} is not supported: use auto, cpu, cuda or cuda:<index>")
    index = rank if named.index is None else named.index
    if index >= count:
        raise ConfigError(f"device={device!r}, rank {rank}: there is no cuda:{index}; {count} CUDA devices found")
    return torch.device("cuda", index)
