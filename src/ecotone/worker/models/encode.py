"""The encoder step: items in, one tensor of rows for each, and a reason in place of the tensor where it failed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ecotone.protocol.arrays import Array
from ecotone.protocol.connector import EncoderSpec
from ecotone.protocol.step import MultiModalItem
from ecotone.worker.models.families import CONCAT_AXIS, FEATURE_FUNCTIONS
from ecotone.worker.models.tensors import to_tensor


@dataclass(frozen=True)
class EncodeFailure:
    """Why an item has no rows. Only the requests that need the item are affected."""

    reason: str


class Encoder:
    """The vision or audio part of a model.

    Args:
        core: transformers' model without its head; it has the ``get_<modality>_features`` methods.
        spec: the rows to produce.
    """

    def __init__(self, core: Any, spec: EncoderSpec, device: torch.device, dtype: torch.dtype) -> None:
        self._core = core
        self._model_type: str = core.config.model_type
        self._axis = CONCAT_AXIS.get(self._model_type, 0)
        self._spec = spec
        self._device = device
        self._dtype = dtype

    def encode(self, items: Sequence[MultiModalItem]) -> list[Tensor | EncodeFailure]:
        """Rows ``[num_rows, width]`` of each item, in storage of its own. Items that can
        share an encoder call do."""
        groups: dict[tuple[Any, ...], list[int]] = {}
        for index, item in enumerate(items):
            groups.setdefault(self._shape_key(item), []).append(index)
        results: dict[int, Tensor | EncodeFailure] = {}
        for indices in groups.values():
            group = [items[i] for i in indices]
            results.update(zip(indices, self._encode_group(group), strict=True))
        return [results[i] for i in range(len(items))]

    def _shape_key(self, item: MultiModalItem) -> tuple[Any, ...]:
        """Items with the same key can be concatenated."""
        axis = self._axis
        shapes = sorted((name, a.dtype, a.shape[:axis], a.shape[axis + 1 :]) for name, a in item.inputs.items())
        return item.modality, *shapes

    def _encode_group(self, items: Sequence[MultiModalItem]) -> list[Tensor | EncodeFailure]:
        """One call for all; where it does not work out, one call for each, so that only the culprit fails."""
        results = self._call(items)
        if len(items) > 1 and any(isinstance(result, EncodeFailure) for result in results):
            return [self._call([item])[0] for item in items]
        return results

    def _call(self, items: Sequence[MultiModalItem]) -> list[Tensor | EncodeFailure]:
        try:
            rows = self._rows(items)
        except (RuntimeError, ValueError, TypeError, LookupError) as error:
            # The rim: the model's own code on inputs that came with a request. It raises no types of its own.
            reason = f"the {items[0].modality} encoder failed: {type(error).__name__}: {error}"
            return [EncodeFailure(reason)] * len(items)
        return [self._checked(r, item) for r, item in zip(rows, items, strict=True)]

    def _rows(self, items: Sequence[MultiModalItem]) -> list[Tensor]:
        """Rows of each item, extra levels side by side, not checked yet."""
        function = self._features(items[0].modality)
        tensors = {name: self._join([item.inputs[name] for item in items]) for name in items[0].inputs}
        accepted = inspect.signature(function).parameters
        output = function(**{name: t for name, t in tensors.items() if name in accepted})
        levels = [getattr(output, "pooler_output", output), *(getattr(output, "deepstack_features", None) or ())]
        split = [split_rows(level, [item.num_rows for item in items]) for level in levels]
        return [torch.cat(parts, dim=1) for parts in zip(*split, strict=True)]

    def _features(self, modality: str) -> Callable[..., Any]:
        function = FEATURE_FUNCTIONS.get((self._model_type, modality))
        if function is not None:
            return partial(function, self._core)
        # A family without an encoder of its own for videos sees their frames as images.
        for name in (modality, "image") if modality == "video" else (modality,):
            method: Callable[..., Any] | None = getattr(self._core, f"get_{name}_features", None)
            if method is not None:
                return method
        raise ValueError(f"a {self._model_type} model has no {modality} encoder")

    def _join(self, arrays: Sequence[Array]) -> Tensor:
        joined = torch.cat([to_tensor(array) for array in arrays], dim=self._axis).to(self._device)
        return joined.to(self._dtype) if joined.is_floating_point() else joined

    def _checked(self, rows: Tensor, item: MultiModalItem) -> Tensor | EncodeFailure:
        """``rows``, if they are what the prompt has places for: what is malformed must not reach a cache."""
        want = (item.num_rows, self._spec.width)
        if tuple(rows.shape) != want:
            return EncodeFailure(f"the {item.modality} encoder returned rows {list(rows.shape)}, not {list(want)}")
        rows = rows.to(self._dtype)
        if not bool(rows.isfinite().all()):
            return EncodeFailure(f"the {item.modality} encoder returned values that are not finite")
        return rows


def split_rows(output: Tensor | Sequence[Tensor], counts: Sequence[int]) -> list[Tensor]:
    """What the encoder returned, by item.

    Families return one tensor for each item, for each tile of an item, or one for all. One for each item is
    taken as it is (the caller checks its size); anything else is laid end to end and cut by ``counts``.

    Raises:
        ValueError: the rows are not as many as ``counts`` say.
    """
    parts = list(output) if not isinstance(output, Tensor) or output.ndim > 2 else [output]
    flat = [part.reshape(-1, part.shape[-1]) for part in parts]
    if len(flat) == len(counts):
        return flat
    rows = torch.cat(flat)
    if len(rows) != sum(counts):
        raise ValueError(f"{len(rows)} rows for {len(counts)} items of {sum(counts)}")
    return list(torch.split(rows, list(counts)))
