"""vLLM's own EC connectors, and anybody's written for vLLM, under Ecotone's conformance kit.

    ecotone check ecotone.vllm.kit:EXAMPLE      vLLM's ECExampleConnector
    ecotone check ecotone.vllm.kit:CPU          what the workers of its ECCPUConnector report
    ecotone check ecotone.vllm.kit:MOONCAKE     what the workers of its ECMooncakeConnector report

halves.py puts a connector of vLLM's kind behind Ecotone's contracts, factory.py builds it, metadata.py is for its
worker metadata. See docs/vllm-connectors.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import vllm
from vllm.distributed.ec_transfer.ec_connector.cpu.common import ECCPUWorkerMetadata
from vllm.distributed.ec_transfer.ec_connector.mooncake.metadata import ECMooncakeWorkerMetadata

from ecotone.testing.kit import Capabilities, Subject
from ecotone.vllm.kit.factory import VllmConnectorFactory
from ecotone.vllm.kit.metadata import VllmMetadata

__all__ = ["CPU", "EXAMPLE", "MOONCAKE", "VllmConnectorFactory", "VllmMetadata", "vllm_subject"]


def vllm_subject(
    connector: str,
    module_path: str | None = None,
    *,
    metadata: tuple[VllmMetadata, ...] = (),
    options: Mapping[str, Any] | None = None,
    lose: Callable[[Path], None] | None = None,
    **capabilities: Any,
) -> Subject:
    """A connector of vLLM's kind, as the kit checks it.

    What vLLM's engine has no way to say is not asked: that weights changed, that a load failed. What it guarantees
    holds: the reports of all ranks of a step arrive together, once, in the order of the steps.

    Args:
        connector, module_path: its name, as ``ec_connector`` and ``ec_connector_module_path`` have it.
        metadata: the types that its workers report.
        options: its ``ec_connector_extra_config``; ``{scratch}`` in texts is a new directory for each run.
        lose: see ``Subject``.
        capabilities: further ones, see ``Capabilities``.
    """
    return Subject(
        factory=VllmConnectorFactory(connector, module_path),
        capabilities=Capabilities(
            reset=False, hears_failed_loads=False, reports_may_be_lost=False, **capabilities
        ),
        options=dict(options or {}),
        lose=lose,
        metadata=metadata,
        name=f"{connector} in vLLM {vllm.__version__}",
    )


def _lose_files(directory: Path) -> None:
    for file in directory.rglob("*.safetensors"):
        file.unlink()


# Its workers report nothing: an item is there when its file is.
EXAMPLE = vllm_subject(
    "ECExampleConnector",
    options={"shared_storage_path": "{scratch}"},
    reports_decide=False,
    durable=True,
    lose=_lose_files,
)

# Read as its scheduler reads it: a save that is told twice is told, a load counts as often as it is told.
CPU = VllmMetadata(ECCPUWorkerMetadata, reads={"completed_saves": frozenset, "completed_loads": sorted})

MOONCAKE = VllmMetadata(ECMooncakeWorkerMetadata)
