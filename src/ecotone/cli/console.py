"""What goes where: answers to stdout, progress and errors to stderr."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


@contextmanager
def working(what: str) -> Iterator[None]:
    """Say ``what`` is going on for as long as it does: a spinner, or a line where nobody watches a terminal."""
    if not err.is_terminal:
        err.print(f"{what} ...", markup=False)
        yield
        return
    with err.status(what):
        yield
