"""One image, video or clip, checked and decoded: what a processor is called with, and the digest of all of it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from PIL import Image


@dataclass(frozen=True)
class Medium:
    """A decoded medium.

    Attributes:
        modality: ``image``, ``video`` or ``audio``.
        arguments: of the processor's call, for this medium alone.
        content: digest of everything in ``arguments``.
        name: what to call it in an error.
    """

    modality: str
    arguments: Mapping[str, Any]
    content: bytes
    name: str


def image_medium(image: Image.Image) -> Medium:
    """An RGB image."""
    name = f"image of {image.width} x {image.height} pixels"
    return Medium("image", {"images": [image]}, _digest("image", _pixels(image)), name)


def video_medium(frames: Sequence[Image.Image], fps: float) -> Medium:
    """RGB frames of one size. The processor takes all of them: which to keep was the caller's choice."""
    metadata = {
        "fps": fps,
        "total_num_frames": len(frames),
        "duration": len(frames) / fps,
        "frames_indices": list(range(len(frames))),
        "width": frames[0].width,
        "height": frames[0].height,
    }
    arguments = {"videos": [list(frames)], "video_metadata": [metadata], "do_sample_frames": False}
    content = _digest("video", fps, *(_pixels(frame) for frame in frames))
    name = f"video of {len(frames)} frames of {frames[0].width} x {frames[0].height} pixels"
    return Medium("video", arguments, content, name)


def audio_medium(samples: NDArray[np.float32], sampling_rate: int) -> Medium:
    """One channel, float32 ``[samples]``."""
    arguments = {"audio": [samples], "sampling_rate": sampling_rate}
    content = _digest("audio", sampling_rate, samples.tobytes())
    return Medium("audio", arguments, content, f"clip of {len(samples) / sampling_rate:.3g} seconds")


def _pixels(image: Image.Image) -> tuple[str, tuple[int, int], bytes]:
    return image.mode, image.size, image.tobytes()


def _digest(*facts: Any) -> bytes:
    return hashlib.sha256(msgspec.msgpack.encode(facts)).digest()
