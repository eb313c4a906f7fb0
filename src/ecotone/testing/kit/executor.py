"""``check_executor``: whether an executor brings back what its ranks report, and says so when it cannot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch

from ecotone.config import ECConfig, EngineConfig
from ecotone.errors import EcotoneError, LostReportsError, RankFailedError, ShutDownError
from ecotone.executor.base import Executor
from ecotone.protocol.connector import ECConnectorFactory, ECRole
from ecotone.protocol.outputs import ModelRunnerOutput
from ecotone.protocol.params import PoolingParams, SamplingParams
from ecotone.protocol.step import SchedulerOutput
from ecotone.testing.connectors import RecordedCalls, RecordingConnectorFactory, RecordingMetadata
from ecotone.testing.kit.report import Report, Violation, ViolationError, verdicts_of
from ecotone.testing.kit.rules import EXECUTOR_RULES
from ecotone.testing.models import PIXELS, PLACEHOLDER, tiny_item
from ecotone.testing.steps import OrderedRequest, Steps, whole_steps

MakeExecutor = Callable[[EngineConfig, ECConnectorFactory, str], Executor]
Task = Literal["generate", "embed"]
RECORDING = "ecotone.testing.connectors:RecordingConnectorFactory"
_PROGRESS_S = 60.0
_REPORTED = "build_connector_worker_meta"


def check_executor(
    make: MakeExecutor,
    *,
    num_ranks: int = 2,
    kill: Callable[[Executor, int], None] | None = None,
    name: str = "",
    only: str = "",
) -> Report:
    """Check the executors that ``make`` builds, each for a few steps.

    Args:
        make: builds one from a configuration, a connector factory and an engine id. Its ranks are the kit's:
            ``ecotone.testing.executors.tiny_rank`` in this process, ``TINY_RANK`` (its import path) in others.
        num_ranks: ranks it is built with; 1 for an executor that has no more.
        kill: ends the process of one rank of an executor; ``None`` where ranks have none of their own.
        name: of the report.
        only: the name of the one rule to check.
    """
    checker = _Checker(make, num_ranks, kill)
    checks: Counter[str] = Counter()
    violations: dict[str, Violation] = {}
    for rule, check in checker.checks().items():
        if only not in ("", rule):
            continue
        checks[rule] += 1
        try:
            check()
        except ViolationError as violation:
            violations[rule] = Violation(rule=rule, detail=violation.detail)
        except Exception as error:  # noqa: BLE001 - a rim: whatever an executor raises is what is reported
            violations[rule] = Violation(rule=rule, detail=f"{type(error).__name__}: {error}")
    return Report(
        subject=name or getattr(make, "__name__", "executor"),
        runs=checker.built,
        verdicts=verdicts_of(
            EXECUTOR_RULES, {} if kill else {"kill": "no rank has a process"}, checks, violations
        ),
    )


class _Checker:
    """One method for each rule; each raises where the rule is broken.

    Attributes:
        built: how many executors were.
    """

    def __init__(self, make: MakeExecutor, num_ranks: int, kill: Callable[[Executor, int], None] | None) -> None:
        self.built = 0
        self._make = make
        self._num_ranks = num_ranks
        self._kill = kill

    def checks(self) -> dict[str, Callable[[], None]]:
        """Rule -> its check. What is refused comes first: it says how many ranks the others have."""
        found = {
            "refuses-what-it-cannot-deliver": self.refuses,
            "delivers-every-rank": self.delivers,
            "delivers-empty-outputs": self.empty_outputs,
            "chains-aggregators": self.chains,
            "names-every-participant": self.participants,
            "names-a-rank-that-raises": self.raising_rank,
            "ends-once-and-for-all": self.ends,
        }
        return found | ({} if self._kill is None else {"names-a-dead-rank": partial(self.dead_rank, self._kill)})

    def refuses(self) -> None:
        if self._num_ranks == 1:
            return
        try:
            with self._executor() as (executor, _):
                if not executor.delivers.all_ranks:
                    raise ViolationError("", f"it was built for {self._num_ranks} ranks, and delivers one")
        except LostReportsError:
            self._num_ranks = 1  # more are refused, as they should be

    def delivers(self) -> None:
        kinds: tuple[tuple[ECRole, Task], ...] = (
            ("ec_both", "generate"),
            ("ec_both", "embed"),
            ("ec_producer", "generate"),
        )
        for role, task in kinds:
            with self._executor(role, task) as (_, steps):
                for leave, run in _EXITS.items():
                    self._check_delivered(run(steps, task), f"{role}, {task}, {leave}")

    def _check_delivered(self, output: ModelRunnerOutput, where: str) -> None:
        report = output.ec_connector_output
        meta = None if report is None else report.ec_connector_worker_meta
        if not isinstance(meta, RecordedCalls):
            raise ViolationError("", f"{where}: no rank's report arrived, but {meta}")
        for rank in range(self._num_ranks):
            built = meta.hooks(rank).count(_REPORTED)
            if built != 1:
                raise ViolationError("", f"{where}: {built} reports of rank {rank} arrived")
        stats = report.ec_connector_stats if report is not None else None
        told = [entry.rank for entry in stats.ranks] if stats is not None else []
        if told != list(range(self._num_ranks)):
            raise ViolationError("", f"{where}: the counters of ranks {told} arrived")

    def empty_outputs(self) -> None:
        with self._executor(silent=True) as (_, steps):
            for leave, run in _EXITS.items():
                output = run(steps, "generate")
                if output.ec_connector_output is not None:
                    raise ViolationError("", f"{leave}: nobody reported, and {output.ec_connector_output} arrived")

    def chains(self) -> None:
        with self._executor() as (executor, steps):
            executor.init_kv_output_aggregator(2 * self._num_ranks)
            for finished, expected in ((["z"], None), (["z"], {"z"}), ([], None)):
                output = steps.step(metadata=RecordingMetadata(), finished=finished)
                kv = output.kv_connector_output
                came = None if kv is None else set(kv.finished_sending)
                if came != expected:
                    raise ViolationError(
                        "", f"two reports of each rank finish a request: {came} instead of {expected}"
                    )
                self._check_delivered(output, "beside a KV report")

    def participants(self) -> None:
        with self._executor() as (executor, _):
            named = [participant.rank for participant in executor.participants()]
            if named != list(range(self._num_ranks)):
                raise ViolationError("", f"there are {self._num_ranks} ranks, and it names {named}")

    def raising_rank(self) -> None:
        last = self._num_ranks - 1
        with self._executor(raise_in="get_finished", on_rank=last) as (_, steps):
            try:
                steps.step(metadata=RecordingMetadata())
            except EcotoneError as error:
                self._check_named(error, last, "get_finished raises, as its script says")
                return
        raise ViolationError("", f"rank {last} raised, and the step went on")

    def dead_rank(self, kill: Callable[[Executor, int], None]) -> None:
        last = self._num_ranks - 1
        with self._executor() as (executor, steps):
            steps.step(metadata=RecordingMetadata())
            kill(executor, last)
            executor.wait_for_progress(_PROGRESS_S)
            try:
                steps.step(metadata=RecordingMetadata())
            except RankFailedError as error:
                if error.rank != last:
                    raise ViolationError("", f"rank {last} was killed, and rank {error.rank} is named") from error
                return
        raise ViolationError("", f"rank {last} was killed, and the step went on")

    def _check_named(self, error: EcotoneError, rank: int, cause: str) -> None:
        named = self._num_ranks == 1 or f"rank {rank}" in str(error)
        if not named or cause not in str(error):
            raise ViolationError("", f"rank {rank} raised {cause!r}; the caller hears {error}")

    def ends(self) -> None:
        with self._executor() as (executor, _):
            executor.shutdown()
            executor.shutdown()
            calls: tuple[Callable[[], Any], ...] = (
                executor.check_health,
                lambda: executor.execute_model(SchedulerOutput(step=1)),
                lambda: executor.collective_rpc("statistics"),
            )
            for call in calls:
                try:
                    call()
                except ShutDownError:
                    continue
                raise ViolationError("", "a call after shutdown() does not raise ShutDownError")

    @contextmanager
    def _executor(
        self, role: ECRole = "ec_both", task: Task = "generate", **script: Any
    ) -> Iterator[tuple[Executor, Steps]]:
        """A new executor with the recording connector, which does what ``script`` says."""
        config = EngineConfig(
            model="tiny",
            device="cpu",
            task=task,
            block_size=4,
            kv_blocks=64,
            tensor_parallel_size=self._num_ranks,
            ec=ECConfig(connector=RECORDING, role=role, options=script),
        )
        executor = self._make(config, RecordingConnectorFactory(), "kit")
        self.built += 1
        try:
            executor.init_ec_output_aggregator()
            yield executor, Steps(whole_steps(executor))
        finally:
            executor.shutdown()


def _request(req_id: str, task: Task, *, broken: bool = False) -> OrderedRequest:
    pixels = torch.full((3, PIXELS), torch.nan) if broken else None
    item = tiny_item(req_id, 1, 3, pixels=pixels)
    params = PoolingParams() if task == "embed" else SamplingParams()
    return OrderedRequest(req_id, [5, *[PLACEHOLDER] * 3, 6], (item,), params=params)


def _whole(steps: Steps, task: Task) -> ModelRunnerOutput:
    request = _request("whole", task)
    return steps.step((request, request.order(encode=(0,))), metadata=RecordingMetadata())


def _chunk(steps: Steps, task: Task) -> ModelRunnerOutput:
    request = _request("chunk", task)
    return steps.step((request, request.order(2, (0,))), metadata=RecordingMetadata())


def _nothing_scheduled(steps: Steps, task: Task) -> ModelRunnerOutput:  # noqa: ARG001
    return steps.step(metadata=RecordingMetadata())


def _nothing_left(steps: Steps, task: Task) -> ModelRunnerOutput:
    request = _request("broken", task, broken=True)
    return steps.step((request, request.order(encode=(0,))), metadata=RecordingMetadata())


_EXITS: dict[str, Callable[[Steps, Task], ModelRunnerOutput]] = {
    "a whole prompt": _whole,
    "a chunk of a prompt": _chunk,
    "nothing scheduled": _nothing_scheduled,
    "every request failed": _nothing_left,
}
