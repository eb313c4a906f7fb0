"""Values that are checked where they are built."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecotone.errors import DecodeError, SamplingError
from ecotone.protocol import Array, PoolingParams, SamplingParams

NUMPY_DTYPES = ["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64"]


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3), (2, 0, 3)])
def test_arrays_come_back_bit_by_bit(dtype: str, shape: tuple[int, ...]) -> None:
    raw = np.random.default_rng(0).integers(0, 2 if dtype == "bool" else 100, shape)
    array = np.asarray(raw, dtype)
    there = Array.from_numpy(array)
    back = there.to_numpy()
    assert (there.dtype, there.shape, back.dtype, back.shape) == (dtype, shape, array.dtype, shape)
    assert back.tobytes() == array.tobytes()
    assert not back.flags.writeable


def test_arrays_of_any_memory_order_and_byte_order() -> None:
    array = np.arange(6, dtype="float32").reshape(2, 3)
    assert Array.from_numpy(array.T) == Array.from_numpy(np.ascontiguousarray(array.T))
    assert Array.from_numpy(array.astype(">f4")) == Array.from_numpy(array)


def test_bfloat16_travels_as_its_bits() -> None:
    rows = np.array([[1.5, -2.0, 3.25]], "<f4")  # exact in bfloat16, which is the upper half of a float32
    upper = (rows.view("<u4") >> 16).astype("<u2")
    array = Array("bfloat16", (1, 3), memoryview(upper.tobytes()))
    assert type(array.data) is bytes
    assert np.array_equal((array.to_numpy().astype("<u4") << 16).view("<f4"), rows)


@pytest.mark.parametrize(
    ("dtype", "shape", "data", "message"),
    [
        ("float31", (1,), b"1234", "dtype 'float31' is not one of bool"),
        ("float32", (2,), b"1234", "needs 8 bytes, got 4"),
        ("float32", (), b"", "needs 4 bytes, got 0"),
        ("float32", (-1,), b"", "negative length"),
        ("float32", (-1, -1), b"1234", "negative length"),
        ("uint8", (1,) * 33, b"1", "33 axes"),
        ("uint8", (2**63,) * 32, b"", "needs"),
        ("uint8", (0, 2**63), b"", "axes beyond"),
        ("bool", (2,), b"\x01\x02", "other than 0 and 1"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(dtype: str, shape: tuple[int, ...], data: bytes, message: str) -> None:
    with pytest.raises(DecodeError, match=message):
        Array(dtype, shape, data)


@pytest.mark.parametrize("dtype", ["complex64", "uint16", "U3", "O"])
def test_numpy_types_without_a_wire_form_are_refused(dtype: str) -> None:
    with pytest.raises(DecodeError, match="dtype"):
        Array.from_numpy(np.zeros(2, dtype))


@pytest.mark.parametrize(
    ("name", "allowed", "refused"),
    [
        ("max_tokens", [1, 2**31 - 1], [0, -1, 2**31, 1.0, True, None, "5"]),
        ("temperature", [0, 0.0, 1, 100.0], [-0.1, 100.1, float("nan"), float("inf"), "hot", None]),
        ("top_k", [0, 1, 2**31 - 1], [-1, 2**31, 0.5, None]),
        ("top_p", [1, 1e-9, 1.0], [0, 0.0, -1, 1.0001, float("nan"), None]),
        ("min_p", [0, 1, 0.5], [-0.1, 1.1, float("nan"), None]),
        ("repetition_penalty", [0.01, 1, 100], [0, 0.0, -1.0, 101, float("nan"), None]),
        ("presence_penalty", [-2, 0.0, 2], [-2.1, 2.1, float("nan"), "0"]),
        ("frequency_penalty", [-2, 0.0, 2], [-2.1, 2.1, float("nan"), "0"]),
        ("n", [1, 128], [0, 129, 1.0, None]),
        ("min_tokens", [0, 64], [-1, 65, 1.0, None]),
        ("seed", [None, 0, 2**63 - 1], [-1, 2**63, 0.5, "0"]),
        ("stop", [(), ("a",), ["a", "é"], ("x" * 1024,), ("a",) * 16],
         [("",), "ab", ("x" * 1025,), ("a",) * 17, (1,), ("\ud800",), None]),
        ("stop_token_ids", [(), (0,), [5], (2**31 - 1,)], [(-1,), (2**31,), (1.0,), 5, (0,) * 1025]),
        ("ignore_eos", [True, False], [1, None]),
        ("logprobs", [None, 0, 64], [-1, 65, 1.0]),
    ],
)  # fmt: skip
def test_sampling_parameters_have_ranges(name: str, allowed: list[object], refused: list[object]) -> None:
    for value in allowed:
        SamplingParams(**{name: value})
    for value in refused:
        with pytest.raises(SamplingError, match=f"^{name}=.*: must be "):
            SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("name", "refused"),
    [("pooling", "first"), ("pooling", None), ("pooling", ["last"]), ("normalize", 1), ("normalize", None)],
)
def test_pooling_parameters_have_ranges(name: str, refused: object) -> None:
    PoolingParams(pooling="mean", normalize=False)
    with pytest.raises(SamplingError, match=f"^{name}="):
        PoolingParams(**{name: refused})


@given(st.text(max_size=3, alphabet=st.characters(exclude_categories=())))
def test_every_accepted_stop_string_can_be_sent(text: str) -> None:
    try:
        params = SamplingParams(stop=(text,))
    except SamplingError:
        return
    assert params.stop[0].encode().decode() == text
