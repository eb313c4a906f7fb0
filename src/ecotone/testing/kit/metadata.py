"""``check_worker_metadata``: whether a type of worker metadata is a join that survives the wire."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import reduce
from random import Random
from typing import Any

from ecotone.errors import EcotoneError
from ecotone.protocol.outputs import ECConnectorWorkerMetadata
from ecotone.testing.kit.report import Report, Violation, verdicts_of
from ecotone.testing.kit.rules import METADATA_RULES
from ecotone.testing.kit.uses import MetadataUse, OwnMetadata

DEFAULT_EXAMPLES = 200
Law = Callable[[MetadataUse, Any, Any, Any], str | None]


def check_worker_metadata(
    kind: type[ECConnectorWorkerMetadata] | MetadataUse,
    *,
    seed: int = 0,
    examples: int = DEFAULT_EXAMPLES,
    make: Callable[[Random], ECConnectorWorkerMetadata] | None = None,
) -> Report:
    """Check the laws of ``kind`` on values made from its annotations.

    Args:
        kind: the type, or how another engine uses one of its own.
        seed: of the values.
        examples: triples of values to try each law on.
        make: draws one value; for a type whose annotations allow what its connector never makes.
    """
    use = kind if isinstance(kind, MetadataUse) else OwnMetadata(kind, make)
    draw = Random(seed)
    try:
        values = use.values(2 + examples, draw)
    except EcotoneError as error:  # most often a type that says nothing of its values: none can be made
        fault = Violation(rule="metadata-round-trips", detail=str(error), seed=seed)
        return _report(use, seed, 0, Counter(), {fault.rule: fault})
    laws = {rule: law for rule, law in _LAWS.items() if use.joins_all or law is not _all}
    checks: Counter[str] = Counter()
    violations: dict[str, Violation] = {}
    for number in range(examples):
        triple = [values[0], *draw.sample(values, 2)] if number % 8 == 0 else draw.choices(values, k=3)
        draw.shuffle(triple)
        for rule, law in laws.items():
            if rule in violations:
                continue
            checks[rule] += 1
            found = _violation(use, rule, law, triple, seed)
            if found is not None:
                violations[rule] = found
    return _report(use, seed, examples, checks, violations)


def _violation(use: MetadataUse, rule: str, law: Law, values: Sequence[Any], seed: int) -> Violation | None:
    fault = _fault(use, law, values)
    if fault is None:
        return None
    fewest = _fewest(use, law, values)
    return Violation(
        rule=rule,
        detail=_fault(use, law, fewest) or fault,
        events=tuple(f"{name} = {value}" for name, value in zip("abc", fewest, strict=False)),
        seed=seed,
    )


def _report(
    use: MetadataUse, seed: int, runs: int, checks: Counter[str], violations: dict[str, Violation]
) -> Report:
    missing = {} if use.joins_all else {"joins_all": "it joins two at a time"}
    return Report(
        subject=use.name,
        seed=seed,
        runs=runs,
        verdicts=verdicts_of(METADATA_RULES, missing, checks, violations),
    )


def _fault(use: MetadataUse, law: Law, values: Sequence[Any]) -> str | None:
    a, b, c = map(use.fresh, values)
    try:
        return law(use, a, b, c)
    except Exception as error:  # noqa: BLE001 - a rim: what a type's methods raise is what is reported
        return f"{type(error).__name__}: {error}"


def _fewest(use: MetadataUse, law: Law, values: Sequence[Any]) -> list[Any]:
    """Of ``values``, repeated as may be, the three that say in the fewest words how the law is broken."""
    smallest = sorted(values, key=lambda value: len(str(value)))
    candidates = [[a, b, c] for a in smallest for b in smallest for c in smallest]
    candidates.sort(key=lambda triple: sum(len(str(value)) for value in triple))
    return next((triple for triple in candidates if _fault(use, law, triple) is not None), list(values))


def _pure(use: MetadataUse, a: Any, b: Any, _c: Any) -> str | None:
    before = str(a), str(b)
    first = use.join(a, b)
    if (str(a), str(b)) != before:
        return f"a.aggregate(b) changed an operand: a became {a}, b {b}"
    second = use.join(a, b)
    return None if use.same(first, second) else f"a.aggregate(b) is {first}, and then {second}"


def _commutative(use: MetadataUse, a: Any, b: Any, _c: Any) -> str | None:
    return _differ(use, _join(use, a, b), _join(use, b, a))


def _associative(use: MetadataUse, a: Any, b: Any, c: Any) -> str | None:
    return _differ(use, _join(use, _join(use, a, b), c), _join(use, a, _join(use, b, c)))


def _idempotent(use: MetadataUse, a: Any, b: Any, _c: Any) -> str | None:
    joined = _join(use, a, b)
    return (
        _differ(use, _join(use, a, a), a)
        or _differ(use, _join(use, joined, b), joined)
        or _differ(use, _join(use, joined, a), joined)
    )


def _all(use: MetadataUse, a: Any, b: Any, c: Any) -> str | None:
    metas = [a, b, c]
    one_by_one = reduce(lambda x, y: _join(use, x, y), metas)
    return _differ(use, use.join_all(metas), one_by_one) or _differ(use, use.join_all([a]), a)


def _round_trip(use: MetadataUse, a: Any, b: Any, _c: Any) -> str | None:
    sent = _join(use, a, b)
    came = use.send(sent)
    if type(came) is not type(a):
        return f"sent a {type(a).__name__}, received a {type(came).__name__}"
    return _differ(use, sent, came)


def _counts_when_falsy(use: MetadataUse, a: Any, b: Any, _c: Any) -> str | None:
    expected = _join(use, a, b)
    for truth in (True, False):
        joined = _join(use, use.with_truth(a, truth), use.with_truth(b, truth))
        if use.content(joined) != use.content(expected):
            return f"with bool(...) {truth}, a.aggregate(b) is {joined} instead of {expected}"
    return _fold_fault(use, a, b)


def _fold_fault(use: MetadataUse, a: Any, b: Any) -> str | None:
    for metas in ((a, None), (None, a), (a, b), (b, a)):
        came = use.fold([None if meta is None else use.fresh(meta) for meta in metas])
        expected = reduce(lambda x, y: _join(use, x, y), [meta for meta in metas if meta is not None])
        if came is None or not use.same(came, expected):
            return f"reported by two ranks as {metas}, folded to {came}"
    return None


def _join(use: MetadataUse, left: Any, right: Any) -> Any:
    """The join, of operands that nothing else holds: whether it changes them is another law's question."""
    return use.join(use.fresh(left), use.fresh(right))


def _differ(use: MetadataUse, left: Any, right: Any) -> str | None:
    return None if use.same(left, right) else f"{left} on one side, {right} on the other"


_LAWS: dict[str, Law] = {
    "metadata-is-pure": _pure,
    "metadata-is-commutative": _commutative,
    "metadata-is-associative": _associative,
    "metadata-is-idempotent": _idempotent,
    "metadata-aggregates-all": _all,
    "metadata-round-trips": _round_trip,
    "metadata-counts-when-falsy": _counts_when_falsy,
}
