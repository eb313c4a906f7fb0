"""Ecotone: a distributed encoder cache for multimodal inference.

The names below are imported when they are first used: ``import ecotone`` needs neither torch nor transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ecotone.config import ECConfig, EngineConfig
    from ecotone.engine.audio import AudioInput
    from ecotone.engine.engine import Engine
    from ecotone.engine.inputs import InputProcessor, Prompt
    from ecotone.engine.inspection import inspect_model
    from ecotone.engine.media import ImageInput
    from ecotone.engine.outputs import RequestMetrics, RequestOutput, StreamDelta
    from ecotone.engine.stream import Stream
    from ecotone.engine.video import Video, VideoInput
    from ecotone.errors import (
        ConfigError,
        ContractError,
        DecodeError,
        EcotoneError,
        IllegalTransitionError,
        IntegrityError,
        InvalidMediaError,
        ItemTooLargeError,
        LostReportsError,
        MissingOutputError,
        ModelError,
        PlaceholderError,
        PromptTooLongError,
        RankFailedError,
        RankTimeoutError,
        RequestError,
        RequestFailedError,
        ResourceError,
        RoundTripError,
        SamplingError,
        ShutDownError,
        UnknownTypeError,
        UnsupportedModelError,
        WireError,
    )
    from ecotone.protocol.params import PoolingParams, SamplingParams

_HOMES = {
    "ecotone.config": ("ECConfig", "EngineConfig"),
    "ecotone.engine.audio": ("AudioInput",),
    "ecotone.engine.engine": ("Engine",),
    "ecotone.engine.inputs": ("InputProcessor", "Prompt"),
    "ecotone.engine.inspection": ("inspect_model",),
    "ecotone.engine.media": ("ImageInput",),
    "ecotone.engine.outputs": ("RequestMetrics", "RequestOutput", "StreamDelta"),
    "ecotone.engine.stream": ("Stream",),
    "ecotone.engine.video": ("Video", "VideoInput"),
    "ecotone.protocol.params": ("PoolingParams", "SamplingParams"),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "AudioInput",
    "ConfigError",
    "ContractError",
    "DecodeError",
    "ECConfig",
    "EcotoneError",
    "Engine",
    "EngineConfig",
    "IllegalTransitionError",
    "ImageInput",
    "InputProcessor",
    "IntegrityError",
    "InvalidMediaError",
    "ItemTooLargeError",
    "LostReportsError",
    "MissingOutputError",
    "ModelError",
    "PlaceholderError",
    "PoolingParams",
    "Prompt",
    "PromptTooLongError",
    "RankFailedError",
    "RankTimeoutError",
    "RequestError",
    "RequestFailedError",
    "RequestMetrics",
    "RequestOutput",
    "ResourceError",
    "RoundTripError",
    "SamplingError",
    "SamplingParams",
    "ShutDownError",
    "Stream",
    "StreamDelta",
    "UnknownTypeError",
    "UnsupportedModelError",
    "Video",
    "VideoInput",
    "WireError",
    "inspect_model",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'ecotone' has no attribute {name!r}")
    return getattr(import_module(_HOME.get(name, "ecotone.errors")), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
