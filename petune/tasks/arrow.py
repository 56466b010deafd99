"""Arrow IPC files before they are read: `datasets` maps them into memory, so that what is not compressed
fills none.

A compressed buffer says itself how much it holds, and the library allocates that at once; `save_to_disk`
compresses nothing. Whether a record batch is compressed stands in its metadata (format/Message.fbs of Apache
Arrow), of which pyarrow tells nothing before it is read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from petune.errors import DataError
from petune.tasks.lines import shown

# fields of Message, DictionaryBatch and RecordBatch, by their ids in the schema
_HEADER, _DATA, _COMPRESSION = 2, 1, 3


def refuse_compressed(path: Path) -> None:
    """Raise DataError for an Arrow IPC stream or file with compressed buffers, and for one that is damaged;
    no buffer is read."""
    import pyarrow.ipc  # type: ignore[import-untyped]  # comes with datasets

    try:
        with pyarrow.memory_map(str(path)) as source:
            if source.read(8) != b"ARROW1\0\0":
                source.seek(0)  # a stream, which is what datasets writes; a file holds one behind its mark
            for message in pyarrow.ipc.MessageReader.open_stream(source):
                if message.type in ("record batch", "dictionary") and _is_compressed(message):
                    remedy = "save it again with save_to_disk of datasets, or write it as .jsonl"
                    raise DataError(
                        "the table is compressed, and could fill the memory", where=shown(path), remedy=remedy
                    )
    except DataError:
        raise
    except Exception as error:  # pyarrow raises bare classes of its own for damaged files
        if isinstance(error, OSError) and error.errno is not None:
            raise
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(
            f"not a whole Arrow file: {first}", where=shown(path), remedy="save or copy it again"
        ) from error


def _is_compressed(message: Any) -> bool:
    """Whether a message with a batch of rows or of a dictionary names a compression."""
    data = message.metadata.to_pybytes()
    batch = _table(data, _table(data, 0, None), _HEADER)
    if message.type == "dictionary":
        batch = _table(data, batch, _DATA)
    return _field(data, batch, _COMPRESSION) is not None


def _table(data: bytes, at: int, field: int | None) -> int:
    """Where the table lies that a field of the table at `at` refers to; None: that the number at `at` refers
    to."""
    place = at if field is None else _field(data, at, field)
    if place is None:
        raise ValueError("a message without a batch")
    return place + int.from_bytes(data[place : place + 4], "little")


def _field(data: bytes, at: int, field: int) -> int | None:
    """Where a field of the table at `at` lies; None where it is absent. A table begins with the way back to
    the list of its fields."""
    fields = at - int.from_bytes(data[at : at + 4], "little", signed=True)
    if 4 + 2 * field >= int.from_bytes(data[fields : fields + 2], "little"):
        return None
    offset = int.from_bytes(data[fields + 4 + 2 * field : fields + 6 + 2 * field], "little")
    return at + offset if offset else None
