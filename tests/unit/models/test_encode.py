"""The encoder step: batches, storage, and one bad item that fails alone."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from model_cases import Family, image_request
from torch import Tensor

from ecotone.protocol.arrays import Array
from ecotone.protocol.step import MultiModalItem
from ecotone.worker.models import EncodeFailure, ModelAdapter
from ecotone.worker.models.encode import split_rows
from ecotone.worker.models.families import CONCAT_AXIS, FEATURE_FUNCTIONS
from ecotone.worker.models.tensors import dtype_name, to_tensor


@pytest.fixture
def items() -> list[MultiModalItem]:
    return [item for seed in (1, 2) for item in image_request(seed).items]


def with_pixels(item: MultiModalItem, pixels: np.ndarray[Any, Any]) -> MultiModalItem:
    return msgspec.structs.replace(item, inputs={"pixel_values": Array.from_numpy(pixels)})


class CountedCalls:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, core: Any) -> None:
        self.sizes: list[int] = []
        original = core.get_image_features

        def counted(pixel_values: Tensor) -> Any:
            self.sizes.append(len(pixel_values))
            return original(pixel_values)

        monkeypatch.setattr(core, "get_image_features", counted)


@pytest.fixture
def own() -> tuple[Any, ModelAdapter]:
    """An adapter, and the model inside it, that a test may tamper with."""
    model = Family.make("llava").reference
    return model, ModelAdapter(model, max_model_len=512)


def test_rows(tiny: Family, items: list[MultiModalItem]) -> None:
    results = tiny.adapter.encode(items)
    assert len(results) == 4
    for item, rows in zip(items, results, strict=True):
        assert isinstance(rows, Tensor)
        assert rows.shape == (item.num_rows, tiny.adapter.info.encoder.width)
        assert dtype_name(rows.dtype) == tiny.adapter.info.encoder.dtype
        assert rows.untyped_storage().nbytes() == rows.nbytes  # dropping one item frees its memory
        alone = tiny.adapter.encode([item])[0]
        assert isinstance(alone, Tensor)
        assert torch.allclose(rows, alone, rtol=0, atol=1e-5)
    assert tiny.adapter.encode([]) == []


def test_items_of_one_shape_share_a_call(
    own: tuple[Any, ModelAdapter], items: list[MultiModalItem], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, adapter = own
    calls = CountedCalls(monkeypatch, model.model)
    small = with_pixels(items[1], np.zeros((1, 3, 14, 14), np.float32))
    results = adapter.encode([items[0], small, items[2], items[3]])
    assert sorted(calls.sizes) == [1, 3]
    failed = results.pop(1)
    assert isinstance(failed, EncodeFailure)  # CLIP takes one size; the others are not affected
    assert "image encoder failed" in failed.reason
    assert all(isinstance(rows, Tensor) for rows in results)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda item: msgspec.structs.replace(item, num_rows=15), r"rows \[16, 32\], not \[15, 32\]"),
        (lambda item: with_pixels(item, np.full((1, 3, 28, 28), np.nan, np.float32)), "not finite"),
        (lambda item: with_pixels(item, np.full((1, 3, 28, 28), np.inf, np.float32)), "not finite"),
        (lambda item: with_pixels(item, np.zeros((2, 3, 28, 28), np.float32)), "32 rows for 1 items of 16|rows"),
        (lambda item: msgspec.structs.replace(item, inputs={}), "image encoder failed"),
        (lambda item: msgspec.structs.replace(item, modality="audio"), "a llava model has no audio encoder"),
        (lambda item: with_pixels(item, np.ones((), np.float32)), "image encoder failed"),
    ],
)
def test_one_bad_item_fails_alone(tiny: Family, items: list[MultiModalItem], spoil: Any, reason: str) -> None:
    results = tiny.adapter.encode([items[0], spoil(items[1]), *items[2:]])
    assert isinstance(results[1], EncodeFailure)
    assert re.search(reason, results[1].reason), results[1].reason
    good = tiny.adapter.encode([items[0], *items[2:]])
    for got, want in zip([results[0], *results[2:]], good, strict=True):
        assert isinstance(got, Tensor)
        assert isinstance(want, Tensor)
        assert torch.allclose(got, want, rtol=0, atol=1e-5)


def test_rows_have_the_models_dtype(items: list[MultiModalItem]) -> None:
    adapter = ModelAdapter(Family.make("llava").reference.to(torch.bfloat16), max_model_len=512)
    assert adapter.info.encoder.dtype == "bfloat16"
    rows = adapter.encode(items[:1])[0]
    assert isinstance(rows, Tensor)
    assert rows.dtype == torch.bfloat16


def test_families_that_concatenate_elsewhere(
    own: tuple[Any, ModelAdapter], items: list[MultiModalItem], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Families whose processors give [1, tiles, ...]: put together along the tiles."""
    monkeypatch.setitem(CONCAT_AXIS, "llava", 1)
    model, _ = own
    adapter = ModelAdapter(model, max_model_len=512)
    original = model.model.get_image_features
    monkeypatch.setattr(model.model, "get_image_features", lambda pixel_values: original(pixel_values[0]))
    tiled = [with_pixels(item, item.inputs["pixel_values"].to_numpy()[None]) for item in items]
    for got, want in zip(adapter.encode(tiled), Family.make("llava").adapter.encode(items), strict=True):
        assert isinstance(got, Tensor)
        assert isinstance(want, Tensor)
        assert torch.equal(got, want)


