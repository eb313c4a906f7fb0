"""Operations and answers: what they refuse, and that they survive the wire."""

from __future__ import annotations

import math

import msgspec
import pytest

from ecotone.errors import DecodeError
from ecotone.node import (
    Abort,
    Absent,
    Acquire,
    AnyAnswer,
    AnyOp,
    Commit,
    Done,
    Extent,
    Forget,
    ForgetAll,
    Layout,
    Lookup,
    Namespace,
    NoRoom,
    Pending,
    Ready,
    Release,
    Ticket,
)

NS = Namespace(model="m", revision="r", dtype="bfloat16", width=8, processor="p")
KEY, LAYOUT = NS.key("x"), Layout("bfloat16", (576, 4096))
EXTENTS = (Extent("r", 1, 0, 64), Extent("r", 1, 128, 10))

OPS: list[AnyOp] = [
    Acquire(1, KEY, LAYOUT, 1.5, 0.25), Acquire(2, KEY, LAYOUT), Lookup(3, KEY, LAYOUT, 2.0), Commit(4, 9),
    Abort(5, 9), Release(6, 9), Forget(7, KEY), ForgetAll(8, NS.digest),
]  # fmt: skip
ANSWERS: list[AnyAnswer] = [
    Ready(1, 9, EXTENTS), Ticket(2, 9, EXTENTS), Pending(3), Absent(4), NoRoom(5), Done(6, effect=True),
]  # fmt: skip


def test_every_kind_survives_the_wire() -> None:
    assert {type(op) for op in OPS} == {Acquire, Lookup, Commit, Abort, Release, Forget, ForgetAll}
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(OPS), type=list[AnyOp]) == OPS
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(ANSWERS), type=list[AnyAnswer]) == ANSWERS


def test_a_layout_knows_its_size() -> None:
    assert LAYOUT.nbytes == 576 * 4096 * 2
    assert Layout("float64", ()).nbytes == 8


@pytest.mark.parametrize(("dtype", "shape"), [("float17", (1,)), ("uint8", (0, 4)), ("uint8", (-1,))])
def test_an_impossible_layout_is_refused(dtype: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(DecodeError, match="layout"):
        Layout(dtype, shape)


@pytest.mark.parametrize("seconds", [-1.0, math.nan, math.inf])
def test_a_lease_or_cost_that_is_no_duration_is_refused(seconds: float) -> None:
    with pytest.raises(DecodeError, match="lease_s"):
        Acquire(1, KEY, LAYOUT, seconds)
    with pytest.raises(DecodeError, match="cost_s"):
        Acquire(1, KEY, LAYOUT, None, seconds)
    with pytest.raises(DecodeError, match="lease_s"):
        Lookup(1, KEY, LAYOUT, seconds)


def test_what_is_not_a_key_never_becomes_an_operation() -> None:  # hazard 40
    for key in ("../../etc/passwd", "x" * 97, KEY + "/.."):
        for make in (lambda k: Acquire(1, k, LAYOUT), lambda k: Lookup(1, k, LAYOUT), lambda k: Forget(1, k)):
            with pytest.raises(DecodeError, match="not a cache key"):
                make(key)
    with pytest.raises(DecodeError, match="not a namespace"):
        ForgetAll(1, "")


def test_the_same_refusals_apply_to_bytes_from_elsewhere() -> None:
    hostile = msgspec.to_builtins(OPS[0]) | {"key": "../x"}
    with pytest.raises(DecodeError, match="not a cache key"):
        msgspec.msgpack.decode(msgspec.msgpack.encode(hostile), type=AnyOp)
    unknown = msgspec.to_builtins(OPS[3]) | {"force": True}
    with pytest.raises(msgspec.ValidationError, match="force"):
        msgspec.msgpack.decode(msgspec.msgpack.encode(unknown), type=AnyOp)
