"""How an engine makes, joins and carries the values of a worker metadata type: what its laws are tried through."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cache
from random import Random
from types import new_class
from typing import Any

import msgspec

from ecotone.protocol.aggregate import ECOutputAggregator
from ecotone.protocol.outputs import ECConnectorOutput, ECConnectorWorkerMetadata, ModelRunnerOutput
from ecotone.protocol.wire import decode, encode, register
from ecotone.testing.kit.instances import make_instances

Meta = ECConnectorWorkerMetadata


class MetadataUse(ABC):
    """A type of worker metadata, as its engine uses it.

    Attributes:
        name: of reports.
        joins_all: whether it can join any number of reports at once.
    """

    name: str
    joins_all: bool

    @abstractmethod
    def values(self, count: int, draw: Random) -> list[Any]:
        """``count`` values, the first one of defaults where there are any.

        Raises:
            EcotoneError: it is no type of which there can be any, and why.
            TypeError: none could be made.
        """

    @abstractmethod
    def fresh(self, value: Any) -> Any:
        """``value``, for one law to try: no other sees what is done to it."""

    @abstractmethod
    def join(self, left: Any, right: Any) -> Any:
        """Both reports as one."""

    @abstractmethod
    def join_all(self, values: Sequence[Any]) -> Any:
        """One or more reports as one."""

    @abstractmethod
    def same(self, left: Any, right: Any) -> bool:
        """Whether they say the same, and are of the same type."""

    @abstractmethod
    def content(self, value: Any) -> Any:
        """What ``value`` says, whatever its type."""

    @abstractmethod
    def with_truth(self, value: Any, truth: bool) -> Any:
        """``value``, of a type whose values are all truthy, or all falsy."""

    @abstractmethod
    def send(self, value: Any) -> Any:
        """``value`` as it comes out of another process."""

    @abstractmethod
    def fold(self, reports: Sequence[Any]) -> Any:
        """What the scheduler half hears when the ranks report these; ``None`` is a rank that reports nothing."""


class OwnMetadata(MetadataUse):
    """A type of Ecotone's protocol.

    Args:
        make: draws one value; ``None`` makes them from the annotations.
    """

    joins_all = True

    def __init__(self, kind: type[Meta], make: Callable[[Random], Meta] | None = None) -> None:
        self.name = kind.__name__
        self._kind = kind
        self._make = make

    def values(self, count: int, draw: Random) -> list[Meta]:
        register(self._kind)
        if self._make is None:
            return make_instances(self._kind, count, draw)
        return [self._make(draw) for _ in range(count)]

    def fresh(self, value: Meta) -> Meta:
        return value  # it is frozen

    def join(self, left: Meta, right: Meta) -> Meta:
        return left.aggregate(right)

    def join_all(self, values: Sequence[Meta]) -> Meta:
        return type(values[0]).aggregate_all(values)

    def same(self, left: Meta, right: Meta) -> bool:
        return left == right

    def content(self, value: Meta) -> dict[str, Any]:
        return msgspec.structs.asdict(value)

    def with_truth(self, value: Meta, truth: bool) -> Meta:
        kind = _with_truth(type(value), truth)
        return kind(**{name: getattr(value, name) for name in value.__struct_fields__})

    def send(self, value: Meta) -> Any:
        message = ECConnectorOutput(ec_connector_worker_meta=value)
        return decode(encode(message), ECConnectorOutput).ec_connector_worker_meta

    def fold(self, reports: Sequence[Meta | None]) -> Meta | None:
        folded = ECOutputAggregator().aggregate([_output(report) for report in reports])
        report = None if folded is None else folded.ec_connector_output
        return None if report is None else report.ec_connector_worker_meta


def _output(report: Meta | None) -> ModelRunnerOutput:
    return ModelRunnerOutput(ec_connector_output=ECConnectorOutput(ec_connector_worker_meta=report))


@cache
def _with_truth(kind: type[Meta], truth: bool) -> type[Meta]:
    name = f"{'Truthy' if truth else 'Falsy'}{kind.__name__}"
    return new_class(name, (kind,), {"frozen": True}, lambda body: body.update(__bool__=lambda _: truth))
