"""Sound from outside: samples, or a WAV file. Nothing is resampled: that is a choice, and a library's work."""

from __future__ import annotations

import io
import wave
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ecotone.engine.medium import Medium, audio_medium
from ecotone.engine.sources import Source, is_source, read_source
from ecotone.errors import InvalidMediaError

AudioInput: TypeAlias = Source | tuple[NDArray[Any], int]
"""A WAV file's path, bytes or ``data:`` URL; or samples and their sampling rate in Hz. Samples are floats from -1
to 1, ``[samples]`` or ``[samples, channels]``; several channels are averaged."""

# 32-bit samples of 8 channels; beside the samples there are headers.
_MAX_BYTES_PER_SAMPLE, _HEADER_BYTES = 32, 1 << 20
_MAX_CHANNELS = 8


def load_audio(source: AudioInput, *, sampling_rate: int, max_seconds: float) -> Medium:
    """``source`` as a medium of one channel.

    Args:
        source: see ``AudioInput``.
        sampling_rate: what the model takes, Hz; anything else is refused.
        max_seconds: longer clips are refused; nothing is cut off silently.

    Raises:
        InvalidMediaError: it cannot be read, is no sound, has another sampling rate, is empty or too long.
    """
    limit = int(max_seconds * sampling_rate)
    if is_source(source):
        data, name = read_source(
            source,  # type: ignore[arg-type]
            kind="audio",
            limit=limit * _MAX_BYTES_PER_SAMPLE + _HEADER_BYTES,
        )
        samples, rate = _from_wav(data, name)
    else:
        name = "clip"
        samples, rate = _from_pair(source)
    if rate != sampling_rate:
        raise InvalidMediaError(
            f"{name} has {rate} samples in a second, and the model takes {sampling_rate}: resample it first, "
            f"e.g. with ffmpeg -i IN -ar {sampling_rate} OUT.wav"
        )
    if not 1 <= len(samples) <= limit:
        raise InvalidMediaError(
            f"{name} has {len(samples) / rate:g} seconds; from one sample to {max_seconds:g} seconds are allowed"
        )
    if not np.isfinite(samples).all():
        raise InvalidMediaError(f"{name} has samples that are not finite")
    return audio_medium(samples, rate)


def _from_pair(source: object) -> tuple[NDArray[np.float32], int]:
    match source:
        case (np.ndarray() as samples, int() as rate) if samples.dtype.kind == "f" and samples.ndim in (1, 2):
            return _mono(samples, "clip"), rate
    raise InvalidMediaError(
        f"clip of type {type(source).__name__}: allowed are a WAV file (path, bytes, data: URL), or a pair of "
        "float samples [samples] or [samples, channels] and their sampling rate"
    )


def _from_wav(data: bytes, name: str) -> tuple[NDArray[np.float32], int]:
    try:
        with wave.open(io.BytesIO(data)) as file:
            channels, width, rate = file.getnchannels(), file.getsampwidth(), file.getframerate()
            frames = file.readframes(file.getnframes())
            complete = len(frames) == file.getnframes() * channels * width
    except (wave.Error, EOFError, RuntimeError) as error:
        reason = str(error) or "it ends too early"
        raise InvalidMediaError(
            f"{name} is not a PCM WAV file, which is all that is read here: {reason}"
        ) from None
    if not complete:
        raise InvalidMediaError(f"{name} is cut short")
    return _mono(_samples(frames, width, name).reshape(-1, channels), name), rate


def _samples(frames: bytes, width: int, name: str) -> NDArray[np.float64]:
    """From -1 to 1."""
    if width == 1:
        return (np.frombuffer(frames, np.uint8).astype(np.float64) - 128) / 128
    if width == 3:  # no such integer in numpy: the low byte of 32 bits stays empty
        wide = np.zeros((len(frames) // 3, 4), np.uint8)
        wide[:, 1:] = np.frombuffer(frames, np.uint8).reshape(-1, 3)
        frames, width = wide.tobytes(), 4
    if width not in (2, 4):
        raise InvalidMediaError(f"{name} has {8 * width} bits per sample; 8, 16, 24 and 32 are read")
    samples: NDArray[np.float64] = np.frombuffer(frames, f"<i{width}").astype(np.float64) / 2 ** (8 * width - 1)
    return samples


def _mono(samples: NDArray[Any], name: str) -> NDArray[np.float32]:
    if samples.ndim == 2:
        if not 1 <= samples.shape[1] <= _MAX_CHANNELS:
            raise InvalidMediaError(
                f"{name} has {samples.shape[1]} channels; from 1 to {_MAX_CHANNELS} are averaged "
                "(the axes are [samples, channels])"
            )
        samples = samples.mean(axis=1)
    return np.ascontiguousarray(samples, np.float32)
