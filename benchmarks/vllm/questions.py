"""What the engines are asked: the same for each of them."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import numpy as np
from PIL import Image

SIDE = 336
"""Width and height of every image, in pixels."""
TEXT = "USER: <image> What digit is this? ASSISTANT:"
_BLOCKS = 12


def image(number: int) -> Image.Image:
    """Image ``number``: coloured blocks, large enough that no two images look the same to a random encoder."""
    blocks = np.random.default_rng(number).integers(0, 256, (_BLOCKS, _BLOCKS, 3), np.uint8)
    side = SIDE // _BLOCKS
    return Image.fromarray(blocks.repeat(side, axis=0).repeat(side, axis=1))


def about(number: int) -> dict[str, Any]:
    """A question about image ``number``, as ``LLM.generate`` takes it."""
    return {"prompt": TEXT, "multi_modal_data": {"image": image(number)}}


def fresh(start: int = 1_000) -> Iterator[int]:
    """Numbers of images that nobody has asked about."""
    while True:
        yield start
        start += 1


def mix(seen: list[int], unseen: Iterator[int], count: int, repeated: float, seed: int) -> list[int]:
    """Images of ``count`` questions, the share ``repeated`` of them about images of ``seen``, equally often.

    No image follows itself: the engine's own cache would hold it.
    """
    again = round(count * repeated)
    numbers = [seen[i % len(seen)] for i in range(again)] + [next(unseen) for _ in range(count - again)]
    random = Random(seed)
    while True:
        random.shuffle(numbers)
        ordered = _apart(numbers)
        if ordered is not None:
            return ordered


def _apart(numbers: list[int]) -> list[int] | None:
    """``numbers`` in much the same order, none beside itself; ``None`` where the last ones cannot be parted."""
    left, ordered = list(numbers), [-1]
    while left:
        place = next((i for i, number in enumerate(left) if number != ordered[-1]), None)
        if place is None:
            return None
        ordered.append(left.pop(place))
    return ordered[1:]
