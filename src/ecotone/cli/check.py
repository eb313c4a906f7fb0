"""``ecotone check``: the conformance kit."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import typer

from ecotone.errors import ConfigError
from ecotone.testing.kit.target import check_target, find_target

_USAGE = 2


def run(name: str, *, options: str | None, seed: int, examples: int, only: str, as_json: bool) -> bool:
    """Check what ``name`` stands for and print the report; whether it keeps every rule."""
    sys.path.insert(0, str(Path.cwd()))  # as ``python -m`` does
    try:
        target = find_target(name, None if options is None else _parse(options))
    except ConfigError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(_USAGE) from error
    report = check_target(target, seed=seed, examples=examples, only=only)
    if only and not report.runs:
        typer.echo(f"error: there is no example {only!r}", err=True)
        raise typer.Exit(_USAGE)
    typer.echo(json.dumps(report.as_dict(), indent=2) if as_json else str(report))
    return report.ok


def _parse(options: str) -> dict[str, Any]:
    try:
        parsed = json.loads(options)
    except ValueError as error:
        raise ConfigError(f"--options is no JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise ConfigError("--options must be a JSON object")
    return parsed
