"""What a step costs on its way to the ranks and back: through each executor, and through codec and fold alone.

The steps schedule nothing: what is measured is the channel. Codec and fold are those of the executors, over the
answers of simulated ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import count
from typing import Any

from benchmarks.harness import interleave, timed
from ecotone.config import EngineConfig
from ecotone.connectors.messages import EcotoneWorkerMetadata, Report, ReportKind
from ecotone.executor.base import Executor
from ecotone.executor.messages import Reply
from ecotone.executor.methods import decode_result, encode_result
from ecotone.executor.multiproc import MultiprocExecutor
from ecotone.executor.uniproc import UniprocExecutor
from ecotone.protocol import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    ECConnectorOutput,
    ECOutputAggregator,
    ModelRunnerOutput,
    SchedulerOutput,
    decode,
    encode,
    fold_outputs,
)
from ecotone.testing.executors import TINY_RANK, over_the_wire, tiny_rank

RANKS = (64, 256, 1024)
ITEMS = (0, 1, 16, 256)
_AGGREGATORS = (ECOutputAggregator(),)


@contextmanager
def _executors() -> Iterator[dict[str, Executor]]:
    """Every executor that can be had here, with the tiny model."""
    config = EngineConfig(model="tiny", device="cpu", kv_blocks=64)
    two = EngineConfig(model="tiny", device="cpu", kv_blocks=64, tensor_parallel_size=2)
    makers: dict[str, Callable[[], Executor]] = {
        "uniproc, 1 rank": lambda: UniprocExecutor(config, None, "benchmark", make_rank=tiny_rank),
        "uniproc over the wire, 1 rank": lambda: UniprocExecutor(
            config, None, "benchmark", make_rank=over_the_wire(tiny_rank)
        ),
        "multiproc, 2 ranks": lambda: MultiprocExecutor(two, None, "benchmark", make_rank=TINY_RANK),
    }
    if find_spec("ray") is not None:
        makers |= _ray_executors(two)
    made: dict[str, Executor] = {}
    try:
        for name, make in makers.items():
            made[name] = make()
            if made[name].delivers.all_ranks:
                made[name].init_ec_output_aggregator()
        yield made
    finally:
        for executor in made.values():
            executor.shutdown()


def _ray_executors(config: EngineConfig) -> dict[str, Callable[[], Executor]]:
    from ecotone.executor.ray import RayExecutor, RayExecutorV2  # noqa: PLC0415 - an optional extra

    return {
        "ray, 2 ranks": lambda: RayExecutorV2(config, None, "benchmark", make_rank=TINY_RANK),
        "ray, single reply, 2 ranks": lambda: RayExecutor(config, None, "benchmark", make_rank=TINY_RANK),
    }


def _steps(executor: Executor) -> Callable[[], object]:
    numbers = count(1)
    return lambda: executor.execute_model(SchedulerOutput(step=next(numbers)))


def _channels(quick: bool) -> dict[str, Any]:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with _executors() as executors:
        found = interleave(
            {name: timed(_steps(executor)) for name, executor in executors.items()}, rounds=100 if quick else 1000
        )
    return {f"step: {name}": summary.as_us() for name, summary in found.items()}


def _answers(ranks: int, items: int, busy: int) -> list[ModelRunnerOutput]:
    """One step's answers: ``busy`` of ``ranks`` ranks report ``items`` saves, the others nothing."""
    return [
        ModelRunnerOutput.with_ec_conn_output_only(_report(rank, items) if rank < busy else None)
        for rank in range(ranks)
    ]


def _report(rank: int, items: int) -> ECConnectorOutput | None:
    if not items:
        return None
    facts = frozenset(Report(rank, 1, transfer, ReportKind.SAVED) for transfer in range(items))
    return ECConnectorOutput(ec_connector_worker_meta=EcotoneWorkerMetadata(facts))


def _take_in(messages: list[bytes]) -> ModelRunnerOutput:
    """What an executor does with the replies of a step."""
    replies = [decode(message, Reply) for message in messages]
    outputs = [decode_result("sample_tokens", reply.result or b"") for reply in replies]
    return fold_outputs(outputs, 0, _AGGREGATORS) or EMPTY_MODEL_RUNNER_OUTPUT


def _send_out(outputs: list[ModelRunnerOutput]) -> list[bytes]:
    """What the ranks do."""
    return [encode(Reply(1, encode_result(output))) for output in outputs]


def _codec_and_fold(quick: bool) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    for ranks in RANKS:
        for items in ITEMS:
            outputs = _answers(ranks, items, busy=ranks)
            messages = _send_out(outputs)
            number = max(1, 4096 // (ranks * (items + 1)))
            found = interleave(
                {
                    "take in": timed(lambda messages=messages: _take_in(messages), number),  # type: ignore[misc]
                    "send": timed(lambda outputs=outputs: _send_out(outputs), number),  # type: ignore[misc]
                },
                rounds=5 if quick else 30,
            )
            reports = ranks * max(items, 1)
            rows[f"{ranks} ranks x {items} items"] = {
                **found["take in"].as_us(),
                "us_each_report_or_idle_rank": round(found["take in"].median * 1e6 / reports, 3),
                "ranks_side_us": round(found["send"].median * 1e6 / ranks, 2),
            }
    return rows


def _idle_ranks(quick: bool) -> dict[str, Any]:
    """One rank reports; what each further rank adds that has nothing to say."""
    few, many = (_send_out(_answers(ranks, 16, busy=1)) for ranks in (1, 1024))
    found = interleave(
        {"few": timed(lambda: _take_in(few), 20), "many": timed(lambda: _take_in(many))},
        rounds=20 if quick else 300,
    )
    each = (found["many"].median - found["few"].median) / 1023
    return {"each idle rank of 1,024": {"median_us": round(each * 1e6, 3)}}


def run(quick: bool) -> dict[str, Any]:
    """Medians and deciles (us). ``us_each_report_or_idle_rank``: taking in, divided by reports, or by ranks where
    nobody reports."""
    return {**_idle_ranks(quick), **_codec_and_fold(quick), **_channels(quick)}
