"""The double keeps the contract, so that what runs on it would run on a real connector."""

import pytest

from ecotone.errors import ConfigError, ContractError
from ecotone.protocol.connector import (
    CacheLookup,
    ECItem,
    ECSchedulerContext,
    ECWorkerContext,
    EncoderSpec,
    Participant,
)
from ecotone.protocol.outputs import ECConnectorOutput
from ecotone.protocol.wire import decode, encode
from ecotone.testing.connectors import (
    Call,
    RecordedCalls,
    RecordingConnectorFactory,
    RecordingMetadata,
)

CAT = ECItem("ns:cat", 3)


def make_scheduler_half(role="ec_both", ranks=(0, 1), **script):
    context = ECSchedulerContext(
        engine_id="engine",
        role=role,
        options=script,
        participants=tuple(Participant(rank, "host") for rank in ranks),
        encoder=EncoderSpec(4, 0, "float32"),
        clock=lambda: 0.0,
    )
    return RecordingConnectorFactory().scheduler_half(context)


def saved_by(*ranks):
    calls = frozenset(Call(rank, 1, "save_caches", "ns:cat") for rank in ranks)
    return ECConnectorOutput(ec_connector_worker_meta=RecordedCalls(calls))


def test_an_item_is_ready_when_every_participant_saved_it():
    half = make_scheduler_half()
    assert half.lookup("a", CAT) is CacheLookup.MISS
    half.update_state_after_alloc("a", CAT)
    assert half.build_connector_meta() == RecordingMetadata(saves=("ns:cat",))
    half.update_connector_output(saved_by(0))
    half.update_connector_output(saved_by(0))
    assert half.lookup("b", CAT) is CacheLookup.MISS
    half.update_connector_output(saved_by(1))
    assert half.lookup("b", CAT) is CacheLookup.READY
    half.update_state_after_alloc("b", CAT)
    assert half.build_connector_meta() == RecordingMetadata(loads=("ns:cat",))
    assert half.build_connector_meta() == RecordingMetadata()
    assert [name for name, _ in half.calls].count("build_connector_meta") == 3


@pytest.mark.parametrize("lose", ["failed load", "reset"])
def test_what_is_lost_is_a_miss_again(lose):
    half = make_scheduler_half(ranks=(0,))
    half.update_connector_output(saved_by(0))
    if lose == "reset":
        half.reset_cache("other")
        assert half.lookup("a", CAT) is CacheLookup.READY
        half.reset_cache("ns")
    else:
        half.update_connector_output(ECConnectorOutput(failed_loads=frozenset({"ns:cat"})))
    assert half.lookup("a", CAT) is CacheLookup.MISS
    assert len(half.outputs) == (1 if lose == "reset" else 2)


def test_pending_as_often_as_the_script_says():
    half = make_scheduler_half(pending={"ns:cat": 2})
    answers = [half.lookup("a", CAT) for _ in range(3)]
    assert answers == [CacheLookup.PENDING, CacheLookup.PENDING, CacheLookup.MISS]


def test_a_consumer_saves_nothing():
    half = make_scheduler_half("ec_consumer")
    half.update_state_after_alloc("a", CAT)
    assert half.build_connector_meta() == RecordingMetadata()


def test_the_end_of_a_request_and_of_the_half_are_on_record():
    half = make_scheduler_half()
    half.request_finished("a")
    half.shutdown()
    assert half.calls == [("request_finished", "a")]
    assert half.shutdowns == 1


def test_orders_of_another_connector_and_uncleared_ones_are_refused():
    context = ECWorkerContext(
        engine_id="engine",
        role="ec_both",
        options={},
        rank=0,
        epoch=0,
        encoder=EncoderSpec(4, 0, "float32"),
        device="cpu",
        wakeup=lambda: None,
    )
    half = RecordingConnectorFactory().worker_half(context)
    with pytest.raises(ContractError, match="ECItem is not this connector's metadata"):
        half.bind_connector_metadata(CAT)
    with pytest.raises(ContractError, match="outside a step"):
        half.start_load_caches({})
    half.bind_connector_metadata(RecordingMetadata())
    with pytest.raises(ContractError, match="was not cleared"):
        half.bind_connector_metadata(RecordingMetadata())


def test_a_script_with_a_typing_error_is_refused():
    with pytest.raises(ConfigError, match="unknown option 'pendign'"):
        RecordingConnectorFactory().validate("ec_both", {"pendign": {}})


def test_the_record_is_a_join_and_survives_the_wire():
    one, two = (RecordedCalls(frozenset({Call(rank, 1, "get_finished", "a")})) for rank in (0, 1))
    both = one.aggregate(two)
    assert both == two.aggregate(one) == both.aggregate(one)
    assert decode(
        encode(ECConnectorOutput(ec_connector_worker_meta=both)), ECConnectorOutput
    ) == ECConnectorOutput(ec_connector_worker_meta=both)
    assert both.hooks(1) == ["get_finished:a"]
    assert not both
