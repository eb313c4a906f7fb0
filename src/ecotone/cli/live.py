"""The demo while it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from ecotone.cli.console import err
from ecotone.cli.passes import Pass


@contextmanager
def watching(passes: Sequence[Pass], total: int) -> Iterator[Callable[[], None]]:
    """Show the passes on a terminal; call what this gives after each question."""
    progress = Progress(
        TextColumn("asking"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=err,
        auto_refresh=False,
    )
    task = progress.add_task("asking", total=total)
    with Live(console=err, transient=True, refresh_per_second=8) as live:

        def update() -> None:
            progress.update(task, completed=len(passes[0].outputs))
            live.update(Group(_table(passes), _latest(passes[0]), progress))

        yield update


def _table(passes: Sequence[Pass]) -> Table:
    table = Table("", "requests", "right", "encoder runs", "loads", "saves")
    for each in passes:
        figures = (len(each.outputs), each.correct, each.encodes, each.loads, each.saves)
        table.add_row(each.name, *(str(figure) for figure in figures))
    return table


def _latest(latest: Pass) -> Text:
    question, output = latest.questions[-1], latest.outputs[-1]
    names = ", ".join(path.name for path in question.images)
    right = latest.is_right(len(latest.outputs) - 1)
    return Text.assemble((f"{names}: {question.text} ", "dim"), (output.text.strip(), "green" if right else "red"))
