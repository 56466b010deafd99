"""The activation cache of PAC (Ouyang et al. 2024, arXiv:2408.10746): a frozen backbone is run once for each
row.

A ladder reads h_1 .. h_L, what the backbone's blocks give, or some of them, and nothing that trains comes
before or between them. So what they give for a row of tokens is the same in every epoch: the first pass that
meets a row writes it down, every later one reads it and runs no block. Stored is what the ladder reads, and
what the last block gives. Embeddings, final norm, head and the ladder itself run as ever, so loss and
gradients are those of an uncached run: to the bit where rows were padded alike and the stored dtype is the
computed one; a bf16 backbone rounds otherwise in a batch of another width, which an uncached run shows just
as much.

A head of one's own behind a frozen model needs what the last block gives alone, h_L, and that is stored: of
transformers' heads of classes the token, or the sum, that they read, see petune.methods.head_rows. The blocks
are in eval mode then: dropout would make them another model in every step.

A row is known by its tokens (and types, positions, and how far from the left it begins), so any loop, any
order, any batch and any plan meets it again; one of a decoder also by its encoder's. Padding is not stored.

Rows are kept in files, for other processes and later runs. On a GPU they stay in its memory besides, while
all of them fit its room; where they do not, threads read them ahead of the passes that were announced.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, cast, get_args

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from petune.errors import UsageError
from petune.files.given import path_of
from petune.methods.cached_backbone import StillBase, refuse_moving
from petune.methods.configs import ROOM
from petune.methods.head_rows import ends_here, head_rows, reads_one_stack
from petune.methods.held_levels import CacheRoom
from petune.methods.level_reader import AHEAD, Request, Threads
from petune.methods.row_keys import alike, cast_of, sources_of
from petune.methods.stack_levels import StackLevels, form_of, refuse_pickling, sizes_of
from petune.methods.stack_levels import Stored as Stored
from petune.methods.wrapped import is_wrapped
from petune.models import family_of
from petune.models.port import names_of
from petune.models.spec import Family, StackName
from petune.models.stack import Stack, disown_stacks, own_stacks, stacks_in


@dataclass
class Counts:
    """Rows whose blocks did not run and rows whose blocks did, one for each stack that they went through;
    calls that the cache had no part in."""

    read: int = 0
    computed: int = 0
    passed_by: int = 0


@dataclass
class _Next:
    """A call of the model that is expected: its rows and what it wants of the stacks, once that was asked."""

    call: Mapping[str, Any]
    rows: object = None
    requests: list[tuple[StackLevels, Request]] | None = None


class ActivationCache:
    """The cache of a model under ladders, or of the parts of it that a process holds; or of a frozen model
    that was not wrapped and has a head that trains.

        >>> base = transformers.AutoModelForCausalLM.from_pretrained("my-model")
        >>> model = petune.wrap(base, "side", reduction=4)
        >>> tokens = torch.tensor([[1, 9, 10, 11, 2]])
        >>> with petune.ActivationCache(model, "cache") as cache:
        ...     losses = [model(input_ids=tokens, labels=tokens).loss for epoch in range(3)]
        >>> cache.counts.computed, cache.counts.read  # the second and third run no block of the backbone
        (1, 2)

        >>> model = transformers.AutoModelForSequenceClassification.from_pretrained("my-model")
        >>> base = model.base_model.requires_grad_(False)  # what is left is the head
        >>> with petune.ActivationCache(model, "cache") as cache:
        ...     losses = [model(input_ids=tokens, labels=torch.tensor([1])).loss for epoch in range(3)]
        >>> cache.counts.computed, cache.counts.read
        (1, 2)

    folder: where rows are kept, for this base and this computation alone; made where it is not. dtype: "auto"
    stores what was computed; fp32, bf16 and fp8 (a scale for each token of each level) round it. together:
    other processes run the same rows, so that all must know the same ones: rows count from the next `look`
    on. writes: whether this process adds rows. Hidden states of padding are zeros where rows are read. Raises
    UsageError for a model whose blocks or embeddings train, as they give something else in every step, and
    for one under another method; so does a pass of one that was changed since, unless `identity` names it.
    """

    _cast = ""  # of the last pass: what autocast makes of rows

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        folder: str | Path,
        dtype: Stored = "auto",
        *,
        room: float = ROOM,
        identity: str | None = None,
        together: bool = False,
        writes: bool = True,
    ) -> None:
        if dtype not in get_args(Stored):
            what, expected = f"dtype {dtype!r} is unknown", ", ".join(get_args(Stored))
            raise UsageError(what, where="cache.dtype", expected=expected)
        if not 0 <= room <= 1:
            what = "room is a share of the device's free memory"
            raise UsageError(what, where="room", expected="0 to 1", found=str(room))
        given, ddp = [model] if isinstance(model, nn.Module) else model, nn.parallel.DistributedDataParallel
        self.models = [one.module if isinstance(one, ddp) else one for one in given]
        self.room, self._threads, self._next = CacheRoom(room), Threads(), deque[_Next]()
        self._twins: dict[int, tuple[Tensor, int, Tensor]] = {}  # on the CPU, of those that were handed on
        self.dtype: Stored = dtype
        self.folder, self.together, self.counts, self.phase = path_of(folder), together, Counts(), 0
        for one in self.models:
            refuse_moving(one)
        self._bases = {} if identity else {one: StillBase(one) for one in self.models}
        self.folder /= identity or self._bases[self.models[0]].identity
        self.levels: dict[nn.Module, dict[Stack, StackLevels]] = {}
        self._hooks, self._still = list[RemovableHandle](), list[nn.Module]()
        self._behind: dict[nn.Module, StackLevels] = {}  # whose head reads a sum of what this base gives
        self._owned: set[Stack] = set()
        for one in self.models:
            family, before = cast("Family", family_of(one)), set(stacks_in(one).values())
            if not is_wrapped(one):
                own_stacks(one, family)
            stacks = [stack for stack in stacks_in(one).values() if stack.numbered]
            self._owned |= set(stacks) - before
            self.levels[one] = {}
            leader: StackLevels | None = None
            for stack in reversed(stacks):
                width = family.shape(family.part(cast("Any", one).config, stack.name)).width
                picks = head_rows(one, family) if ends_here(stack, family) else None
                stack.levels = level = StackLevels(
                    stack, self.folder, dtype, writes, width, self.room, self._threads, picks, leader
                )
                self.levels[one][stack] = level
                if picks is not None and picks.summed:
                    base = cast("nn.Module", cast("Any", one).base_model)
                    self._behind[base] = level
                    self._hooks.append(base.register_forward_hook(self._pooled))
                whole = stack.wire is None and reads_one_stack(one, family)
                leader = level if whole else None
            self._hooks += [
                one.register_forward_pre_hook(self._begin, with_kwargs=True),
                one.register_forward_hook(self._end, always_call=True),
            ]

    # ------------------------------------------------------------ the rows of a pass

    def _begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if model not in self.levels:  # a copy, with the hooks of the original
            return
        if model in self._bases:
            self._bases[model].refuse_changed()
        if not is_wrapped(model):
            base = getattr(model, "base_model", model)
            self._still = [module for module in base.modules() if module.training]
            base.eval()
        call = dict(zip(names_of(type(model)), args, strict=False)) | dict(kwargs)
        device = next((one.device for one in call.values() if isinstance(one, Tensor)), torch.device("cpu"))
        if model in self._bases:
            self._cast = cast_of(device.type)
        sources = sources_of(model, self._at_hand(call), self._cast)
        self.counts.passed_by += sources is None
        if not self.together:
            self.look()
        for stack, level in self.levels[model].items():
            if sources is None:
                level.begin((), (0, 0), device)
                continue
            rows, ids = sources[_kind(stack, sources)]
            level.begin(rows, (ids.shape[0], ids.shape[1]), device, call)
            self.counts.read += len(rows) * (level.known is not None)
            self.counts.computed += len(rows) * (level.known is None)
        self._meet(alike(sources))

    def _pooled(self, base: nn.Module, args: Any, output: Any) -> Any:
        """What a base gives to a head that reads a sum of it."""
        if (level := self._behind.get(base)) is None:  # a copy
            return None
        if isinstance(output, tuple):
            return (level.behind(output[0]), *output[1:])
        output.last_hidden_state = level.behind(output.last_hidden_state)
        return output

    def _meet(self, rows: object) -> None:
        """Expect a call no more that begins, nor those before it, which never came. One that nobody expected,
        of an evaluation between two steps, takes nothing from those that come next."""
        asked = [one.rows for one in islice(self._next, AHEAD) if one.requests is not None]
        if rows in asked:
            for _ in range(asked.index(rows) + 1):
                self._next.popleft()
            self._read_next()

    def knows(self, model: nn.Module, call: Mapping[str, Any]) -> bool:
        """Whether a call of `model` with these arguments would run no block: all its rows are there, as far
        as was last looked at."""
        sources = sources_of(model, call, self._cast)
        return sources is not None and all(
            level.has(sources[_kind(stack, sources)][0]) for stack, level in self.levels[model].items()
        )

    @property
    def reads_ahead(self) -> bool:
        """Whether rows come from their files while a device computes: on a GPU that has no room for all of
        them. The stages of a pipeline, which see parts of a call, read when they are asked."""
        device = next(value.device for value in self.models[0].parameters() if not value.is_meta)
        whole = len(self.models) == 1 and all(
            stack.wire is None for stack in self.levels.get(self.models[0], {})
        )
        return whole and waits_for_files(device) and not self.room.on(device)

    def expect(self, calls: Iterable[Mapping[str, Any]]) -> None:
        """Say with which arguments the model is called next, in order: where it `reads_ahead`, rows that were
        computed before are read meanwhile, two passes ahead at most."""
        self._next = deque(map(_Next, calls if self.reads_ahead else ()))
        self._read_next()

    def _read_next(self) -> None:
        """Begin to read for the next passes, what others were expected is dropped."""
        coming: dict[StackLevels, list[Request]] = {level: [] for level in self._all}
        for one in islice(self._next, AHEAD):
            if one.requests is None:
                one.requests = list(self._requests(one))
            for level, request in one.requests:
                coming[level].append(request)
        for level, requests in coming.items():
            level.expect(requests)

    def _requests(self, coming: _Next) -> Iterator[tuple[StackLevels, Request]]:
        """What a call of the model wants of the stacks that know all its rows, which are noted."""
        (model,) = self.models
        device = next(value.device for value in model.parameters() if not value.is_meta)
        sources = sources_of(model, coming.call, self._cast)
        coming.rows = alike(sources)
        if sources is None:
            return
        for stack, level in self.levels.get(model, {}).items():
            rows, ids = sources[_kind(stack, sources)]
            if (one := level.request(rows, (ids.shape[0], ids.shape[1]), device)) is not None:
                yield level, one

    def ahead(
        self, batches: Iterable[Mapping[str, Any]], device: torch.device | str | None = None
    ) -> Iterator[dict[str, Any]]:
        """`batches`, the arguments that a loop calls the model with, tensors on the CPU; each is handed on,
        on `device` if one is named, while the next one is expected. To know rows by tensors that came to a
        GPU in another way waits for all that it computes.

            >>> for batch in cache.ahead(batches, "cuda"):
            ...     loss = model(**batch).loss
        """
        waiting: list[Mapping[str, Any]] = []
        for batch in batches:
            waiting.append(batch)
            self.expect(waiting)
            if len(waiting) == AHEAD:
                yield self._handed_on(waiting.pop(0), device)
        for batch in waiting:
            yield self._handed_on(batch, device)

    def _handed_on(self, batch: Mapping[str, Any], device: torch.device | str | None) -> dict[str, Any]:
        """A batch on a device, and from now on it is that whose tensors are known by those on the CPU."""
        moved = {
            name: _moved(value, torch.device(device)) if device and isinstance(value, Tensor) else value
            for name, value in batch.items()
        }
        pairs = [(there, batch[name]) for name, there in moved.items() if isinstance(there, Tensor)]
        self._twins = {id(there): (there, there._version, here) for there, here in pairs}
        return moved

    def _at_hand(self, call: Mapping[str, Any]) -> dict[str, Any]:
        """A call with the tensors that were handed on, and not written to since, as they are on the CPU."""
        at_hand = dict(call)
        for name, value in call.items():
            there, version, here = self._twins.get(id(value), (None, 0, None))
            if there is value and value is not None and value._version == version:
                at_hand[name] = here
        return at_hand

    def _end(self, model: nn.Module, args: Any, output: Any) -> None:
        levels = self.levels.get(model, {}).values()
        gpus = {gpu for level in levels if (gpu := level.fetch()) is not None}
        for gpu in gpus:  # once for what all stacks gave
            torch.cuda.current_stream(gpu).synchronize()
        for level in levels:
            level.end()
        while self._still:
            self._still.pop().training = True

    def __deepcopy__(self, memo: object) -> ActivationCache:
        """Itself: there is one for the original, and a copy computes."""
        return self

    __reduce_ex__ = refuse_pickling

    @property
    def _all(self) -> list[StackLevels]:
        return [level for levels in self.levels.values() for level in levels.values()]

    # ------------------------------------------------------------ the whole

    def look(self) -> None:
        """Begin the next phase. See petune.files.row_store.RowStore.look."""
        self.phase += 1
        for level in self._all:
            level.phase = self.phase
            if level.store is not None:
                level.store.look(self.phase)

    @property
    def nbytes(self) -> int:
        """Bytes of all rows that are known."""
        return sum(level.store.nbytes for level in self._all if level.store is not None)

    @property
    def held_bytes(self) -> int:
        """Bytes of rows that stay on the device; 0 where they are read from their files."""
        return self.room.taken

    def own_bytes(self, amounts: Mapping[StackName, tuple[int, int]], dtype: torch.dtype) -> int:
        """Bytes of so many tokens of so many rows of the stacks of this process, whose blocks compute in
        `dtype`."""
        form, size = form_of(self.dtype, dtype), 0
        for level in self._all:
            tokens, rows = amounts[level.stack]
            count = tokens if level.picks is None else rows * level.picks.count
            size += count * len(level.kept) * sum(sizes_of(form, level.width))
        return size

    def __enter__(self) -> ActivationCache:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave the model as it was; the rows stay."""
        self._threads.close()
        for handle in self._hooks:
            handle.remove()
        for model, levels in self.levels.items():
            for stack, level in levels.items():
                stack.levels = None
                if level.store is not None:
                    level.store.close()
            disown_stacks(model, self._owned.__contains__)
        self.levels.clear()
        self._behind.clear()


def _moved(value: Tensor, device: torch.device) -> Tensor:
    """A tensor of the CPU on a device, which nothing waits for."""
    pinned = value.pin_memory() if device.type == "cuda" else value
    return pinned.to(device, non_blocking=True)


def waits_for_files(device: torch.device) -> bool:
    """Whether reading for this device is work that it has no part in."""
    return device.type == "cuda"


def _kind(stack: Stack, sources: Mapping[str, Any]) -> str:
    """Which of the rows of a call go through a stack."""
    return "decoder" if stack.name == "decoder" and "decoder" in sources else "input"
