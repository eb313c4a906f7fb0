"""Videos from outside, as frames: nothing here decodes a video file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ecotone.engine.media import ImageInput, check_total, load_frames, load_image
from ecotone.engine.medium import Medium, video_medium
from ecotone.engine.sources import Source, is_source
from ecotone.errors import InvalidMediaError

DEFAULT_FPS = 2.0


@dataclass(frozen=True)
class Video:
    """Frames, in the order in which they are shown. All of them are used.

    Attributes:
        frames: images of one size, or uint8 pixels ``[frames, height, width, 3]``.
        fps: how many of these frames a second of the video has. Models that tell the time of a frame use it.
    """

    frames: Sequence[ImageInput] | NDArray[np.uint8]
    fps: float = DEFAULT_FPS


VideoInput: TypeAlias = Video | Sequence[ImageInput] | NDArray[np.uint8] | Source
"""A ``Video``; its frames alone; or an animated GIF, WebP, PNG or TIFF as a path, bytes or a ``data:`` URL."""


def load_video(source: VideoInput, *, max_pixels: int, max_frames: int) -> Medium:
    """``source`` as a medium.

    Args:
        source: see ``VideoInput``.
        max_pixels: of a frame; all of them together may have ``VIDEO_FACTOR`` times as many.
        max_frames: longer videos are refused; nothing is left out silently.

    Raises:
        InvalidMediaError: it cannot be read, has no frames or too many, frames of several sizes, or too
            many pixels.
    """
    if is_source(source):
        frames, fps = load_frames(source, max_pixels=max_pixels, max_frames=max_frames)  # type: ignore[arg-type]
        return _medium(frames, fps or DEFAULT_FPS)
    video = source if isinstance(source, Video) else Video(source)  # type: ignore[arg-type]
    given: Any = video.frames
    if not isinstance(given, (Sequence, np.ndarray)) or is_source(given):
        raise InvalidMediaError(
            f"video of type {type(given).__name__}: allowed are a list of frames, a uint8 array "
            "[frames, height, width, 3], or an animated image as a path, bytes or a data: URL"
        )
    if not 1 <= len(given) <= max_frames:
        raise InvalidMediaError(f"video has {len(given)} frames; from 1 to {max_frames} are allowed")
    frames = []
    for frame in given:
        frames.append(load_image(frame, max_pixels=max_pixels))
        check_total(frames, "video", max_pixels)
    return _medium(frames, video.fps)


def _medium(frames: list[Image.Image], fps: float) -> Medium:
    sizes = sorted({frame.size for frame in frames})
    if len(sizes) > 1:
        raise InvalidMediaError(f"video has frames of several sizes, e.g. {sizes[0]} and {sizes[-1]}")
    if not isinstance(fps, (int, float)) or not isfinite(fps) or fps <= 0:
        raise InvalidMediaError(f"video with fps={fps!r}: must be a number above 0")
    return video_medium(frames, float(fps))
