"""The fold of EC reports: a join, whatever the order and however often; and no report is lost on the way."""

from collections.abc import Callable
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from protocol_samples import (
    Facts,
    Falsy,
    FastFacts,
    Marks,
    ec_outputs,
    facts,
    metas,
    rank_stats,
    runner_outputs,
    stats,
)

from ecotone.errors import ContractError, MissingOutputError
from ecotone.protocol import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    ECConnectorOutput,
    ECConnectorStats,
    ECOutputAggregator,
    KVConnectorOutput,
    KVOutputAggregator,
    ModelRunnerOutput,
    RankStats,
    fold_outputs,
)

only_ec = ModelRunnerOutput.with_ec_conn_output_only
only_kv = ModelRunnerOutput.with_kv_conn_output_only
fast = facts.map(FastFacts)
one_kind = st.sampled_from([facts.map(Facts), fast, facts.map(Falsy)])


def fold(*reports: ECConnectorOutput | None) -> ECConnectorOutput | None:
    folded = ECOutputAggregator().aggregate([only_ec(report) for report in reports], 0)
    assert folded is not None
    return folded.ec_connector_output


def with_meta(meta: Any) -> ECConnectorOutput:
    return ECConnectorOutput(ec_connector_worker_meta=meta)


# --- the join law


def assert_join_law(a: Any, b: Any, c: Any) -> None:
    assert a.aggregate(b) == b.aggregate(a)
    assert a.aggregate(b.aggregate(c)) == a.aggregate(b).aggregate(c)
    assert a.aggregate(a) == a
    assert a.aggregate(b).aggregate(b) == a.aggregate(b)


@given(stats, stats, stats)
def test_statistics_are_a_join(a: ECConnectorStats, b: ECConnectorStats, c: ECConnectorStats) -> None:
    assert_join_law(a, b, c)


@given(st.data())
def test_sample_metadata_is_a_join(data: st.DataObject) -> None:
    kind = data.draw(one_kind)
    assert_join_law(*(data.draw(kind) for _ in range(3)))


@given(st.lists(stats, min_size=1, max_size=5))
def test_folding_statistics_at_once_is_folding_them_in_turn(parts: list[ECConnectorStats]) -> None:
    in_turn = parts[0]
    for part in parts[1:]:
        in_turn = in_turn.aggregate(part)
    assert ECConnectorStats.aggregate_all(parts) == in_turn.aggregate(in_turn)


@given(st.lists(facts, min_size=1, max_size=5))
def test_a_fold_of_its_own_equals_the_default_one(parts: list[frozenset[tuple[int, int]]]) -> None:
    default = Facts.aggregate_all([Facts(part) for part in parts])
    assert FastFacts.aggregate_all([FastFacts(part) for part in parts]).done == default.done


@given(st.lists(rank_stats, max_size=6))
def test_statistics_keep_one_entry_for_each_start_of_a_rank(entries: list[RankStats]) -> None:
    found = ECConnectorStats(entries).ranks
    identities = [(entry.rank, entry.epoch) for entry in found]
    assert identities == sorted({(entry.rank, entry.epoch) for entry in entries})
    for entry in entries:
        kept = found[identities.index((entry.rank, entry.epoch))].counters
        assert all(kept[name] >= value for name, value in entry.counters.items())


# --- the fold


@given(st.lists(ec_outputs(fast), min_size=1, max_size=4))
def test_the_fold_does_not_depend_on_the_order_of_ranks(reports: list[ECConnectorOutput]) -> None:
    folded = fold(*reports)
    for order in permutations(reports):
        assert fold(*order) == folded


@given(st.lists(ec_outputs(fast), min_size=1, max_size=4))
def test_folding_twice_changes_nothing(reports: list[ECConnectorOutput]) -> None:
    folded = fold(*reports)
    assert fold(*reports, *reports) == folded
    assert fold(folded, *reports) == folded
    assert fold(*reports, folded) == folded


