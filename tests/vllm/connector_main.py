"""Makes the connector as vLLM's scheduler does, from vLLM's whole configuration, without an engine.

``python connector_main.py MODEL`` reads ``{"case": {"transfer": {...}, "version": ..., "twice": ...}}`` from stdin
and writes ``{"case": class or error}`` to stdout, e.g. ``"EcotoneConnector"`` or ``"ConfigError: ..."``.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import vllm
from vllm.config import ECTransferConfig, VllmConfig
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole
from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory
from vllm.engine.arg_utils import EngineArgs
from vllm.plugins import load_general_plugins

from ecotone.errors import EcotoneError


def outcome(config: VllmConfig, transfer: dict[str, Any], version: str | None = None, twice: bool = False) -> str:
    """What becomes of one case. ``version``: what vLLM says that it is. ``twice``: while another one is there."""
    config.ec_transfer_config = ECTransferConfig(**transfer)
    real, vllm.__version__ = vllm.__version__, version or vllm.__version__
    connector = None
    try:
        connector = ECConnectorFactory.create_connector(config, ECConnectorRole.SCHEDULER)
        if twice:
            ECConnectorFactory.create_connector(config, ECConnectorRole.SCHEDULER)
        return type(connector).__name__
    except EcotoneError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        vllm.__version__ = real
        if connector is not None:
            connector.shutdown()


def main() -> None:
    """All cases with one configuration."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    load_general_plugins()
    sizes: dict[str, Any] = {"max_model_len": 256, "kv_cache_memory_bytes": 1 << 26}
    config = EngineArgs(sys.argv[1], dtype="float32", enforce_eager=True, **sizes).create_engine_config()
    json.dump({name: outcome(config, **case) for name, case in json.load(sys.stdin).items()}, answers)
    answers.close()


if __name__ == "__main__":
    main()
