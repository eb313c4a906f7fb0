"""A worker's side: carries the orders to Ecotone's worker half, under the names that vLLM's encoder cache has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING

from ecotone.protocol.connector import ECWorkerConnector
from ecotone.protocol.outputs import ECConnectorOutput
from ecotone.vllm.messages import NO_ORDERS, VllmStepMetadata, VllmWorkerMetadata
from ecotone.vllm.support import check_same_host

if TYPE_CHECKING:
    import torch

EncoderOutputs = MutableMapping[str, "torch.Tensor"]


class KeyedCache(MutableMapping[str, "torch.Tensor"]):
    """vLLM's encoder cache, with the connector's keys in place of vLLM's identifiers.

    Args:
        cache: identifier -> rows ``[num_rows, width]``.
        identifiers: key -> identifier, of the items that a step's orders name. There are no others in here.
    """

    def __init__(self, cache: EncoderOutputs, identifiers: Mapping[str, str]) -> None:
        self._cache = cache
        self._identifiers = identifiers

    def __getitem__(self, key: str) -> torch.Tensor:
        return self._cache[self._identifiers[key]]

    def __setitem__(self, key: str, rows: torch.Tensor) -> None:
        self._cache[self._identifiers[key]] = rows

    def __delitem__(self, key: str) -> None:
        del self._cache[self._identifiers[key]]

    def __iter__(self) -> Iterator[str]:
        return (key for key, identifier in self._identifiers.items() if identifier in self._cache)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class WorkerSide:
    """What vLLM's model runner drives, once a step that computes something.

    Args:
        half: Ecotone's worker half; ``None`` on a rank without an encoder, which takes no part.
    """

    def __init__(self, half: ECWorkerConnector | None) -> None:
        self._half = half
        self._step = NO_ORDERS
        self._keys: dict[str, str] = {}  # identifier -> key, of this step

    def bind(self, metadata: VllmStepMetadata) -> None:
        """The orders of the step that begins.

        Raises:
            ConfigError: the scheduler is on another machine.
        """
        self._step = metadata
        if metadata.orders is None or self._half is None:
            return
        check_same_host(metadata.host)
        self._keys = {identifier: key for key, identifier in metadata.identifiers.items()}
        self._half.bind_connector_metadata(metadata.orders)

    def load(self, cache: EncoderOutputs) -> None:
        """Put what was ordered into vLLM's encoder cache. The compute that follows may read it.

        A load that fails is not made good here: vLLM then finds the item missing and ends the engine, which is
        better than an answer without its image. It cannot be told to encode any more.
        """
        if self._step.orders is None or self._half is None:
            return
        keyed = KeyedCache(cache, self._step.identifiers)
        self._half.start_load_caches(keyed)
        self._half.wait_for_loads(keyed)

    def save(self, cache: EncoderOutputs, identifier: str) -> None:
        """``cache[identifier]`` was just encoded, or is there otherwise: save it where that was ordered."""
        key = self._keys.get(identifier)
        if key is not None and self._half is not None and self._half.is_producer:
            self._half.save_caches(KeyedCache(cache, self._step.identifiers), key)

    def report(self) -> VllmWorkerMetadata | None:
        """What happened since the last report; ``None`` when nothing did."""
        if self._half is None:
            return None
        meta, stats = self._half.build_connector_worker_meta(), self._half.get_ec_connector_stats()
        if meta is None and stats is None:
            return None  # most steps, which pay for no more than this
        return VllmWorkerMetadata(ECConnectorOutput(ec_connector_worker_meta=meta, ec_connector_stats=stats))

    def clear(self) -> None:
        """The step ended."""
        if self._step.orders is not None and self._half is not None:
            self._half.clear_connector_metadata()
        self._step = NO_ORDERS
        self._keys = {}

    def shutdown(self) -> None:
        """Let go of the region. Idempotent."""
        if self._half is not None:
            self._half.shutdown()
