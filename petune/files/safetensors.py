"""Strict files: safetensors and JSON, read as if a stranger had written them, written so that a reader never
sees half of one.

The header is checked before a tensor is allocated, and data is read, never mapped: a file that shrinks
meanwhile is an error, no SIGBUS. The writer is our own because errno, mode and memory matter to a save; the
safetensors library reads its files, and it reads the library's.
"""

from __future__ import annotations

import errno
import json
import math
import os
import reprlib
import stat
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
from torch import Tensor

from petune.errors import FileError, MachineError, Problem, TrainingFault

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
WEIGHTS = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
)  # one may be read from another; 8 bits mean nothing without a scale

# A header is parsed into Python objects some twenty times its size: 4 MiB hold about 40,000 tensors and bound
# what a hostile one can cost.
MAX_HEADER = 4 << 20
MAX_JSON = 16 << 20

_CONVERT = "petune reads no pickle; ask its author for safetensors, or convert it where you trust it"
_FOREIGN: tuple[tuple[bytes, str, str], ...] = (
    (
        b"version https://git-lfs",
        "a git-LFS pointer, not the file itself",
        "run `git lfs pull` in its repository",
    ),
    (
        b"<",
        "an HTML or XML page, as a failed download leaves",
        "download it again; the page may ask for a login",
    ),
    (b"PK\x03\x04", "a zip archive, as torch.save writes", _CONVERT),
    (b"\x80\x02", "a pickle", _CONVERT),
    (b"\x80\x03", "a pickle", _CONVERT),
    (b"\x80\x04", "a pickle", _CONVERT),
    (b"\x80\x05", "a pickle", _CONVERT),
    (b"\x93NUMPY", "a numpy file", "convert it to safetensors"),
    (b"\x1f\x8b", "a gzip archive", "unpack it first"),
    (b"GGUF", "a GGUF file", "use the safetensors files of the same model"),
    (b"{", "a JSON text", "give the .safetensors file beside it"),
)

_REMEDIES = {
    errno.ENOSPC: "free some space, or files (inodes), and run again; what was committed before is intact",
    errno.EDQUOT: "your quota is used up: free some space and run again; what was committed before is intact",
    errno.EFBIG: "the file size is limited here: see `ulimit -f`",
    errno.ENOENT: "its folder is not there: make it first (mkdir -p)",
    errno.EACCES: "check owner and mode of the file and its folder",
    errno.EPERM: "check owner and mode of the file and its folder",
    errno.ENOTDIR: "a file stands in a folder's place: move it away",
    errno.EROFS: "the file system is read-only: choose another folder",
    errno.EIO: "the disk reports an error: look at the system's log before writing here again",
}


