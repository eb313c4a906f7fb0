"""The entry point that vLLM calls in each of its processes (group ``vllm.general_plugins``)."""

from __future__ import annotations

from contextlib import suppress

from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory

NAME = "EcotoneConnector"


def register() -> None:
    """Make the connector known by its name. vLLM may call it more than once in a process."""
    with suppress(ValueError):  # it is known already
        ECConnectorFactory.register_connector(NAME, "ecotone.vllm.connector", NAME)
