"""Connector doubles: small, complete, scripted, and everything they were asked is on record.

``RecordingConnectorFactory`` builds a connector that really keeps encodings (in the worker half, in memory), so
whole engines run on it; its options script what goes wrong. The record of hook calls travels in the worker
metadata, so a test reads it the same way whether the rank is in this process or in another.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from typing import Any, Literal, Self

import msgspec
import torch

from ecotone.config import parse_config
from ecotone.errors import ContractError, EcotoneError
from ecotone.protocol.connector import (
    CacheLookup,
    ECConnectorFactory,
    ECConnectorMetadata,
    ECItem,
    ECRole,
    ECSchedulerConnector,
    ECSchedulerContext,
    ECWorkerConnector,
    ECWorkerContext,
    EncoderCache,
)
from ecotone.protocol.outputs import (
    ECConnectorOutput,
    ECConnectorStats,
    ECConnectorWorkerMetadata,
    KVConnectorOutput,
    ModelRunnerOutput,
    RankStats,
)
from ecotone.protocol.step import SchedulerOutput
from ecotone.protocol.wire import register
from ecotone.worker.worker import Worker

LoadFate = Literal["missing", "short", "wrong_dtype"]


class ScriptedError(EcotoneError):
    """What a double raises when its script says so."""


class RecordingOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The script.

    Attributes:
        silent: report nothing, neither metadata nor statistics.
        load_fates: key -> what its loads come to instead of the rows.
        pending: key -> how many lookups are answered PENDING first.
        report_finished: report finished requests as sent and received, as a transfer per request would end.
        raise_in: name of a worker half's hook that raises ``ScriptedError``.
        block_in: name of a worker half's hook that signals a report, and never returns.
        on_rank: the one rank that raises or blocks; ``None`` is every rank.
        late: rank -> how many steps its reports come late.
        repeat: every report comes a second time, with the next one.
    """

    silent: bool = False
    load_fates: dict[str, LoadFate] = {}
    pending: dict[str, int] = {}
    report_finished: bool = False
    raise_in: str = ""
    block_in: str = ""
    on_rank: int | None = None
    late: dict[int, int] = {}
    repeat: bool = False


@register
class RecordingMetadata(ECConnectorMetadata, frozen=True, forbid_unknown_fields=True):
    """Keys to load and to save in this step."""

    loads: tuple[str, ...] = ()
    saves: tuple[str, ...] = ()


class Call(msgspec.Struct, frozen=True, order=True, array_like=True, forbid_unknown_fields=True):
    """One call of a worker half's hook: its ``serial`` number on its ``rank``, and what it was about."""

    rank: int
    serial: int
    hook: str
    argument: str = ""


@register
class RecordedCalls(ECConnectorWorkerMetadata, frozen=True, forbid_unknown_fields=True):
    """The hook calls since the last report, joined by union. It is falsy, which must not make it vanish."""

    calls: frozenset[Call] = frozenset()

    def aggregate(self, other: Self) -> Self:
        """The union."""
        return msgspec.structs.replace(self, calls=self.calls | other.calls)

    def __bool__(self) -> bool:
        return False

    def hooks(self, rank: int) -> list[str]:
        """``hook`` or ``hook:argument`` of each call on ``rank``, in order."""
        own = sorted(call for call in self.calls if call.rank == rank)
        return [f"{call.hook}:{call.argument}" if call.argument else call.hook for call in own]


