"""``ecotone sim``: the fault simulator."""

from __future__ import annotations

from typing import Any

import msgspec
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ecotone.cli.console import err, out
from ecotone.testing.sim import EnginePlan, Finding, Outcome, Sweep, replay, sweep

_SHOWN_LINES = 40
_MAX_FAILURES = 10


def run_seed(seed: int, *, shrinking: bool, as_json: bool) -> bool:
    """Replay one seed; whether it holds every rule."""
    finding = replay(seed, shrinking=shrinking)
    if as_json:
        typer.echo(_json(finding))
    else:
        _print_finding(finding, lines=None)
    return not finding.outcome.failed


def run_sweep(start: int, seeds: int, *, shrinking: bool, as_json: bool) -> bool:
    """Run seeds from ``start`` on, until ten of them failed; whether every rule held."""
    columns = (TextColumn("simulating"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.fields[failed]} failed"), console=err, transient=True) as progress:
        task = progress.add_task("seeds", total=seeds, failed=0)
        failed = 0

        def advance(outcome: Outcome) -> None:
            nonlocal failed
            failed += outcome.failed
            progress.update(task, advance=1, failed=failed)

        result = sweep(range(start, start + seeds), max_failures=_MAX_FAILURES, on_seed=advance)
    if as_json:
        typer.echo(_json(result))
    else:
        _print_sweep(result, shrinking=shrinking)
    return not result.failures


def _print_sweep(result: Sweep, *, shrinking: bool) -> None:
    for failure in result.failures:
        out.print(f"seed {failure.seed}: {failure.rule}: {failure.detail}", markup=False, soft_wrap=True)
    if result.failures:
        out.print()
        _print_finding(replay(result.failures[0].seed, shrinking=shrinking), lines=_SHOWN_LINES)
        out.print(
            f"\n{len(result.failures)} of {result.seeds} seeds broke a rule; 'ecotone sim --seed N' replays one"
        )
        return
    said = ", ".join(f"{result.counts.get(name, 0):,} {what}" for name, what in _SAID)
    out.print(f"{result.seeds:,} seeds, {result.events:,} events: every rule held")
    out.print(f"({said})", style="dim")


_SAID = (
    ("steps", "steps"),
    ("encodes_ordered", "encodes"),
    ("loads_ordered", "loads"),
    ("rollbacks", "rollbacks"),
    ("preemptions", "preemptions"),
    ("requests.finished_aborted", "aborts"),
)


def _print_finding(finding: Finding, lines: int | None) -> None:
    """Its plan and timeline, the last ``lines`` of it."""
    outcome, plan = finding.outcome, finding.plan
    out.print(f"seed {finding.seed}, cut down to what it needs" if outcome.failed else f"seed {finding.seed}")
    where = "one shared node" if plan.shared else "an embedded node"
    engines = ", ".join(f"e{i} {_engine(engine)}" for i, engine in enumerate(plan.engines))
    out.print(f"{where} of {plan.capacity} bytes; {engines}; {len(plan.requests)} requests", markup=False)
    for fault in plan.faults:
        out.print(f"fault: {fault.kind} at {fault.at} s (engine {fault.engine}, {fault.seconds} s)", markup=False)
    shown = outcome.timeline if lines is None else outcome.timeline[-lines:]
    for seconds, text in shown:
        out.print(f"{seconds:10.4f}  {text}", markup=False, soft_wrap=True)
    if outcome.failed:
        out.print(f"broke {outcome.rule}: {outcome.detail}", style="bold red", markup=False, soft_wrap=True)
    else:
        out.print("every rule held")


def _engine(plan: EnginePlan) -> str:
    steps = plan.limits.max_concurrent_steps
    return f"{plan.role} of {plan.ranks} ranks" + (f", {steps} steps in flight" if steps > 1 else "")


def _json(value: Any) -> str:
    return msgspec.json.format(msgspec.json.encode(value)).decode()
