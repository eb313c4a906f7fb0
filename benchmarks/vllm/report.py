"""The figures as tables for the docs, and which goals they meet."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks.vllm.names import COPY, ECOTONE, EXAMPLE, HELD, HIT, MISS, SHARES

GOAL_TEXT_US, GOAL_LOAD, WITHIN = 20.0, 1.5, 1.03


def goals(engines: Mapping[str, Any], alone: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """By goal: the figure, what it should be, and whether it is."""
    hits = {name: engine["first_token_ms"][HIT]["median"] for name, engine in engines.items()}
    best = min(value for name, value in hits.items() if name != ECOTONE)
    of_best = round(hits[ECOTONE] / best, 3)
    text_us = engines[ECOTONE]["text_alone"]["hooks_us"]
    rows: dict[str, dict[str, Any]] = {
        "first token on a hit, times the best other's": _goal(of_best, f"at most {WITHIN}", of_best <= WITHIN),
        "us in hooks per step of text alone": _goal(text_us, f"under {GOAL_TEXT_US:g}", text_us < GOAL_TEXT_US),
    }
    for shape, table in alone.items():
        faster = round(table[EXAMPLE]["load_ms"] / table[ECOTONE]["load_ms"], 2)
        name = f"times faster than ECExampleConnector, load of {shape}"
        rows[name] = _goal(faster, f"at least {GOAL_LOAD}", faster >= GOAL_LOAD)
    return rows


def _goal(figure: float, wanted: str, met: bool) -> dict[str, Any]:
    return {"measured": figure, "goal": wanted, "met": "yes" if met else "no"}


def markdown(results: Mapping[str, Any]) -> str:
    """All tables, each under what it says."""
    engines, alone = results["engines"], results["alone"]
    parts = [
        _conditions(results),
        _titled("Time to first token, ms: median (10% to 90%)", _first_tokens(engines)),
        _titled("Time in a connector's hooks per question, both sides, ms", _image_hooks(engines)),
        _titled("A mix of questions at once: questions per second, encoder runs by round", _mixes(engines)),
        _titled("Text alone: a step, and the time in hooks of it: medians (means)", _text(engines)),
        _titled("Memory of the engine's processes, MiB, at the end", _memory(engines)),
        *(
            _titled(f"Saves and loads alone, {shape} bfloat16, ms (times `{COPY}`)", _alone(table))
            for shape, table in alone.items()
        ),
        _titled("Goals", _goals(results["goals"])),
    ]
    return "\n\n".join(parts) + "\n"


def _conditions(results: Mapping[str, Any]) -> str:
    load, sizes = results["load"], results["sizes"]
    return (
        f"{results['machine']['cpus']} cores, vLLM {results['vllm']}; "
        f"load average while it ran {load['min']} to {load['max']}, median {load['median']}; "
        f"{sizes['rounds']} rounds, {sizes['first_tokens']} first tokens of each kind and {sizes['mixed']} mixed "
        "questions of each mix in a round."
    )


def _titled(title: str, rows: Iterable[Iterable[object]]) -> str:
    first, *others = [[str(cell) for cell in row] for row in rows]
    lines = [first, ["---", *("---:" for _ in first[1:])], *others]
    return f"### {title}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _first_tokens(engines: Mapping[str, Any]) -> Iterable[Iterable[object]]:
    yield ["", HIT, HELD, MISS]
    for name, engine in engines.items():
        kinds = [engine["first_token_ms"][kind] for kind in (HIT, HELD, MISS)]
        yield [name, *(f"{kind['median']:.1f} ({kind['p10']:.1f} to {kind['p90']:.1f})" for kind in kinds)]


def _image_hooks(engines: Mapping[str, Any]) -> Iterable[Iterable[object]]:
    yield ["", HIT, HELD, MISS]
    for name, engine in engines.items():
        if any(engine["hooks_ms"].values()):
            yield [name, *(f"{engine['hooks_ms'][kind]:.2f}" for kind in (HIT, HELD, MISS))]


def _mixes(engines: Mapping[str, Any]) -> Iterable[Iterable[object]]:
    yield ["", *(heading for share in SHARES for heading in (f"{share}, per s", "encoder runs"))]
    for name, engine in engines.items():
        cells: list[object] = []
        for share in SHARES:
            cells += [engine["questions_per_s"][share], ", ".join(map(str, engine["encodes"][share]))]
        yield [name, *cells]


def _text(engines: Mapping[str, Any]) -> Iterable[Iterable[object]]:
    yield ["", "step, ms", "scheduler's hooks, us", "worker's hooks, us", "both, us"]
    for name, engine in engines.items():
        text = engine["text_alone"]
        sides = ["", "", ""]
        if "hooks_us" in text:
            mean = text["scheduler_mean_us"] + text["worker_mean_us"]
            sides = [f"{text[f'{s}_us']:.1f} ({text[f'{s}_mean_us']:.1f})" for s in ("scheduler", "worker")]
            sides.append(f"{text['hooks_us']:.1f} ({mean:.1f})")
        yield [name, f"{text['step_ms']:.2f}", *sides]


def _memory(engines: Mapping[str, Any]) -> Iterable[Iterable[object]]:
    yield ["", "resident", "proportional share", "files written"]
    for name, engine in engines.items():
        yield [name, *(f"{engine['memory'][key]:,.0f}" for key in ("rss_mib", "pss_mib", "files_mib"))]


def _alone(table: Mapping[str, Any]) -> Iterable[Iterable[object]]:
    columns = ("save", "load", "load_and_read")
    yield ["", "save", "load", "load, then read once"]
    for name, row in table.items():
        cells = [
            f"{row[f'{column}_ms']:.3f} ({row[f'{column}_of_copy']:.2f})" if f"{column}_ms" in row else ""
            for column in columns
        ]
        yield [f"`{name}`" if name == COPY else name, *cells]


def _goals(rows: Mapping[str, Any]) -> Iterable[Iterable[object]]:
    yield ["", "measured", "goal", "met"]
    for name, row in rows.items():
        yield [name, row["measured"], row["goal"], row["met"]]
