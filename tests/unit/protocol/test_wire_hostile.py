"""Bytes from elsewhere: every one of them is a message or a typed error, in bounded time and memory."""

import struct
import tracemalloc
from typing import Any, Self

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from protocol_samples import Facts, model_infos, runner_outputs, scheduler_outputs

from ecotone.errors import DecodeError, WireError
from ecotone.protocol import (
    Array,
    ECConnectorOutput,
    ECConnectorWorkerMetadata,
    ModelInfo,
    ModelRunnerOutput,
    NewRequestData,
    RankStats,
    SamplingParams,
    ScheduledRequest,
    SchedulerOutput,
    decode,
    encode,
    register,
)

KINDS: list[Any] = [SchedulerOutput, ModelRunnerOutput, ECConnectorOutput, ModelInfo, Array]
kinds = st.sampled_from(KINDS)
messages = st.one_of(scheduler_outputs, runner_outputs(), model_infos)


def decode_or_refuse(data: bytes, kind: Any) -> None:
    """Raises anything but a WireError, or a message that cannot be sent again: the test fails."""
    try:
        message = decode(data, kind)
    except WireError:
        return
    assert type(message) is kind
    encode(message)


@given(st.binary(max_size=64), kinds)
def test_random_bytes(data: bytes, kind: Any) -> None:
    decode_or_refuse(data, kind)


@given(messages, kinds)
def test_a_message_taken_for_another(message: Any, kind: Any) -> None:
    decode_or_refuse(encode(message), kind)


@given(messages, st.data())
def test_a_message_cut_short(message: Any, data: st.DataObject) -> None:
    whole = encode(message)
    length = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(DecodeError):
        decode(whole[:length], type(message))


@given(messages, st.data())
def test_a_message_with_flipped_bits(message: Any, data: st.DataObject) -> None:
    damaged = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    decode_or_refuse(bytes(damaged), type(message))


@given(messages, st.binary(min_size=1, max_size=4))
def test_a_message_with_more_behind_it(message: Any, rest: bytes) -> None:
    with pytest.raises(DecodeError):
        decode(encode(message) + rest, type(message))


HUGE_HEADERS = {
    "array32": b"\xdd\xff\xff\xff\xff",
    "map32": b"\xdf\xff\xff\xff\xff",
    "str32": b"\xdb\xff\xff\xff\xff",
    "bin32": b"\xc6\xff\xff\xff\xff",
    "ext32": b"\xc9\xff\xff\xff\xff\x01",
    "array16": b"\xdc\xff\xff",
    "map16": b"\xde\xff\xff",
}
# Where a header can stand: in place of the whole message, and in place of each kind of container in one.
PLACES: list[tuple[Any, bytes]] = [
    (SchedulerOutput, b""),
    (Array, b""),
    (Array, b"\x93\xa5uint8"),
    (Array, b"\x93\xa5uint8\x90"),
    (SchedulerOutput, b"\x82\xa4step\x01\xa9scheduled"),
    (SchedulerOutput, b"\x82\xa4step\x01\xb0finished_req_ids"),
    (ModelRunnerOutput, b"\x81\xa7req_ids"),
    (ModelRunnerOutput, b"\x81\xb1sampled_token_ids\x91"),
    (ModelRunnerOutput, b"\x81\xaerequest_errors"),
    (ECConnectorOutput, b"\x81\xb8ec_connector_worker_meta"),
    (ECConnectorOutput, b"\x81\xb8ec_connector_worker_meta\x92"),
    (ECConnectorOutput, b"\x81\xb8ec_connector_worker_meta\x92\xa1x"),
    (ECConnectorOutput, b"\x81\xa7unknown"),
]


@pytest.mark.parametrize("header", HUGE_HEADERS.values(), ids=HUGE_HEADERS)
@pytest.mark.parametrize(("kind", "before"), PLACES)
def test_a_header_that_claims_more_than_there_is(kind: Any, before: bytes, header: bytes) -> None:
    with pytest.raises(WireError):  # so that what is cached by the first decoding is not counted
        decode(before + header, kind)
    tracemalloc.start()
    try:
        for tail in (b"", b"\x00" * 100, header * 100):
            with pytest.raises(WireError):
                decode(before + header + tail, kind)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("nest", [b"\x91", b"\x81\xa1x", b"\x81\x90", b"\x92\xc0"])
@pytest.mark.parametrize(("kind", "before"), PLACES)
def test_deep_nesting(kind: Any, before: bytes, nest: bytes) -> None:
    for bottom in (b"", b"\xc0"):
        with pytest.raises(WireError):
            decode(before + nest * 100_000 + bottom, kind)


