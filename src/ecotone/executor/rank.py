"""What an executor needs of a rank, and how one is made where it will live."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, Protocol, cast

from ecotone.config import EngineConfig
from ecotone.errors import ConfigError
from ecotone.protocol.connector import ECConnectorFactory
from ecotone.worker.ranks import RankSpec


class Rank(Protocol):
    """What an executor needs of a ``Worker``."""

    @property
    def takes_part(self) -> bool:
        """Whether it takes part in EC transfers."""
        ...

    def call(self, method: str, *args: Any) -> Any:
        """Call ``method`` by name."""
        ...


# config, ec_factory, engine_id, spec, epoch, wakeup; see ``Worker``.
RankFactory = Callable[[EngineConfig, ECConnectorFactory | None, str, RankSpec, int, Callable[[], None]], Rank]

WORKER = "ecotone.worker.worker:Worker"


def import_rank_factory(name: str) -> RankFactory:
    """What ``module:attribute`` names, in a process that was told nothing but the name.

    Raises:
        ConfigError: there is no such thing.
    """
    module, _, attribute = name.partition(":")
    try:
        return cast(RankFactory, getattr(import_module(module), attribute))
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"rank factory {name!r} cannot be imported: {error}") from error