@given(st.lists(ec_outputs(fast), min_size=1, max_size=4))
def test_the_fold_has_all_that_was_reported_and_no_more(reports: list[ECConnectorOutput]) -> None:
    folded = fold(*reports) or ECConnectorOutput()
    for name in ("finished_sending", "finished_recving", "failed_loads"):
        assert getattr(folded, name) == frozenset().union(*(getattr(report, name) for report in reports))
    given_metas = [r.ec_connector_worker_meta for r in reports if r.ec_connector_worker_meta is not None]
    done = folded.ec_connector_worker_meta
    assert (done is None) == (not given_metas)
    assert done is None or done.done == frozenset().union(*(meta.done for meta in given_metas))
    given_stats = [r.ec_connector_stats for r in reports if r.ec_connector_stats is not None]
    assert (folded.ec_connector_stats is None) == (not given_stats)
    assert not given_stats or folded.ec_connector_stats == ECConnectorStats.aggregate_all(given_stats)


@given(st.lists(runner_outputs(fast), min_size=1, max_size=4), st.data())
def test_the_fold_takes_everything_else_from_the_output_rank(
    outputs: list[ModelRunnerOutput], data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, len(outputs) - 1))
    before = [ModelRunnerOutput.with_ec_conn_output(output, output.ec_connector_output) for output in outputs]
    folded = ECOutputAggregator().aggregate(outputs, rank)
    assert folded is not None
    without_ec = ModelRunnerOutput.with_ec_conn_output
    assert without_ec(folded, None) == without_ec(outputs[rank], None)
    again = [without_ec(output, output.ec_connector_output) for output in outputs]
    assert again == before


@pytest.mark.parametrize("falsy", [Falsy(), Falsy(frozenset({(0, 1)}))])
def test_falsy_metadata_counts(falsy: Falsy) -> None:
    assert not falsy
    folded = fold(None, with_meta(falsy))
    assert folded is not None
    assert folded.ec_connector_worker_meta is falsy
    joined = fold(with_meta(Falsy(frozenset({(1, 1)}))), with_meta(falsy))
    assert joined is not None
    assert joined.ec_connector_worker_meta == Falsy(falsy.done | {(1, 1)})


def test_a_sole_report_arrives_as_it_is() -> None:
    report = ECConnectorOutput(failed_loads={"k"}, ec_connector_worker_meta=Facts())
    assert fold(None, report, None) is report


def test_nobody_reported() -> None:
    tokens = ModelRunnerOutput(req_ids=("r",), sampled_token_ids=((1,),), ec_connector_output=ECConnectorOutput())
    folded = ECOutputAggregator().aggregate([tokens, EMPTY_MODEL_RUNNER_OUTPUT], 0)
    assert folded == ModelRunnerOutput(req_ids=("r",), sampled_token_ids=((1,),))
    empty = ECOutputAggregator().aggregate([EMPTY_MODEL_RUNNER_OUTPUT] * 3, 1)
    assert empty is EMPTY_MODEL_RUNNER_OUTPUT


def test_metadata_of_two_types_cannot_be_joined() -> None:
    with pytest.raises(ContractError, match="Facts of rank 1, Marks of rank 2"):
        fold(None, with_meta(Facts()), with_meta(Marks()))


@given(st.lists(metas, max_size=4))
def test_each_reported_type_is_joined_by_its_own_rule(found: list[Any]) -> None:
    reports = [with_meta(meta) for meta in found]
    if len({type(meta) for meta in found}) > 1:
        with pytest.raises(ContractError):
            fold(None, *reports)
    elif found:
        folded = fold(None, *reports)
        assert folded is not None
        assert folded.ec_connector_worker_meta == type(found[0]).aggregate_all(found)


# --- missing outputs

EC, KV = ECConnectorOutput(failed_loads={"k"}), KVConnectorOutput(invalid_block_ids={1})
EC_REPORT, KV_REPORT, EMPTY = only_ec(EC), only_kv(KV), EMPTY_MODEL_RUNNER_OUTPUT
AGGREGATORS: dict[str, tuple[Callable[[], Any], ModelRunnerOutput]] = {
    "ec": (ECOutputAggregator, EC_REPORT),
    "kv": (lambda: KVOutputAggregator(1), KV_REPORT),
}


