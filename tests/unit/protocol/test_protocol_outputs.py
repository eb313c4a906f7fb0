"""Frozen down to the containers: the shared empty output cannot be written through, copies leave it alone."""

from types import MappingProxyType

import msgspec
import pytest
from hypothesis import given
from protocol_samples import Facts, Falsy, ec_outputs, kv_outputs, runner_outputs

import ecotone.protocol
from ecotone.errors import ContractError
from ecotone.protocol import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    ECConnectorMetadata,
    ECConnectorOutput,
    ECConnectorStats,
    ECConnectorWorkerMetadata,
    KVConnectorOutput,
    ModelRunnerOutput,
    MultiModalItem,
    NewRequestData,
    RankStats,
    SamplingParams,
    ScheduledRequest,
    SchedulerOutput,
)

with_ec, with_ec_only = ModelRunnerOutput.with_ec_conn_output, ModelRunnerOutput.with_ec_conn_output_only
with_kv, with_kv_only = ModelRunnerOutput.with_kv_conn_output, ModelRunnerOutput.with_kv_conn_output_only
PRISTINE = ModelRunnerOutput()


@pytest.mark.parametrize("field", ModelRunnerOutput.__struct_fields__)
def test_no_field_of_the_empty_output_can_be_assigned(field: str) -> None:
    with pytest.raises(AttributeError):
        setattr(EMPTY_MODEL_RUNNER_OUTPUT, field, ())
    with pytest.raises(AttributeError):
        delattr(EMPTY_MODEL_RUNNER_OUTPUT, field)
    assert EMPTY_MODEL_RUNNER_OUTPUT == PRISTINE


def test_no_container_of_the_empty_output_can_be_written() -> None:
    kinds = {type(getattr(EMPTY_MODEL_RUNNER_OUTPUT, name)) for name in ModelRunnerOutput.__struct_fields__}
    assert kinds == {tuple, MappingProxyType, type(None)}
    with pytest.raises(TypeError):
        EMPTY_MODEL_RUNNER_OUTPUT.request_errors["r"] = "boom"


def test_containers_are_frozen_whatever_was_given() -> None:
    rows, errors = [[1], [2]], {"a": "x"}
    output = ModelRunnerOutput(req_ids=["a", "b"], sampled_token_ids=rows, request_errors=MappingProxyType(errors))
    rows[0].append(9)
    rows.append([3])
    errors["b"] = "y"
    assert output.req_ids == ("a", "b")
    assert output.sampled_token_ids == ((1,), (2,))
    assert output.request_errors == {"a": "x"}

    sent = {"r"}
    ec, kv = ECConnectorOutput(finished_sending=sent), KVConnectorOutput(finished_recving=sent)
    sent.add("later")
    assert ec.finished_sending == kv.finished_recving == {"r"}
    assert type(ec.finished_sending) is type(kv.finished_recving) is frozenset


def test_containers_of_a_step_are_frozen() -> None:
    tokens, keys, finished = [1, 2], ["k"], {"r"}
    item = MultiModalItem(modality="image", item_id="i", offset=0, num_rows=1, inputs={})
    new = NewRequestData(
        req_id="r", prompt_token_ids=tokens, items=[item], item_keys=keys, params=SamplingParams(stop=["a"])
    )
    run = ScheduledRequest(req_id="r", num_computed_tokens=0, num_tokens=1, num_known_tokens=1, block_ids=tokens)
    step = SchedulerOutput(step=1, new_requests=[new], scheduled=[run], finished_req_ids=finished)
    for held in (tokens, keys):
        held.clear()
    finished.clear()
    assert (new.prompt_token_ids, new.items, new.item_keys) == ((1, 2), (item,), ("k",))
    assert new.params.stop == ("a",)
    assert run.block_ids == (1, 2)
    assert (step.new_requests, step.scheduled, step.finished_req_ids) == ((new,), (run,), frozenset({"r"}))
    assert step.total_num_scheduled_tokens == 1


@pytest.mark.parametrize("text", ["req-1", b"req-1"])
def test_a_lone_string_is_no_collection(text: object) -> None:
    with pytest.raises(TypeError, match="finished_sending"):
        ECConnectorOutput(finished_sending=text)


