"""The plug-in inside the real vLLM. Collected only where vLLM is installed: ``make test-vllm`` makes such a place.

An engine takes half a minute to start on two idle cores, so few are started, and each answers many questions.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from engine_process import HERE, EngineProcess, StartEngine

TIMEOUT_S = 1800

if find_spec("vllm") is None:
    collect_ignore_glob = ["*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Name -> checkpoint; and ``pictures``, a folder of them."""
    folder = tmp_path_factory.mktemp("models")
    subprocess.run([sys.executable, str(HERE / "bed_models.py"), str(folder)], check=True, timeout=300)
    return {path.name: path for path in folder.iterdir()}


@pytest.fixture(scope="session")
def images(models: dict[str, Path]) -> dict[str, list[str]]:
    """Model -> images for it, different ones."""
    shipped = sorted((models["digits"] / "images").glob("*.png"), key=lambda path: path.stem[::-1])
    return {"digits": [*map(str, shipped)], "qwen3_vl": [*map(str, sorted(models["pictures"].iterdir()))]}


@pytest.fixture(scope="module")
def start_engine(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartEngine]:
    """Begins to start an engine of a named model: several of them start faster beside each other. Whoever asks one
    calls ``wait_until_started`` before. What is left of them at the end of the module is killed."""
    engines: list[EngineProcess] = []

    def start(model: str, **options: Any) -> EngineProcess:
        folder = tmp_path_factory.mktemp("engine")
        engines.append(EngineProcess(models[model], folder / "log.txt", **options))
        return engines[-1]

    yield start
    for engine in engines:
        engine.kill()
