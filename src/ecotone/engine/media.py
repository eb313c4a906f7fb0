"""Images from outside: read from wherever they are, checked before they are decoded, and made plain RGB."""

from __future__ import annotations

import base64
import binascii
import io
import os
import stat
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from ecotone.errors import InvalidMediaError

ImageInput: TypeAlias = str | os.PathLike[str] | bytes | Image.Image | NDArray[np.uint8]
"""A path, a ``data:`` URL, an encoded image's bytes, a PIL image, or uint8 pixels ``[height, width, 3]``."""

FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
# Processors resize by the shorter side: the longer side of a thin image would grow without limit.
MAX_ASPECT_RATIO = 200
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
    16-bit grey is scaled to 8 bits, an EXIF orientation is applied. A relative path is one of the process.

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
    data, name = _read(source, max_pixels)
    if not data:
        raise InvalidMediaError(f"{name} is empty")
    with _pillow(name):
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    with image:
        return _decode(image, name, max_pixels)


def _read(source: str | os.PathLike[str] | bytes, max_pixels: int) -> tuple[bytes, str]:
    """The encoded image and what to call it in an error."""
    limit = max_pixels * MAX_BYTES_PER_PIXEL + HEADER_BYTES
    if isinstance(source, (bytes, bytearray, memoryview)):
        return _bounded(bytes(source), limit, f"image of {len(source)} bytes")
    if isinstance(source, str) and source[:5].lower() == "data:":
        return _bounded(_from_data_url(source, limit), limit, "image in a data: URL")
    if isinstance(source, str) and "://" in source[:16]:
        raise InvalidMediaError(
            f"image {source[:80]!r} is a remote address, and nothing is fetched from the network: "
            "give a path, bytes or a data: URL"
        )
    if isinstance(source, (str, os.PathLike)):
        return _from_file(Path(source), limit)
    raise InvalidMediaError(
        f"image of type {type(source).__name__}: allowed are a path, bytes, a data: URL, a PIL image, "
        "or a uint8 array [height, width, 3]"
    )


def _bounded(data: bytes, limit: int, name: str) -> tuple[bytes, str]:
    if len(data) > limit:
        raise InvalidMediaError(f"{name} has {len(data)} bytes; at most {limit} are allowed")
    return data, name


def _from_file(path: Path, limit: int) -> tuple[bytes, str]:
    name = f"image {str(path)!r}"
    try:
        # Without blocking: opening a named pipe would otherwise wait for its writer.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise InvalidMediaError(f"{name} is not a regular file")
            with open(fd, "rb", closefd=False) as file:
                return _bounded(file.read(limit + 1), limit, name)
        finally:
            os.close(fd)
    except InvalidMediaError:
        raise
    except (OSError, ValueError) as error:
        raise InvalidMediaError(f"{name} cannot be read: {error}") from None


def _from_data_url(url: str, limit: int) -> bytes:
    header, comma, payload = url[5:].partition(",")
    media_type, *options = header.split(";")
    if not comma or "base64" not in options:
        raise InvalidMediaError(f"data: URL {url[:40]!r} is not of the form data:image/png;base64,...")
    if media_type and not media_type.lower().startswith("image/"):
        raise InvalidMediaError(f"data: URL holds {media_type[:40]!r}; only image/... is allowed")
    if len(payload) > limit * 4 // 3 + 4:
        raise InvalidMediaError(f"data: URL of {len(url)} characters; the image may have {limit} bytes at most")
    try:
        return base64.b64decode(payload, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidMediaError(f"data: URL {url[:40]!r} is not valid base64: {error}") from None


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
        raise InvalidMediaError(f"{name} has more than one frame; give the frames as separate images")
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
