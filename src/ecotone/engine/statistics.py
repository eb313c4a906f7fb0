"""What an engine counts, in one place."""

from __future__ import annotations

from typing import Any

from ecotone.engine.build import Parts
from ecotone.engine.core import EngineCore
from ecotone.node.keys import Namespace

_NODE = "node."


def collect_statistics(parts: Parts, core: EngineCore, namespace: Namespace) -> dict[str, Any]:
    """A nested dictionary of numbers, for export as JSON::

    engine     requests_in_flight; namespace (its digest) and epoch (resets of the encoder cache)
    scheduler  what was ordered, deferred, preempted; the state of its queues and caches
    connector  the EC connector's own counters, the ranks' summed as ``ranks.*``; empty without one
    node       the node's, where the connector has one
        ranks      a list, for each rank its number, pid, what its model runner did, and under ``connector``
               its own half of the EC connector's counters
    """
    connector = {} if parts.connector is None else parts.connector.statistics()
    halves = {} if parts.connector is None else parts.connector.rank_statistics()
    ranks = parts.executor.collective_rpc("statistics")
    return {
        "engine": {
            "requests_in_flight": core.num_records,
            "namespace": namespace.digest,
            "epoch": namespace.epoch,
        },
        "scheduler": dict(parts.scheduler.statistics()),
        "connector": {name: value for name, value in connector.items() if not name.startswith(_NODE)},
        "node": {n.removeprefix(_NODE): value for n, value in connector.items() if n.startswith(_NODE)},
        "ranks": [{**rank, "connector": halves.get(rank["rank"], {})} for rank in ranks],
    }