def test_a_claim_is_not_quoted_at_full_length() -> None:
    name = "x" * 2**20
    with pytest.raises(DecodeError) as caught:
        decode(msgspec.msgpack.encode({name: 1}), ModelInfo)
    assert len(str(caught.value)) < 1000


def step_with(**changes: Any) -> bytes:
    return msgspec.msgpack.encode({"step": 1, **changes})


def run_with(**changes: Any) -> dict[str, Any]:
    return {"req_id": "r", "num_computed_tokens": 0, "num_tokens": 1, "num_known_tokens": 1, **changes}


def announced(**params: Any) -> bytes:
    return step_with(new_requests=[{"req_id": "r", "prompt_token_ids": [1], "params": params}])


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (step_with(step=0), SchedulerOutput),
        (step_with(step=True), SchedulerOutput),
        (step_with(step=1.0), SchedulerOutput),
        (step_with(unknown=1), SchedulerOutput),
        (step_with(finished_req_ids=[b"r"]), SchedulerOutput),
        (step_with(scheduled=[run_with(num_tokens=0)]), SchedulerOutput),
        (step_with(scheduled=[run_with(num_computed_tokens=-1)]), SchedulerOutput),
        (step_with(scheduled=[run_with(encode=[-1])]), SchedulerOutput),
        (announced(type="sampling", top_p=2.0), SchedulerOutput),
        (announced(type="sampling", stop=["\0" * 2000]), SchedulerOutput),
        (announced(type="pooling", pooling="first"), SchedulerOutput),
        (announced(type="beam"), SchedulerOutput),
        (announced(), SchedulerOutput),
        (msgspec.msgpack.encode({"rank": 0, "epoch": 0, "counters": {"a": float("nan")}}), RankStats),
        (msgspec.msgpack.encode({"rank": 0, "epoch": 0, "counters": {"a": -1}}), RankStats),
        (msgspec.msgpack.encode({"req_ids": ["a"], "pooler_output": [None, None]}), ModelRunnerOutput),
        (msgspec.msgpack.encode(["uint8", [2**63] * 32, b""]), Array),
        (msgspec.msgpack.encode(["uint8", [2**63] * 5000, b""]), Array),
        (msgspec.msgpack.encode(["bool", [1], b"\x02"]), Array),
        (b"\x81\xa7req_ids\x91\xa2\xff\xff", ModelRunnerOutput),  # no UTF-8
        (b"\xc1", ModelRunnerOutput),  # a byte that msgpack never uses
    ],
)
def test_values_out_of_bounds(data: bytes, kind: Any) -> None:
    assert decode(step_with(scheduled=[run_with()]), SchedulerOutput).scheduled == (
        ScheduledRequest(**run_with()),
    )
    assert isinstance(decode(announced(type="sampling"), SchedulerOutput).new_requests[0], NewRequestData)
    assert decode(announced(type="sampling"), SchedulerOutput).new_requests[0].params == SamplingParams()
    with pytest.raises(DecodeError):
        decode(data, kind)


@register
class Touchy(ECConnectorWorkerMetadata, frozen=True):
    """Its check fails in a way of its own."""

    key: str = "known"

    def __post_init__(self) -> None:
        {"known": 1}[self.key]

    def aggregate(self, other: Self) -> Self:
        return self


def test_whatever_a_types_own_check_raises_is_a_decode_error() -> None:
    tag = f"{Touchy.__module__}:Touchy"
    data = msgspec.msgpack.encode({"ec_connector_worker_meta": [tag, msgspec.msgpack.encode({"key": "other"})]})
    with pytest.raises(DecodeError, match="other") as caught:
        decode(data, ECConnectorOutput)
    assert isinstance(caught.value.__cause__, KeyError)


def test_memory_is_bounded_by_the_size_of_the_message() -> None:
    """Many tiny items are the most a sender gets for its bytes; the factor is a constant."""
    rows = msgspec.msgpack.encode({"sampled_token_ids": [[]] * 100_000})
    facts = msgspec.msgpack.encode({"done": [[n, n] for n in range(20_000)]})
    tag = f"{Facts.__module__}:Facts".encode()
    report = b"\x81\xb8ec_connector_worker_meta\x92\xd9" + struct.pack("B", len(tag)) + tag
    report += b"\xc6" + struct.pack(">I", len(facts)) + facts
    for data, kind in ((rows, ModelRunnerOutput), (report, ECConnectorOutput)):
        tracemalloc.start()
        try:
            decode_or_refuse(data, kind)
            assert tracemalloc.get_traced_memory()[1] < 100 * len(data)
        finally:
            tracemalloc.stop()
