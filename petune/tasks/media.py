"""Pictures and sounds of rows: where one lies, or its bytes, and how the tensor that a model reads is made of
it.

It is made when a batch asks for it, by transformers' own processor: the pixels of all rows would fill the
memory, places and files do not. Pillow, which opens pictures, is asked for when the first one is.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np

from petune.errors import DataError, MachineError, Problem, UsageError
from petune.tasks.configs import DataConfig
from petune.tasks.lines import shown
from petune.tasks.sounds import Sound, samples_of, sound_of

MediaKind = Literal["image", "audio"]  # what a model reads beside texts
Read = TypeVar("Read")
# what rows of a format are made of, texts where it is another; and the format, by what a model reads
_READ_IN: Mapping[str, MediaKind] = {"image-label": "image", "audio-text": "audio"}
FORMAT_OF: Mapping[str, str] = {kind: format_ for format_, kind in _READ_IN.items()}
CALLED = {"text": "texts", "image": "pictures", "audio": "sounds"}
ONE = {"image": "picture", "audio": "sound"}
# settings of data that mean something for texts alone
_OF_TEXTS = ("max_length", "max_target_length", "truncation", "packing", "chunk", "prefix", "separator")


@dataclass(frozen=True)
class Media:
    """A picture or a sound of a row: the file where it lies, or its bytes, and the SHA-256 of these."""

    sha256: str
    file: Path | None = None
    data: bytes | None = None

    @classmethod
    def at(cls, file: Path) -> Media:
        """The one in a file, which is read for its hash. Raises OSError."""
        return cls(hashlib.sha256(file.read_bytes()).hexdigest(), file)

    @classmethod
    def of(cls, data: bytes) -> Media:
        """The one of these bytes."""
        return cls(hashlib.sha256(data).hexdigest(), data=data)

    def __str__(self) -> str:
        """How it is told to a person."""
        return f"bytes {self.sha256[:12]}" if self.file is None else shown(self.file)

    def read(self) -> bytes:
        """Its bytes. Raises OSError."""
        return self.file.read_bytes() if self.data is None and self.file is not None else self.data or b""


@dataclass(frozen=True)
class Reader:
    """What makes a model's input of pictures or sounds. processor: transformers' own; argument: of the
    model's forward pass; shape: of one input; tokens: of the model for it; begins: the token that a decoder
    behind it begins with."""

    kind: MediaKind
    processor: Any
    argument: str
    shape: tuple[int, ...]
    tokens: int
    begins: int | None = None

    def save_pretrained(self, folder: Path) -> None:
        """Write the processor's settings, which transformers reads."""
        self.processor.save_pretrained(folder)


def rate_of(reader: Reader | None) -> int | None:
    """Samples a second of the sounds that a reader takes; None where it takes none."""
    return int(reader.processor.sampling_rate) if reader is not None and reader.kind == "audio" else None


@dataclass(frozen=True)
class Reading:
    """A picture or a sound that is read when a batch asks for it."""

    media: Media
    reader: Reader

    def tensor(self, where: str) -> np.ndarray[Any, Any]:
        """What the model reads, float32, of the reader's shape. Raises DataError, which names the row
        `where`, for a file that is gone or damaged since its row was read."""
        if self.reader.kind == "audio":
            rate = self.reader.processor.sampling_rate
            samples = read_sound(self.media, rate, where, samples_of)
            return made_of_sound(self.reader.processor, self.reader.argument, samples)
        return made(self.reader.processor, self.reader.argument, picture_of(self.media, where))


def made(processor: Any, argument: str, given: Any, **how: Any) -> np.ndarray[Any, Any]:
    """What a processor makes of one picture, or of samples, float32."""
    found: Any = processor(given, return_tensors="np", **how)[argument][0]
    return np.ascontiguousarray(found, dtype=np.float32)


