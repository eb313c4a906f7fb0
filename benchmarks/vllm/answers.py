"""First tokens, mixes, text alone: every engine is asked the same, in turns, another one first in each round."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

from benchmarks.harness import summarize
from benchmarks.vllm.engines import Answers, Engine, say
from benchmarks.vllm.hooks import SIDES
from benchmarks.vllm.names import HELD, HIT, MISS, NONE, SHARES
from benchmarks.vllm.questions import about, fresh, mix

SEEN = [1, 2, 3, 4]
"""Images that were asked about before anything is measured."""
TEXTS = ["What digit is this?", "USER: What is one and two? ASSISTANT:", "List the digits.", "Is it seven?"]
TEXT_STEPS = 64
_MIX_TOKENS = 8


@dataclass(frozen=True)
class Sizes:
    """How much is asked per round."""

    rounds: int
    first_tokens: int
    mixed: int


@dataclass
class Found:
    """Of one engine, over all rounds.

    Attributes:
        first_tokens: kind of question -> seconds of each.
        mixes: share of repeats -> questions per second, by round.
        encodes: the same -> encoder runs, by round.
        step_s: seconds per step of ``TEXTS`` together, by round.
        hooks: side -> seconds in hooks of each of those steps.
        image_hooks: kind of question -> hook -> seconds in it, for each question.
        text_hooks: hook -> seconds in it per step of ``TEXTS``, by round.
    """

    first_tokens: dict[str, list[float]] = field(default_factory=lambda: {HIT: [], MISS: [], HELD: []})
    mixes: dict[str, list[float]] = field(default_factory=lambda: {share: [] for share in SHARES})
    encodes: dict[str, list[int]] = field(default_factory=lambda: {share: [] for share in SHARES})
    step_s: list[float] = field(default_factory=list)
    hooks: dict[str, list[float]] = field(default_factory=lambda: {side: [] for side in SIDES})
    image_hooks: dict[str, list[dict[str, float]]] = field(default_factory=lambda: {HIT: [], MISS: [], HELD: []})
    text_hooks: list[dict[str, float]] = field(default_factory=list)


def measure(engines: Sequence[Engine], sizes: Sizes) -> dict[str, Found]:
    """By name of the engine.

    Raises:
        RuntimeError: an engine answered other than the first one, or encoded what it should have loaded.
    """
    for engine in engines:
        engine.warm(SEEN)
    found = {engine.name: Found() for engine in engines}
    unseen = fresh()
    for number in range(sizes.rounds):
        for part in _parts(sizes, unseen, number):
            say(f"round {number + 1} of {sizes.rounds}: {part.what}")
            first = number % len(engines)
            order = [*engines[first:], *engines[:first]]
            answers = {}
            for engine in order:
                answers[engine.name] = part.ask(engine, found[engine.name])
                engine.rest()
            _compare(part.what, answers)
    return found


@dataclass(frozen=True)
class _Part:
    what: str
    ask: Callable[[Engine, Found], list[tuple[int, ...]]]


def _parts(sizes: Sizes, unseen: Iterator[int], seed: int) -> Iterator[_Part]:
    yield _first_tokens(HIT, [SEEN[i % len(SEEN)] for i in range(sizes.first_tokens)])
    yield _first_tokens(HELD, [SEEN[-1]] * sizes.first_tokens)
    yield _first_tokens(MISS, [next(unseen) for _ in range(sizes.first_tokens)])
    for share, repeated in SHARES.items():
        yield _mixed(share, mix(SEEN, unseen, sizes.mixed, repeated, seed))
    yield _Part("text alone", _text_alone)


def _first_tokens(kind: str, numbers: list[int]) -> _Part:
    def ask(engine: Engine, found: Found) -> list[tuple[int, ...]]:
        # What the engine holds when the first question comes: an image of the list, or another.
        engine.ask([about(SEEN[-1])])
        answers = []
        for number in numbers:
            before = engine.hooks.seconds()
            answers.append(engine.ask([about(number)]))
            found.image_hooks[kind].append(_between(before, engine.hooks.seconds(), 1))
        _check_encodes(engine.name, kind, answers)
        found.first_tokens[kind] += [answer.seconds for answer in answers]
        return [answer.tokens[0] for answer in answers]

    return _Part(f"first token, {kind}", ask)


def _check_encodes(name: str, kind: str, answers: Sequence[Answers]) -> None:
    expected = {HELD: 0, MISS: 1, HIT: 1 if name == NONE else 0}[kind]
    encodes = [answer.encodes for answer in answers]
    if set(encodes) != {expected}:
        raise RuntimeError(f"this measures something else: {name}, {kind}: {encodes} encodes")


def _mixed(share: str, numbers: list[int]) -> _Part:
    questions = [about(number) for number in numbers]

    def ask(engine: Engine, found: Found) -> list[tuple[int, ...]]:
        answer = engine.ask(questions, _MIX_TOKENS)
        found.mixes[share].append(len(questions) / answer.seconds)
        found.encodes[share].append(answer.encodes)
        return answer.tokens

    return _Part(f"a mix, {share}", ask)


def _text_alone(engine: Engine, found: Found) -> list[tuple[int, ...]]:
    engine.ask(TEXTS)  # what the last part left behind is not its
    before, steps = engine.hooks.seconds(), {side: engine.hooks.steps(side) for side in SIDES}
    answer = engine.ask(TEXTS, TEXT_STEPS)
    found.step_s.append(answer.seconds / TEXT_STEPS)
    found.text_hooks.append(_between(before, engine.hooks.seconds(), TEXT_STEPS))
    for side in SIDES:
        found.hooks[side] += engine.hooks.latest(side, engine.hooks.steps(side) - steps[side])
    return answer.tokens


def _between(before: Mapping[str, float], after: Mapping[str, float], count: int) -> dict[str, float]:
    return {name: (after[name] - before[name]) / count for name in after}


def _medians_us(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Microseconds in each hook that took any."""
    medians = {name: median(row[name] for row in rows) for name in rows[0]}
    return {name: round(seconds * 1e6, 2) for name, seconds in medians.items() if seconds}


