"""Images from outside: what is taken, what is refused, and that the error says why."""

from __future__ import annotations

import base64
import io
import os
import random
import struct
import threading
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ecotone.engine.media import MAX_ASPECT_RATIO, load_image
from ecotone.errors import InvalidMediaError

LIMIT = 10_000


def encode(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def gradient(width: int = 12, height: int = 8) -> Image.Image:
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[..., 0] = np.linspace(0, 255, width, dtype=np.uint8)
    pixels[..., 1] = np.linspace(0, 255, height, dtype=np.uint8)[:, None]
    pixels[..., 2] = 77
    return Image.fromarray(pixels)


def refused(source: object, *says: str, max_pixels: int = LIMIT) -> None:
    with pytest.raises(InvalidMediaError) as caught:
        load_image(source, max_pixels=max_pixels)  # type: ignore[arg-type]
    for text in says:
        assert text in str(caught.value)


def png_header(width: int, height: int) -> bytes:
    """A PNG that claims a size and has next to no data."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", head)
        + chunk(b"IDAT", zlib.compress(b"\0" * 64))
        + chunk(b"IEND", b"")
    )


def test_every_kind_of_source_gives_the_same_pixels(tmp_path: Path) -> None:
    image = gradient()
    data = encode(image)
    path = tmp_path / "a.png"
    path.write_bytes(data)
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    for source in (image, np.asarray(image), data, bytearray(data), memoryview(data), path, str(path), url):
        loaded = load_image(source, max_pixels=LIMIT)  # type: ignore[arg-type]
        assert loaded.mode == "RGB"
        assert loaded.tobytes() == image.tobytes()


def test_the_result_shares_nothing_with_the_source() -> None:
    pixels = np.zeros((4, 4, 3), np.uint8)
    from_array = load_image(pixels, max_pixels=LIMIT)
    pixels[:] = 255
    image = gradient()
    from_image = load_image(image, max_pixels=LIMIT)
    image.paste((0, 0, 0), (0, 0, *image.size))
    assert from_array.getpixel((0, 0)) == (0, 0, 0)
    assert from_image.tobytes() == gradient().tobytes()


@pytest.mark.parametrize("kind", ["PNG", "BMP", "GIF", "TIFF", "PPM", "WEBP", "JPEG"])
def test_formats(kind: str) -> None:
    loaded = load_image(encode(Image.new("RGB", (9, 7), (200, 30, 30)), kind), max_pixels=LIMIT)
    assert loaded.size == (9, 7)
    assert np.abs(np.asarray(loaded).astype(int) - (200, 30, 30)).max() < 12


@pytest.mark.parametrize(
    ("mode", "colour", "expected"),
    [
        ("1", 1, (255, 255, 255)),
        ("L", 90, (90, 90, 90)),
        ("CMYK", (0, 255, 255, 0), (255, 0, 0)),
        ("RGBA", (255, 0, 0, 255), (255, 0, 0)),
        ("RGBA", (0, 0, 0, 0), (255, 255, 255)),
        ("LA", (0, 0), (255, 255, 255)),
        ("I;16", 65535, (255, 255, 255)),
        ("I;16", 0, (0, 0, 0)),
        ("I;16", 257 * 100, (100, 100, 100)),
    ],
)
def test_modes(mode: str, colour: object, expected: tuple[int, int, int]) -> None:
    assert load_image(Image.new(mode, (3, 2), colour), max_pixels=LIMIT).getpixel((1, 1)) == expected


def test_sixteen_bit_png_keeps_its_greys() -> None:
    ramp = np.linspace(0, 65535, 256).astype(np.uint16).reshape(16, 16)
    loaded = np.asarray(load_image(encode(Image.fromarray(ramp)), max_pixels=LIMIT))
    assert loaded[0, 0, 0] == 0
    assert loaded[-1, -1, 0] == 255
    assert (np.diff(loaded[..., 0].reshape(-1).astype(int)) >= 0).all()


def test_palette_with_a_transparent_colour_is_laid_over_white() -> None:
    image = Image.new("P", (4, 4), 0)
    image.putpalette([0, 0, 0, 250, 0, 0])
    image.putpixel((1, 1), 1)
    loaded = load_image(encode(image, "PNG", transparency=0), max_pixels=LIMIT)
    assert loaded.getpixel((0, 0)) == (255, 255, 255)
    assert loaded.getpixel((1, 1)) == (250, 0, 0)


def test_exif_orientation_is_applied() -> None:
    image = gradient(12, 8)
    exif = Image.Exif()
    exif[0x0112] = 6  # rotate by 90 degrees to be upright
    loaded = load_image(encode(image, "PNG", exif=exif), max_pixels=LIMIT)
    assert loaded.size == (8, 12)
    assert loaded.tobytes() == image.transpose(Image.Transpose.ROTATE_270).tobytes()


@pytest.mark.parametrize("mode", ["I", "F"])
def test_modes_without_a_range_are_refused(mode: str) -> None:
    refused(Image.new(mode, (3, 3)), repr(mode), "8 or 16 bits")


def test_size_is_checked_before_decoding() -> None:
    refused(png_header(50_000, 50_000), "pixels")
    refused(png_header(200, 100), "200 x 100", "20000", str(LIMIT))


def test_between_pillows_limit_and_ours_nothing_is_warned(recwarn: pytest.WarningsRecorder) -> None:
    # More than Pillow likes, fewer than allowed here: only the missing pixels are wrong with it.
    refused(png_header(10_000, 9_500), "cannot be decoded", max_pixels=100_000_000)
    assert not recwarn.list


@pytest.mark.parametrize("size", [(0, 5), (5, 0), (0, 0)])
def test_zero_sized(size: tuple[int, int]) -> None:
    refused(Image.new("RGB", size), f"{size[0]} x {size[1]}", "at least 1")
    refused(np.zeros((size[1], size[0], 3), np.uint8), "at least 1")


def test_thin_images_are_refused() -> None:
    assert load_image(Image.new("RGB", (MAX_ASPECT_RATIO, 1)), max_pixels=LIMIT).size == (MAX_ASPECT_RATIO, 1)
    refused(Image.new("RGB", (MAX_ASPECT_RATIO + 1, 1)), "201 x 1", "200 times")


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "TIFF", "BMP", "GIF", "PPM"])
def test_truncated(kind: str) -> None:
    rng = np.random.default_rng(0)
    data = encode(Image.fromarray(rng.integers(0, 255, (32, 32, 3), dtype=np.uint8)), kind)
    refused(data[: len(data) // 2])


def test_damaged_bytes_give_an_image_or_our_error() -> None:
    rng = random.Random(0)
    noise = np.random.default_rng(0).integers(0, 255, (16, 16, 3), dtype=np.uint8)
    refusals = 0
    for kind in ("PNG", "JPEG", "GIF", "TIFF", "WEBP", "BMP"):
        good = encode(Image.fromarray(noise), kind)
        for _ in range(60):
            bad = bytearray(good)
            for _ in range(rng.randint(1, 8)):
                bad[rng.randrange(len(bad))] = rng.randrange(256)
            try:
                assert load_image(bytes(bad), max_pixels=LIMIT).mode == "RGB"
            except InvalidMediaError:
                refusals += 1
    assert refusals > 50


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "TIFF", "PNG"])
def test_more_than_one_frame(kind: str) -> None:
    frames = [gradient(), Image.new("RGB", (12, 8))]
    refused(encode(frames[0], kind, save_all=True, append_images=frames[1:]), "more than one frame")


def test_first_picture_of_an_mpo_is_the_image() -> None:
    data = encode(Image.new("RGB", (8, 8), (9, 9, 200)), "MPO", save_all=True, append_images=[gradient()])
    assert load_image(data, max_pixels=LIMIT).size == (8, 8)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (b"", "is empty"),
        (b"not an image at all", "allowed are BMP"),
        (b"%!PS-Adobe-3.0 EPSF", "allowed are BMP"),
        ("https://example.org/a.png", "nothing is fetched"),
        ("file:///etc/hostname", "nothing is fetched"),
        ("no/such/file.png", "No such file"),
        ("nul\0byte.png", "cannot be read"),
        ("data:image/png,xyz", "base64"),
        ("data:image/png;base64", "base64"),
        ("data:text/html;base64,AAAA", "text/html"),
        ("data:image/png;base64,@@@@", "not valid base64"),
        ("data:image/png;base64,", "is empty"),
        (7, "of type int"),
        (None, "of type NoneType"),
        (np.zeros((4, 4), np.uint8), "uint8[4, 4]"),
        (np.zeros((4, 4, 4), np.uint8), "uint8[4, 4, 4]"),
        (np.zeros((4, 4, 3), np.float32), "float32[4, 4, 3]"),
    ],
)
def test_what_is_no_image_is_refused_by_name(source: object, says: str) -> None:
    refused(source, says)


def test_files_that_are_no_files(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    refused(pipe, "not a regular file")
    refused(tmp_path, "not a regular file")
    refused(Path("/dev/zero"), "not a regular file")
    (tmp_path / "empty.png").touch()
    refused(tmp_path / "empty.png", "is empty")


def test_encoded_size_is_bounded(tmp_path: Path) -> None:
    big = b"\0" * (8 * 100 + 2**20 + 1)
    (tmp_path / "big.png").write_bytes(big)
    url = "data:image/png;base64," + base64.b64encode(big).decode()
    for source in (big, tmp_path / "big.png", url, url + "AAAA" * 9):
        refused(source, "at most", max_pixels=100)


def test_a_closed_or_broken_pil_image(tmp_path: Path) -> None:
    path = tmp_path / "half.png"
    path.write_bytes(encode(gradient(64, 64))[:90])
    with Image.open(path) as image:
        refused(image, "PIL image", "cannot be decoded")


def test_broken_metadata_is_an_error_and_no_warning() -> None:
    exif = b"Exif\0\0" + b"II*\0\x08\0\0\0" + b"\xff\xff" + b"\1" * 9
    refused(encode(gradient(), "JPEG", exif=exif), "cannot be decoded")


def test_threads() -> None:
    good, bad, wrong = encode(gradient()), b"nothing", []

    def work() -> None:
        for _ in range(30):
            if load_image(good, max_pixels=LIMIT).tobytes() != gradient().tobytes():
                wrong.append("pixels")
            try:
                load_image(bad, max_pixels=LIMIT)
                wrong.append("taken")
            except InvalidMediaError:
                pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
