"""The shipped model through whole engines. Every test ends with balanced books."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from digit_questions import MODEL, ROWS, Digit

from ecotone import ECConfig, Engine


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so small a model gains nothing from more
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def digits() -> list[Digit]:
    """Held-out images, different digits in turn."""
    labels: dict[str, int] = json.loads((MODEL / "images" / "labels.json").read_text())
    names = sorted(labels, key=lambda name: (name.rpartition("_")[2], name))
    return [Digit(MODEL / "images" / name, labels[name]) for name in names]


Make = Callable[..., Engine]


@pytest.fixture
def make_engine() -> Iterator[Make]:
    """Engines for one test; with a node of 1 MiB unless ``ec`` says otherwise. Checked and closed after it."""
    engines: list[Engine] = []

    def make(**options: Any) -> Engine:
        defaults = {"kv_blocks": 128, "ec": ECConfig(options={"memory": "1MiB"})}
        engines.append(Engine(MODEL, **{**defaults, **options}))
        return engines[-1]

    yield make
    for engine in engines:
        try:
            assert engine.settle()
            engine.check_integrity()
            assert engine.statistics()["engine"]["requests_in_flight"] == 0
        finally:
            engine.close()


@pytest.fixture(scope="session")
def shared() -> Iterator[Engine]:
    """An engine whose encoder cache holds two images, with the connector."""
    with Engine(
        MODEL, encoder_cache_rows=2 * ROWS, kv_blocks=128, ec=ECConfig(options={"memory": "4MiB"})
    ) as engine:
        yield engine


@pytest.fixture
def cached(shared: Engine) -> Iterator[Engine]:
    """``shared``, with nothing in its caches."""
    shared.reset_encoder_cache()
    assert shared.settle()
    yield shared
    assert shared.settle()
    shared.check_integrity()
    assert shared.statistics()["engine"]["requests_in_flight"] == 0


@pytest.fixture(scope="session")
def plain() -> Iterator[Engine]:
    """The same without a connector."""
    with Engine(MODEL, encoder_cache_rows=2 * ROWS, kv_blocks=128) as engine:
        yield engine
        engine.check_integrity()