def test_parallel_fields_are_parallel_or_empty() -> None:
    ModelRunnerOutput(req_ids=("a", "b"))
    ModelRunnerOutput(req_ids=("a", "b"), pooler_output=(None, None))
    with pytest.raises(ContractError, match="sampled_token_ids has 1 entries for 2 requests"):
        ModelRunnerOutput(req_ids=("a", "b"), sampled_token_ids=((1,),))
    with pytest.raises(ContractError, match="2 keys for 0 items"):
        NewRequestData(req_id="r", prompt_token_ids=(1,), item_keys=("a", "b"), params=SamplingParams())


@given(runner_outputs(), ec_outputs(), kv_outputs)
def test_a_part_is_put_beside_the_rest(
    output: ModelRunnerOutput, ec: ECConnectorOutput, kv: KVConnectorOutput
) -> None:
    before = msgspec.structs.asdict(output)
    both = with_kv(with_ec(output, ec), kv)
    assert msgspec.structs.asdict(output) == before
    assert both.ec_connector_output is (None if ec.is_empty() else ec)
    assert both.kv_connector_output is (None if kv.is_empty() else kv)
    assert with_kv(with_ec(both, output.ec_connector_output), output.kv_connector_output) == with_kv(
        with_ec(output, output.ec_connector_output), output.kv_connector_output
    )
    assert both == with_ec(with_kv(output, kv), ec)
    assert EMPTY_MODEL_RUNNER_OUTPUT == PRISTINE


def test_nothing_to_report_is_the_shared_empty_output() -> None:
    for nothing in (None, ECConnectorOutput()):
        assert with_ec_only(nothing) is EMPTY_MODEL_RUNNER_OUTPUT
    for nothing in (None, KVConnectorOutput()):
        assert with_kv_only(nothing) is EMPTY_MODEL_RUNNER_OUTPUT


def test_a_report_alone_does_not_reach_the_shared_empty_output() -> None:
    ec, kv = ECConnectorOutput(finished_sending={"r"}), KVConnectorOutput(invalid_block_ids={1})
    assert with_ec_only(ec).ec_connector_output is ec
    assert with_kv_only(kv).kv_connector_output is kv
    assert EMPTY_MODEL_RUNNER_OUTPUT == PRISTINE


@pytest.mark.parametrize(
    "report",
    [
        ECConnectorOutput(finished_sending={"r"}),
        ECConnectorOutput(finished_recving={"r"}),
        ECConnectorOutput(failed_loads={"k"}),
        ECConnectorOutput(ec_connector_worker_meta=Falsy()),
        ECConnectorOutput(ec_connector_stats=ECConnectorStats()),
        KVConnectorOutput(finished_sending={"r"}),
        KVConnectorOutput(finished_recving={"r"}),
        KVConnectorOutput(invalid_block_ids={0}),
        KVConnectorOutput(expected_finished_count=1),
    ],
)
def test_whatever_is_there_makes_a_report(report: ECConnectorOutput | KVConnectorOutput) -> None:
    assert not report.is_empty()


def test_metadata_without_a_join_cannot_be_built() -> None:
    class Half(ECConnectorWorkerMetadata, frozen=True):
        done: int = 0

    for kind in (ECConnectorWorkerMetadata, Half):
        with pytest.raises(TypeError, match="abstract"):
            kind()


def test_metadata_is_frozen_by_inheritance() -> None:
    class Order(ECConnectorMetadata):
        loads: tuple[int, ...] = ()

    for message in (Facts(), Order()):
        with pytest.raises(AttributeError):
            setattr(message, message.__struct_fields__[0], ())


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), 2**53 + 1])
def test_counters_are_exact_numbers(value: float) -> None:
    with pytest.raises(ContractError, match="rank 3: counter loads="):
        RankStats(3, 0, {"loads": value})


def test_statistics_are_summed_on_export_only() -> None:
    first = ECConnectorStats((RankStats(1, 0, {"loads": 2}), RankStats(0, 0, {"loads": 3, "seconds": 0.5})))
    later = ECConnectorStats((RankStats(0, 0, {"loads": 4}), RankStats(0, 1, {"loads": 1})))
    joined = first.aggregate(later)
    assert [(entry.rank, entry.epoch) for entry in joined.ranks] == [(0, 0), (0, 1), (1, 0)]
    assert joined.total() == {"loads": 7, "seconds": 0.5}


def test_exported_names_are_sorted_and_exist() -> None:
    names = ecotone.protocol.__all__
    assert len(names) == len(set(names))
    by_kind = sorted(names, key=lambda name: (not name.isupper(), name[0].islower(), name))
    assert names == by_kind
    assert all(hasattr(ecotone.protocol, name) for name in names)