@dataclass(frozen=True)
class Entry:
    """One tensor of a header: `begin` and `end` are bytes from the start of the data."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class Header:
    """What a tensor file says of itself. `start` is the byte at which the data begins."""

    tensors: Mapping[str, Entry]
    metadata: Mapping[str, str]
    start: int


# ---------------------------------------------------------------- the file system, in our words


@contextmanager
def writing(path: Path, doing: str = "write") -> Iterator[None]:
    """Turn what the system refuses while writing, or `doing` something else with a folder that is being
    written, into MachineError with path and errno."""
    try:
        yield
    except OSError as error:
        raise _machine_error(doing, path, error) from error


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn what the system refuses while reading into FileError (absent, a link, a bad sector) or
    MachineError (all else)."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            raise FileError("does not exist", where=str(path), remedy="check the path") from error
        if error.errno == errno.ELOOP:
            raise FileError(
                "is a symbolic link",
                where=str(path),
                expected="a regular file",
                remedy="copy the file itself here",
            ) from error
        if error.errno == errno.EIO:
            raise FileError(
                "cannot be read back (EIO): the disk has lost it", where=str(path), remedy="use another copy"
            ) from error
        raise _machine_error("read", path, error) from error


def _work_of(path: Path) -> Path:
    """The file beside `path` that becomes it when it is whole."""
    return path.with_name(f".{path.name}.tmp-{os.getpid()}")


def _machine_error(doing: str, path: Path, error: OSError) -> MachineError:
    name = errno.errorcode.get(error.errno or 0, str(error.errno))
    ours = (None, str(_work_of(path)), _work_of(path))  # whose name would tell the reader nothing
    where = str(path if error.filename in ours else error.filename)
    return MachineError(
        f"cannot {doing}: {error.strerror} ({name})", where=where, remedy=_REMEDIES.get(error.errno or 0)
    )


def open_regular(path: Path, *, links: bool = False) -> FileIO:
    """Open a regular file for reading, unbuffered; a FIFO or device never blocks, a symbolic link is refused
    unless `links`.

    Raises FileError when there is no such file or it is something else, MachineError when the system refuses.
    """
    with reading(path):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if links else os.O_NOFOLLOW))
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise FileError(
                "is not a regular file",
                where=str(path),
                remedy="give the file itself, not a folder, pipe or device",
            )
        return FileIO(fd, "rb")


def write_file(path: Path, chunks: Iterable[bytes | memoryview | int], *, sync: bool = False) -> None:
    """Write a file under a temporary name beside `path` and rename it there; mode 0644 as the umask allows.

    A chunk that is a number leaves room for so many bytes, which read as zeros until somebody writes them.
    `sync` flushes the file and its folder to disk; inside `checkpoint.commit` that is done once for all.
    Raises MachineError.
    """
    work = _work_of(path)
    with writing(path):
        try:
            work.unlink(missing_ok=True)
            fd = os.open(work, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
            try:
                for chunk in chunks:
                    if isinstance(chunk, int):
                        os.ftruncate(fd, os.lseek(fd, chunk, os.SEEK_CUR))
                        continue
                    rest = memoryview(chunk).cast("B")
                    while rest:
                        rest = rest[os.write(fd, rest) :]
                if sync:
                    os.fsync(fd)
            finally:
                os.close(fd)
            os.rename(work, path)
            if sync:
                sync_folder(path.parent)
        except BaseException:
            with suppress(OSError):  # the error that brought us here is the one worth telling
                work.unlink(missing_ok=True)
            raise


def sync_folder(folder: Path) -> None:
    """Flush a folder's names to disk; file systems that cannot (EINVAL) are taken at their word. Raises
    OSError."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(fd)


# ---------------------------------------------------------------- JSON


def parse_json(text: bytes, where: str) -> Any:
    """Parse UTF-8 JSON; a key given twice, NaN, Infinity and nesting without end raise FileError
    (where:line:column)."""
    try:
        return json.loads(
            text.decode("utf-8"),
            object_pairs_hook=_distinct,
            parse_constant=_no_constant,
            parse_float=_finite,
        )
    except json.JSONDecodeError as error:
        place = f"{where}:{error.lineno}:{error.colno}"
        remedy = "mend this place, or use another copy of the file"
        raise FileError(f"not JSON: {error.msg}", where=place, remedy=remedy) from error
    except RecursionError as error:
        raise FileError("not usable JSON: nested too deeply", where=where) from error
    except ValueError as error:
        raise FileError(f"not usable JSON: {error}", where=where) from error


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError(f"the key {Counter(key for key, _ in pairs).most_common(1)[0][0]!r} appears twice")
    return found


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON number")


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text} is too large for a number")
    return value


def read_bytes(path: Path, *, links: bool = False) -> bytes:
    """A regular file of at most 16 MiB. Raises FileError or MachineError."""
    with open_regular(path, links=links) as file, reading(path):
        size = os.fstat(file.fileno()).st_size
        if size > MAX_JSON:
            raise FileError(
                "is too large to be what it is named",
                where=str(path),
                expected=f"at most {MAX_JSON}",
                found=f"{size} bytes",
            )
        return _read(file, path, size)


