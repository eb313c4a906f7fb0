"""``check_worker_metadata``: whether a type of worker metadata is a join that survives the wire."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache, reduce
from random import Random
from types import new_class
from typing import Any

import msgspec

from ecotone.errors import EcotoneError
from ecotone.protocol.aggregate import ECOutputAggregator
from ecotone.protocol.outputs import ECConnectorOutput, ECConnectorWorkerMetadata, ModelRunnerOutput
from ecotone.protocol.wire import decode, encode, register
from ecotone.testing.kit.instances import make_instances
from ecotone.testing.kit.report import Report, Violation, verdicts_of
from ecotone.testing.kit.rules import METADATA_RULES

DEFAULT_EXAMPLES = 200
Meta = ECConnectorWorkerMetadata


def check_worker_metadata(
    kind: type[ECConnectorWorkerMetadata],
    *,
    seed: int = 0,
    examples: int = DEFAULT_EXAMPLES,
    make: Callable[[Random], ECConnectorWorkerMetadata] | None = None,
) -> Report:
    """Check the laws of ``kind`` on values made from its annotations.

    Args:
        seed: of the values.
        examples: triples of values to try each law on.
        make: draws one value; for a type whose annotations allow what its connector never makes.
    """
    draw = Random(seed)
    checks: Counter[str] = Counter()
    violations: dict[str, Violation] = {}

    def check(rule: str, law: Callable[..., str | None], values: Sequence[Any]) -> None:
        if rule in violations:
            return
        checks[rule] += 1
        fault = _fault(law, values)
        if fault is not None:
            fewest = _fewest(law, values)
            violations[rule] = Violation(
                rule=rule,
                detail=_fault(law, fewest) or fault,
                events=tuple(f"{name} = {value}" for name, value in zip("abc", fewest, strict=False)),
                seed=seed,
            )

    try:
        register(kind)
    except EcotoneError as error:
        violations["metadata-round-trips"] = Violation(rule="metadata-round-trips", detail=str(error), seed=seed)
    if violations:  # most often a type that says nothing of its values: none can be made
        return _report(kind, seed, 0, checks, violations)
    values = make_instances(kind, 2 + examples, draw) if make is None else [make(draw) for _ in range(examples)]
    for number in range(examples):
        triple = [values[0], *draw.sample(values, 2)] if number % 8 == 0 else draw.choices(values, k=3)
        draw.shuffle(triple)
        for rule, law in _LAWS.items():
            check(rule, law, triple)
    return _report(kind, seed, examples, checks, violations)


def _report(
    kind: type[Meta], seed: int, runs: int, checks: Counter[str], violations: dict[str, Violation]
) -> Report:
    return Report(
        subject=kind.__name__,
        seed=seed,
        runs=runs,
        verdicts=verdicts_of(METADATA_RULES, {}, checks, violations),
    )


def _fault(law: Callable[..., str | None], values: Sequence[Meta]) -> str | None:
    try:
        return law(*values)
    except Exception as error:  # noqa: BLE001 - a rim: what a type's methods raise is what is reported
        return f"{type(error).__name__}: {error}"


def _fewest(law: Callable[..., str | None], values: Sequence[Meta]) -> list[Meta]:
    """Of ``values``, repeated as may be, the three that say in the fewest words how the law is broken."""
    smallest = sorted(values, key=lambda value: len(str(value)))
    candidates = [[a, b, c] for a in smallest for b in smallest for c in smallest]
    candidates.sort(key=lambda triple: sum(len(str(value)) for value in triple))
    return next((triple for triple in candidates if _fault(law, triple) is not None), list(values))


def _pure(a: Meta, b: Meta, _c: Meta) -> str | None:
    before = str(a), str(b)
    first = a.aggregate(b)
    if (str(a), str(b)) != before:
        return f"aggregate changed an operand: a = {a}, b = {b}"
    second = a.aggregate(b)
    return None if first == second else f"a.aggregate(b) is {first}, and then {second}"


def _commutative(a: Meta, b: Meta, _c: Meta) -> str | None:
    return _differ(a.aggregate(b), b.aggregate(a))


def _associative(a: Meta, b: Meta, c: Meta) -> str | None:
    return _differ(a.aggregate(b).aggregate(c), a.aggregate(b.aggregate(c)))


def _idempotent(a: Meta, b: Meta, _c: Meta) -> str | None:
    joined = a.aggregate(b)
    return (
        _differ(a.aggregate(a), a) or _differ(joined.aggregate(b), joined) or _differ(joined.aggregate(a), joined)
    )


def _all(a: Meta, b: Meta, c: Meta) -> str | None:
    metas = [a, b, c]
    return _differ(type(a).aggregate_all(metas), reduce(lambda x, y: x.aggregate(y), metas)) or _differ(
        type(a).aggregate_all([a]), a
    )


def _round_trip(a: Meta, b: Meta, _c: Meta) -> str | None:
    sent = ECConnectorOutput(ec_connector_worker_meta=a.aggregate(b))
    received = decode(encode(sent), ECConnectorOutput)
    came = received.ec_connector_worker_meta
    if type(came) is not type(a):
        return f"sent a {type(a).__name__}, received a {type(came).__name__}"
    return _differ(sent.ec_connector_worker_meta, came)


def _counts_when_falsy(a: Meta, b: Meta, _c: Meta) -> str | None:
    expected = a.aggregate(b)
    for truth in (True, False):
        kind = _with_truth(type(a), truth)
        joined = _recast(a, kind).aggregate(_recast(b, kind))
        if msgspec.structs.asdict(joined) != msgspec.structs.asdict(expected):
            return f"with bool(...) {truth}, a.aggregate(b) is {joined} instead of {expected}"
    return _fold_fault(a, b)


def _fold_fault(a: Meta, b: Meta) -> str | None:
    def output(meta: Meta | None) -> ModelRunnerOutput:
        return ModelRunnerOutput(ec_connector_output=ECConnectorOutput(ec_connector_worker_meta=meta))

    for metas in ((a, None), (None, a), (a, b), (b, a)):
        folded = ECOutputAggregator().aggregate([output(meta) for meta in metas])
        report = None if folded is None else folded.ec_connector_output
        came = None if report is None else report.ec_connector_worker_meta
        expected = type(a).aggregate_all([meta for meta in metas if meta is not None])
        if came is None or came != expected:
            return f"reported by two ranks as {metas}, folded to {came}"
    return None


@cache
def _with_truth(kind: type[Meta], truth: bool) -> type[Meta]:
    """``kind`` whose values are all truthy, or all falsy."""
    name = f"{'Truthy' if truth else 'Falsy'}{kind.__name__}"
    return new_class(name, (kind,), {"frozen": True}, lambda body: body.update(__bool__=lambda _: truth))


def _recast(value: Meta, kind: type[Meta]) -> Meta:
    return kind(**{name: getattr(value, name) for name in value.__struct_fields__})


def _differ(left: Meta | None, right: Meta | None) -> str | None:
    return None if left == right else f"{left} on one side, {right} on the other"


_LAWS: dict[str, Callable[..., str | None]] = {
    "metadata-is-pure": _pure,
    "metadata-is-commutative": _commutative,
    "metadata-is-associative": _associative,
    "metadata-is-idempotent": _idempotent,
    "metadata-aggregates-all": _all,
    "metadata-round-trips": _round_trip,
    "metadata-counts-when-falsy": _counts_when_falsy,
}
