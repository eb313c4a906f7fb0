"""Images from outside: read from wherever they are, checked before they are decoded, and made plain RGB."""

from __future__ import annotations

import io
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from ecotone.engine.sources import Source, is_source, read_source
from ecotone.errors import InvalidMediaError

ImageInput: TypeAlias = Source | Image.Image | NDArray[np.uint8]
"""A path, a ``data:`` URL, an encoded image's bytes, a PIL image, or uint8 pixels ``[height, width, 3]``."""

FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
# Processors resize by the shorter side: the longer side of a thin image would grow without limit.
MAX_ASPECT_RATIO = 200
# All frames of a video are held at the same time: together they may have as many times the pixels of an image.
VIDEO_FACTOR = 8
# The widest pixel of the formats above is four channels of 16 bits; beside the pixels there are headers.
MAX_BYTES_PER_PIXEL, HEADER_BYTES = 8, 1 << 20

_BACKGROUND = (255, 255, 255)
_ALPHA_MODES = ("RGBA", "LA", "PA", "RGBa", "La")
_PLAIN_MODES = ("RGB", "1", "L", "P", "CMYK", "YCbCr", "LAB", "HSV")
_16_BIT_MODES = ("I;16", "I;16L", "I;16B", "I;16N")
# Warning filters belong to the process: only one thread at a time may have changed them.
_filters = threading.Lock()


def load_image(source: ImageInput, *, max_pixels: int) -> Image.Image:
    """``source`` as an upright RGB image that shares nothing with it.

    The size is checked from the header, before anything is decoded. Transparent pixels are laid over white,
    16-bit grey is scaled to 8 bits, an EXIF orientation is applied.

    Args:
        source: see ``ImageInput``.
        max_pixels: larger images are refused.

    Raises:
        InvalidMediaError: it cannot be read, is no image, is broken, animated, empty, too large or too thin.
    """
    if isinstance(source, np.ndarray):
        return _from_array(source, max_pixels)
    if isinstance(source, Image.Image):
        return _decode(source, "PIL image", max_pixels)
    if not is_source(source):
        raise InvalidMediaError(
            f"image of type {type(source).__name__}: allowed are a path, bytes, a data: URL, a PIL image, "
            "or a uint8 array [height, width, 3]"
        )
    data, name = read_source(source, kind="image", limit=max_encoded_bytes(max_pixels))
    with open_image(data, name) as image:
        return _decode(image, name, max_pixels)


def load_frames(source: Source, *, max_pixels: int, max_frames: int) -> tuple[list[Image.Image], float | None]:
    """The frames of an animated image (GIF, WebP, PNG or TIFF), and how many it shows in a second, if it says.
    ``max_pixels`` is for each frame; all of them together may have ``VIDEO_FACTOR`` times as many.

    Raises:
        InvalidMediaError: as ``load_image``; or more than ``max_frames``, or more pixels in all.
    """
    data, name = read_source(source, kind="video", limit=max_encoded_bytes(max_pixels))
    frames: list[Image.Image] = []
    milliseconds = 0.0
    with open_image(data, name) as animation:
        with _pillow(name):
            count = getattr(animation, "n_frames", 1)
        if count > max_frames:
            raise InvalidMediaError(f"{name} has {count} frames; at most {max_frames} are allowed")
        _check_size(animation.width, animation.height, name, max_pixels)
        for number in range(count):
            with _pillow(f"{name}, frame {number}"):
                animation.seek(number)
                _check_size(animation.width, animation.height, name, max_pixels)  # each may have its own
                check_total([*frames, animation], name, max_pixels)  # before it is decoded
                frames.append(_to_rgb(animation, name))
                milliseconds += animation.info.get("duration", 0)
    return frames, 1000 * count / milliseconds if milliseconds > 0 else None


