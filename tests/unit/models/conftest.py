from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from model_cases import MODELS, Family, llava
from transformers import AutoProcessor, LlavaForConditionalGeneration
from transformers.utils import logging as transformers_logging

from ecotone.worker.models import load_model

DIGITS = Path(__file__).parents[3] / "models" / "digits-llava"
CPU = torch.device("cpu")


@pytest.fixture(scope="session", autouse=True)
def _quiet_and_single_threaded() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the models are small: more threads only wait for each other
    transformers_logging.disable_progress_bar()
    yield
    transformers_logging.enable_progress_bar()
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def digits_folder() -> Path:
    return DIGITS


@pytest.fixture(scope="session")
def labels(digits_folder: Path) -> dict[str, int]:
    labels: dict[str, int] = json.loads((digits_folder / "images" / "labels.json").read_bytes())
    return labels


@pytest.fixture(scope="session")
def digits(digits_folder: Path) -> Family:
    """The shipped model."""
    reference = LlavaForConditionalGeneration.from_pretrained(digits_folder).eval()
    return Family(reference, load_model(str(digits_folder), device=CPU, dtype=None))


@pytest.fixture(scope="session")
def processor(digits_folder: Path) -> Any:
    return AutoProcessor.from_pretrained(digits_folder)


@pytest.fixture(scope="session", params=list(MODELS))
def family(request: pytest.FixtureRequest) -> Family:
    return Family.make(request.param)


@pytest.fixture(scope="session")
def tiny() -> Family:
    return Family.make("llava")


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny-llava")
    llava().save_pretrained(folder)
    return folder
