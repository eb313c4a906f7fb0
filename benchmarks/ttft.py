"""Time to first token of a question about an image seen before: its encoding is loaded, or the encoder runs again.

Two engines take turns over the same requests, one with the cache and one without. Each engine's own encoder cache
holds one image, and two images alternate, so the image asked about is never held. Both engines have preprocessed
both images before. Two models: the shipped one, whose encoder costs next to nothing, and a random one with an
encoder of 22 million parameters and 256 rows an image, before the same small language model.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.harness import interleave, ratio
from benchmarks.llava import DIGITS, make_llava, rows_of
from ecotone import ECConfig, Engine, Prompt, SamplingParams

TEXT = "USER: <image> What digit is this? ASSISTANT:"
SIDE = 224
ONE_TOKEN = SamplingParams(max_tokens=1)


def run(quick: bool) -> dict[str, Any]:
    """By model: medians in ms with a load and with an encode, and how many times faster the load is. ``quick``
    asks fewer questions."""
    rounds = 10 if quick else 60
    with tempfile.TemporaryDirectory(prefix="ecotone-bench-") as folder:
        heavy = make_llava(Path(folder), SIDE)
        return {"digits": _measure(DIGITS, 16, rounds), "22M encoder": _measure(heavy, rows_of(SIDE), rounds)}


def _measure(model: Path, rows: int, rounds: int) -> dict[str, float]:
    random = np.random.default_rng(0)
    images = [Image.fromarray(random.integers(0, 256, (SIDE, SIDE, 3), np.uint8)) for _ in range(2)]
    prompts = [Prompt(TEXT, images=[image]) for image in images]
    plain = Engine(model, encoder_cache_rows=rows)
    cached = Engine(model, encoder_cache_rows=rows, ec=ECConfig(options={"memory": "16MiB"}))
    with plain, cached:
        for engine in (plain, cached):
            engine.generate([*prompts, *prompts], ONE_TOKEN)
            engine.settle()
        measured = interleave({"load": _ask(cached, prompts, 0), "encode": _ask(plain, prompts, 1)}, rounds)
    load, encode = measured["load"], measured["encode"]
    return {
        "load_ms": round(load.median * 1e3, 1),
        "encode_ms": round(encode.median * 1e3, 1),
        "times_faster": round(ratio(encode, load), 2),
    }


def _ask(engine: Engine, prompts: list[Prompt], encodes: int) -> Callable[[], float]:
    return partial(_first_token, engine, cycle(prompts), encodes)


def _first_token(engine: Engine, prompts: Any, encodes: int) -> float:
    """Seconds to the first token of the next prompt, which must take ``encodes`` encoder runs, or else a load."""
    [output] = engine.generate(next(prompts), ONE_TOKEN)
    engine.settle()
    metrics = output.metrics
    if (
        metrics is None
        or (metrics.num_encoded, metrics.num_loaded) != (encodes, 1 - encodes)
        or metrics.ttft_s is None
    ):
        raise RuntimeError(f"this measures something else: {metrics}")
    return metrics.ttft_s
