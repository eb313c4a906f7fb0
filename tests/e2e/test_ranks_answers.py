"""The shipped model on several ranks, each a process: the same answers, token by token. Each image is encoded
once, and its rows are saved by all ranks that have an encoder, and loaded by each of them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from digit_questions import MODEL, ROWS, Digit, count_up, tokens, total, which

from ecotone import ECConfig, Engine, Prompt, SamplingParams
from ecotone.errors import ShutDownError

# Every rank is a Python with torch and transformers to start: on a busy machine four of them take a while.
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

FORMS = {
    "tp2": {"tensor_parallel_size": 2},
    "tp2, images divided": {"tensor_parallel_size": 2, "mm_encoder_tp_mode": "data"},
    "pp2": {"pipeline_parallel_size": 2},
    "tp2 x pp2, images divided": {
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 2,
        "mm_encoder_tp_mode": "data",
    },
}
IMAGES = 6
PARAMS = SamplingParams(max_tokens=40)


@contextmanager
def engine(**options: Any) -> Iterator[Engine]:
    # Room for three images in the ranks' own caches: what comes back is loaded from the node.
    ec = ECConfig(options={"memory": "1MiB", "prefault": False})
    with Engine(str(MODEL), ec=ec, encoder_cache_rows=3 * ROWS, kv_blocks=128, **options) as made:
        yield made


def questions(digits: list[Digit]) -> list[list[Prompt]]:
    """Batches, each asked when the one before is answered and saved."""
    chosen = digits[:IMAGES]
    return [
        [which(digit) for digit in chosen],
        [total(chosen[i], chosen[-1 - i]) for i in range(IMAGES)],
        [count_up(digit) for digit in chosen],
    ]


def ask(engine: Engine, digits: list[Digit]) -> list[tuple[int, ...]]:
    answers = []
    for batch in questions(digits):
        answers += tokens(engine.generate(batch, PARAMS))
        assert engine.settle()
    return answers


@pytest.fixture(scope="module")
def alone(digits: list[Digit]) -> tuple[list[tuple[int, ...]], dict[str, float]]:
    """One rank's answers, and its connector's figures."""
    with engine() as made:
        return ask(made, digits), made.statistics()["ranks"][0]["connector"]


@pytest.mark.parametrize("form", FORMS)
def test_answers_are_those_of_one_rank(
    form: str, digits: list[Digit], alone: tuple[list[tuple[int, ...]], dict[str, float]]
) -> None:
    options = FORMS[form]
    tp, pp = options.get("tensor_parallel_size", 1), options.get("pipeline_parallel_size", 1)
    answers, one_rank = alone
    with engine(**options) as made:
        assert ask(made, digits) == answers
        made.check_integrity()
        statistics = made.statistics()
    ranks = statistics["ranks"]
    assert len({rank["pid"] for rank in ranks}) == tp * pp
    assert (statistics["scheduler"]["steps_ahead"] > 0) == (pp > 1)
    first_stage, others = ranks[:tp], ranks[tp:]
    assert [rank["encodes"] for rank in first_stage] == [IMAGES] * tp
    divided = options.get("mm_encoder_tp_mode") == "data"
    assert sum(rank["tower_items"] for rank in first_stage) == IMAGES * (1 if divided else tp)
    connectors = [rank["connector"] for rank in first_stage]
    assert sum(figures["save_bytes"] for figures in connectors) == one_rank["save_bytes"]
    loaded = {figures["view_bytes"] for figures in connectors}
    # Steps in flight share the requests out otherwise, and then other images are still held.
    assert loaded == {one_rank["view_bytes"]} if pp == 1 else len(loaded) == 1 and 0 not in loaded
    assert all(rank["encodes"] == 0 and rank["connector"] == {} for rank in others)


def test_a_rank_that_dies_ends_the_engine_and_nothing_is_left(digits: list[Digit]) -> None:
    with engine(tensor_parallel_size=2) as made:
        [output] = made.generate([which(digits[0])], PARAMS)
        assert output.error is None
        pids = [int(rank["pid"]) for rank in made.statistics()["ranks"]]
        os.kill(pids[1], signal.SIGKILL)
        try:
            [output] = made.generate([which(digits[1])], PARAMS)
            error: Exception | None = output.error
        except ShutDownError as refusal:  # it was noticed before the request came
            error = refusal
        assert f"rank 1 (pid {pids[1]}) was killed by SIGKILL" in str(error)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