def read_json(path: Path, *, links: bool = False) -> dict[str, Any]:
    """The object in a JSON file of at most 16 MiB. Raises FileError or MachineError."""
    text = read_bytes(path, links=links)
    if not text.lstrip().startswith(b"{"):
        _refuse_foreign(text, path)
    value = parse_json(text, str(path))
    if not isinstance(value, dict):
        raise FileError("not a JSON object", where=str(path), expected="{...}", found=type(value).__name__)
    return value


def write_json(path: Path, value: Mapping[str, Any], *, sync: bool = False) -> None:
    """Write an object as indented JSON; floats come back bit-identical. Raises ValueError for NaN or
    Infinity, MachineError."""
    write_file(path, [json.dumps(value, indent=1, allow_nan=False).encode() + b"\n"], sync=sync)


# ---------------------------------------------------------------- tensors


def write_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str] | None = None,
    *,
    finite: bool = True,
    sync: bool = False,
) -> None:
    """Write named tensors as one safetensors file; equal tensors give equal bytes. Holds one tensor in memory
    beside the given ones. Of a tensor on the meta device there is the room alone (files/range_writer.py).

    Raises TrainingFault for a non-finite value (unless `finite` is False), ValueError for what safetensors
    cannot name, MachineError.
    """
    if not tensors:
        raise ValueError(f"{path}: no tensors to write")
    # widest first: every offset is aligned
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    end = 0
    for name, tensor in ordered:
        if fault := _name_fault(name):
            raise ValueError(f"{path}: tensor {name!r} {fault}")
        if tensor.dtype not in _NAMES:
            raise ValueError(
                f"{path}: tensor {name!r} has dtype {tensor.dtype}, which safetensors cannot hold"
            )
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    beginning = header_bytes(header)
    if (size := len(beginning) - 8) > MAX_HEADER:
        raise ValueError(
            f"{path}: {len(tensors)} tensors need a header of {size} bytes; split them over several files"
        )

    def chunks() -> Iterator[bytes | memoryview | int]:
        yield beginning
        for name, tensor in ordered:
            if tensor.is_meta:
                yield tensor.nbytes
                continue
            here = tensor.detach().cpu().contiguous()
            if finite:
                refuse_not_finite(here, f"{path}  {name}")
            yield bytes_of(here)

    write_file(path, chunks(), sync=sync)


def refuse_not_finite(tensor: Tensor, where: str) -> None:
    """Raise TrainingFault for a NaN or an infinity in what is about to be written."""
    if not is_finite(tensor):
        remedy = "see the last steps' losses"
        raise TrainingFault("holds a NaN or an infinity: not written", where=where, remedy=remedy)


def refuse_failed(tensor: Tensor, where: str) -> None:
    """Raise FileError for a NaN or an infinity in what was read."""
    if not is_finite(tensor):
        remedy = "its training had failed: use an earlier one"
        raise FileError("holds a NaN or an infinity", where=where, remedy=remedy)


def refuse_no_truths(values: Tensor, where: str) -> None:
    """Raise FileError for bytes that were read as truth values, and are none."""
    if values.gt(1).any():
        remedy = "the file is damaged: use another copy"
        raise FileError("a truth value is neither 0 nor 1", where=where, remedy=remedy)


def header_bytes(header: Mapping[str, Any]) -> bytes:
    """What a safetensors file begins with: the length of its header, and the header, padded to 8 bytes."""
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def read_header(path: Path, *, links: bool = False) -> Header:
    """Names, dtypes, shapes and metadata of a tensor file, none of its data. Raises FileError or
    MachineError."""
    with open_regular(path, links=links) as file, reading(path):
        return _header(file, path)


def tensor_kinds(path: Path, *, links: bool = False) -> dict[str, Tensor]:
    """Every tensor of a safetensors file by name, on the meta device. Raises as `read_header`."""
    entries = read_header(path, links=links).tensors.items()
    return {name: torch.empty(entry.shape, dtype=entry.dtype, device="meta") for name, entry in entries}