class RecordingWorkerConnector(ECWorkerConnector):
    """Keeps what it saves; loads settle in ``wait_for_loads``.

    Attributes:
        built: every object ``build_connector_worker_meta`` returned.
        bound: the metadata of the step under way.
        stored: key -> rows.
        shutdowns: how often ``shutdown`` was called.
    """

    worker_metadata_type = RecordedCalls

    def __init__(self, context: ECWorkerContext, options: RecordingOptions) -> None:
        super().__init__(context)
        self.context = context
        self.options = options
        self.built: list[RecordedCalls] = []
        self.bound: RecordingMetadata | None = None
        self.stored: dict[str, torch.Tensor] = {}
        self.shutdowns = 0
        self._serial = 0
        self._calls: list[Call] = []
        self._held: deque[frozenset[Call]] = deque()  # reports that are made and not given yet
        self._last: frozenset[Call] = frozenset()
        self._counters = {"saves": 0, "loads": 0}

    def bind_connector_metadata(self, metadata: ECConnectorMetadata) -> None:
        """See the contract.

        Raises:
            ContractError: another connector's metadata, or the last step's was not cleared.
        """
        self._record("bind_connector_metadata")
        if not isinstance(metadata, RecordingMetadata):
            raise ContractError(f"{type(metadata).__name__} is not this connector's metadata")
        if self.bound is not None:
            raise ContractError("a step begins and the last one's metadata was not cleared")
        self.bound = metadata

    def clear_connector_metadata(self) -> None:
        """See the contract."""
        self._record("clear_connector_metadata")
        self.bound = None

    def start_load_caches(self, encoder_cache: EncoderCache) -> None:  # noqa: ARG002
        """See the contract."""
        self._record("start_load_caches", ",".join(self._orders().loads))

    def wait_for_loads(self, encoder_cache: EncoderCache) -> None:
        """See the contract."""
        self._record("wait_for_loads")
        for key in self._orders().loads:
            fate, rows = self.options.load_fates.get(key), self.stored.get(key)
            if rows is None or fate == "missing":
                continue
            self._counters["loads"] += 1
            encoder_cache[key] = rows[:-1] if fate == "short" else rows.half() if fate == "wrong_dtype" else rows

    def save_caches(self, encoder_cache: EncoderCache, key: str) -> None:
        """See the contract."""
        self._record("save_caches", key)
        if key in self._orders().saves:
            self._counters["saves"] += 1
            self.stored[key] = encoder_cache[key].clone()

    def get_finished(self, finished_req_ids: frozenset[str]) -> tuple[frozenset[str], frozenset[str]]:
        """See the contract."""
        self._record("get_finished", ",".join(sorted(finished_req_ids)))
        finished = finished_req_ids if self.options.report_finished else frozenset()
        return finished, finished

    def build_connector_worker_meta(self) -> RecordedCalls | None:
        """See the contract. The record up to and including this call."""
        self._record("build_connector_worker_meta")
        if self.options.silent:
            return None
        self._held.append(frozenset(self._calls))
        self._calls.clear()
        if len(self._held) <= self.options.late.get(self.context.rank, 0):
            return None
        calls = self._held.popleft()
        self.built.append(RecordedCalls(calls | self._last if self.options.repeat else calls))
        self._last = calls
        return self.built[-1]

    def get_ec_connector_stats(self) -> ECConnectorStats | None:
        """See the contract. ``saves`` and ``loads``."""
        self._record("get_ec_connector_stats")
        if self.options.silent:
            return None
        return ECConnectorStats((RankStats(self.context.rank, self.context.epoch, self._counters),))

    def shutdown(self) -> None:
        """See the contract."""
        self.shutdowns += 1

    def _orders(self) -> RecordingMetadata:
        if self.bound is None:
            raise ContractError("a hook that needs orders was called outside a step that has any")
        return self.bound

    def _record(self, hook: str, argument: str = "") -> None:
        self._serial += 1
        self._calls.append(Call(self.context.rank, self._serial, hook, argument))
        if self.options.on_rank not in (None, self.context.rank):
            return
        if hook == self.options.block_in:
            self.context.wakeup()
            threading.Event().wait()
        if hook == self.options.raise_in:
            raise ScriptedError(f"{hook} raises, as its script says")


