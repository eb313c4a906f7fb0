"""The demo's figures as tables."""

from __future__ import annotations

from collections.abc import Callable

from rich.table import Table

from ecotone.cli.console import out
from ecotone.cli.demo import DemoResult
from ecotone.cli.passes import Pass


def print_report(result: DemoResult) -> None:
    """Print everything the demo found out."""
    out.print(_answers(result))
    out.print(_work(result))
    out.print(_ranks(result))
    same = (
        "[green]token-identical[/] with and without the cache"
        if result.identical
        else "[bold red]NOT THE SAME[/] with and without the cache"
    )
    out.print(f"{len(result.cached.outputs)} answers, {same}.")


def _answers(result: DemoResult) -> Table:
    table = Table(
        "question", "asked", "right with the cache", "right without", title="Answers", title_justify="left"
    )
    kinds = dict.fromkeys(question.kind for question in result.cached.questions)
    for kind in kinds:
        chosen = [i for i, question in enumerate(result.cached.questions) if question.kind == kind]
        right = [sum(each.is_right(i) for i in chosen) for each in (result.cached, result.uncached)]
        table.add_row(kind, str(len(chosen)), *map(str, right))
    return table


def _work(result: DemoResult) -> Table:
    table = Table(
        "",
        result.cached.name,
        result.uncached.name,
        title=f"Work: {result.num_images} images, the worker's own encoder cache holds {result.cache_images}",
        title_justify="left",
    )
    lines: list[tuple[str, Callable[[Pass], str]]] = [
        ("requests", lambda p: str(len(p.outputs))),
        ("right answers", lambda p: str(p.correct)),
        ("encoder runs", lambda p: str(p.encodes)),
        ("loads from the node", lambda p: str(p.loads)),
        ("saves to the node", lambda p: str(p.saves)),
        ("bytes saved", lambda p: f"{sum(rank.bytes_saved for rank in p.ranks):,}"),
        ("bytes loaded", lambda p: f"{sum(rank.bytes_loaded for rank in p.ranks):,}"),
        ("first token, image never seen before", lambda p: _ms(p.ttft_ms(result.first_sights))),
        (f"first token, image seen before ({len(result.paired)} pairs)", lambda p: _ms(p.ttft_ms(result.paired))),
        ("seconds in all", lambda p: f"{p.seconds:.2f}"),
    ]
    for name, read in lines:
        table.add_row(name, read(result.cached), read(result.uncached))
    table.caption = (
        "First tokens are medians. Of an image seen before, one engine loads the encoding and the other "
        "encodes it again; "
    )
    ranks = len(result.cached.ranks)
    table.caption += "nothing else differs." if ranks == 1 else f"but it has {ranks} ranks, and the other has one."
    table.caption_justify = "left"
    return table


def _ranks(result: DemoResult) -> Table:
    table = Table("rank", "pid", "encoder runs", "saves", "loads", "bytes saved", "bytes loaded")
    table.title, table.title_justify = f"Ranks {result.cached.name}", "left"
    for rank in result.cached.ranks:
        figures = (rank.rank, rank.pid, rank.tower_items, rank.saves, rank.loads)
        table.add_row(*map(str, figures), f"{rank.bytes_saved:,}", f"{rank.bytes_loaded:,}")
    return table


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} ms"