def read_tensors(
    path: Path, *, finite: bool = True, links: bool = False, under: str = ""
) -> dict[str, Tensor]:
    """Every tensor of a safetensors file whose name begins with `under`, on the CPU, each in memory of its
    own.

    Refused with FileError: what safetensors refuses and, beyond that, names given twice, no tensors, names
    that could escape a folder, a symbolic link (unless `links`: a hub cache is made of them) and a NaN or
    infinity (unless `finite` is False).
    """
    tensors: dict[str, Tensor] = {}
    with open_regular(path, links=links) as file, reading(path):
        header = _header(file, path)
        file.seek(header.start)
        for name, entry in sorted(header.tensors.items(), key=lambda item: item[1].begin):
            if not name.startswith(under):
                file.seek(entry.end - entry.begin, os.SEEK_CUR)
                continue
            tensors[name] = tensor = _empty(entry, f"{path}  {name}")
            _fill(bytes_of(tensor), file, path)
            if entry.dtype is torch.bool:
                refuse_no_truths(tensor.view(torch.uint8), f"{path}  {name}")
            if finite:
                refuse_failed(tensor, f"{path}  {name}")
    return tensors


def check_dtypes(found: Mapping[str, Tensor], wanted: Mapping[str, torch.dtype], where: str) -> list[str]:
    """Names of the tensors `found` in the file `where` that are rounded when they are read into the dtypes
    `wanted`.

    Raises FileError naming the first ten that cannot be read: integers, truth values, complex and 8-bit
    numbers in the place of weights.
    """
    pairs = {
        name: (value.dtype, wanted[name]) for name, value in found.items() if value.dtype != wanted[name]
    }
    remedy = (
        "use the file as its training saved it: a quantised or converted one lacks what is needed to read it"
    )
    problems = [
        Problem(
            f"holds {_said(mine)}, not weights", f"{where}  {name}", expected=_said(theirs), remedy=remedy
        )
        for name, (mine, theirs) in pairs.items()
        if mine not in WEIGHTS or theirs not in WEIGHTS
    ]
    if problems:
        raise FileError(problems[:10])
    return [name for name, (mine, theirs) in pairs.items() if torch.promote_types(mine, theirs) != theirs]


