"""Builds a connector of vLLM's kind with vLLM's own factory, and puts it behind Ecotone's contracts."""

from __future__ import annotations

from typing import Any

from vllm.config import ECTransferConfig, ParallelConfig, VllmConfig
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole
from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory as VllmFactory

from ecotone.errors import ConfigError
from ecotone.protocol import ECConnectorFactory, ECRole, ECSchedulerContext, ECWorkerContext
from ecotone.vllm.kit.halves import VllmSchedulerHalf, VllmWorkerHalf


class VllmConnectorFactory(ECConnectorFactory):
    """Builds both sides with vLLM's factory.

    Args:
        connector, module_path: as ``ec_connector`` and ``ec_connector_module_path`` have it.
    """

    def __init__(self, connector: str, module_path: str | None = None) -> None:
        self._connector = connector
        self._module_path = module_path

    def validate(self, role: ECRole, options: dict[str, Any]) -> None:
        """Refuse a connector that vLLM does not find.

        Raises:
            ConfigError: and why.
        """
        try:
            VllmFactory.get_connector_class(self._transfer(role, options, "validate"))
        except (ValueError, ImportError, AttributeError) as error:
            raise ConfigError(f"vLLM has no EC connector {self._connector!r}: {error}") from error

    def scheduler_half(self, context: ECSchedulerContext) -> VllmSchedulerHalf:
        """See the contract."""
        config = self._config(context, len(context.participants))
        return VllmSchedulerHalf(context, VllmFactory.create_connector(config, ECConnectorRole.SCHEDULER))

    def worker_half(self, context: ECWorkerContext) -> VllmWorkerHalf:
        """See the contract."""
        config = self._config(context, 1)  # how many ranks there are, a worker is not told
        config.parallel_config.rank = context.rank
        return VllmWorkerHalf(context, VllmFactory.create_connector(config, ECConnectorRole.WORKER))

    def _config(self, context: ECSchedulerContext | ECWorkerContext, num_ranks: int) -> VllmConfig:
        config = VllmConfig(
            parallel_config=ParallelConfig(tensor_parallel_size=num_ranks, distributed_executor_backend="mp")
        )
        # Not given to it above: it refuses an engine that only encodes without a model, and there is none here.
        config.ec_transfer_config = self._transfer(context.role, context.options, context.engine_id)
        config.instance_id = context.engine_id
        return config

    def _transfer(self, role: ECRole, options: dict[str, Any], engine_id: str) -> ECTransferConfig:
        return ECTransferConfig(
            ec_connector=self._connector,
            ec_connector_module_path=self._module_path,
            ec_role=role,
            engine_id=engine_id,
            ec_connector_extra_config=dict(options),
        )
