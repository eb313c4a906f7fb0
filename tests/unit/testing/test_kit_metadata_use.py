"""Worker metadata of another engine, under the laws: a dataclass that is joined in place."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field

import pytest

from ecotone.testing import check_worker_metadata
from ecotone.testing.kit.instances import make_instances
from ecotone.testing.kit.uses import MetadataUse


@dataclass
class Grows:
    """Joined by extending the left one."""

    saves: list[str] = field(default_factory=list)

    def aggregate(self, other):
        self.saves.extend(other.saves)
        return self


@dataclass
class Unites:
    saves: set[str] = field(default_factory=set)

    def aggregate(self, other):
        return type(self)(self.saves | other.saves)


@dataclass
class LooksAtTruth(Unites):
    def aggregate(self, other):
        return type(self)(self.saves | other.saves) if other else self


class Use(MetadataUse):
    joins_all = False

    def __init__(self, kind, read=lambda field: field):
        self.name, self._kind, self._read = kind.__name__, kind, read

    def values(self, count, draw):
        return make_instances(self._kind, count, draw)

    def fresh(self, value):
        return deepcopy(value)

    def join(self, left, right):
        return left.aggregate(right)

    def join_all(self, values):
        raise NotImplementedError

    def same(self, left, right):
        return self.content(left) == self.content(right)

    def content(self, value):
        return self._read(value.saves)

    def with_truth(self, value, truth):
        value.__class__ = type(self.name, (self._kind,), {"__bool__": lambda _: truth})
        return value

    def send(self, value):
        return deepcopy(value)

    def fold(self, reports):
        folded = None
        for report in reports:
            if report is not None:
                folded = report if folded is None else folded.aggregate(report)
        return folded


@pytest.mark.parametrize(
    ("use", "broken"),
    [
        (Use(Unites), set()),
        # Each law has values of its own: that the join changes them is the first one's to say, and nobody else's.
        (Use(Grows), {"metadata-is-pure", "metadata-is-commutative", "metadata-is-idempotent"}),
        (Use(Grows, sorted), {"metadata-is-pure", "metadata-is-idempotent"}),
        (Use(Grows, frozenset), {"metadata-is-pure"}),
        (Use(LooksAtTruth), {"metadata-counts-when-falsy"}),
    ],
)
def test_each_law_is_held_to_what_its_engine_does(use, broken):
    report = check_worker_metadata(use, examples=60)
    assert {violation.rule for violation in report.violations} == broken, str(report)
    assert report.names("skipped") == ("metadata-aggregates-all",)
    assert report.subject == use.name