@pytest.mark.parametrize("part", AGGREGATORS)
def test_missing_outputs(part: str) -> None:
    make, report = AGGREGATORS[part]
    for outputs, rank in (([None], 0), ([None, None], 1), ([None, EMPTY], 0), ([EMPTY, None, EMPTY], 1)):
        assert make().aggregate(outputs, rank) is None
    for outputs, rank, missing in (
        ([None, report], 0, (0,)),
        ([report, None, None, EMPTY], 2, (1, 2)),
        ([EMPTY, None], 0, (1,)),
        ([None, report, None], 1, (0, 2)),
    ):
        with pytest.raises(MissingOutputError) as caught:
            make().aggregate(outputs, rank)
        assert caught.value.ranks == missing
        assert ", ".join(map(str, missing)) in str(caught.value)


@pytest.mark.parametrize("part", AGGREGATORS)
@pytest.mark.parametrize(("outputs", "rank"), [([], 0), ([EMPTY], 1), ([EMPTY, EMPTY], -1)])
def test_an_output_rank_that_is_no_rank(part: str, outputs: list[ModelRunnerOutput], rank: int) -> None:
    with pytest.raises(ContractError, match=f"output rank {rank} is none of the {len(outputs)}"):
        AGGREGATORS[part][0]().aggregate(outputs, rank)
    with pytest.raises(ContractError, match="output rank"):
        fold_outputs(outputs, rank, [])


# --- the chain


@given(st.lists(runner_outputs(fast) | st.just(EMPTY), min_size=1, max_size=4), st.data())
def test_the_chain_loses_nothing_in_either_order(outputs: list[ModelRunnerOutput], data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, len(outputs) - 1))
    ec_alone = ECOutputAggregator().aggregate(outputs, rank)
    kv_alone = KVOutputAggregator(2).aggregate(outputs, rank)
    assert ec_alone is not None
    assert kv_alone is not None
    expected = ModelRunnerOutput.with_kv_conn_output(ec_alone, kv_alone.kv_connector_output)
    before = list(outputs)
    assert fold_outputs(outputs, rank, [ECOutputAggregator(), KVOutputAggregator(2)]) == expected
    assert fold_outputs(outputs, rank, [KVOutputAggregator(2), ECOutputAggregator()]) == expected
    assert all(now is then for now, then in zip(outputs, before, strict=True))
    assert ModelRunnerOutput() == EMPTY


@pytest.mark.parametrize("kv_first", [False, True])
def test_the_shared_empty_output_at_the_output_rank(kv_first: bool) -> None:
    aggregators = [ECOutputAggregator(), KVOutputAggregator(1)]
    folded = fold_outputs([EMPTY, EC_REPORT, KV_REPORT], 0, aggregators[::-1] if kv_first else aggregators)
    assert folded == ModelRunnerOutput(ec_connector_output=EC, kv_connector_output=KV)
    assert ModelRunnerOutput() == EMPTY
    assert fold_outputs([EMPTY, EMPTY, EMPTY], 0, aggregators) is EMPTY


@pytest.mark.parametrize("kv_first", [False, True])
@pytest.mark.parametrize("report", [EC_REPORT, KV_REPORT])
def test_no_report_is_lost_beside_a_missing_output(kv_first: bool, report: ModelRunnerOutput) -> None:
    aggregators = [ECOutputAggregator(), KVOutputAggregator(1)]
    with pytest.raises(MissingOutputError):
        fold_outputs([None, report], 0, aggregators[::-1] if kv_first else aggregators)
    assert fold_outputs([None, EMPTY], 0, aggregators) is None


def test_without_aggregators_the_output_rank_answers() -> None:
    assert fold_outputs([EC_REPORT, KV_REPORT], 1, []) is KV_REPORT
    assert fold_outputs([None], 0, []) is None
