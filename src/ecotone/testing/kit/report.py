"""What a check found."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec

from ecotone.testing.kit.rules import Rule

Status = Literal["held", "violated", "skipped", "not reached"]
_MARKS: Mapping[Status, str] = {"held": "ok", "violated": "VIOLATED", "skipped": "skipped", "not reached": "-"}


class ViolationError(Exception):
    """A rule was broken; stops the run in which it was. ``rule`` is its name."""

    def __init__(self, rule: str, detail: str) -> None:
        super().__init__(f"{rule}: {detail}")
        self.rule = rule
        self.detail = detail


class Violation(msgspec.Struct, frozen=True, kw_only=True):
    """How a rule was broken.

    Attributes:
        rule: its name.
        detail: what was seen.
        setup: in which engine: role, task, ranks.
        events: the shortest sequence found that breaks it, in words.
        log: what happened in each step.
        seed, example: replay it: ``check_connector(..., seed=seed, only=example)``.
    """

    rule: str
    detail: str
    setup: str = ""
    events: tuple[str, ...] = ()
    log: tuple[str, ...] = ()
    seed: int = 0
    example: str = ""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one rule.

    Attributes:
        status: ``not reached`` is no praise: nothing that was run had to do with the rule.
        checks: how often something could have broken it.
        why: of a rule that was skipped.
    """

    rule: Rule
    status: Status
    checks: int = 0
    why: str = ""
    violation: Violation | None = None

    @property
    def explanation(self) -> str:
        """Of a rule that was broken: its text, what was seen, and after which events. Otherwise empty."""
        return "" if self.violation is None else "\n".join(_explained(self.rule, self.violation))


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All verdicts about one subject.

    Attributes:
        subject: what was checked.
        seed: of the random examples.
        runs: engines that were run, the shrinking included.
        verdicts: in the order of the rules.
    """

    subject: str
    seed: int = 0
    runs: int = 0
    verdicts: tuple[Verdict, ...] = ()

    @property
    def violations(self) -> tuple[Violation, ...]:
        """Of the rules that were broken."""
        return tuple(v.violation for v in self.verdicts if v.violation is not None)

    @property
    def ok(self) -> bool:
        """Whether no rule was broken."""
        return not self.violations

    def verdict(self, name: str) -> Verdict:
        """What became of the rule ``name``.

        Raises:
            KeyError: there is no such rule.
        """
        for verdict in self.verdicts:
            if verdict.rule.name == name:
                return verdict
        raise KeyError(name)

    def names(self, status: Status) -> tuple[str, ...]:
        """The rules that came to ``status``."""
        return tuple(v.rule.name for v in self.verdicts if v.status == status)

    def __add__(self, other: Report) -> Report:
        """Both verdicts as one report, otherwise this one."""
        return msgspec.structs.replace(self, verdicts=(*self.verdicts, *other.verdicts))

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return {"ok": self.ok, **plain}

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"{self.subject}: {len(self.verdicts)} rules, {self.runs} runs, seed {self.seed}"
        width = max((len(v.rule.name) for v in self.verdicts), default=0)
        for verdict in self.verdicts:
            note = f"{verdict.checks} checks" if verdict.status in ("held", "violated") else verdict.why
            yield f"  {verdict.rule.name:{width}}  {_MARKS[verdict.status]:8}  {note}".rstrip()
        for verdict in self.verdicts:
            if verdict.violation is not None:
                yield ""
                yield verdict.explanation
        yield ""
        yield self._summary()

    def _summary(self) -> str:
        counts = {status: len(self.names(status)) for status in _MARKS}
        said = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
        return f"{'passed' if self.ok else 'FAILED'}: {said}"


def verdicts_of(
    rules: Sequence[Rule],
    missing: Mapping[str, str],
    checks: Mapping[str, int],
    violations: Mapping[str, Violation],
) -> tuple[Verdict, ...]:
    """One verdict for each of ``rules``.

    Args:
        missing: capability -> why it is not there.
        checks: rule -> how often it was checked.
        violations: by rule.
    """
    return tuple(_verdict(rule, missing, checks.get(rule.name, 0), violations.get(rule.name)) for rule in rules)


def _verdict(rule: Rule, missing: Mapping[str, str], checks: int, violation: Violation | None) -> Verdict:
    if violation is not None:
        return Verdict(rule=rule, status="violated", checks=max(checks, 1), violation=violation)
    if rule.needs in missing:
        return Verdict(rule=rule, status="skipped", why=missing[rule.needs])
    return Verdict(rule=rule, status="held" if checks else "not reached", checks=checks)


def _explained(rule: Rule, violation: Violation) -> Iterator[str]:
    yield f"{rule.name}: {rule.text}"
    yield f"  seen: {violation.detail}"
    if violation.setup:
        yield f"  in:   {violation.setup}"
    if violation.events:
        yield "  after these events:"
        yield from (f"    {number}. {event}" for number, event in enumerate(violation.events, 1))
    elif violation.setup:
        yield "  without any event: an engine starts, rests and ends"
    if violation.log:
        yield "  step by step:"
        yield from (f"    {line}" for line in violation.log)
    if violation.example:
        yield f"  replay: seed {violation.seed}, example {violation.example}"