def made_of_sound(processor: Any, argument: str, samples: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """What a processor makes of samples at its own rate, float32."""
    return made(processor, argument, samples, sampling_rate=processor.sampling_rate)


def read_sound(media: Media, rate: int, where: str, read: Callable[[bytes], Read]) -> Read:
    """What `read` finds in the bytes of a sound's file. Raises DataError for a file that is gone or damaged
    since its row was read, and for a sound of another rate than the model's: to resample is to filter."""
    try:
        data = media.read()
        if (own := sound_of(data).rate) == rate:
            return read(data)
    except (OSError, ValueError) as error:
        what, remedy = f"the sound cannot be read: {error}", "save it again as WAV"
        raise DataError(what, where=where, found=str(media), remedy=remedy) from error
    raise other_rate(own, rate, where)


def other_rate(own: int, rate: int, where: str) -> DataError:
    """What is wrong with a sound of `own` samples a second for a model that reads `rate`."""
    return DataError(
        "the sound has another rate than the model reads",
        where=where,
        expected=f"{rate} samples a second",
        found=str(own),
        remedy=f"resample it: ffmpeg -i IN -ar {rate} OUT.wav",
    )


def pillow() -> Any:
    """Pillow's module of pictures. Raises MachineError where it is not installed."""
    try:
        from PIL import Image
    except ImportError:
        what = "pictures are opened by Pillow, which is not installed"
        raise MachineError(what, remedy="pip install pillow") from None
    return Image


def picture_of(media: Media, where: str) -> Any:
    """The whole picture in three colours, as Pillow has it. Raises DataError."""
    image = pillow()
    try:
        with image.open(io.BytesIO(media.read())) as found:
            return _upright(found).convert("RGB")
    except Exception as error:  # Pillow raises classes of many kinds for damaged files
        what, remedy = f"the picture cannot be read: {_first_line(error)}", "save it again as PNG or JPEG"
        raise DataError(what, where=where, found=str(media), remedy=remedy) from error


def _upright(picture: Any) -> Any:
    """A photograph as it is looked at: cameras write down how they were held, as transformers heeds too."""
    from PIL import ImageOps

    return ImageOps.exif_transpose(picture)


def refuse_other(media: Media, kind: MediaKind) -> Sound | None:
    """Raise ValueError, in words, for what is no picture, or no sound, by its first bytes; the rest is not
    read. What a sound says of itself; None of a picture."""
    if kind == "audio":
        return sound_of(media.read())
    image = pillow()
    try:
        with image.open(io.BytesIO(media.read())):
            pass
    except Exception as error:
        raise ValueError(_first_line(error)) from error
    return None


def png(picture: Any) -> bytes:
    """A picture in memory, Pillow's or an array [height, width, 3] of bytes, as a file without loss."""
    if isinstance(picture, np.ndarray):
        picture = pillow().fromarray(picture)
    if picture.mode not in ("1", "L", "LA", "I", "P", "RGB", "RGBA"):  # others a PNG has not
        picture = picture.convert("RGB")
    file = io.BytesIO()
    picture.save(file, format="PNG")
    return file.getvalue()


def blank(height: int, width: int) -> Any:
    """A black picture."""
    return pillow().new("RGB", (width, height))


def read_in(format_: str) -> Literal["text", "image", "audio"]:
    """What rows of this format are made of."""
    return _READ_IN.get(format_, "text")


def refuse_settings(config: DataConfig, reads: str) -> None:
    """Raise UsageError for settings of texts beside a model that reads something else, and for one of sounds
    beside a model that reads none."""
    usual = DataConfig(path=config.path)
    names = [name for name in _OF_TEXTS if reads == "image" or name != "max_target_length"]
    names = [] if reads == "text" else [*names, "stream"]
    names += [] if reads == "audio" else ["language"]
    set_here = [name for name in names if getattr(config, name) != getattr(usual, name)]
    problems = [
        Problem(
            f"it means nothing for a model that reads {CALLED[reads]}",
            f"data.{name}",
            remedy=f"remove data.{name}",
        )
        for name in set_here
    ]
    if problems:
        raise UsageError(problems)


def refuse_other_format(format_: str, reads: str) -> None:
    """Raise UsageError unless rows of this format are what the model reads."""
    wanted = FORMAT_OF.get(reads)
    if (format_ in FORMAT_OF.values() or wanted is not None) and format_ != wanted:
        what = f"the model reads {CALLED[reads]}, and the rows are of format {format_}"
        expected = wanted or "a format of texts"
        remedy = f"set data.format: {wanted}" if wanted else "take another model, or rows of texts"
        raise UsageError(what, where="data.format", expected=expected, found=format_, remedy=remedy)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
