"""What the demo asks: every image several times, long after the worker's copy of its encoding is gone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ecotone.errors import ModelError

_WORDS = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen",
)  # fmt: skip


@dataclass(frozen=True)
class Digit:
    """An image of a handwritten digit, and which it is."""

    path: Path
    label: int


@dataclass(frozen=True)
class Question:
    """A question with its right answer.

    Attributes:
        kind: groups questions in the report.
        text: the question.
        images: what it is about, in order.
        answer: the right answer, as the model was taught to put it.
        is_repeat: whether every image of it was asked about before.
    """

    kind: str
    text: str
    images: tuple[Path, ...]
    answer: str
    is_repeat: bool


def load_digits(model: Path, count: int) -> list[Digit]:
    """The first ``count`` labelled images of a model's folder, different digits in turn.

    Raises:
        ModelError: the folder has none, or fewer.
    """
    folder = model / "images"
    try:
        labels: dict[str, int] = json.loads((folder / "labels.json").read_text())
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{str(folder / 'labels.json')!r} cannot be read, and the demo asks about labelled images: {error}"
        ) from None
    # Names are digit<label>_<number>.png: by number first, so that neighbours show different digits.
    names = sorted(labels, key=lambda name: (name.rpartition("_")[2], name))
    if count > len(names):
        raise ModelError(f"{count} images were asked for, and {str(folder)!r} has {len(names)}")
    return [Digit(folder / name, labels[name]) for name in names[:count]]


def plan_questions(digits: Sequence[Digit]) -> list[Question]:
    """The questions in the order they are asked: in each round every image comes up once."""
    half = len(digits) // 2
    sums = [(digits[i], digits[half + i]) for i in range(half)]
    others = [(digits[i], digits[half + (i + 1) % half]) for i in range(half)]
    return [
        *(_which(d, "which", is_repeat=False) for d in digits),
        *(_sum(*pair) for pair in sums),
        *(_larger(*pair) for pair in others),
        *(_count(d) for d in digits),
        *(_which(d, "which, again", is_repeat=True) for d in digits),
    ]


def _which(digit: Digit, kind: str, *, is_repeat: bool) -> Question:
    answer = f"The digit is {_WORDS[digit.label]}."
    return Question(kind, "What digit is this?", (digit.path,), answer, is_repeat)


def _count(digit: Digit) -> Question:
    answer = ", ".join(_WORDS[digit.label : digit.label + 9]) + "."
    return Question("count", "Count up from this digit.", (digit.path,), answer, True)


def _sum(a: Digit, b: Digit) -> Question:
    answer = f"The sum is {_WORDS[a.label + b.label]}."
    return Question("sum", "What is the sum of the digits?", (a.path, b.path), answer, True)


def _larger(a: Digit, b: Digit) -> Question:
    answer = f"The larger digit is {_WORDS[max(a.label, b.label)]}."
    if a.label == b.label:
        answer = f"Both digits are {_WORDS[a.label]}."
    return Question("larger", "Which digit is larger?", (a.path, b.path), answer, True)
