"""``ecotone inspect`` as tables."""

from __future__ import annotations

from typing import Any

from rich.markup import escape
from rich.table import Table

from ecotone.cli.console import out


def print_inspection(found: dict[str, Any]) -> None:
    """Print what ``inspect_model`` found."""
    table = Table(show_header=False, title=found["family"], title_justify="left")
    levels = (
        f", of {found['hidden_size']} and {found['levels']} more levels of the same" if found["levels"] else ""
    )
    lines = {
        "architecture": found["architecture"],
        "encoder": "\n".join(found["towers"]),
        "placeholders": "\n".join(f"{name}: {token}" for name, token in found["placeholders"].items()),
        "a row": f"{found['width']} x {found['dtype']}{levels}: {found['bytes_per_row']:,} bytes",
        "longest prompt and output": f"{found['max_model_len']:,} tokens",
    }
    for name, text in lines.items():
        table.add_row(name, escape(text))
    out.print(table)
    items = Table("item", "rows", "prompt tokens", "bytes", f"entries in {found['memory']:,} bytes")
    for item in found["items"]:
        if "error" not in item:
            figures = (item["rows"], item["prompt_tokens"], item["bytes"], item["entries"])
            items.add_row(escape(_name(item)), *(f"{figure:,}" for figure in figures))
    out.print(items)
    for item in found["items"]:
        if "error" in item:
            out.print(escape(f"{_name(item)}: {item['error']}"))


def _name(item: dict[str, Any]) -> str:
    return f"{item['modality']} {item['name']}"