def _compare(what: str, answers: dict[str, list[tuple[int, ...]]]) -> None:
    expected = answers[next(iter(answers))]
    for name, tokens in answers.items():
        if tokens != expected:
            raise RuntimeError(f"{what}: {name} answers {tokens}, another engine {expected}")


def figures(found: Found) -> dict[str, Any]:
    """What is reported of one engine: times in ms, of steps in ms and us."""
    first = {kind: summarize(seconds) for kind, seconds in found.first_tokens.items()}
    text: dict[str, Any] = {"step_ms": round(median(found.step_s) * 1e3, 3)}
    for side in SIDES:
        if found.hooks[side]:
            text[f"{side}_us"] = round(median(found.hooks[side]) * 1e6, 2)
            text[f"{side}_mean_us"] = round(fmean(found.hooks[side]) * 1e6, 2)
    if any(found.hooks.values()):
        text["hooks_us"] = round(sum(text[f"{side}_us"] for side in SIDES), 2)
    return {
        "first_token_ms": {
            kind: {name: round(value * 1e3, 2) for name, value in summary._asdict().items()}
            for kind, summary in first.items()
        },
        "hooks_ms": {
            kind: round(median(sum(row.values()) for row in rows) * 1e3, 3)
            for kind, rows in found.image_hooks.items()
        },
        "hooks_us": {
            **{kind: _medians_us(rows) for kind, rows in found.image_hooks.items()},
            "step of text alone": _medians_us(found.text_hooks),
        },
        "questions_per_s": {share: round(median(rates), 2) for share, rates in found.mixes.items()},
        "encodes": found.encodes,
        "text_alone": text,
    }