def _said(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _header(file: FileIO, path: Path) -> Header:
    size = os.fstat(file.fileno()).st_size
    first = _read(file, path, min(size, 64))
    length = struct.unpack("<Q", first[:8])[0] if size > 8 else 0
    if first[8:9] != b"{" or length > size - 8:
        _refuse_foreign(first, path)
        expected, found = f"a header of {length} bytes", f"{size} bytes in all"
        raise FileError(
            "not a safetensors file, or cut short", where=str(path), expected=expected, found=found
        )
    if length > MAX_HEADER:
        raise FileError(
            "the header is too long",
            where=str(path),
            expected=f"at most {MAX_HEADER} bytes",
            found=f"{length}",
        )
    file.seek(8)
    found = parse_json(_read(file, path, length), f"{path} (header)")
    if not isinstance(found, dict):
        raise FileError("the header is not a JSON object", where=str(path))
    metadata = found.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise FileError("the header's metadata is not text by name", where=str(path))
    if not found:
        raise FileError(
            "holds no tensors",
            where=str(path),
            remedy="the save that wrote it had nothing to save: check what was trained",
        )
    entries = {name: _entry(name, fields, path) for name, fields in found.items()}
    _check_cover(entries, size - 8 - length, path)
    return Header(entries, metadata, 8 + length)


def _entry(name: str, fields: object, path: Path) -> Entry:
    def refuse(what: str, **sides: str) -> NoReturn:
        raise FileError(what, where=f"{path}  {name!r}"[:1000], **sides)

    if fault := _name_fault(name):
        refuse(f"the tensor's name {fault}")
    if not isinstance(fields, dict) or set(fields) != {"dtype", "shape", "data_offsets"}:
        refuse("the header's entry is not dtype, shape and data_offsets", found=reprlib.repr(fields))
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        refuse("unknown dtype", expected=", ".join(DTYPES), found=reprlib.repr(dtype))
    if not _naturals(shape) or len(shape) > 64:
        refuse("the shape is not a list of sizes", found=reprlib.repr(shape))
    if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        refuse("data_offsets is not [begin, end]", found=reprlib.repr(offsets))
    if (needed := math.prod(shape) * DTYPES[dtype].itemsize) != offsets[1] - offsets[0]:
        refuse(
            "shape and data differ in size",
            expected=f"{dtype} {shape}: {needed} bytes",
            found=f"{offsets[1] - offsets[0]} bytes",
        )
    return Entry(DTYPES[dtype], tuple(shape), offsets[0], offsets[1])


def _naturals(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)


def _check_cover(entries: Mapping[str, Entry], size: int, path: Path) -> None:
    """Tensors lie one after the other from the first data byte to the last: no overlap, no hole, nothing
    behind."""
    at = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != at:
            where = f"{path}  {name}"
            raise FileError(
                "the data overlaps or has a hole",
                where=where,
                expected=f"begin {at}",
                found=f"begin {entry.begin}",
            )
        at = entry.end
    if at != size:
        what = "cut short" if at > size else "bytes behind the last tensor"
        raise FileError(
            what,
            where=str(path),
            expected=f"{at} bytes of data",
            found=f"{size}",
            remedy="copy or download it again",
        )


def _name_fault(name: str) -> str | None:
    if not name or len(name) > 1024:
        return "is empty or longer than 1024 characters"
    if not name.isprintable() or "\\" in name:
        return "holds a control character or a backslash"
    if name.startswith("/") or ".." in name.split("/"):
        return "looks like a path out of its folder"
    return "is reserved" if name == "__metadata__" else None


def _empty(entry: Entry, where: str) -> Tensor:
    try:
        return torch.empty(entry.shape, dtype=entry.dtype)
    # the sizes agree with the file, so this is a file too large for this machine
    except (RuntimeError, OverflowError) as error:
        raise MachineError(
            "does not fit in memory", where=where, expected=f"{entry.end - entry.begin} bytes"
        ) from error


def bytes_of(tensor: Tensor) -> memoryview:
    """A contiguous CPU tensor's own memory."""
    if not tensor.numel():
        return memoryview(b"")
    return memoryview(cast(Any, tensor.reshape(-1).view(torch.uint8).numpy()))


def is_finite(tensor: Tensor) -> bool:
    """Whether `tensor` holds neither a NaN nor an infinity, read once at the speed of memory, without a
    mask."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    # NaN wins both; no mask is allocated
    low, high = torch.aminmax(tensor.float() if tensor.element_size() == 1 else tensor)
    return math.isfinite(low.item()) and math.isfinite(high.item())


def _read(file: FileIO, path: Path, size: int) -> bytes:
    held = bytearray(size)
    _fill(memoryview(held), file, path)
    return bytes(held)


def _fill(rest: memoryview, file: FileIO, path: Path) -> None:
    while rest:
        count = file.readinto(rest)
        if not count:
            raise FileError(
                "became shorter while it was read",
                where=str(path),
                remedy="let no other program write it, then try again",
            )
        rest = rest[count:]


def _refuse_foreign(first: bytes, path: Path) -> None:
    if not first:
        raise FileError("is empty", where=str(path), remedy="copy or download it again")
    start = first.lstrip(b"\xef\xbb\xbf \t\r\n")
    for prefix, what, remedy in _FOREIGN:
        if first.startswith(prefix) or start.startswith(prefix):
            raise FileError(f"is {what}", where=str(path), remedy=remedy)
