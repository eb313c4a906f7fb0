import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

# family_cases: what each family's processor would make of some items
sys.path.append(str(Path(__file__).parents[1] / "models"))


@pytest.fixture(scope="session", autouse=True)
def _single_threaded() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
