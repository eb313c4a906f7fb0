"""Whatever the protocol can say comes back from the wire as it was; what cannot is refused when it is sent."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Self

import msgspec
import pytest
from hypothesis import given
from protocol_samples import (
    Facts,
    Falsy,
    FastFacts,
    Marks,
    Orders,
    arrays,
    model_infos,
    new_requests,
    runner_outputs,
    scheduler_outputs,
)

from ecotone.errors import ContractError, DecodeError, RoundTripError, UnknownTypeError
from ecotone.protocol import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    MAX_MESSAGE_BYTES,
    AnyConnectorMetadata,
    AnyWorkerMetadata,
    Array,
    ECConnectorMetadata,
    ECConnectorOutput,
    ECConnectorWorkerMetadata,
    ModelInfo,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
    decode,
    encode,
    register,
)


def assert_comes_back(message: Any) -> None:
    back = decode(encode(message), type(message))
    assert back == message
    assert type(back) is type(message)
    assert decode(encode(back), type(message)) == message


@given(scheduler_outputs)
def test_steps_come_back(message: SchedulerOutput) -> None:
    assert_comes_back(message)


@given(runner_outputs())
def test_outputs_come_back(message: ModelRunnerOutput) -> None:
    assert_comes_back(message)
    back = decode(encode(message), ModelRunnerOutput)
    if message.ec_connector_output is not None:
        sent, got = message.ec_connector_output, back.ec_connector_output
        assert got is not None
        assert type(got.ec_connector_worker_meta) is type(sent.ec_connector_worker_meta)
    assert type(back.request_errors) is MappingProxyType


@given(model_infos)
def test_model_facts_come_back(message: ModelInfo) -> None:
    assert_comes_back(message)


@given(arrays())
def test_arrays_come_back(message: Array) -> None:
    assert_comes_back(message)


@given(new_requests())
def test_containers_of_messages_come_back(message: NewRequestData) -> None:
    assert decode(encode([message, message]), tuple[NewRequestData, ...]) == (message, message)


def test_sending_changes_nothing() -> None:
    meta = Facts(frozenset({(1, 2)}))
    output = ModelRunnerOutput.with_ec_conn_output_only(ECConnectorOutput(ec_connector_worker_meta=meta))
    encode(output)
    assert output.ec_connector_output is not None
    assert output.ec_connector_output.ec_connector_worker_meta is meta
    assert decode(encode(EMPTY_MODEL_RUNNER_OUTPUT), ModelRunnerOutput) == ModelRunnerOutput()


@pytest.mark.parametrize("buffer", [bytes, bytearray, memoryview])
def test_any_buffer_can_be_decoded(buffer: Any) -> None:
    assert decode(buffer(encode(SchedulerOutput(step=3))), SchedulerOutput) == SchedulerOutput(step=3)


# --- polymorphic fields


class Carton(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Polymorphic values at every depth, and of both bases."""

    by_name: Mapping[str, tuple[AnyWorkerMetadata | None, ...]] = {}
    order: AnyConnectorMetadata | None = None
    inner: tuple["Carton", ...] = ()
    exact: Falsy = Falsy()


def test_polymorphic_values_keep_their_type_at_any_depth() -> None:
    inner = Carton(order=Orders((("k", 1),)), by_name={"x": (Marks({"m": -5}), None)})
    message = Carton(
        by_name=MappingProxyType({"a": (Facts(), FastFacts(frozenset({(1, 2)}))), "b": ()}),
        inner=(inner,),
        exact=Falsy(frozenset({(3, 4)})),
    )
    back = decode(encode(message), Carton)
    assert back == message
    assert [type(meta) for meta in back.by_name["a"]] == [Facts, FastFacts]
    assert type(back.inner[0].order) is Orders
    alone = decode(encode([Facts(), Marks({"m": 1})]), tuple[AnyWorkerMetadata, ...])
    assert alone == (Facts(), Marks({"m": 1}))


class Unregistered(ECConnectorWorkerMetadata, frozen=True):
    done: int = 0

    def aggregate(self, other: Self) -> Self:
        return self


def report(meta: ECConnectorWorkerMetadata) -> ECConnectorOutput:
    return ECConnectorOutput(ec_connector_worker_meta=meta)


def test_an_unregistered_type_is_not_sent() -> None:
    with pytest.raises(RoundTripError, match="Unregistered is not registered"):
        encode(report(Unregistered()))


def envelope(tag: Any, data: Any) -> bytes:
    return msgspec.msgpack.encode({"ec_connector_worker_meta": [tag, data]})


