"""The shipped model's images, its questions, and what an engine did about them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ecotone import Engine, Prompt, RequestOutput

MODEL = Path(__file__).parents[2] / "models" / "digits-llava"
ROWS = 16  # encoder rows of an image
WORDS = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen",
)  # fmt: skip


class Digit(NamedTuple):
    path: Path
    label: int


def which(digit: Digit) -> Prompt:
    return Prompt("USER: <image> What digit is this? ASSISTANT:", [digit.path])


def total(a: Digit, b: Digit) -> Prompt:
    return Prompt("USER: <image><image> What is the sum of the digits? ASSISTANT:", [a.path, b.path])


def count_up(digit: Digit) -> Prompt:
    return Prompt("USER: <image> Count up from this digit. ASSISTANT:", [digit.path])


def tokens(outputs: Sequence[RequestOutput]) -> list[tuple[int, ...]]:
    assert all(output.error is None for output in outputs)
    return [output.token_ids for output in outputs]


class Counts:
    """What an engine did since this was made."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._before = self._read()

    def _read(self) -> dict[str, float]:
        assert self._engine.settle()
        statistics = self._engine.statistics()
        [rank] = statistics["ranks"]
        ec = rank["connector"]
        return {
            "encodes": rank["encodes"],
            "loads": ec.get("loads", 0) + ec.get("views", 0),
            "saves": ec.get("saves", 0),
            "evictions": statistics["node"].get("evictions", 0),
            "preemptions": statistics["scheduler"]["preemptions"],
        }

    def __getitem__(self, name: str) -> float:
        return self._read()[name] - self._before[name]
