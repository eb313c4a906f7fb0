"""Putting an engine together: everything is checked before anything is started, and a failure leaves nothing."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from ecotone.config import ECConfig, EngineConfig, parse_config
from ecotone.connectors.factory import create_factory
from ecotone.engine.admission import SchedulerLimits
from ecotone.engine.checkpoint import check_model_folder
from ecotone.engine.core import EngineCore
from ecotone.engine.inputs import InputProcessor
from ecotone.engine.scheduler import Scheduler
from ecotone.executor.base import Executor
from ecotone.node.identity import runtime, weights_digest
from ecotone.node.keys import Namespace
from ecotone.protocol.connector import (
    ECConnectorFactory,
    ECSchedulerConnector,
    ECSchedulerContext,
)
from ecotone.protocol.model import ModelInfo
from ecotone.worker.parallel.division import check_folder_division

ExecutorFactory = Callable[[EngineConfig, ECConnectorFactory | None, str], Executor]


@dataclass(frozen=True)
class Parts:
    """What an engine is made of. ``close`` ends all of it, ranks first, and may be called again."""

    model_info: ModelInfo
    namespace: Namespace
    inputs: InputProcessor
    executor: Executor
    connector: ECSchedulerConnector | None
    scheduler: Scheduler
    core: EngineCore
    close: Callable[[], None]


def make_config(config: EngineConfig | str | Path, overrides: dict[str, Any]) -> EngineConfig:
    """``config``, or that of a model folder, with ``overrides``.

    Raises:
        ConfigError: an unknown option, or a value out of range.
    """
    given = msgspec.structs.asdict(config) if isinstance(config, EngineConfig) else {"model": str(config)}
    fields: dict[str, Any] = {**given, **overrides}
    ec = fields.get("ec")
    if isinstance(ec, ECConfig | dict):  # a struct that was built by hand was not checked yet
        options = msgspec.structs.asdict(ec) if isinstance(ec, ECConfig) else ec
        fields["ec"] = parse_config(ECConfig, options, "ec")
    return parse_config(EngineConfig, fields, "engine")


def build(config: EngineConfig, executor_factory: ExecutorFactory, clock: Callable[[], float]) -> Parts:
    """An engine's parts.

    Raises:
        ConfigError: a configuration that cannot work.
        ModelError: the model cannot be loaded.
        ResourceError: the machine does not have what was asked for.
    """
    model = check_model_folder(config.model)
    if config.world_size > 1:
        check_folder_division(model, tensor=config.tensor_parallel_size, stages=config.pipeline_parallel_size)
    ec_factory = None if config.ec is None else create_factory(config.ec)
    if config.ec is not None and ec_factory is not None:
        ec_factory.check_machine(config.ec.role, config.ec.options)
    inputs = InputProcessor(
        model,
        max_image_pixels=config.max_image_pixels,
        max_video_frames=config.max_video_frames,
        max_audio_seconds=config.max_audio_seconds,
    )
    revision = config.revision or weights_digest(model)
    engine_id = uuid.uuid4().hex
    with ExitStack() as stack:
        executor = executor_factory(config, ec_factory, engine_id)
        stack.callback(executor.shutdown)
        model_info: ModelInfo = executor.collective_rpc("model_info")[0]
        limits = SchedulerLimits.from_config(config, model_info, executor.max_concurrent_steps)
        connector = _connect(config, ec_factory, engine_id, executor, model_info, clock)
        # The ranks let go of the region before the half that owns it does.
        started = stack.pop_all()
    with ExitStack() as stack:
        if connector is not None:
            stack.callback(connector.shutdown)
        stack.push(started)
        namespace = Namespace(
            model=f"{model_info.architecture}:{model.resolve().name}",
            revision=f"{revision} on {runtime()}",
            dtype=model_info.encoder.dtype,
            width=model_info.encoder.width,
            processor=inputs.options,
            tenant=config.tenant,
        )
        scheduler = Scheduler(limits, connector, model_info.eos_token_ids, clock)
        # Its own copy: prompts are tokenized while a step decodes, and a fast tokenizer is not thread-safe.
        core = EngineCore(scheduler, executor, deepcopy(inputs.tokenizer), clock)
        close = stack.pop_all().close
    return Parts(model_info, namespace, inputs, executor, connector, scheduler, core, close)


def _connect(
    config: EngineConfig,
    ec_factory: ECConnectorFactory | None,
    engine_id: str,
    executor: Executor,
    model_info: ModelInfo,
    clock: Callable[[], float],
) -> ECSchedulerConnector | None:
    if config.ec is None or ec_factory is None:
        return None
    context = ECSchedulerContext(
        engine_id=engine_id,
        role=config.ec.role,
        options=config.ec.options,
        participants=executor.participants(),
        encoder=model_info.encoder,
        clock=clock,
    )
    executor.init_ec_output_aggregator()
    return ec_factory.scheduler_half(context)
