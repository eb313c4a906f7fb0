"""What differs between model families. Everything else is found out from signatures and attributes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

# Class names in ``config.json`` that there are tests for.
SUPPORTED_ARCHITECTURES = ("LlavaForConditionalGeneration",)

# model_type -> the axis along which the processor's tensors of several items are put together for one encoder
# call. 0 where not listed.
CONCAT_AXIS: Mapping[str, int] = {}

# (model_type, modality) -> a function (core model, **processor tensors) -> rows, for families without a
# ``get_<modality>_features`` method.
FEATURE_FUNCTIONS: Mapping[tuple[str, str], Callable[..., Any]] = {}
