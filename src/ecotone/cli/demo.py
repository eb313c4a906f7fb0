"""``ecotone demo``: the same questions to two engines, one with the cache and one without, taking turns.

Each question is asked alone, and the next one when everything that the last one left behind (a save) is settled.
The engines take turns question by question, each of them first every other time, so that both see the same
machine, busy or not. Both were warmed up, on images that no question is about.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

import ecotone
from ecotone.cli.console import working
from ecotone.cli.live import watching
from ecotone.cli.passes import Pass, make_prompt
from ecotone.cli.questions import Question, load_digits, plan_questions
from ecotone.config import ECConfig, EngineConfig
from ecotone.errors import ConfigError

_MEMORY = "64MiB"
_KV_BLOCKS = 256


@dataclass(frozen=True)
class DemoResult:
    """What came of it: ``cached`` and ``uncached`` answered the same questions."""

    model: Path
    num_images: int
    cache_images: int
    cached: Pass
    uncached: Pass

    @property
    def identical(self) -> bool:
        """Whether both gave the same tokens for every question."""
        pairs = zip(self.cached.outputs, self.uncached.outputs, strict=True)
        return all(a.token_ids == b.token_ids for a, b in pairs)

    @property
    def paired(self) -> list[int]:
        """Questions about one image, seen before by both engines, that the cached one answered with a load and the
        other with an encode, and nothing else: their times differ by just that."""
        return [i for i in range(len(self.cached.questions)) if self._differs_by_one_load(i)]

    @property
    def first_sights(self) -> list[int]:
        """Questions about images that neither engine had seen."""
        return [i for i, question in enumerate(self.cached.questions) if not question.is_repeat]

    def _differs_by_one_load(self, index: int) -> bool:
        with_cache, without = self.cached.outputs[index].metrics, self.uncached.outputs[index].metrics
        if with_cache is None or without is None or len(self.cached.questions[index].images) != 1:
            return False
        loaded = (with_cache.num_encoded, with_cache.num_loaded) == (0, 1)
        return loaded and (without.num_encoded, without.num_loaded) == (1, 0)

    def as_dict(self) -> dict[str, Any]:
        """The figures, for JSON. ``encodes``, ``loads``, ``saves`` and bytes are those of the cached pass alone.
        ``ttft_encode_ms`` is of the uncached pass, ``ttft_load_ms`` of the cached one: medians over ``paired``."""
        cached, uncached = self.cached, self.uncached
        return {
            "model": str(self.model),
            "requests": len(cached.outputs),
            "images": self.num_images,
            "images_in_encoder_cache": self.cache_images,
            "correct": cached.correct,
            "encodes": cached.encodes,
            "loads": cached.loads,
            "saves": cached.saves,
            "bytes_saved": sum(rank.bytes_saved for rank in cached.ranks),
            "bytes_loaded": sum(rank.bytes_loaded for rank in cached.ranks),
            "identical_to_uncached": self.identical,
            "ttft_pairs": len(self.paired),
            "ttft_encode_ms": uncached.ttft_ms(self.paired),
            "ttft_load_ms": cached.ttft_ms(self.paired),
            "ttft_first_sight_ms": {
                "cached": cached.ttft_ms(self.first_sights),
                "uncached": uncached.ttft_ms(self.first_sights),
            },
            "seconds": cached.seconds,
            "uncached": {
                "correct": uncached.correct,
                "encodes": uncached.encodes,
                "loads": uncached.loads,
                "saves": uncached.saves,
                "seconds": uncached.seconds,
            },
            "ranks": [asdict(rank) for rank in cached.ranks],
        }


def run(
    model: Path, num_images: int, cache_images: int, ranks: Mapping[str, Any] = MappingProxyType({})
) -> DemoResult:
    """Ask everything of both engines.

    Args:
        ranks: options of ``EngineConfig`` that put the engine with the cache on several ranks. The other has one.

    Raises:
        ConfigError: so many encodings fit into the worker's encoder cache that it would never need another.
        ModelError: no such model, or no labelled images in its folder.
    """
    check_sizes(num_images, cache_images)
    questions = plan_questions(load_digits(model, num_images))
    # Before torch is imported. So small a model is fastest on one thread, and on a busy machine by far.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with ExitStack() as stack:
        with working(f"loading {model}"):
            rows = rows_per_image(model)
            passes = [
                _start(stack, name, model, cache_images, rows, options)
                for name, options in (
                    ("with the cache", {"ec": ECConfig(options={"memory": _MEMORY}), **ranks}),
                    ("without", {}),
                )
            ]
        with working("warming up"):
            for each in passes:
                each.warm_up(_blank_prompts(cache_images))
        _ask(passes, questions)
        return DemoResult(model, num_images, cache_images, *passes)


def check_sizes(num_images: int, cache_images: int) -> None:
    """Refuse an encoder cache that would never need another.

    Raises:
        ConfigError: it holds more than half of the images.
    """
    if cache_images > num_images // 2:
        raise ConfigError(
            f"an encoder cache for {cache_images} of {num_images} images would hold on to what comes back: "
            f"at most {num_images // 2}"
        )


def _start(
    stack: ExitStack, name: str, model: Path, cache_images: int, rows_per_image: int, options: Mapping[str, Any]
) -> Pass:
    config = EngineConfig(
        model=str(model), encoder_cache_rows=cache_images * rows_per_image, kv_blocks=_KV_BLOCKS, **options
    )
    return Pass(name, stack.enter_context(ecotone.Engine(config)))


def rows_per_image(model: Path) -> int:
    """Encoder rows of a demo image."""
    inputs = ecotone.InputProcessor(model, max_image_pixels=_blank(0).size)
    [item] = inputs.process(make_prompt("", [_blank(0)])).items
    return item.num_rows


def _blank(grey: int) -> NDArray[np.uint8]:
    return np.full((64, 64, 3), grey, np.uint8)


def _blank_prompts(cache_images: int) -> list[ecotone.Prompt]:
    """More images than fit into the encoder cache, twice: encodes, saves, evictions and loads all happen."""
    blanks = [_blank(grey) for grey in range(cache_images + 1)] * 2
    return [make_prompt("What digit is this?", [blank]) for blank in blanks]


def _ask(passes: Sequence[Pass], questions: Sequence[Question]) -> None:
    with watching(passes, len(questions)) as update:
        for number, question in enumerate(questions):
            for each in passes if number % 2 == 0 else reversed(passes):
                each.ask(question)
            update()