def check_total(frames: Sequence[Image.Image], name: str, max_pixels: int) -> None:
    """Refuse frames that have more than ``VIDEO_FACTOR * max_pixels`` together.

    Raises:
        InvalidMediaError: they have.
    """
    total, limit = sum(frame.width * frame.height for frame in frames), VIDEO_FACTOR * max_pixels
    if total > limit:
        raise InvalidMediaError(
            f"{name}: its first {len(frames)} frames have {total} pixels; at most {limit} are allowed"
        )


def max_encoded_bytes(max_pixels: int) -> int:
    """Bytes that an image of ``max_pixels`` may have in a file."""
    return max_pixels * MAX_BYTES_PER_PIXEL + HEADER_BYTES


@contextmanager
def open_image(data: bytes, name: str) -> Iterator[Image.Image]:
    """The image in ``data``, not decoded yet.

    Raises:
        InvalidMediaError: it is none of a known format.
    """
    with _pillow(name):
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    with image:
        yield image


def _from_array(array: NDArray[np.uint8], max_pixels: int) -> Image.Image:
    if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] != 3:
        raise InvalidMediaError(
            f"image array {array.dtype}{list(array.shape)}: allowed is uint8 [height, width, 3]"
        )
    _check_size(array.shape[1], array.shape[0], "image array", max_pixels)
    return Image.fromarray(np.ascontiguousarray(array))


def _check_size(width: int, height: int, name: str, max_pixels: int) -> None:
    size = f"{name} has {width} x {height} pixels"
    if width < 1 or height < 1:
        raise InvalidMediaError(f"{size}; both sides must be at least 1")
    if width * height > max_pixels:
        raise InvalidMediaError(f"{size}, {width * height} in all; at most {max_pixels} are allowed")
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        raise InvalidMediaError(f"{size}; one side may be at most {MAX_ASPECT_RATIO} times the other")


def _decode(image: Image.Image, name: str, max_pixels: int) -> Image.Image:
    _check_size(image.width, image.height, name, max_pixels)
    with _pillow(name):
        # An MPO is a photograph followed by previews of it: its first picture is the image.
        animated = getattr(image, "is_animated", False) and image.format != "MPO"
    if animated:
        raise InvalidMediaError(
            f"{name} has more than one frame; give the frames as separate images, or all of it as a video"
        )
    with _pillow(name):
        return _to_rgb(ImageOps.exif_transpose(image), name)


def _to_rgb(image: Image.Image, name: str) -> Image.Image:
    if image.mode in _16_BIT_MODES:
        grey = np.asarray(image).astype(np.uint16)
        return Image.fromarray(((grey.astype(np.uint32) + 128) // 257).astype(np.uint8)).convert("RGB")
    if image.mode in _ALPHA_MODES or "transparency" in image.info:
        layer = image.convert("RGBA")
        page = Image.new("RGB", image.size, _BACKGROUND)
        page.paste(layer, mask=layer.getchannel("A"))
        return page
    if image.mode not in _PLAIN_MODES:
        raise InvalidMediaError(
            f"{name} has pixels of mode {image.mode!r}, whose range is not defined; give 8 or 16 bits per channel"
        )
    # Rebuilt from its pixels: what else the file said (comments, profiles) stays behind.
    return Image.frombytes("RGB", image.size, image.convert("RGB").tobytes())


@contextmanager
def _pillow(name: str) -> Iterator[None]:
    """Whatever Pillow says about ``name``, as an error of ours."""
    with _filters, warnings.catch_warnings():
        warnings.filterwarnings("error", module="PIL")
        # Comes before the size is known here; ``_check_size`` decides about it.
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        try:
            yield
        except InvalidMediaError:
            raise
        except UnidentifiedImageError:
            raise InvalidMediaError(
                f"{name} is not an image of a known format; allowed are {', '.join(FORMATS)}"
            ) from None
        # A rim: on broken files decoders raise whatever they stumble over.
        except Exception as error:  # noqa: BLE001
            raise InvalidMediaError(f"{name} cannot be decoded: {error or type(error).__name__}") from None
