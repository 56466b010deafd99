"""Where the activation cache keeps what the blocks of one stack give, and the form that it has there."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, cast

import torch
from torch import Tensor, nn

from petune.errors import UsageError
from petune.files.row_store import RowStore
from petune.methods.head_rows import HeadRows, Picked, head_rows, reads_one_stack
from petune.methods.held_levels import CacheRoom, HeldLevels
from petune.methods.level_reader import LevelReader, Request, Threads
from petune.methods.row_keys import BatchRow
from petune.models import family_of
from petune.models.fp8 import quantise
from petune.models.spec import Family
from petune.models.stack import Stack

Stored = Literal["auto", "fp32", "bf16", "fp8"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
_FP8 = torch.float8_e4m3fn
COMPUTED = {str(one): one for one in (torch.float32, torch.bfloat16, torch.float16, torch.float64)}


def refuse_pickling(cache: Any, protocol: object) -> NoReturn:
    """Raise UsageError for a cache that is written with its model: nobody would tell it of its rows."""
    what = "a model with an open activation cache cannot be pickled, as torch.save does"
    remedy = "close the cache first, or write what trains alone: petune.save(model, folder)"
    raise UsageError(what, where=str(cache.folder), remedy=remedy)


class StackLevels:
    """What the blocks of one stack give that are read, see stack_protocols.Levels: of the rows of the running
    pass, and where all of them are kept: in files, and while there is room on the device.

    picks: what a head reads of a row, which alone is kept. leader: of a stack of which nothing is kept, that
    of the stack behind it: where rows are known there, no block runs here. The blocks are not asked either
    for a sum behind the final norm: `numbers` is empty then, and who has it calls `write`."""

    def __init__(
        self,
        stack: Stack,
        folder: Path,
        stored: Stored,
        writer: bool,
        width: int,
        room: CacheRoom,
        threads: Threads,
        picks: HeadRows | None = None,
        leader: StackLevels | None = None,
    ) -> None:
        ladder, here = cast("Any", stack.ladder), [number for number, _ in stack.numbered]
        self.kept: Sequence[int] = [  # none where there is a leader
            number
            for number in here
            if leader is None and (number == here[-1] or (ladder is not None and ladder.reads(number)))
        ]
        self.picks, self.leader, self.picked = picks, leader, cast("Picked | None", None)
        self.numbers: Sequence[int] = () if picks is not None and picks.summed else self.kept
        self.stack = stack.name
        self.name = f"{stack.name}.{here[-1]}" if ladder is None else f"{stack.name}.{here[0]}-{here[-1]}"
        if ladder is not None and len(self.kept) < len(here):  # which they are, a bit for each block
            self.name += f"-{sum(1 << number - here[0] for number in self.kept):x}"
        self.name += "" if picks is None else picks.name
        self.folder, self.stored, self.writer = folder, stored, writer
        self.store: RowStore | None = None
        self.held, self.reader = HeldLevels(room), LevelReader(threads)
        self.phase = 0
        self.rows: Sequence[BatchRow] = ()
        self.known: Tensor | None = None
        self.values: Tensor | None = None
        self.fresh: dict[int, Tensor] = {}
        self.copies: list[Tensor] = []
        self.width = width
        self.dtype = self.form = torch.float32
        # what was computed stands in the middle
        if self.kept and (kind := RowStore.kind_in(folder, self.name)) is not None:
            computed = f"torch.{kind.split(' ')[1]}" if " " in kind else ""
            self.open(COMPUTED.get(computed, torch.float32), None)

    def __deepcopy__(self, memo: object) -> None:
        """A copy of the model has no cache: nobody would tell it of its rows."""

    __reduce_ex__ = refuse_pickling

    def has(self, rows: Sequence[BatchRow]) -> bool:
        """Whether all `rows` are there, as far as this stack keeps any. Their bytes are not looked at."""
        if self.leader is not None:
            return True
        return self.store is not None and all(row.key in self.store.places for row in rows)

    # ------------------------------------------------------------ a pass

    def begin(
        self,
        rows: Sequence[BatchRow],
        shape: tuple[int, int],
        device: torch.device,
        call: Mapping[str, Any] | None = None,
    ) -> None:
        """The rows of a pass, [batch, seq] = `shape`, of a `call` of the model: they are read if all of them
        are known. A leader has begun before."""
        self.rows, self.known, self.values, self.picked = rows, None, None, None
        self.fresh.clear()
        if self.leader is not None:
            known = self.leader.known is not None
            self.known = torch.empty(0, *shape, self.width, device=device) if known else None
            return
        if self.picks is not None and rows:
            assert call is not None, "it is a call that has rows"
            self.rows, self.picked = self.picks.rows(rows), self.picks.of(call, shape, device)
        if (request := self.request(rows, shape, device)) is not None:
            found = self._read(request)
            self.values = found if self.picked is None else self.picked.spread(found)
            self.known = self.values[: len(self.numbers)]  # none where the blocks are not asked

    def request(
        self, rows: Sequence[BatchRow], shape: tuple[int, int], device: torch.device
    ) -> Request | None:
        """What reads `rows`, [batch, seq] = `shape`, or what is kept of them; None unless all of them are
        there with the bytes that were written."""
        if self.picks is not None:
            rows, shape = self.picks.rows(rows), (shape[0], self.picks.count)
        if not rows or self.store is None:
            return None
        places = [self.store.find(row.key) for row in rows]
        if not all(places):
            return None
        levels, found = len(self.kept), cast("list[Any]", places)
        return Request(self.store, tuple(rows), found, shape, levels, self._sizes, device)

    def expect(self, requests: Iterable[Request]) -> None:
        """Begin to read for passes that come next, in order; what others were expected is dropped."""
        coming = [one for one in requests if not self.held.has(one.rows)]
        self.reader.forget_others(one.wanted for one in coming)
        for one in coming:
            if not self.reader.expect(one):
                break

    def fetch(self) -> torch.device | None:
        """Begin to copy to the host what was computed, once the blocks have run; the GPU that has to be
        waited for before `end`, None where there is none."""
        if not (self.kept and self.writes) or len(self.fresh) < len(self.kept):
            return None
        levels = torch.stack([self.fresh[number] for number in self.kept])  # [levels, batch, seq, width]
        self.store = self.store or self.open(levels.dtype, self.phase)
        packed = [part.contiguous().view(torch.uint8) for part in _packed(levels, self.form)]
        self.held.put(self.rows, packed)
        if not self.writer:
            return None
        self.copies = [_on_host(part) for part in packed]
        return levels.device if levels.is_cuda else None

    def end(self) -> None:
        """Write down what was fetched, and forget the pass."""
        if self.copies:
            self._write()
        self.rows, self.known, self.values, self.picked, self.copies = (), None, None, None, []
        self.fresh.clear()

    @property
    def writes(self) -> bool:
        """See stack_protocols.Levels. A process that writes nothing takes part too: ranks make hidden
        states whole together."""
        return bool(self.rows) and self.known is None

    def write(self, number: int, hidden: Tensor) -> Tensor | None:
        """See stack_protocols.Levels; a sum is read as what it was taken of, always."""
        self.fresh[number] = kept = hidden if self.picked is None else self.picked.taken(hidden)
        form = form_of(self.stored, kept.dtype)
        if form is _FP8 or torch.promote_types(form, kept.dtype) is not form:
            values, *scales = _packed(kept, form)
            kept = _unpacked(values, scales[0] if scales else None, kept.dtype)
        elif self.numbers:
            return None
        return kept if self.picked is None else self.picked.spread(kept)

    def behind(self, hidden: Tensor) -> Tensor:
        """What the head is given in the place of `hidden`, [batch, seq, width] behind the final norm: that of
        which sums over tokens are those that are kept."""
        if not self.rows:
            return hidden
        return cast("Tensor", self.write(self.kept[-1], hidden)) if self.values is None else self.values[0]

    # ------------------------------------------------------------ bytes

    def open(self, dtype: torch.dtype, phase: int | None) -> RowStore:
        """The store of rows whose levels were computed in `dtype`. phase: see RowStore."""
        self.dtype = dtype
        self.form = form_of(self.stored, dtype)
        token = len(self.kept) * sum(self._sizes)
        kind = f"{len(self.kept)}x{self.width} {_short(dtype)} as {_short(self.form)}"
        self.store = RowStore(self.folder, self.name, token, kind, self.writer, phase)
        return self.store

    @property
    def scaled(self) -> bool:
        """Whether each token of a level has a scale."""
        return self.form is _FP8

    @property
    def _sizes(self) -> tuple[int, ...]:
        """See `sizes_of`."""
        return sizes_of(self.form, self.width)

    def _read(self, request: Request) -> Tensor:
        """[levels, batch, seq, width] of rows that are there, zeros for padding."""
        if self.held.has(request.rows):
            parts = self.held.get(request.rows, request.shape)
        else:
            parts = self.reader.take(request)
            self.held.put(request.rows, parts)
        factors = parts[1].view(torch.float32) if self.scaled else None
        return _unpacked(parts[0].view(self.form), factors, self.dtype)

    def _write(self) -> None:
        """Add the rows of this pass, whose bytes are on the host."""
        assert self.store is not None, "it was opened when they were fetched"
        for at, row in enumerate(self.rows):
            here = slice(row.first, row.first + row.tokens)
            parts = (level[at, here] for part in self.copies for level in part)
            views = [memoryview(part.contiguous().numpy().reshape(-1)) for part in parts]
            self.store.write(row.key, row.tokens, views)


def _on_host(part: Tensor) -> Tensor:
    """A tensor on the CPU; of one on a GPU a copy in pinned memory, which is on its way."""
    if not part.is_cuda:
        return part
    return torch.empty(part.shape, dtype=part.dtype, pin_memory=True).copy_(part, non_blocking=True)


def form_of(stored: Stored, dtype: torch.dtype) -> torch.dtype:
    """What levels of a dtype are stored in; fp32 narrows nothing."""
    form = dtype if stored == "auto" else DTYPES[stored]
    return torch.promote_types(form, dtype) if stored == "fp32" else form


def sizes_of(form: torch.dtype, width: int) -> tuple[int, ...]:
    """Bytes of a token of a level that is stored in `form`: of its values, and of its scale if it has one."""
    return (width * form.itemsize, *([4] if form is _FP8 else []))


def stack_bytes(
    model: nn.Module,
    stack: Stack,
    stored: Stored,
    dtype: torch.dtype,
    tokens: int,
    rows: int,
    lasts: Collection[int] = (),
) -> int:
    """Bytes of so many `tokens` of so many `rows` of a stack of `model`, whose blocks compute in `dtype`.
    lasts: the last block of each stage of a pipeline that has some of it; none without stages."""
    family, ladder = cast("Family", family_of(model)), cast("Any", stack.ladder)
    width = family.shape(family.part(cast("Any", model).config, stack.name)).width
    token = sum(sizes_of(form_of(stored, dtype), width))
    if ladder is not None:
        read = ladder.settings.beside(len(stack)) if ladder.settings.climbs else ()
        return len({*read, len(stack) - 1, *lasts}) * token * tokens
    last, behind = len(stack) - 1, stack.name == list(family.stacks)[-1]
    if not behind and not lasts and reads_one_stack(model, family):
        return 0
    if not behind or (picks := head_rows(model, family)) is None:
        return len({last, *lasts}) * token * tokens
    return (len({*lasts} - {last}) * tokens + picks.count * rows) * token


def _packed(levels: Tensor, form: torch.dtype) -> tuple[Tensor, ...]:
    """`levels` as they are stored: in eight bits with a float32 scale for each token of each level."""
    if form is not _FP8:
        return (levels.to(form),)
    q, scale = quantise(levels.flatten(0, -2))
    return q.unflatten(0, levels.shape[:-1]), scale.unflatten(0, levels.shape[:-1])


def _unpacked(values: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
    """What was `_packed`, as it is read."""
    return (values if scales is None else values.float() * scales).to(dtype)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
