"""A type of vLLM's worker metadata, joined and carried as vLLM joins and carries it."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from copy import copy, deepcopy
from random import Random
from typing import Any

from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorWorkerMetadata
from vllm.distributed.ec_transfer.ec_connector.utils import ECOutputAggregator
from vllm.v1.outputs import ECConnectorOutput, ModelRunnerOutput

from ecotone.testing.kit.instances import make_instances
from ecotone.testing.kit.uses import MetadataUse


class VllmMetadata(MetadataUse):
    """A dataclass of vLLM's kind.

    Values are pickled on their way, as vLLM does between processes, and folded by vLLM's own aggregator.

    Args:
        kind: the type.
        reads: field -> how its connector's scheduler side reads it, where that is not literally: two values that
            read the same say the same. A list in which order does not matter is read by ``sorted``.
    """

    joins_all = False

    def __init__(
        self,
        kind: type[ECConnectorWorkerMetadata],
        reads: Mapping[str, Callable[[Any], Any]] | None = None,
    ) -> None:
        self.name = kind.__name__
        self._kind = kind
        self._reads = dict(reads or {})

    def values(self, count: int, draw: Random) -> list[Any]:
        return make_instances(self._kind, count, draw)

    def fresh(self, value: Any) -> Any:
        return deepcopy(value)

    def join(self, left: Any, right: Any) -> Any:
        return left.aggregate(right)

    def join_all(self, values: Sequence[Any]) -> Any:
        raise NotImplementedError("vLLM joins two at a time")

    def same(self, left: Any, right: Any) -> bool:
        return type(left) is type(right) and self.content(left) == self.content(right)

    def content(self, value: Any) -> dict[str, Any]:
        return {name: self._reads.get(name, _as_it_is)(field) for name, field in vars(value).items()}

    def with_truth(self, value: Any, truth: bool) -> Any:
        changed = copy(value)
        name = f"{'Truthy' if truth else 'Falsy'}{self.name}"
        changed.__class__ = type(name, (self._kind,), {"__bool__": lambda _: truth})
        return changed

    def send(self, value: Any) -> Any:
        return pickle.loads(pickle.dumps(value))  # noqa: S301 - our own bytes, carried as vLLM does

    def fold(self, reports: Sequence[Any]) -> Any:
        outputs = [
            ModelRunnerOutput.with_ec_conn_output_only(ECConnectorOutput(ec_connector_worker_meta=report))
            for report in reports
        ]
        folded = ECOutputAggregator().aggregate(outputs)
        report = None if folded is None else folded.ec_connector_output
        return None if report is None else report.ec_connector_worker_meta


def _as_it_is(field: Any) -> Any:
    return field
