"""EC connectors written for vLLM's base class, for the kit: one that is right, and some that are not."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import quiet_vllm  # noqa: F401 - before vLLM
from vllm.distributed.ec_transfer.ec_connector.base import (
    ECConnectorBase,
    ECConnectorMetadata,
    ECConnectorRole,
    ECConnectorWorkerMetadata,
)

_STORES: dict[str, dict[tuple[str, int], Any]] = {}  # of an engine: (hash, rank) -> rows


@dataclass
class ToyMetadata(ECConnectorMetadata):
    """Hashes to load, and hashes to save with the number of the save."""

    loads: list[str] = field(default_factory=list)
    saves: dict[str, int] = field(default_factory=dict)


@dataclass
class ToyReport(ECConnectorWorkerMetadata):
    """Facts (number of the save, rank, whether it is done)."""

    ended: set[tuple[int, int, bool]] = field(default_factory=set)

    def aggregate(self, other: ECConnectorWorkerMetadata) -> ToyReport:
        assert isinstance(other, ToyReport)
        return ToyReport(self.ended | other.ended)


class ToyConnector(ECConnectorBase):
    """Keeps rows in this process, and calls an item stored once every rank has said so."""

    def __init__(self, vllm_config: Any, role: ECConnectorRole) -> None:
        super().__init__(vllm_config, role)
        parallel = vllm_config.parallel_config
        self.store = _STORES.setdefault(vllm_config.ec_transfer_config.engine_id, {})
        self.rank, self.ranks = parallel.rank, set(range(parallel.tensor_parallel_size))
        self.stored: set[str] = set()
        self.saving: dict[int, str] = {}
        self.missing: dict[int, set[int]] = {}
        self.number = 0
        self.next = ToyMetadata()
        self.saves: dict[str, int] = {}
        self.ended: set[tuple[int, int, bool]] = set()

    def has_cache_item(self, identifier: str) -> bool:
        return identifier in self.stored

    def update_state_after_alloc(self, request: Any, index: int) -> None:
        key = request.mm_features[index].identifier
        if key in self.stored:
            self.next.loads += [key] * self.is_consumer
        elif self.is_producer and key not in self.saving.values():
            self.number += 1
            self.saving[self.number], self.missing[self.number] = key, set(self.ranks)
            self.next.saves[key] = self.number

    def build_connector_meta(self, scheduler_output: Any) -> ToyMetadata:
        metadata, self.next = self.next, ToyMetadata()
        return metadata

    def update_connector_output(self, connector_output: Any) -> None:
        report = connector_output.ec_connector_worker_meta
        for number, rank, done in sorted(report.ended) if report is not None else ():
            missing = self.missing.get(number, set())
            missing.discard(rank)
            if number in self.saving and (not done or not missing):
                key = self.saving.pop(number)
                self.missing.pop(number)
                self.stored |= {key} if done else set()

    def has_pending_push_work(self) -> bool:
        return bool(self.saving)

    def bind_connector_metadata(self, connector_metadata: ECConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, ToyMetadata)
        self.saves = dict(connector_metadata.saves)

    def start_load_caches(self, encoder_cache: dict[str, Any], **_: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, ToyMetadata)
        for key in metadata.loads:
            encoder_cache[key] = self.store[key, self.rank]

    def save_caches(self, encoder_cache: dict[str, Any], mm_hash: str, **_: Any) -> None:
        if mm_hash in self.saves:
            self.store[mm_hash, self.rank] = encoder_cache[mm_hash].clone()
            self.ended.add((self.saves.pop(mm_hash), self.rank, True))

    def build_connector_worker_meta(self) -> ToyReport | None:
        self.ended |= {(number, self.rank, False) for number in self.saves.values()}
        self.saves = {}
        ended, self.ended = self.ended, set()
        return ToyReport(ended) if ended else None


class AnnouncesOrders(ToyConnector):
    def build_connector_meta(self, scheduler_output: Any) -> ToyMetadata:
        self.stored |= set(self.next.saves)
        return super().build_connector_meta(scheduler_output)


class LoadsInReverse(ToyConnector):
    def save_caches(self, encoder_cache: dict[str, Any], mm_hash: str, **_: Any) -> None:
        super().save_caches({mm_hash: encoder_cache[mm_hash].flip(0)}, mm_hash)


class LeavesOut(ToyConnector):
    def start_load_caches(self, encoder_cache: dict[str, Any], **_: Any) -> None:
        """No rows."""


class LoadsAll(ToyConnector):
    def build_connector_meta(self, scheduler_output: Any) -> ToyMetadata:
        self.next.loads = sorted(self.stored)
        return super().build_connector_meta(scheduler_output)


class DefersForEver(ToyConnector):
    def ensure_cache_available(self, request: Any, num_computed_tokens: int) -> bool:
        return not self.stored


class NeverRests(ToyConnector):
    def has_pending_push_work(self) -> bool:
        return True


class RaisesWhenFinished(ToyConnector):
    def request_finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        raise KeyError(request.request_id)


class Tells(ToyConnector):
    """Says which hooks were called, with what."""

    told: list[tuple[Any, ...]]

    def __init__(self, vllm_config: Any, role: ECConnectorRole) -> None:
        super().__init__(vllm_config, role)
        self.told = []
        self.gone: set[str] = set()

    def ensure_cache_available(self, request: Any, num_computed_tokens: int) -> bool:
        self.told.append(("available", request.request_id, num_computed_tokens))
        return True

    def has_cache_item(self, identifier: str) -> bool:
        self.told.append(("has", identifier))
        return super().has_cache_item(identifier)

    def update_state_after_alloc(self, request: Any, index: int) -> None:
        self.told.append(("alloc", request.request_id, index, request.get_num_encoder_embeds(index)))
        super().update_state_after_alloc(request, index)

    def build_connector_meta(self, scheduler_output: Any) -> ToyMetadata:
        encode, finished = scheduler_output.scheduled_encoder_inputs, scheduler_output.finished_req_ids
        self.told.append(("build", dict(encode), set(finished)))
        return super().build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        self.told.append(("output", connector_output.ec_connector_worker_meta))

    def take_unavailable_requests(self) -> set[str]:
        gone, self.gone = self.gone, set()
        return gone

    def request_finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        self.told.append(("finished", request.request_id, request.is_finished()))
        return False, None

    def start_save_caches(self, **_: Any) -> None:
        self.told.append(("start_save",))

    def start_load_caches(self, encoder_cache: dict[str, Any], **_: Any) -> None:
        self.told.append(("start_load",))

    def save_caches(self, encoder_cache: dict[str, Any], mm_hash: str, **_: Any) -> None:
        self.told.append(("save", mm_hash))
        super().save_caches(encoder_cache, mm_hash)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        self.told.append(("get_finished", finished_req_ids))
        return None, None

    def get_ec_connector_stats(self) -> None:
        self.told.append(("stats",))

    def build_connector_worker_meta(self) -> ToyReport | None:
        self.told.append(("worker_meta",))
        return super().build_connector_worker_meta()

    def clear_connector_metadata(self) -> None:
        self.told.append(("clear",))
        super().clear_connector_metadata()

    def shutdown(self) -> None:
        self.told.append(("shutdown",))
