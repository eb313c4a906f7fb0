"""The conformance kit on executors: those that are right, and some that are not."""

from __future__ import annotations

import os
import signal

import pytest

from ecotone.executor.base import Delivers
from ecotone.executor.uniproc import UniprocExecutor
from ecotone.protocol.outputs import ECConnectorOutput, ModelRunnerOutput
from ecotone.testing import check_executor
from ecotone.testing.executors import TINY_RANK, over_the_wire, tiny_rank


@pytest.mark.parametrize("make_rank", [tiny_rank, over_the_wire(tiny_rank)])
def test_one_rank_in_this_process_passes(make_rank):
    report = check_executor(
        lambda config, factory, engine_id: UniprocExecutor(config, factory, engine_id, make_rank=make_rank),
        num_ranks=1,
    )
    assert report.ok, str(report)
    assert report.names("skipped") == ("names-a-dead-rank",)


def test_ranks_in_processes_pass(multiproc):
    report = check_executor(
        lambda config, factory, engine_id: multiproc(config, factory, engine_id, make_rank=TINY_RANK),
        kill=lambda executor, rank: os.kill(executor.ranks[rank].pid, signal.SIGKILL),
    )
    assert report.ok, str(report)
    assert len(report.names("held")) == len(report.verdicts)


class DropsReports(UniprocExecutor):
    """Loses the report of a step that computed nothing."""

    def collective_rpc(self, *args, **options):
        output = super().collective_rpc(*args, **options)
        if isinstance(output, ModelRunnerOutput) and not output.req_ids:
            return ModelRunnerOutput.with_ec_conn_output(output, None)
        return output


class FoldsTwice(UniprocExecutor):
    """Counts each KV report twice."""

    def collective_rpc(self, *args, kv_output_aggregator=None, **options):
        output = super().collective_rpc(*args, kv_output_aggregator=kv_output_aggregator, **options)
        if kv_output_aggregator is not None and isinstance(output, ModelRunnerOutput):
            return kv_output_aggregator.aggregate([ModelRunnerOutput.with_kv_conn_output_only(None), output], 1)
        return output


class NoFold(UniprocExecutor):
    """Has no KV aggregator."""

    def init_kv_output_aggregator(self, expected_finished_count):
        pass


class NamesNobody(UniprocExecutor):
    def participants(self):
        return ()


class HidesErrors(UniprocExecutor):
    """Answers a step that failed as if nothing had been in it."""

    def collective_rpc(self, method, *args, **options):
        try:
            return super().collective_rpc(method, *args, **options)
        except Exception:
            if self._rank is None:
                raise
            return ModelRunnerOutput()


class LivesOn(UniprocExecutor):
    def shutdown(self):
        pass


class InventsAnEmptyReport(UniprocExecutor):
    """Attaches a report to outputs that have none."""

    def collective_rpc(self, *args, **options):
        output = super().collective_rpc(*args, **options)
        if isinstance(output, ModelRunnerOutput) and output.ec_connector_output is None:
            return ModelRunnerOutput.with_ec_conn_output(output, ECConnectorOutput(failed_loads={"x"}))
        return output


MUTANTS = {
    DropsReports: "delivers-every-rank",
    NoFold: "chains-aggregators",
    FoldsTwice: "chains-aggregators",
    NamesNobody: "names-every-participant",
    HidesErrors: "names-a-rank-that-raises",
    LivesOn: "ends-once-and-for-all",
    InventsAnEmptyReport: "delivers-empty-outputs",
}


@pytest.mark.parametrize("kind", MUTANTS, ids=lambda kind: kind.__name__)
def test_a_broken_executor_breaks_its_rule(kind):
    report = check_executor(
        lambda config, factory, engine_id: kind(config, factory, engine_id, make_rank=tiny_rank), num_ranks=1
    )
    assert MUTANTS[kind] in [violation.rule for violation in report.violations], str(report)


def test_an_executor_that_loses_reports_and_takes_them_is_found(multiproc):
    class TakesWhatItLoses(multiproc):
        delivers = Delivers(all_ranks=False, steps_in_flight=16)

        def _refuse_to_lose(self, reports, world_size):
            pass

    report = check_executor(
        lambda config, factory, engine_id: TakesWhatItLoses(config, factory, engine_id, make_rank=TINY_RANK),
        only="refuses-what-it-cannot-deliver",
    )
    assert [violation.rule for violation in report.violations] == ["refuses-what-it-cannot-deliver"]


def test_an_executor_that_refuses_what_it_would_lose_is_right(multiproc):
    class Refuses(multiproc):
        delivers = Delivers(all_ranks=False, steps_in_flight=16)

    report = check_executor(
        lambda config, factory, engine_id: Refuses(config, factory, engine_id, make_rank=TINY_RANK)
    )
    assert report.verdict("refuses-what-it-cannot-deliver").status == "held"
