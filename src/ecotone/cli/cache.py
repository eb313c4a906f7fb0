"""``ecotone cache``: look into a node, or a directory that none uses, and take things out of it."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Annotated, Any, TypeGuard

import msgspec
import typer
from rich.table import Table

from ecotone.cli import cache_folder
from ecotone.cli.console import out
from ecotone.config import parse_bytes
from ecotone.errors import ConfigError, IntegrityError, ResourceError
from ecotone.node.keys import namespace_of
from ecotone.node.server.hosted import hosted_address
from ecotone.node.server.listen import Address
from ecotone.node.server.messages import Description, EntryReport, Outcome
from ecotone.node.server.tool import NodeTool

cache = typer.Typer(no_args_is_help=True, help="Look into a node, or a disk directory, and take things out of it.")

_PLURALS = {"entry": "entries", "file": "files"}
_DISK_IS_LATE = (
    "forgotten in memory, but the disk does not know it yet: it is slow, or it fails ('stat' shows disk_failing). "
    "The node tells it as soon as it works; if the node ends before that, what is on the disk comes back"
)

Where = Annotated[
    Path | None,
    typer.Argument(metavar="WHERE", help="Socket of a running node, or a disk directory that no node uses."),
]
Engine = Annotated[
    str | None,
    typer.Option(metavar="ID", help="Instead of WHERE: the engine whose own process has the node."),
]
Tenant = Annotated[str, typer.Option(help="Whose entries; by default those of engines that name no tenant.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Namespace = Annotated[
    str | None, typer.Option(help="Only this namespace (32 hex digits, as 'stat' and 'ls' show it).")
]


@cache.command()
def stat(where: Where = None, engine: Engine = None, tenant: Tenant = "", as_json: AsJson = False) -> None:
    """Sizes, hits and pins: of the node, its tenants and engines, and of each namespace."""
    at = _target(where, engine)
    if _is_folder(at):
        stored = cache_folder.by_namespace(cache_folder.entries_of(cache_folder.find(at, tenant), None))
        if as_json:
            _print_json({"namespaces": stored})
        else:
            out.print(_table("namespace", stored))
        return
    with NodeTool(at, tenant) as node:
        description, namespaces = node.describe(), _by_namespace(list(node.entries()))
    if as_json:
        _print_json({**_plain(description), "namespaces": namespaces})
        return
    for table in (*_tables(description), _table("namespace", namespaces)):
        out.print(table)


@cache.command("ls")
def list_entries(
    where: Where = None,
    engine: Engine = None,
    tenant: Tenant = "",
    namespace: Namespace = None,
    as_json: AsJson = False,
) -> None:
    """Every entry in a node's memory: key, shape, bytes, state, hits, pins, age in seconds; or every file in a
    directory: key, bytes, age."""
    at = _target(where, engine)
    if _is_folder(at):
        files = cache_folder.entries_of(cache_folder.find(at, tenant), namespace)
        if as_json:
            _print_json([msgspec.to_builtins(file) for file in files])
            return
        for file in files:
            typer.echo(f"{file.key}  {file.nbytes}  age={file.age_s:.1f}")
        return
    with NodeTool(at, tenant) as node:
        if as_json:
            _print_json([msgspec.to_builtins(entry) for entry in node.entries(namespace)])
            return
        for entry in node.entries(namespace):
            typer.echo(
                f"{entry.key}  {entry.dtype}{list(entry.shape)}  {entry.nbytes}  {entry.state}  "
                f"hits={entry.hits}  pins={entry.pins}  age={entry.age_s:.1f}"
            )


@cache.command()
def verify(where: Where = None, engine: Engine = None, tenant: Tenant = "", as_json: AsJson = False) -> None:
    """Check that the books of everything the node owns add up, or that every file in a directory has the bytes of
    its digest; exit code 1 if not."""
    at = _target(where, engine)
    if _is_folder(at):
        outcome = cache_folder.verify(cache_folder.find(at, tenant))
    else:
        with NodeTool(at, tenant) as node:
            outcome = node.verify()
    _print_outcome(outcome, "verified", as_json)
    if outcome.problem:
        raise IntegrityError(outcome.problem)


@cache.command()
def evict(
    where: Where = None,
    engine: Engine = None,
    free: Annotated[
        str | None,
        typer.Option(
            help="A node: evict until so much memory is free, e.g. 512MiB. A directory: give back so much."
        ),
    ] = None,
    key: Annotated[str | None, typer.Option(help="Take this one entry out.")] = None,
    tenant: Tenant = "",
    as_json: AsJson = False,
) -> None:
    """Evict entries that nobody uses until there is room, or take one entry out. What a node evicts from memory
    stays on its disk; an entry that is taken out does not."""
    if (free is None) == (key is None):
        raise ConfigError("say either --free SIZE or --key KEY")
    at = _target(where, engine)
    if _is_folder(at):
        outcome = cache_folder.evict(cache_folder.find(at, tenant), free, key)
    else:
        with NodeTool(at, tenant) as node:
            outcome = node.evict(key=key) if free is None else _free(node, tenant, parse_bytes(free, "free"))
    _print_outcome(outcome, "evicted", as_json)
    if key is not None and not (outcome.entries or outcome.files):
        raise ConfigError(f"there is no entry {key}")
    if outcome.problem:
        raise ResourceError(outcome.problem)


@cache.command()
def clear(
    where: Where = None,
    engine: Engine = None,
    tenant: Tenant = "",
    namespace: Namespace = None,
    as_json: AsJson = False,
) -> None:
    """Forget everything, or one namespace, in memory and on the disk. Engines go on, and encode again."""
    at = _target(where, engine)
    if _is_folder(at):
        outcome = cache_folder.clear(cache_folder.find(at, tenant), namespace)
    else:
        with NodeTool(at, tenant) as node:
            outcome = node.clear(namespace)
            if not outcome.problem and node.describe().tenants[tenant].get("disk_drops_pending"):
                outcome = msgspec.structs.replace(outcome, problem=_DISK_IS_LATE)
    _print_outcome(outcome, "forgotten", as_json)
    if outcome.problem:
        raise ResourceError(outcome.problem)


def _target(where: Path | None, engine: str | None) -> Address:
    match where, engine:
        case Path() as path, None:
            return path
        case None, str() as engine_id:
            return hosted_address(engine_id)
    raise ConfigError("say either WHERE (a node's socket, or a disk directory) or --engine ID")


def _is_folder(at: Address) -> TypeGuard[Path]:
    return isinstance(at, Path) and at.is_dir()


def _free(node: NodeTool, tenant: str, nbytes: int) -> Outcome:
    outcome, figures = node.evict(nbytes), node.describe().tenants[tenant]
    if figures["bytes_free"] >= nbytes:
        return outcome
    free, total = int(figures["bytes_free"]), int(figures["bytes_total"])
    return msgspec.structs.replace(outcome, problem=f"{free} of {total} bytes are free, and no more can be now")


def _by_namespace(entries: list[EntryReport]) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = defaultdict(
        lambda: {"entries": 0, "bytes": 0, "hits": 0, "pins": 0, "oldest_s": 0.0}
    )
    for entry in entries:
        row = found[namespace_of(entry.key)]
        row["entries"] += 1
        row["bytes"] += entry.nbytes
        row["hits"] += entry.hits
        row["pins"] += entry.pins
        row["oldest_s"] = max(row["oldest_s"], round(entry.age_s, 1))
    return dict(found)


def _tables(description: Description) -> list[Table]:
    engines = {
        engine.engine_id: {"connected": "yes" if engine.connected else "no", **engine.counters}
        for engine in description.engines
    }
    tenants = {name or "(default)": figures for name, figures in description.tenants.items()}
    return [_sideways("tenant", tenants), _table("engine", engines)]


def _sideways(title: str, columns: dict[str, dict[str, float]]) -> Table:
    """Few things with many figures: one column each."""
    table = Table(title, *columns)
    for name in dict.fromkeys(name for figures in columns.values() for name in figures):
        table.add_row(name, *(_figure(figures.get(name, "")) for figures in columns.values()))
    return table


def _table(title: str, rows: dict[str, Any]) -> Table:
    """Many things with few figures: one row each."""
    columns = list(dict.fromkeys(name for row in rows.values() for name in row))
    table = Table(title, *columns)
    for name, row in rows.items():
        table.add_row(name, *(_figure(row.get(column, "")) for column in columns))
    return table


def _figure(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:,.10g}"


def _print_outcome(outcome: Outcome, verb: str, as_json: bool) -> None:
    if as_json:
        _print_json(_plain(outcome))
    elif not outcome.problem or outcome.entries:
        on_disk = f"; on disk {_count(outcome.files, 'file')}, {outcome.file_bytes} bytes" if outcome.files else ""
        typer.echo(f"{_count(outcome.entries, 'entry')} {verb}, {outcome.nbytes} bytes{on_disk}")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {_PLURALS[noun]}"


def _plain(message: Description | Outcome) -> dict[str, Any]:
    """Its fields, without what only the wire needs, and with counts as whole numbers."""
    fields = msgspec.to_builtins(message)
    del fields["msg"]
    return {name: _counts(value) for name, value in fields.items()}


def _counts(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _counts(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_counts(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2))
