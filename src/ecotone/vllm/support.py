"""What the plug-in can run in, checked before anything is stored: a combination that would lose encodings or serve
wrong ones is refused with the reason, never tried."""

from __future__ import annotations

import socket
from typing import Any

from ecotone.errors import ConfigError
from ecotone.vllm.options import VllmOptions

OLDEST, TOO_NEW = (0, 32), (0, 33)
"""Versions of vLLM: from the first on, below the second. What was tried is in docs/vllm.md."""


def check_version(version: str) -> None:
    """Refuse a vLLM whose connector interface this package was not written for.

    Raises:
        ConfigError: naming the version and those that are supported.
    """
    parts = version.split("+")[0].split(".")
    try:
        found = int(parts[0]), int(parts[1])
    except (IndexError, ValueError):
        raise ConfigError(f"vLLM calls itself {version!r}: its release cannot be told from that") from None
    if not OLDEST <= found < TOO_NEW:
        below, above = (".".join(map(str, release)) for release in (OLDEST, TOO_NEW))
        raise ConfigError(f"vLLM {version}: Ecotone's plug-in supports {below} and later releases below {above}")


def check_supported(vllm_config: Any, options: VllmOptions) -> None:
    """Refuse what cannot work with ``vllm_config`` (vLLM's own, whole configuration).

    Raises:
        ConfigError: naming the setting, the reason and what to do instead.
    """
    role = vllm_config.ec_transfer_config.ec_role
    if options.node_path is None and role != "ec_both":
        raise ConfigError(
            f"ec_role={role!r} over an embedded node: its memory ends with this engine, and no other one "
            "reaches it. Start 'ecotone node', give every engine \"node\": \"unix:PATH\", or use 'ec_both'"
        )
    if vllm_config.model_config.is_encoder_decoder:
        raise ConfigError(
            "an encoder-decoder model: vLLM asks its EC connector about the items of such a model and then never "
            "lets it load them. Start it without --ec-transfer-config"
        )
    lora = vllm_config.lora_config
    if lora is not None and lora.enable_tower_connector_lora and options.outlive_engine:
        raise ConfigError(
            "enable_tower_connector_lora with a shared node or a disk: vLLM names an encoding after the adapter's "
            "name, not its content, so another engine's adapter of that name would be served. Use an embedded "
            "node without a disk"
        )
    _check_parallel(vllm_config.parallel_config)


def _check_parallel(parallel: Any) -> None:
    if parallel.prefill_context_parallel_size > 1:
        raise ConfigError(
            "prefill_context_parallel_size > 1: which of its ranks hold an item's rows was never tried"
        )
    backend = parallel.distributed_executor_backend
    if backend == "external_launcher":
        raise ConfigError(
            "distributed_executor_backend='external_launcher' has a scheduler in every rank, each with a node of "
            "its own: use mp, uni or ray"
        )
    machines = max(parallel.nnodes_within_dp, _ray_machines(parallel.placement_group))
    if machines > 1:
        raise ConfigError(f"ranks of one engine on {machines} machines: a node's region reaches one")


def _ray_machines(placement_group: Any) -> int:
    """Over how many machines Ray spreads the ranks; 0 where it does not place them, or not yet."""
    if placement_group is None:
        return 0
    from ray.util import placement_group_table  # noqa: PLC0415 - an optional extra, there where this group is

    return len(set(placement_group_table(placement_group)["bundles_to_node_id"].values()))


def check_same_host(host: str) -> None:
    """For a worker, with the scheduler's host: both must be on one.

    Raises:
        ConfigError: they are not.
    """
    if host != socket.gethostname():
        raise ConfigError(
            f"this rank is on {socket.gethostname()!r} and its scheduler on {host!r}: a node's region reaches one "
            "machine, so all ranks of an engine must be on the scheduler's"
        )