class RecordingSchedulerConnector(ECSchedulerConnector):
    """READY is what every participant said it saved.

    Attributes:
        calls: name and argument of every call, in order.
        outputs: every report it received.
    """

    def __init__(self, context: ECSchedulerContext, options: RecordingOptions) -> None:
        super().__init__(context)
        self.calls: list[tuple[str, str]] = []
        self.outputs: list[ECConnectorOutput] = []
        self.shutdowns = 0
        self._ranks = frozenset(p.rank for p in context.participants)
        self._pending = dict(options.pending)
        self._saved: dict[str, set[int]] = {}
        self._loads: list[str] = []
        self._saves: list[str] = []

    def lookup(self, req_id: str, item: ECItem) -> CacheLookup:
        """See the contract."""
        self.calls.append(("lookup", f"{req_id}:{item.key}"))
        if self._pending.get(item.key, 0) > 0:
            self._pending[item.key] -= 1
            return CacheLookup.PENDING
        return CacheLookup.READY if self._is_ready(item.key) and self.is_consumer else CacheLookup.MISS

    def update_state_after_alloc(self, req_id: str, item: ECItem) -> None:
        """See the contract."""
        self.calls.append(("update_state_after_alloc", f"{req_id}:{item.key}"))
        (self._loads if self._is_ready(item.key) else self._saves).append(item.key)

    def build_connector_meta(self) -> RecordingMetadata:
        """See the contract."""
        self.calls.append(("build_connector_meta", ""))
        metadata = RecordingMetadata(tuple(self._loads), tuple(self._saves) if self.is_producer else ())
        self._loads.clear()
        self._saves.clear()
        return metadata

    def update_connector_output(self, output: ECConnectorOutput) -> None:
        """See the contract."""
        self.outputs.append(output)
        for key in output.failed_loads:
            self._saved.pop(key, None)
        meta = output.ec_connector_worker_meta
        if isinstance(meta, RecordedCalls):
            for call in meta.calls:
                if call.hook == "save_caches":
                    self._saved.setdefault(call.argument, set()).add(call.rank)

    def request_finished(self, req_id: str) -> None:
        """See the contract."""
        self.calls.append(("request_finished", req_id))

    def reset_cache(self, namespace: str) -> None:
        """See the contract."""
        self.calls.append(("reset_cache", namespace))
        self._saved = {k: v for k, v in self._saved.items() if not k.startswith(f"{namespace}:")}

    def shutdown(self) -> None:
        """See the contract."""
        self.shutdowns += 1

    def _is_ready(self, key: str) -> bool:
        return bool(self._ranks) and self._saved.get(key, set()) >= self._ranks


class RecordingConnectorFactory(ECConnectorFactory):
    """Builds recording halves and keeps hold of those built in this process.

    Attributes:
        workers, schedulers: the halves, in the order they were built.
    """

    def __init__(self) -> None:
        self.workers: list[RecordingWorkerConnector] = []
        self.schedulers: list[RecordingSchedulerConnector] = []

    def validate(self, role: ECRole, options: Mapping[str, Any]) -> None:  # noqa: ARG002
        """See the contract."""
        _parse(options)

    def scheduler_half(self, context: ECSchedulerContext) -> RecordingSchedulerConnector:
        """See the contract."""
        self.schedulers.append(RecordingSchedulerConnector(context, _parse(context.options)))
        return self.schedulers[-1]

    def worker_half(self, context: ECWorkerContext) -> RecordingWorkerConnector:
        """See the contract."""
        self.workers.append(RecordingWorkerConnector(context, _parse(context.options)))
        return self.workers[-1]


def _parse(options: Mapping[str, Any]) -> RecordingOptions:
    return parse_config(RecordingOptions, dict(options), "options of RecordingConnector")


class KVReportingWorker(Worker):
    """A rank with a KV connector: it reports every request that the step says is finished as sent."""

    _report: KVConnectorOutput | None = None

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        """See ``Worker``."""
        self._report = KVConnectorOutput(finished_sending=scheduler_output.finished_req_ids)
        output = super().execute_model(scheduler_output)
        return None if output is None else ModelRunnerOutput.with_kv_conn_output(output, self._report)

    def sample_tokens(self) -> ModelRunnerOutput:
        """See ``Worker``."""
        return ModelRunnerOutput.with_kv_conn_output(super().sample_tokens(), self._report)
