"""Where the activation cache keeps what the blocks of one stack give, and the form that it has there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor

from petune.files.row_store import RowStore
from petune.methods.row_keys import Row
from petune.models.fp8 import quantise
from petune.models.stack import Stack

Stored = Literal["auto", "fp32", "bf16", "fp8"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
_FP8 = torch.float8_e4m3fn
_NAMED = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


class StackLevels:
    """What the blocks of one stack give that are read, see stack_protocols.Levels: of the rows of the
    running pass, and where all of them are kept."""

    def __init__(self, stack: Stack, folder: Path, stored: Stored, writer: bool, width: int) -> None:
        ladder, here = cast("Any", stack.ladder), [number for number, _ in stack.numbered]
        self.numbers: Sequence[int] = [
            number for number in here if number == here[-1] or (ladder is not None and ladder.reads(number))
        ]
        self.name = f"{stack.name}.{here[-1]}" if ladder is None else f"{stack.name}.{here[0]}-{here[-1]}"
        if ladder is not None and len(self.numbers) < len(here):  # which they are, a bit for each block
            self.name += f"-{sum(1 << number - here[0] for number in self.numbers):x}"
        self.folder, self.stored, self.writer = folder, stored, writer
        self.store: RowStore | None = None
        self.phase = 0
        self.rows: Sequence[Row] = ()
        self.shape = (0, 0)
        self.known: Tensor | None = None
        self.fresh: dict[int, Tensor] = {}
        self.width = width
        self.dtype = self.form = torch.float32
        # what was computed stands in the middle
        if (kind := RowStore.kind_in(folder, self.name)) is not None:
            self.open(_NAMED.get(kind.split(" ")[1], torch.float32) if " " in kind else torch.float32, None)

    def __deepcopy__(self, memo: object) -> None:
        """A copy of the model has no cache: nobody would tell it of its rows."""

    def has(self, rows: Sequence[Row]) -> bool:
        """Whether all `rows` are there. Their bytes are not looked at."""
        return self.store is not None and all(row.key in self.store.places for row in rows)

    # ------------------------------------------------------------ a pass

    def begin(self, rows: Sequence[Row], shape: tuple[int, int], device: torch.device) -> None:
        """The rows of a pass, [batch, seq] = `shape`: they are read if all of them are known."""
        self.rows, self.shape, self.known = rows, shape, None
        self.fresh.clear()
        if rows and self.store is not None:
            places = [self.store.find(row.key) for row in rows]
            if all(places):
                self.known = self._read(cast("list[Any]", places), device)

    def end(self) -> None:
        """Write down what was computed, once the blocks have run."""
        if self.writes and len(self.fresh) == len(self.numbers):
            self._write()
        self.rows, self.known = (), None
        self.fresh.clear()

    @property
    def writes(self) -> bool:
        """See stack_protocols.Levels. A process that writes nothing takes part too: ranks make hidden
        states whole together."""
        return bool(self.rows) and self.known is None

    def write(self, number: int, hidden: Tensor) -> Tensor | None:
        """See stack_protocols.Levels."""
        self.fresh[number] = hidden
        form = form_of(self.stored, hidden.dtype)
        if form is not _FP8 and torch.promote_types(form, hidden.dtype) is form:
            return None
        return _unpacked(*_packed(hidden, form), hidden.dtype)

    # ------------------------------------------------------------ bytes

    def open(self, dtype: torch.dtype, phase: int | None) -> RowStore:
        """The store of rows whose levels were computed in `dtype`. phase: see RowStore."""
        self.dtype = dtype
        self.form = form_of(self.stored, dtype)
        token = len(self.numbers) * (self.width * self.form.itemsize + 4 * self.scaled)
        kind = f"{len(self.numbers)}x{self.width} {_short(dtype)} as {_short(self.form)}"
        self.store = RowStore(self.folder, self.name, token, kind, self.writer, phase)
        return self.store

    @property
    def scaled(self) -> bool:
        """Whether each token of a level has a scale."""
        return self.form is _FP8

    def _read(self, places: Sequence[Any], device: torch.device) -> Tensor:
        """[levels, batch, seq, width] of rows that are there, zeros for padding."""
        assert self.store is not None
        shape = len(self.numbers), *self.shape
        pinned = device.type == "cuda"
        values = torch.zeros((*shape, self.width * self.form.itemsize), dtype=torch.uint8, pin_memory=pinned)
        scales = torch.zeros((*shape, 4 * self.scaled), dtype=torch.uint8, pin_memory=pinned)
        for at, (row, place) in enumerate(zip(self.rows, places, strict=True)):
            here = slice(row.first, row.first + row.tokens)
            parts = [level[at, here] for level in values] + [
                level[at, here] for level in scales
            ] * self.scaled
            self.store.read(place, [memoryview(part.numpy().reshape(-1)) for part in parts])
        found = values.to(device, non_blocking=True).view(self.form)
        factors = scales.to(device, non_blocking=True).view(torch.float32) if self.scaled else None
        return _unpacked(found, factors, self.dtype)

    def _write(self) -> None:
        """Add the rows of this pass."""
        levels = torch.stack([self.fresh[number] for number in self.numbers])  # [levels, batch, seq, width]
        store = self.store or self.open(levels.dtype, self.phase)
        if not self.writer:
            return
        values, scales = _packed(levels, self.form)
        own, scale = _bytes(values), None if scales is None else _bytes(scales)
        for at, row in enumerate(self.rows):
            here = slice(row.first, row.first + row.tokens)
            parts = [level[at, here] for level in own]
            parts += [] if scale is None else [level[at, here] for level in scale]
            views = [memoryview(part.contiguous().numpy().reshape(-1)) for part in parts]
            store.write(row.key, row.tokens, views)


def form_of(stored: Stored, dtype: torch.dtype) -> torch.dtype:
    """What levels of a dtype are stored in; fp32 narrows nothing."""
    form = dtype if stored == "auto" else DTYPES[stored]
    return torch.promote_types(form, dtype) if stored == "fp32" else form


def _packed(levels: Tensor, form: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """`levels` as they are stored: in eight bits with a float32 scale for each token of each level."""
    if form is not _FP8:
        return levels.to(form), None
    q, scale = quantise(levels.flatten(0, -2))
    return q.unflatten(0, levels.shape[:-1]), scale.unflatten(0, levels.shape[:-1])


def _unpacked(values: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
    """What was `_packed`, as it is read."""
    return (values if scales is None else values.float() * scales).to(dtype)


def _bytes(values: Tensor) -> Tensor:
    """The bytes of `values` on the CPU, in its last dim."""
    return values.contiguous().view(torch.uint8).cpu()


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
