"""Four engines on one node against four engines with a quarter of its memory each, on the same requests.

The images are those of the shipped model and copies of them, moved by whole pixels so that each is another item.
Which one a request asks about follows Zipf's law, and which engine it goes to is drawn. It goes to that engine of
one fleet, and right after it to that of the other, in turns which of them is first, one at a time: so the time to
the first token is not that of engines that wait for each other's cores.
"""

from __future__ import annotations

import os
import random
import tempfile
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from PIL import Image, ImageChops

from benchmarks.shared_node import running_node
from ecotone.cli.demo import rows_per_image
from ecotone.cli.engine_process import Answered, EngineProcess
from ecotone.cli.models import find_model
from ecotone.config import ECConfig, EngineConfig

ENGINES = 4
IMAGES = 160
IN_MEMORY = 48  # encodings that fit into all memory together
EXPONENT = 1.0
SEED = 1
ENCODING_BYTES = 8192
QUESTION = "What digit is this?"


class _Arm:
    """Four engines, and what became of what they were asked."""

    def __init__(self, stack: ExitStack, options: dict[str, Any]) -> None:
        model = str(find_model("digits"))
        config = EngineConfig(
            model=model,
            kv_blocks=64,
            # Room for one image: what the node holds shows, not what the engine keeps beside it.
            encoder_cache_rows=rows_per_image(Path(model)),
            ec=ECConfig(options=options),
        )
        self._engines = [EngineProcess(config) for _ in range(ENGINES)]
        for engine in self._engines:
            stack.callback(engine.close)
        self._encodes = [0] * ENGINES
        self.tokens: list[tuple[int, ...]] = []
        self.hits: list[float] = []
        self.misses: list[float] = []

    def wait(self) -> None:
        """Until all are there."""
        for engine in self._engines:
            engine.wait()

    def ask(self, number: int, image: Path) -> None:
        """Have one engine answer. Whether it ran its encoder says whether it was a hit."""
        engine = self._engines[number]
        engine.ask(QUESTION, [str(image)])
        answer: Answered = engine.wait()
        encodes = max(rank.encodes for rank in answer.ranks)
        if answer.ttft_s is None:
            raise RuntimeError("an answer without a first token")
        (self.misses if encodes > self._encodes[number] else self.hits).append(answer.ttft_s)
        self._encodes[number] = encodes
        self.tokens.append(answer.token_ids)

    def row(self) -> dict[str, float]:
        """Its line in the table."""
        every = [*self.hits, *self.misses]
        return {
            "requests": len(every),
            "hit_rate": round(len(self.hits) / len(every), 3),
            "encodes": sum(self._encodes),
            "ttft_ms": _ms(every),
            "ttft_mean_ms": round(1e3 * sum(every) / len(every), 2),
            "ttft_of_hits_ms": _ms(self.hits),
            "ttft_of_misses_ms": _ms(self.misses),
        }


def run(quick: bool) -> dict[str, Any]:
    """A row for each fleet: hit rate, encodes, median time to the first token. ``quick`` asks less."""
    requests = 100 if quick else 600
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ecotone-bench-")))
        images = _draw(folder, IMAGES)
        memory = IN_MEMORY * ENCODING_BYTES
        path = stack.enter_context(running_node(folder / "node.sock", memory))
        shared = _Arm(stack, {"node": f"unix:{path}"})
        shared.wait()  # before the others start: eight that import at once are no gain
        own = _Arm(stack, {"memory": memory // ENGINES})
        own.wait()
        load = os.getloadavg()[0]
        chance = random.Random(SEED)
        weights = [1 / rank**EXPONENT for rank in range(1, IMAGES + 1)]
        for turn, image in enumerate(chance.choices(images, weights, k=requests)):
            number = chance.randrange(ENGINES)
            for arm in (shared, own) if turn % 2 else (own, shared):
                arm.ask(number, image)
        if shared.tokens != own.tokens:
            raise RuntimeError("the fleets gave different answers")
        return {
            "one node for four engines": shared.row(),
            "a quarter of it each": own.row(),
            "the machine's load": {"at_the_start": round(load, 1), "at_the_end": round(os.getloadavg()[0], 1)},
        }


def _draw(folder: Path, count: int) -> list[Path]:
    sources = sorted((find_model("digits") / "images").glob("*.png"))
    made = []
    for number, (offset, source) in zip(
        range(count), product(product((0, 1, -1), repeat=2), sources), strict=False
    ):
        made.append(folder / f"{number}.png")
        with Image.open(source) as image:
            ImageChops.offset(image, *offset).save(made[-1])
    random.Random(SEED).shuffle(made)
    return made


def _ms(seconds: list[float]) -> float:
    return round(1e3 * median(seconds), 2) if seconds else 0.0
