"""The questions the digit-reading model learns to answer, and scikit-learn's handwritten digits as pictures."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor
from torch.nn import functional

IMAGE_SIZE = 56
HELD_OUT = 360
WORDS = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen",
)  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """One kind of question.

    Attributes:
        weight: how often it is asked in training.
        images: fewest and most images.
        questions: wordings; the first is the one that is evaluated.
        answer: from the digits in the images to the text.
    """

    weight: float
    images: tuple[int, int]
    questions: tuple[str, ...]
    answer: Callable[[Sequence[int]], str]


def larger(digits: Sequence[int]) -> str:
    if digits[0] == digits[1]:
        return f"Both digits are {WORDS[digits[0]]}."
    return f"The larger digit is {WORDS[max(digits)]}."


KINDS = {
    "one": Kind(
        4,
        (1, 1),
        ("What digit is this?", "Which digit is this?", "Which digit is shown?", "Read the digit."),
        lambda digits: f"The digit is {WORDS[digits[0]]}.",
    ),
    "sum": Kind(
        3, (2, 2), ("What is the sum of the digits?",), lambda digits: f"The sum is {WORDS[sum(digits)]}."
    ),
    "larger": Kind(4, (2, 2), ("Which digit is larger?",), larger),
    "list": Kind(1.5, (1, 4), ("List the digits.",), lambda digits: ", ".join(WORDS[d] for d in digits) + "."),
    "count": Kind(
        0.7,
        (1, 1),
        ("Count up from this digit.",),
        lambda digits: ", ".join(WORDS[digits[0] : digits[0] + 9]) + ".",
    ),
}
TEXT_WEIGHT = 0.8  # "What is three plus four?", without an image


@dataclass(frozen=True)
class Example:
    """A prompt (one ``<image>`` for each image), its answer, and which images of the data set it shows."""

    prompt: str
    answer: str
    images: tuple[int, ...]


def make_prompt(question: str, num_images: int, separator: str = " ") -> str:
    return f"USER: {'<image>' * num_images}{separator if num_images else ''}{question} ASSISTANT:"


def text_example(a: int, b: int) -> Example:
    return Example(make_prompt(f"What is {WORDS[a]} plus {WORDS[b]}?", 0), f"The sum is {WORDS[a + b]}.", ())


def draw_example(rng: random.Random, by_digit: Sequence[Sequence[int]]) -> Example:
    """A training example. Digits are drawn before images, so that every digit and every pair is equally likely."""
    names = [*KINDS, "text"]
    name = rng.choices(names, [kind.weight for kind in KINDS.values()] + [TEXT_WEIGHT])[0]
    if name == "text":
        return text_example(rng.randrange(10), rng.randrange(10))
    kind = KINDS[name]
    digits = [rng.randrange(10) for _ in range(rng.randint(*kind.images))]
    prompt = make_prompt(rng.choice(kind.questions), len(digits), rng.choice((" ", "\n")))
    return Example(prompt, kind.answer(digits), tuple(rng.choice(by_digit[d]) for d in digits))


@dataclass(frozen=True)
class Digits:
    """Handwritten digits: ``pixels`` float32 [N, 8, 8] in 0..1 (1 is ink), ``labels`` int64 [N]."""

    pixels: NDArray[np.float32]
    labels: NDArray[np.int64]


def load_split(seed: int) -> tuple[Digits, Digits]:
    """Training digits and the ``HELD_OUT`` digits that training never sees, stratified by class."""
    pixels, labels = load_digits(return_X_y=True)
    pixels = (pixels.reshape(-1, 8, 8) / 16.0).astype(np.float32)
    train_x, test_x, train_y, test_y = train_test_split(
        pixels, labels, test_size=HELD_OUT, stratify=labels, random_state=seed
    )
    return Digits(train_x, train_y), Digits(test_x, test_y)


def to_picture(pixels: NDArray[np.float32], size: int = IMAGE_SIZE) -> Image.Image:
    """One digit as a grey picture of ``size`` x ``size``, as a user would send it."""
    picture = Image.fromarray((pixels * 255).round().astype(np.uint8))
    return picture.resize((size, size), Image.Resampling.BICUBIC)


def augment(pixels: Tensor, generator: torch.Generator) -> Tensor:
    """[B, 8, 8] in 0..1 -> pixel values [B, 3, 56, 56], each turned, shifted, scaled, faded and made noisy."""

    def uniform(low: float, high: float) -> Tensor:
        return torch.rand(len(pixels), generator=generator) * (high - low) + low

    x = functional.interpolate(
        pixels[:, None], size=(IMAGE_SIZE, IMAGE_SIZE), mode="bicubic", align_corners=False
    ).clamp(0, 1)
    angle, scale = uniform(-0.22, 0.22), uniform(0.85, 1.15)
    rows = (
        torch.stack([scale * angle.cos(), -scale * angle.sin(), uniform(-0.16, 0.16)], 1),
        torch.stack([scale * angle.sin(), scale * angle.cos(), uniform(-0.16, 0.16)], 1),
    )
    grid = functional.affine_grid(torch.stack(rows, 1), list(x.shape), align_corners=False)
    x = functional.grid_sample(x, grid, align_corners=False)
    x = x * uniform(0.7, 1.1)[:, None, None, None] + torch.randn(x.shape, generator=generator) * 0.04
    return ((x.clamp(0, 1) - 0.5) / 0.5).expand(-1, 3, -1, -1)
