"""Clips and videos from outside: what is taken, what is refused, and that the error says why."""

from __future__ import annotations

import base64
import io
import random
import struct
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ecotone.engine.audio import load_audio
from ecotone.engine.medium import Medium, audio_medium, image_medium, video_medium
from ecotone.engine.video import DEFAULT_FPS, Video, load_video
from ecotone.errors import InvalidMediaError

RATE = 8_000


def audio(source: Any, seconds: float = 2.0) -> Medium:
    return load_audio(source, sampling_rate=RATE, max_seconds=seconds)


def video(source: Any, frames: int = 4) -> Medium:
    return load_video(source, max_pixels=1_000, max_frames=frames)


def samples_of(medium: Medium) -> np.ndarray[Any, Any]:
    [samples] = medium.arguments["audio"]
    assert samples.dtype == np.float32
    assert medium.arguments["sampling_rate"] == RATE
    return np.asarray(samples)


def wav(frames: bytes, width: int = 2, channels: int = 1, rate: int = RATE) -> bytes:
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(frames)
    return buffer.getvalue()


# -- sound --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("width", "frames"),
    [
        (1, bytes((0, 64, 128, 192))),
        (2, struct.pack("<4h", -(2**15), -(2**14), 0, 2**14)),
        (3, b"\0\0\x80" + b"\0\0\xc0" + b"\0\0\0" + b"\0\0\x40"),
        (4, struct.pack("<4i", -(2**31), -(2**30), 0, 2**30)),
    ],
)
def test_samples_of_every_width_are_from_minus_1_to_1(width: int, frames: bytes) -> None:
    assert samples_of(audio(wav(frames, width))).tolist() == [-1, -0.5, 0, 0.5]


def test_every_kind_of_source_gives_the_same_clip(tmp_path: Path) -> None:
    values = np.array([0.5, -0.25, 0.0], np.float32)
    data = wav((values * 2**15).astype("<i2").tobytes())
    path = tmp_path / "a.wav"
    path.write_bytes(data)
    url = "data:audio/wav;base64," + base64.b64encode(data).decode()
    sources = (data, bytearray(data), path, str(path), url, (values, RATE), (values.astype(np.float64), RATE))
    loaded = [audio(source) for source in sources]
    assert {medium.content for medium in loaded} == {audio_medium(values, RATE).content}
    assert all(samples_of(medium).tolist() == values.tolist() for medium in loaded)
    assert loaded[0].modality == "audio"


def test_channels_are_averaged() -> None:
    frames = struct.pack("<4h", 2**14, 0, -(2**14), 2**14)
    assert samples_of(audio(wav(frames, channels=2))).tolist() == [0.25, 0.0]
    assert samples_of(audio((np.array([[0.5, 0.0], [-0.5, 0.5]]), RATE))).tolist() == [0.25, 0.0]


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (b"", "is empty"),
        (b"ID3 this is no wave file", "not a PCM WAV file"),
        (wav(b"")[:20], "not a PCM WAV file"),
        (wav(b"\0" * 400)[:200], "cut short"),
        (wav(b"\0\0", rate=44_100), "44100 samples in a second, and the model takes 8000: resample"),
        (wav(b""), "0 seconds"),
        (wav(b"\0" * 2 * (2 * RATE + 1)), "from one sample to 2 seconds"),
        (wav(b"\0" * 18, channels=9), "9 channels"),
        ("no/such.wav", "No such file"),
        ("https://example.org/a.wav", "nothing is fetched"),
        ("data:image/png;base64,AAAA", "only audio/... is allowed"),
        ((np.zeros(3, np.int16), RATE), "float samples"),
        ((np.zeros((1, 1, 1)), RATE), "float samples"),
        ((np.zeros(3), 8_000.0), "float samples"),
        (np.zeros(3), "of type ndarray"),
        ((np.zeros(0), RATE), "0 seconds"),
        ((np.zeros((2, 8_000)), RATE), "8000 channels"),
        ((np.array([0.0, np.nan]), RATE), "not finite"),
        ((np.array([0.0, np.inf]), RATE), "not finite"),
        (7, "of type int"),
        (None, "of type NoneType"),
    ],
)
def test_what_is_no_clip_is_refused_by_name(source: object, says: str) -> None:
    with pytest.raises(InvalidMediaError, match=says):
        audio(source)


def test_a_float_wave_file_is_refused() -> None:
    header = struct.pack(
        "<4sI4s4sIHHIIHH4sI", b"RIFF", 40, b"WAVE", b"fmt ", 16, 3, 1, RATE, 4 * RATE, 4, 32, b"data", 4
    )
    with pytest.raises(InvalidMediaError, match=r"not a PCM WAV file.*format"):
        audio(header + b"\0" * 4)


def test_encoded_sound_is_bounded() -> None:
    with pytest.raises(InvalidMediaError, match="at most"):
        audio(b"RIFF" + b"\0" * (2 * RATE * 32 + 2**20))


# -- videos -------------------------------------------------------------------------------------------------------


def picture(value: int, size: tuple[int, int] = (6, 4)) -> Image.Image:
    return Image.new("RGB", size, (value, 0, 255 - value))


FRAMES = [picture(value) for value in (0, 100, 200)]


def frames_of(medium: Medium) -> list[Image.Image]:
    [frames] = medium.arguments["videos"]
    assert medium.arguments["do_sample_frames"] is False
    return list(frames)


def animation(kind: str, frames: list[Image.Image], **options: object) -> bytes:
    buffer = io.BytesIO()
    frames[0].save(buffer, kind, save_all=True, append_images=frames[1:], **options)
    return buffer.getvalue()