def test_families_with_a_function_of_their_own(tiny: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    def features(core: Any, input_features: Tensor) -> list[Tensor]:
        assert core.config.model_type == "llava"
        return list(input_features * 2)

    monkeypatch.setitem(FEATURE_FUNCTIONS, ("llava", "audio"), features)
    sound = np.ones((1, 5, 32), np.float32)
    item = MultiModalItem(
        modality="audio",
        item_id="0",
        offset=0,
        num_rows=5,
        inputs={
            "input_features": Array.from_numpy(sound),
            "not_wanted": Array.from_numpy(np.zeros(1, np.int64)),
        },
    )
    rows = tiny.adapter.encode([item])[0]
    assert isinstance(rows, Tensor)
    assert torch.equal(rows, torch.full((5, 32), 2.0))


def test_split_rows() -> None:
    rows = torch.arange(12.0).reshape(6, 2)
    assert [len(part) for part in split_rows(rows, [1, 5])] == [1, 5]
    assert [len(part) for part in split_rows(rows.reshape(3, 2, 2), [2, 4])] == [2, 4]  # tiles
    assert [len(part) for part in split_rows(rows.reshape(2, 3, 2), [3, 3])] == [3, 3]  # one for each item
    assert [len(part) for part in split_rows((rows[:4], rows[4:]), [4, 2])] == [4, 2]
    assert [len(part) for part in split_rows([rows], [4, 2])] == [4, 2]
    with pytest.raises(ValueError, match="6 rows for 2 items of 7"):
        split_rows(rows, [4, 3])


@pytest.mark.parametrize("dtype", [np.float32, np.int64, np.bool_, np.float16, np.uint8])
def test_arrays_become_tensors(dtype: Any) -> None:
    values = np.array([[0, 1], [1, 1]], dtype)
    tensor = to_tensor(Array.from_numpy(values))
    assert dtype_name(tensor.dtype) == values.dtype.name
    assert tensor.tolist() == values.tolist()
    tensor[0, 0] = 1  # a copy: nobody else sees it


def test_bfloat16_arrays() -> None:
    source = torch.tensor([1.5, -2.0], dtype=torch.bfloat16)
    array = Array("bfloat16", (2,), source.view(torch.int16).numpy().tobytes())
    assert torch.equal(to_tensor(array), source)
