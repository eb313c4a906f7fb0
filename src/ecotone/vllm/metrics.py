"""The connector's counters, as vLLM logs them and as ``/metrics`` shows them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from prometheus_client import REGISTRY, Counter, Gauge
from vllm.distributed.ec_transfer.ec_connector.metrics import ECConnectorPromMetrics, ECConnectorStats

COUNTERS = {
    "hits": "Items that were loaded in place of being encoded.",
    "misses": "Items that were encoded.",
    "unsaved": "Items that were encoded and could not be stored.",
    "save_failures": "Saves that failed, over all ranks: the log of the rank says why.",
    "load_failures": "Loads that failed, over all ranks: the log of the rank says why.",
    "ranks.saves": "Copies into the node's region, over all ranks.",
    "ranks.save_bytes": "Bytes of these copies.",
    "ranks.save_seconds": "Seconds they took.",
    "ranks.loads": "Copies out of the node's region, over all ranks.",
    "ranks.load_bytes": "Bytes of these copies.",
    "ranks.load_seconds": "Seconds they took.",
    "ranks.views": "Items that ranks read in place, without a copy.",
    "ranks.view_bytes": "Bytes of these items.",
}
GAUGES = {
    "saves_in_flight": "Saves that not every rank has reported yet.",
    "pins_held": "Loaded items that some rank still reads.",
}


# Counters that are sums of the scheduler half's, by how the names of these begin.
_SUMS = {"unsaved": "unsaved.", "save_failures": "ranks.save_failed.", "load_failures": "ranks.load_failed."}


def exported(statistics: Mapping[str, float]) -> dict[str, float]:
    """Of all statistics of the scheduler half, those that vLLM exports."""
    found = {name: statistics.get(name, 0.0) for name in (*COUNTERS, *GAUGES)}
    for name, start in _SUMS.items():
        found[name] = sum(value for of, value in statistics.items() if of.startswith(start))
    return found


class EcotoneStats(ECConnectorStats):
    """What changed since the last one: counters as differences, gauges as they are."""

    data: dict[str, float]

    def aggregate(self, other: ECConnectorStats) -> EcotoneStats:
        """Both, one after the other. Neither is changed."""
        both = {**self.data, **other.data}
        return EcotoneStats(
            {n: both[n] if n in GAUGES else self.data.get(n, 0) + other.data.get(n, 0) for n in both}
        )

    def reset(self) -> None:
        """See vLLM's contract."""
        self.data = {}

    def reduce(self) -> dict[str, int | float]:
        """What vLLM's log shows."""
        return {name: value for name, value in self.data.items() if value}

    def is_empty(self) -> bool:
        """Whether there is nothing to log."""
        return not self.data


class StatsSource:
    """Turns cumulative statistics into what vLLM takes from a connector: what changed."""

    def __init__(self) -> None:
        self._told: dict[str, float] = {}

    def changes(self, statistics: Mapping[str, float]) -> EcotoneStats | None:
        """What changed since the last call; ``None`` when nothing did."""
        now = exported(statistics)
        if now == self._told:
            return None
        changes = {n: value if n in GAUGES else value - self._told.get(n, 0.0) for n, value in now.items()}
        self._told = now
        return EcotoneStats({name: value for name, value in changes.items() if value or name in GAUGES})


class EcotonePromMetrics(ECConnectorPromMetrics):
    """``ecotone:<name>_total`` and ``ecotone:<name>``, with vLLM's labels.

    They are those of the latest engine in the process, as vLLM's own are, which it unregisters by their names.
    """

    _registered: ClassVar[list[Counter | Gauge]] = []

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        while self._registered:
            REGISTRY.unregister(self._registered.pop())
        self._counters = {n: self._per_engine(self._counter_cls, n, text) for n, text in COUNTERS.items()}
        self._gauges = {n: self._per_engine(self._gauge_cls, n, text) for n, text in GAUGES.items()}

    def _per_engine(self, kind: type[Counter] | type[Gauge], name: str, text: str) -> dict[int, Any]:
        suffix = "_total" if kind is self._counter_cls else ""
        # Of several processes that serve one engine, the one that spoke last knows.
        options = {} if kind is self._counter_cls else {"multiprocess_mode": "mostrecent"}
        metric = kind(f"ecotone:{name.removeprefix('ranks.')}{suffix}", text, self._labelnames, **options)
        if isinstance(metric, Counter | Gauge):  # and not Ray's, which has no registry
            self._registered.append(metric)
        return {engine: metric.labels(*values) for engine, values in self.per_engine_labelvalues.items()}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add what changed."""
        for name, value in transfer_stats_data.items():
            if name in self._counters:
                self._counters[name][engine_idx].inc(value)
            elif name in self._gauges:
                self._gauges[name][engine_idx].set(value)
