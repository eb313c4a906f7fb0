"""KV reports count: how many finish a request, and what an adjustment does to those already counting."""

import pytest

from ecotone.errors import ContractError, MissingOutputError
from ecotone.protocol import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    KVConnectorOutput,
    KVOutputAggregator,
    ModelRunnerOutput,
    count_down,
)

only_kv = ModelRunnerOutput.with_kv_conn_output_only


def sets(*reports: str) -> list[frozenset[str]]:
    """Each report's requests, one letter each."""
    return [frozenset(report) for report in reports]


@pytest.mark.parametrize(
    ("missing", "expected", "reports", "after", "finished"),
    [
        ({}, 2, sets(), {}, ""),  # nothing
        ({}, 2, sets("a"), {"a": 1}, ""),  # the first report begins the count
        ({}, 2, sets("a", "a"), {}, "a"),  # all in one step
        ({"a": 1}, 2, sets("a"), {}, "a"),  # the last one came
        ({}, 1, sets("ab", "b"), {}, "ab"),  # one is enough; what is more in the same step is dropped
        ({}, 2, sets("a", "a", "a"), {}, "a"),
        ({"a": 1}, 3, sets("a", "a"), {}, "a"),
        ({}, 2, sets("ab", "b"), {"a": 1}, "b"),  # each request counts by itself
        ({"a": 3}, 2, sets("a"), {"a": 2}, ""),  # lowered meanwhile: it keeps the number it began with
        ({"a": 1}, 9, sets("a"), {}, "a"),  # raised meanwhile: the same
        ({"a": 2}, 2, sets("", ""), {"a": 2}, ""),  # a step without reports
    ],
)
def test_count_down(
    missing: dict[str, int], expected: int, reports: list[frozenset[str]], after: dict[str, int], finished: str
) -> None:
    before = dict(missing)
    assert count_down(missing, expected, reports) == (after, frozenset(finished))
    assert count_down(missing, expected, reports[::-1]) == (after, frozenset(finished))
    assert missing == before


def step(aggregator: KVOutputAggregator, *reports: KVConnectorOutput) -> tuple[str, str]:
    """Fold one step of these ranks' reports: who finished sending, who finished receiving."""
    folded = aggregator.aggregate([EMPTY_MODEL_RUNNER_OUTPUT, *map(only_kv, reports)], 0)
    assert folded is not None
    kv = folded.kv_connector_output or KVConnectorOutput()
    return "".join(sorted(kv.finished_sending)), "".join(sorted(kv.finished_recving))


def test_directions_count_apart() -> None:
    aggregator = KVOutputAggregator(2)
    assert step(aggregator, KVConnectorOutput(finished_sending={"a"}, finished_recving={"b"})) == ("", "")
    assert step(aggregator, KVConnectorOutput(finished_recving={"a"})) == ("", "")
    assert aggregator.statistics() == {"kv_sending_counting": 1, "kv_recving_counting": 2}
    assert step(aggregator, KVConnectorOutput(finished_recving={"a", "b"})) == ("", "ab")
    assert step(aggregator, KVConnectorOutput(finished_sending={"a"})) == ("a", "")
    assert aggregator.statistics() == {"kv_sending_counting": 0, "kv_recving_counting": 0}


def test_an_adjustment_holds_for_requests_that_begin_in_the_same_step_or_later() -> None:
    aggregator = KVOutputAggregator(2)
    step(aggregator, KVConnectorOutput(finished_sending={"a"}))
    # The report of the adjusting rank comes last, and still the new number holds for b.
    assert step(
        aggregator, KVConnectorOutput(finished_sending={"b"}), KVConnectorOutput(expected_finished_count=1)
    ) == ("b", "")
    assert aggregator.expected_finished_count == 1
    assert step(aggregator, KVConnectorOutput(finished_sending={"c"})) == ("c", "")
    assert step(aggregator, KVConnectorOutput(finished_sending={"a"})) == ("a", "")


def test_a_raised_number_does_not_strand_requests_already_counting() -> None:
    aggregator = KVOutputAggregator(2)
    step(aggregator, KVConnectorOutput(finished_recving={"a"}))
    step(aggregator, KVConnectorOutput(expected_finished_count=3))
    assert step(aggregator, KVConnectorOutput(finished_recving={"a", "b"})) == ("", "a")
    assert step(aggregator, KVConnectorOutput(finished_recving={"b"})) == ("", "")
    assert step(aggregator, KVConnectorOutput(finished_recving={"b"})) == ("", "b")


@pytest.mark.parametrize("counts", [(3, 2, 0), (0, 2, 3)])
def test_the_largest_number_named_in_a_step_holds(counts: tuple[int, ...]) -> None:
    aggregator = KVOutputAggregator(1)
    step(aggregator, *(KVConnectorOutput(expected_finished_count=count) for count in counts))
    assert aggregator.expected_finished_count == 3


def test_an_adjustment_is_used_up_and_blocks_are_united() -> None:
    aggregator = KVOutputAggregator(2)
    outputs = [
        only_kv(KVConnectorOutput(invalid_block_ids={rank, 7}, expected_finished_count=2)) for rank in (1, 2)
    ]
    folded = aggregator.aggregate(outputs, 1)
    assert folded == only_kv(KVConnectorOutput(invalid_block_ids={1, 2, 7}))
    adjusted_only = [only_kv(KVConnectorOutput(expected_finished_count=2))]
    assert aggregator.aggregate(adjusted_only, 0) == EMPTY_MODEL_RUNNER_OUTPUT


def test_a_step_with_a_missing_output_is_not_counted() -> None:
    aggregator = KVOutputAggregator(1)
    with pytest.raises(MissingOutputError):
        aggregator.aggregate([only_kv(KVConnectorOutput(finished_sending={"a"})), None], 0)
    assert step(aggregator, KVConnectorOutput(finished_sending={"a"})) == ("a", "")


@pytest.mark.parametrize("count", [0, -1])
def test_somebody_has_to_report(count: int) -> None:
    with pytest.raises(ContractError, match=f"expected_finished_count={count}"):
        KVOutputAggregator(count)


def test_a_negative_adjustment_is_refused() -> None:
    with pytest.raises(ContractError, match="expected_finished_count=-1"):
        KVConnectorOutput(expected_finished_count=-1)