def test_an_unknown_tag_names_itself_and_imports_nothing() -> None:
    with pytest.raises(UnknownTypeError, match="'os:system'"):
        decode(envelope("os:system", b"\x80"), ECConnectorOutput)


@pytest.mark.parametrize(
    "data",
    [
        envelope("marks", b""),
        envelope("marks", b"\xc0"),
        envelope("marks", "\x00"),
        envelope("marks", b"\x80\x80"),
        envelope(7, b"\x80"),
        envelope(f"{Orders.__module__}:Orders", b"\x80"),  # known, but of the other base
        msgspec.msgpack.encode({"ec_connector_worker_meta": {"marks": {}}}),
        msgspec.msgpack.encode({"ec_connector_worker_meta": ["marks"]}),
        msgspec.msgpack.encode({"ec_connector_worker_meta": ["marks", b"\x80", 1]}),
        msgspec.msgpack.encode({"ec_connector_worker_meta": 5}),
        msgspec.msgpack.encode({"ec_connector_worker_meta": msgspec.msgpack.Ext(1, b"\x80")}),
    ],
)
def test_broken_envelopes_are_refused(data: bytes) -> None:
    assert decode(envelope("marks", b"\x80"), ECConnectorOutput) == report(Marks())
    with pytest.raises(DecodeError):
        decode(data, ECConnectorOutput)


# --- the registry


def test_registering_twice_changes_nothing() -> None:
    assert register(Marks, "marks") is Marks
    assert register(Marks) is Marks
    assert register(Facts) is Facts


class Other(Unregistered, frozen=True):
    pass


class Melting(Unregistered, frozen=False):
    pass


class Nesting(ECConnectorMetadata, frozen=True):
    inner: AnyWorkerMetadata | None = None


class Vague(ECConnectorMetadata, frozen=True):
    payload: Any = None


@pytest.mark.parametrize(
    ("kind", "tag", "error", "message"),
    [
        (Other, "marks", ContractError, "'marks' already stands for another type"),
        (Marks, "marks2", ContractError, "Marks is already registered, as 'marks'"),
        (Other, "", ContractError, "1 to 256 characters"),
        (Other, "x" * 257, ContractError, "1 to 256 characters"),
        (Melting, None, ContractError, "Melting is not frozen"),
        (ECConnectorWorkerMetadata, None, ContractError, "not a concrete metadata type"),
        (SchedulerOutput, None, ContractError, "not a concrete metadata type"),
        (Nesting, None, RoundTripError, "Nesting.inner holds further metadata"),
        (Vague, None, RoundTripError, "Vague.payload"),
    ],
)
def test_what_cannot_be_registered(kind: Any, tag: str | None, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        register(kind, tag)


@pytest.mark.parametrize("name", [{"__module__": "__main__"}, {"__qualname__": "f.<locals>.Nowhere"}])
def test_a_type_without_a_name_that_holds_in_every_process_needs_a_tag(name: dict[str, str]) -> None:
    kind = type(ECConnectorMetadata)("Nowhere", (ECConnectorMetadata,), name, frozen=True)
    with pytest.raises(ContractError, match="give it a tag"):
        register(kind)
    assert register(kind, f"test:{name}") is kind
    assert decode(encode([kind()]), tuple[AnyConnectorMetadata, ...]) == (kind(),)


# --- what cannot be sent


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (SchedulerOutput(step=1, free_encoder_keys=("\ud800",)), "surrogate"),
        (SchedulerOutput(step=2**64), "SchedulerOutput cannot be encoded"),
        (SchedulerOutput(step=1, free_encoder_keys=(object(),)), "a object has no wire form"),
        (Vague(1), "Vague.payload"),
    ],
)
def test_what_cannot_come_back_is_not_sent(message: Any, reason: str) -> None:
    with pytest.raises(RoundTripError, match=reason):
        encode(message)


def test_the_size_bound_holds_on_both_sides() -> None:
    message = SchedulerOutput(step=1, free_encoder_keys=("k" * 100,))
    data = encode(message)
    assert decode(data, SchedulerOutput, max_bytes=len(data)) == message
    assert encode(message, max_bytes=len(data)) == data
    with pytest.raises(DecodeError, match=f"{len(data)} bytes; at most {len(data) - 1}"):
        decode(data, SchedulerOutput, max_bytes=len(data) - 1)
    with pytest.raises(RoundTripError, match=f"takes {len(data)} bytes"):
        encode(message, max_bytes=len(data) - 1)
    assert MAX_MESSAGE_BYTES == 256 * 1024 * 1024


def test_a_type_that_cannot_be_received_is_a_fault_of_the_receiver() -> None:
    with pytest.raises(RoundTripError):
        decode(b"\x80", Vague)
