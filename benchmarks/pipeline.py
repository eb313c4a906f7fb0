"""Two pipeline stages with one step in flight, and with two: tokens per second of a real engine.

All engines exist at the same time, one thread a rank, and answer the same prompts in turns: one works while the
others wait. The model is a random LLaVA whose language model is of a size that makes a step many times longer than
its way to the ranks. That all give the same answers is checked.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, ClassVar

import torch
from transformers import AutoConfig, LlavaForConditionalGeneration

from benchmarks.harness import interleave, ratio
from ecotone import Engine, SamplingParams
from ecotone.executor.base import Delivers
from ecotone.executor.factory import create_executor
from ecotone.executor.multiproc import MultiprocExecutor
from ecotone.testing.tiny_models import make_tiny_model

# requests at the same time, tokens of each prompt (one byte is one token), tokens of each answer
WORK = {"decode, 1 request": (1, 16, 24), "decode, 8 requests": (8, 16, 24), "prefill, 8 requests": (8, 200, 1)}
STEP_TOKENS = 256  # a step's budget
TEXT = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
}


class _OneStepInFlight(MultiprocExecutor):
    delivers: ClassVar[Delivers] = Delivers(all_ranks=True, steps_in_flight=1)


def run(quick: bool) -> dict[str, Any]:
    """Medians in tokens per second, prompts included. ``times_faster``: two steps in flight against one, on
    as many ranks. Wants two idle cores: what the stages do at the same time, they must be able to do."""
    torch.set_num_threads(1)
    makers: dict[str, tuple[Callable[..., Any], int]] = {
        "one rank": (create_executor, 1),
        "one step in flight": (_OneStepInFlight, 2),
        "two steps in flight": (create_executor, 2),
    }
    with tempfile.TemporaryDirectory(prefix="ecotone-bench-") as folder, ExitStack() as stack:
        _make_model(Path(folder))
        engines = {
            name: stack.enter_context(
                Engine(
                    folder,
                    executor_factory=factory,
                    pipeline_parallel_size=stages,
                    max_num_batched_tokens=STEP_TOKENS,
                    device="cpu",
                )
            )
            for name, (factory, stages) in makers.items()
        }
        return {name: _measure(engines, *work, 3 if quick else 9) for name, work in WORK.items()}


def _measure(engines: dict[str, Engine], number: int, asked: int, answered: int, rounds: int) -> dict[str, float]:
    prompts = [str(index).ljust(asked, ".") for index in range(number)]
    params = SamplingParams(max_tokens=answered, ignore_eos=True)
    answers = [[output.token_ids for output in engine.generate(prompts, params)] for engine in engines.values()]
    if any(each != answers[0] for each in answers):
        raise RuntimeError("the engines do not agree")
    tasks = {name: partial(_seconds, engine, prompts, params) for name, engine in engines.items()}
    found = interleave(tasks, rounds)
    tokens = number * (asked + answered)
    speeds = {f"{name}_per_s": round(tokens / summary.median, 1) for name, summary in found.items()}
    return {**speeds, "times_faster": ratio(found["one step in flight"], found["two steps in flight"])}


def _seconds(engine: Engine, prompts: list[str], params: SamplingParams) -> float:
    start = perf_counter()
    engine.generate(prompts, params)
    return perf_counter() - start


def _make_model(folder: Path) -> None:
    """A tiny LLaVA's processor and tower, with a language model that is not as tiny."""
    config = AutoConfig.from_pretrained(make_tiny_model("llava", folder))
    for name, value in TEXT.items():
        setattr(config.text_config, name, value)
    torch.manual_seed(0)
    LlavaForConditionalGeneration(config).save_pretrained(folder)
