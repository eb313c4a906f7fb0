"""docs/statistics.md names all that is counted, and nothing else."""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
from digit_questions import MODEL, ROWS, Digit, which
from typer.testing import CliRunner

from ecotone import ECConfig, Engine
from ecotone.cli import cache
from ecotone.cli.app import app
from ecotone.connectors import scheduler as scheduler_half
from ecotone.connectors.messages import FailureReason, ReportKind
from ecotone.connectors.questions import why_unsaved
from ecotone.connectors.transfers import Transfers
from ecotone.node.disk.ledger import Ledger
from ecotone.node.eviction import make_policy
from ecotone.node.exchange import Acquire, AnyOp, Lookup
from ecotone.node.index import Index
from ecotone.node.server import tenants
from ecotone.node.server.client import SharedNodeExchange
from ecotone.node.server.messages import Hello
from ecotone.node.server.node import SharedNode

pytestmark = pytest.mark.e2e

PAGE = Path(__file__).parents[2] / "docs" / "statistics.md"
Make = Callable[..., Engine]


@pytest.fixture(scope="module")
def page() -> dict[str, list[str]]:
    """Heading -> the names under it."""
    named: dict[str, list[str]] = {}
    for section in PAGE.read_text().split("\n## ")[1:]:
        heading, _, text = section.partition("\n")
        rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
        named[heading] = [name for row in rows for name in re.findall(r"`([^`]+)`", row)]
    return named


def test_no_name_is_explained_twice(page: dict[str, list[str]]) -> None:
    for heading, names in page.items():
        assert sorted(set(names)) == sorted(names), heading


def test_what_parts_count(page: dict[str, list[str]], tmp_path: Path) -> None:
    index = Index(4096, "region", 1, make_policy("lru"))
    assert set(page["`node`: memory"]) == index.statistics().keys()
    disk = {f"disk_{name}" for name in Ledger(4096).statistics()}
    assert set(page["`node`: the disk"]) == disk | {"disk_reading"}
    end = SharedNodeExchange(tmp_path / "nowhere", Hello("e", "scheduler"))
    assert set(page["`node`: this end of a shared node"]) == end.statistics().keys()
    with SharedNode(tmp_path / "node", {"": 4096}) as node:
        assert set(page["`ecotone cache stat --json`: `node`"]) == node.statistics().keys()
    counted = {*tenants._ASKED.values(), *tenants._TOLD.values()} | counted_in(tenants, "counters")
    assert set(page["`ecotone cache stat --json`: `engines[].counters`"]) == counted
    by_namespace = cache._by_namespace([Entry()])  # type: ignore[list-item]
    assert set(page["`ecotone cache stat --json`: `namespaces`"]) == by_namespace["0" * 32].keys()


class Entry:
    key, nbytes, hits, pins, age_s = f"{'0' * 32}:{'1' * 64}", 1, 1, 1, 1.0


def counted_in(module: Any, attribute: str) -> set[str]:
    """Texts that are keys of ``self.<attribute>[...]`` or ``....<attribute>[...]`` in a module."""
    subscripts = [
        node for node in ast.walk(ast.parse(inspect.getsource(module))) if isinstance(node, ast.Subscript)
    ]
    return {
        str(node.slice.value)
        for node in subscripts
        if isinstance(node.slice, ast.Constant)
        and isinstance(node.value, ast.Attribute)
        and node.value.attr == attribute
    }


def test_what_the_scheduler_half_counts(page: dict[str, list[str]]) -> None:
    whys = ast.walk(ast.parse(inspect.getsource(why_unsaved)))
    reasons = {str(n.value.value) for n in whys if isinstance(n, ast.Return) and isinstance(n.value, ast.Constant)}
    told = {kind.__name__.lower() for kind in get_args(AnyOp) if kind not in (Acquire, Lookup)}
    assert set(page["`connector`"]) == (
        counted_in(scheduler_half, "_counters")
        | Transfers((0,), lambda: 0).gauges().keys()
        | {f"unsaved.{reason}" for reason in (*reasons, "settled")}
        | {f"told.{kind}" for kind in told}
        | {"answers_awaited", "pending_budget_s"}
    )


def test_what_a_worker_half_counts(page: dict[str, list[str]]) -> None:
    failed = [kind for kind in ReportKind if kind.endswith("_failed")]
    copies = {f"{name}{what}" for name in ("load", "save") for what in ("s", "_bytes", "_seconds")}
    assert set(page["`ranks[].connector`"]) == (
        {f"{kind}.{reason}" for kind in failed for reason in FailureReason} | copies | {"views", "view_bytes"}
    )


def test_what_an_engine_says(
    page: dict[str, list[str]], make_engine: Make, digits: list[Digit], tmp_path: Path
) -> None:
    options = {"memory": "1MiB", "disk": str(tmp_path / "disk")}
    engine = make_engine(encoder_cache_rows=2 * ROWS, ec=ECConfig(options=options))
    for digit in (*digits[:4], *digits[:4]):
        engine.generate(which(digit))
    assert engine.settle()
    said = engine.statistics()
    assert set(page["`engine`"]) == said["engine"].keys()
    assert set(page["`scheduler`"]) == said["scheduler"].keys()
    assert set(page["`node`: memory"]) | set(page["`node`: the disk"]) == said["node"].keys()
    [rank] = said["ranks"]
    half = rank.pop("connector")
    assert set(page["`ranks[]`"]) == rank.keys()
    assert {"views", "saves"} <= half.keys() <= set(page["`ranks[].connector`"])
    sums = {name for name in said["connector"] if name.startswith("ranks.")}
    assert {name.removeprefix("ranks.") for name in sums} == half.keys()
    assert {"hits", "misses", "told.commit"} <= said["connector"].keys() - sums <= set(page["`connector`"])


def test_what_is_said_of_a_directory(page: dict[str, list[str]], digits: list[Digit], tmp_path: Path) -> None:
    options = {"memory": "1MiB", "disk": str(tmp_path / "disk")}
    with Engine(MODEL, kv_blocks=128, ec=ECConfig(options=options)) as engine:
        engine.generate(which(digits[0]))
    said = json.loads(CliRunner().invoke(app, ["cache", "stat", str(tmp_path / "disk"), "--json"]).stdout)
    [figures] = said["namespaces"].values()
    assert figures.keys() < set(page["`ecotone cache stat --json`: `namespaces`"])
