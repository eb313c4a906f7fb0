"""Which executor a configuration means."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

from ecotone.config import EngineConfig
from ecotone.errors import ConfigError
from ecotone.executor.base import Executor
from ecotone.executor.multiproc import MultiprocExecutor
from ecotone.executor.uniproc import UniprocExecutor
from ecotone.protocol.connector import ECConnectorFactory

_RAY = {"ray": "RayExecutorV2", "ray_single_reply": "RayExecutor"}


def create_executor(config: EngineConfig, ec_factory: ECConnectorFactory | None, engine_id: str) -> Executor:
    """The executor that ``config`` names, with its ranks.

    Raises:
        ConfigError: it cannot work, or would lose reports (``LostReportsError``); nothing was started.
        ModelError, ResourceError, RankFailedError: a rank could not be built; nothing is left.
    """
    return _executor_class(config)(config, ec_factory, engine_id)


def _executor_class(
    config: EngineConfig,
) -> type[UniprocExecutor] | type[MultiprocExecutor]:
    kind = config.executor
    if kind == "auto":
        kind = "uniproc" if config.world_size == 1 else "multiproc"
    if kind == "uniproc":
        return UniprocExecutor
    if kind == "multiproc":
        return MultiprocExecutor
    if find_spec("ray") is None:
        raise ConfigError(f"executor={kind!r} needs Ray, which is not installed: pip install 'ecotone[ray]'")
    found: type[MultiprocExecutor] = getattr(import_module("ecotone.executor.ray"), _RAY[kind])
    return found
