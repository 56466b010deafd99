"""Sounds of rows: wave files, read by Python's own module, as one channel of samples."""

from __future__ import annotations

import io
import wave
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from petune.errors import DataError

# of a sample, by its bytes, as files have it
_DEPTHS: dict[int, np.dtype[Any]] = {1: np.dtype("u1"), 2: np.dtype("<i2"), 4: np.dtype("<i4")}


class Sound(NamedTuple):
    """What a wave file says of itself: samples a second, and samples of a channel."""

    rate: int
    length: int


def sound_of(data: bytes) -> Sound:
    """What a wave file says, without its samples. Raises ValueError, in words, for any other."""
    with _opened(data) as file:
        return Sound(file.getframerate(), file.getnframes())


def samples_of(data: bytes) -> np.ndarray[Any, Any]:
    """The samples of a wave file, float32 between -1 and 1, the mean of its channels. Raises ValueError."""
    with _opened(data) as file:
        channels, depth = file.getnchannels(), file.getsampwidth()
        raw: np.ndarray[Any, Any] = np.frombuffer(file.readframes(file.getnframes()), _DEPTHS[depth])
        if len(raw) != channels * file.getnframes():
            raise ValueError("the file is cut off")
    wide: np.ndarray[Any, Any] = raw.astype(np.float32).reshape(-1, channels).mean(1)
    # samples of one byte are counted from 0, wider ones have a sign
    middle, most = (128, 128) if depth == 1 else (0, 1 << (8 * depth - 1))
    scaled: np.ndarray[Any, Any] = (wide - middle) / most
    return scaled.astype(np.float32)


def wav(samples: Any, rate: int) -> bytes:
    """A wave file of samples [length], floats between -1 and 1 or integers of a sign, two bytes each. Raises
    DataError for others."""
    samples = np.asarray(samples)
    if np.issubdtype(samples.dtype, np.signedinteger):
        samples = samples / -float(np.iinfo(samples.dtype).min)
    if samples.ndim != 1 or samples.dtype.kind != "f" or np.abs(samples).max(initial=0) > 1:
        raise DataError(
            "an array that is no sound",
            expected="[length], floats from -1 to 1, or integers of a sign",
            found=f"{list(samples.shape)}, {samples.dtype}",
        )
    held = io.BytesIO()
    with wave.open(held, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((np.clip(samples, -1, 1) * 32767).round().astype("<i2").tobytes())
    return held.getvalue()


@contextmanager
def _opened(data: bytes) -> Iterator[wave.Wave_read]:
    """A wave file with samples that are read here. Raises ValueError, in words."""
    try:
        with wave.open(io.BytesIO(data), "rb") as file:
            if file.getsampwidth() not in _DEPTHS or not file.getnframes():
                raise ValueError(f"{file.getnframes()} samples of {file.getsampwidth()} bytes")
            yield file
    except (wave.Error, EOFError) as error:
        raise ValueError(str(error) or "the file is cut off") from None