def test_every_kind_of_source_gives_the_same_video() -> None:
    pixels = np.stack([np.asarray(frame) for frame in FRAMES])
    sources = (FRAMES, tuple(FRAMES), pixels, list(pixels), Video(FRAMES), animation("PNG", FRAMES, duration=500))
    loaded = [video(source) for source in sources]
    assert {medium.content for medium in loaded} == {video_medium(FRAMES, DEFAULT_FPS).content}
    assert [frame.tobytes() for frame in frames_of(loaded[-1])] == [frame.tobytes() for frame in FRAMES]
    [metadata] = loaded[0].arguments["video_metadata"]
    assert (metadata["fps"], metadata["total_num_frames"], metadata["duration"]) == (2.0, 3, 1.5)


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "TIFF"])
def test_animated_images(kind: str, tmp_path: Path) -> None:
    options = {} if kind == "TIFF" else {"duration": [100, 200, 300]}
    path = tmp_path / "a"
    path.write_bytes(animation(kind, FRAMES, **options))
    medium = video(path)
    assert len(frames_of(medium)) == 3
    assert frames_of(medium)[0].mode == "RGB"
    differences = [
        np.abs(np.asarray(frame).astype(int) - np.asarray(want)).max()
        for frame, want in zip(frames_of(medium), FRAMES, strict=True)
    ]
    assert max(differences) < 12
    [metadata] = medium.arguments["video_metadata"]
    assert metadata["fps"] == (DEFAULT_FPS if kind == "TIFF" else 5.0)
    url = "data:image/gif;base64," + base64.b64encode(path.read_bytes()).decode()
    assert video(url).content == medium.content


def test_a_still_image_is_a_video_of_one_frame() -> None:
    assert len(frames_of(video(animation("PNG", FRAMES[:1])))) == 1


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ([], "0 frames"),
        (np.zeros((0, 4, 4, 3), np.uint8), "0 frames"),
        ([*FRAMES, *FRAMES], "6 frames; from 1 to 4"),
        (animation("GIF", [picture(value) for value in range(0, 250, 50)]), "5 frames; at most 4"),
        ([picture(0), picture(0, (4, 6))], r"several sizes, e.g. \(4, 6\) and \(6, 4\)"),
        (animation("TIFF", [picture(0), picture(1, (4, 6))]), "several sizes"),
        (animation("TIFF", [picture(0), picture(1, (400, 6))]), "2400 in all; at most 1000"),
        (animation("GIF", [picture(0, (40, 40)), picture(9, (40, 40))]), "1600 in all; at most 1000"),
        ([picture(0), "no.png"], "No such file"),
        (animation("GIF", FRAMES)[:-40], "cannot be decoded"),
        (np.zeros((2, 4, 4), np.uint8), "image array"),
        (b"", "is empty"),
        (b"no video", "allowed are BMP"),
        ("data:audio/wav;base64,AAAA", "only video/... is allowed"),
        ("https://example.org/a.mp4", "nothing is fetched"),
        (Video(FRAMES, fps=0), "fps=0"),
        (Video(FRAMES, fps=float("nan")), "fps=nan"),
        (Video("a.gif"), "of type str"),
        (7, "of type int"),
    ],
)
def test_what_is_no_video_is_refused_by_name(source: object, says: str) -> None:
    with pytest.raises(InvalidMediaError, match=says):
        video(source)


@pytest.mark.parametrize("as_file", [True, False])
def test_all_frames_together_are_bounded(as_file: bool, tmp_path: Path) -> None:
    """Each frame is small enough, and so is the file: it is what they come to that would fill the memory."""
    frames = [picture(value, (30, 30)) for value in range(10)]
    source = animation("GIF", frames) if as_file else frames
    assert len(frames_of(video(animation("GIF", frames[:8]) if as_file else frames[:8], 20))) == 8
    with pytest.raises(InvalidMediaError, match="first 9 frames have 8100 pixels; at most 8000"):
        video(source, 20)


def test_damaged_bytes_give_a_medium_or_our_error() -> None:
    rng = random.Random(0)
    noise = np.random.default_rng(0).integers(0, 255, (3, 16, 16, 3), dtype=np.uint8)
    good: list[tuple[Any, bytes]] = [(audio, wav(bytes(range(256)) * 2, channels=2))]
    good += [
        (video, animation(kind, [Image.fromarray(frame) for frame in noise])) for kind in ("GIF", "WEBP", "PNG")
    ]
    refusals = 0
    for load, data in good:
        for _ in range(60):
            bad = bytearray(data)
            for _ in range(rng.randint(1, 6)):
                bad[rng.randrange(rng.choice((48, len(bad))))] = rng.randrange(256)
            try:
                assert isinstance(load(bytes(bad[: rng.choice((len(bad), rng.randrange(len(bad))))])), Medium)
            except InvalidMediaError:
                refusals += 1
    assert refusals > 50


# -- digests ------------------------------------------------------------------------------------------------------


def test_everything_is_in_the_digest() -> None:
    silence = np.zeros(4, np.float32)
    media = [
        image_medium(picture(0)),
        image_medium(picture(1)),
        image_medium(picture(0, (4, 6))),
        image_medium(picture(0).convert("L")),
        video_medium([picture(0)], 2.0),
        video_medium([picture(0)], 1.0),
        video_medium([picture(0), picture(0)], 2.0),
        video_medium([picture(0), picture(1)], 2.0),
        video_medium([picture(1), picture(0)], 2.0),
        audio_medium(silence, RATE),
        audio_medium(silence, RATE + 1),
        audio_medium(silence[:3], RATE),
        audio_medium(np.array([0, 0, 0, 1e-30], np.float32), RATE),
    ]
    assert len({medium.content for medium in media}) == len(media)
