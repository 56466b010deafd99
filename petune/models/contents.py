"""What the tensors of a model hold whose memory is not there yet: ranges of files, or fresh numbers.

A model is built, tuned and cut on the meta device. Its contents are known by name all the while, so that each
rank allocates its own parts alone and fills them: `allocate`, then `Contents.fill`. Values are rounded to the
dtype that the base is loaded in, then cast to that of the tensor they go to, a tensor at a time. A tensor
that is quantised is read whole, quantised where it goes, and narrowed then, and of experts one after the
other: so the model is never there in the dtype it had, and a slice is that of the quantised whole.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from petune.errors import PetuneError
from petune.files.ranges import RangeReader, TensorSource, overlap
from petune.files.safetensors import is_finite
from petune.models.bitsandbytes_files import FourBit
from petune.models.checksums import ALONE, RankShare, checksum, checksums, read_checksums
from petune.models.copied import copied
from petune.models.form import Form
from petune.models.fresh import box_of, draw, holding, initialiser, tuned_owner
from petune.models.frozen_weight import QuantisedWeight, sample_places, sampled
from petune.models.mxfp4_files import Mxfp4
from petune.models.nf4 import Nf4
from petune.models.note import Note
from petune.models.read_plan import ReadPlan
from petune.models.tuned_linear import TunedLinear

COMPARED = 4 << 20  # elements of two tensors that are compared at once
NO_PLAN = ReadPlan({}, frozenset(), {}, [])


@dataclass(frozen=True)
class TensorPart:
    """A part of the tensor `name` that is to be filled: `out`, the box of its shape from `start` on."""

    name: str
    out: Tensor
    start: Sequence[int]


class Contents:
    """What the tensors of a model hold, by name: those of `plan` what `files` do; every other is drawn from
    (seed, name), under the first of its names where it has several.

    place: where the base comes from, for messages. four_bit: those of `files` that bitsandbytes has
    quantised, or that are in MXFP4.
    """

    def __init__(
        self,
        model: nn.Module,
        files: Mapping[str, TensorSource],
        plan: ReadPlan,
        seed: int,
        place: str,
        four_bit: Mapping[str, FourBit | Mxfp4] | None = None,
    ) -> None:
        self.files, self.plan, self.seed, self.place = files, plan, seed, place
        self.four_bit = four_bit or {}
        self.dtypes = {name: value.dtype for name, value in model.state_dict(keep_vars=True).items()}
        self.model, self.names = model, dict[str, str]()

    def remember(self, model: nn.Module) -> None:
        """Take `model`, whole and on the meta device, for the one whose tensors these are: what it has
        become."""
        self.model = copied(model)
        first: dict[int, str] = {}
        every = self.model.named_parameters(remove_duplicate=False)
        self.names = {name: first.setdefault(id(value), name) for name, value in every}

    # ------------------------------------------------------------ filling

    def fill(self, parts: Iterable[TensorPart]) -> list[str]:
        """Fill parts of tensors, those of files in the order in which they lie there. Returns the names of
        those that hold a value which is not finite.

        Raises FileError where a file is not what its header said.
        """
        wanted = sorted(parts, key=self._order)
        bad: list[str] = []
        whole: tuple[str, Form, Tensor] | None = None  # the last that was quantised, for its other parts
        with RangeReader(self.files) as reader:
            for part, following in zip(wanted, [*wanted[1:], None], strict=False):
                if following is not None and (pieces := self.plan.pieces.get(following.name)):
                    reader.expect(pieces[0].source)
                if whole is not None and whole[0] == part.name and isinstance(part.out, QuantisedWeight):
                    part.out.hold(whole[1], part.start, whole[2])
                    continue
                whole = None
                if self._put_as_it_is(part, reader):
                    continue
                if (finite := self._put_experts(part, reader)) is not None:
                    bad += [] if finite else [part.name]
                    continue
                dense = self._dense(part)
                if not self._put(dense, reader):
                    self._draw(dense, reader)
                elif not is_finite(dense.out.detach()):
                    bad.append(part.name)
                if isinstance(part.out, QuantisedWeight):
                    whole = part.name, type(part.out.form).of(dense.out), sampled(dense.out)
                    part.out.hold(whole[1], part.start, whole[2])
        return bad

    def _put_as_it_is(self, part: TensorPart, reader: RangeReader) -> bool:
        """Fill a part in NF4 of what a file holds in it; whether one does."""
        held = self._held_in_four_bits(part.name)
        if held is None or not (isinstance(part.out, QuantisedWeight) and isinstance(part.out.form, Nf4)):
            return False
        form = held.read(reader, part.out.device, part.out.dtype)
        part.out.hold(form, part.start, sampled(form.dense()))
        return True

    def _put_experts(self, part: TensorPart, reader: RangeReader) -> bool | None:
        """Fill a part that holds quantised experts of what files hold, an expert at a time; whether all of it
        is finite, None for any other part."""
        held = part.out
        if not (isinstance(held, QuantisedWeight) and held.dim() == 3 and part.name in self.plan.pieces):
            return None
        finite, whole = True, self._like(part.name)

        def each() -> Iterator[Tensor]:
            nonlocal finite
            for number in range(part.start[0], part.start[0] + len(held)):
                dense = torch.empty((1, *whole.shape[1:]), dtype=held.dtype, device=held.device)
                self._put(TensorPart(part.name, dense, (number, 0, 0)), reader)
                finite = finite and is_finite(dense)
                yield dense[0]

        held.hold_experts(each(), len(whole))
        return finite

    def _held_in_four_bits(self, name: str) -> FourBit | None:
        pieces = self.plan.pieces.get(name, ())
        held = self.four_bit.get(pieces[0].source) if len(pieces) == 1 else None
        return held if isinstance(held, FourBit) else None

    def _dense(self, part: TensorPart) -> TensorPart:
        """Where a part is read: a quantised one as the whole tensor it is of, which is dropped when the part
        holds it."""
        if not isinstance(part.out, QuantisedWeight):
            return part
        whole = torch.empty(self._like(part.name).shape, dtype=part.out.dtype, device=part.out.device)
        return TensorPart(part.name, whole, (0,) * whole.dim())

    def whole(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor of its own, on the CPU, in the dtype it has in the model or in another."""
        like = self._like(name)
        found = torch.empty(like.shape, dtype=dtype or like.dtype)
        self.fill([TensorPart(name, found, (0,) * like.dim())])
        return found

    def readable(self, name: str) -> bool:
        """Whether files hold a tensor as it is, so that some of its entries can be read alone."""
        return name in self.plan.pieces and self._held_in_four_bits(name) is None

    def entries(self, name: str, part: range) -> Tensor:
        """A range of the first dim of a `readable` tensor, on the CPU, in the dtype it has in the model."""
        like = self._like(name)
        found = torch.empty((len(part), *like.shape[1:]) if like.dim() else (), dtype=like.dtype)
        self.fill([TensorPart(name, found, (part.start, *(0,) * (like.dim() - 1))[: like.dim()])])
        return found

    def _like(self, name: str) -> Tensor:
        """The tensor as it is in the model."""
        path, _, leaf = name.rpartition(".")
        found: Tensor = getattr(self.model.get_submodule(path), leaf)
        return found

    def _order(self, part: TensorPart) -> tuple[str, int]:
        pieces = self.plan.pieces.get(part.name)
        if not pieces:
            return "", 0
        first = self.files[pieces[0].source]
        return str(first.path), first.begin

    def _put(self, part: TensorPart, reader: RangeReader) -> bool:
        """Fill a part of what a file holds; whether one does."""
        if part.name not in self.plan.pieces:
            return False
        if (held := self._held_in_four_bits(part.name)) is not None:
            whole = held.read(reader, part.out.device, self.dtypes[part.name]).dense()
            part.out.copy_(box_of(whole, part.start, part.out.shape))
            return True
        self._read(reader, part.name, part.out, part.start, self.dtypes[part.name])
        return True

    def _read(
        self, reader: RangeReader, name: str, out: Tensor, start: Sequence[int], by: torch.dtype | None = None
    ) -> None:
        """Fill `out` with the box of its shape from `start` on of a tensor that files hold, by pieces."""
        for piece in self.plan.pieces[name]:
            if (own := overlap(piece, start, out.shape)) is None:
                continue
            box, there = box_of(out, own.inside, own.size), own.there
            if (more := out.dim() - len(self.files[piece.source].shape)) > 0:  # one of several, an expert
                box, there = box.flatten(0, more), there[more:]
            held = self.four_bit.get(piece.source)
            if isinstance(held, Mxfp4):
                held.fill(reader, box, there, by or box.dtype)
                continue
            if held is not None:
                values = held.read(reader, box.device, by or box.dtype).dense()
                box.copy_(box_of(values, there, box.shape))
                continue
            reader.read(piece.source, box, there, by)

    @torch.no_grad()
    def _draw(self, part: TensorPart, reader: RangeReader) -> None:
        """Draw a part; of what is made of the rows of a weight, after those were read."""
        found = tuned_owner(self.model, part.name)
        if found is None or not isinstance(found[0], TunedLinear) or found[1] not in found[0].of_rows:
            draw(self.model, self.names.get(part.name, part.name), self.seed, part.out, part.start)
            return
        layer, own = found
        like = cast("Tensor", layer.weight)
        rows = torch.empty((len(part.out), *like.shape[1:]), dtype=like.dtype)
        weight = TensorPart(
            part.name.removesuffix(own) + "weight", rows, (part.start[0], *(0,) * (like.dim() - 1))
        )
        if not self._put(weight, reader):
            self._draw(weight, reader)
        made = torch.empty(part.out.shape, dtype=part.out.dtype)
        with holding(layer, "weight", rows), holding(layer, own, made):
            layer.draw(own)
        part.out.copy_(made)

    # ------------------------------------------------------------ comparing

    def same(self, one: str, other: str) -> bool:
        """Whether two tensors of one shape, which files hold, have the same values in the dtype that they are
        loaded in."""
        shape = self._like(one).shape
        rows = max(1, COMPARED // max(1, shape[1:].numel()))
        with RangeReader(self.files) as reader:
            for first in range(0, shape[0], rows):
                size = (min(rows, shape[0] - first), *shape[1:])
                found = [torch.empty(size, dtype=self.dtypes[name]) for name in (one, other)]
                for name, out in zip((one, other), found, strict=True):
                    self._read(reader, name, out, (first, *(0,) * len(shape[1:])))
                if not torch.equal(*found):
                    return False
        return True

    def fingerprint(self) -> str:
        """A digest of what the model is made of: names, dtypes and shapes, a few values of each tensor in the
        files, and the seed of those that are drawn."""
        digest = hashlib.sha256(json.dumps([self.seed, sorted(self.names)]).encode())
        for name in sorted(self.plan.pieces):
            like = self._like(name)
            digest.update(f"{name} {like.dtype} {list(like.shape)}\n".encode())
            digest.update(self.sampled(name).numpy().tobytes())
        return digest.hexdigest()[:16]

    def sampled(self, name: str) -> Tensor:
        """A few values of a tensor, those of `frozen_weight.sampled`, without reading the others."""
        like = self._like(name)
        if (held := self._held_in_four_bits(name)) is not None:
            with RangeReader(self.files) as reader:
                return sampled(held.read(reader, torch.device("cpu"), like.dtype).dense())
        places = [torch.unravel_index(torch.tensor(flat), like.shape) for flat in sample_places(like.numel())]
        parts = [
            TensorPart(name, torch.empty((1,) * like.dim(), dtype=like.dtype), [int(at) for at in place])
            for place in places
        ]
        self.fill(parts)
        return torch.tensor([float(part.out) for part in parts], dtype=torch.float64)


# ---------------------------------------------------------------- a model and its contents


_CONTENTS = Note[Contents]("petune_contents")  # of a model that is not in memory yet
contents_of, detach = _CONTENTS.of, _CONTENTS.taken


def attach(model: nn.Module, contents: Contents) -> None:
    """Leave its contents on a model, as it is now, until it is filled."""
    contents.remember(model)
    _CONTENTS.put(model, contents)


def checksums_of(model: nn.Module, tensors: Mapping[str, Tensor], share: RankShare = ALONE) -> dict[str, int]:
    """The checksum of each of these tensors of `model`, which is whole on every rank of `share`; those that
    are not read yet come from their files, a portion at a time."""
    contents = contents_of(model)
    unread = {
        name: value
        for name, value in tensors.items()
        if contents is not None and value.is_meta and contents.readable(name)
    }
    found = {} if contents is None else read_checksums(unread, contents.entries, share)
    others = [(name, value) for name, value in tensors.items() if name not in unread]
    own = others[share.own([value.nbytes for _, value in others])]
    if contents is None:
        found = checksums(dict(own))
    else:
        found |= {name: checksum(contents.whole(name) if one.is_meta else one) for name, one in own}
    found = share.add_up(found)
    return {name: found[name] for name in tensors}


def allocate(
    modules: Iterable[nn.Module], make: Callable[[nn.Parameter], nn.Parameter]
) -> list[tuple[str, nn.Parameter]]:
    """Put what `make` makes of it in the place of every parameter on the meta device, a shared one once;
    those, with a name of each."""
    made: dict[int, tuple[str, nn.Parameter]] = {}
    before: list[nn.Parameter] = []  # so that no other object gets the id of one
    for module in modules:
        for path, owner in module.named_modules(remove_duplicate=False):
            for leaf, value in owner._parameters.items():
                if value is None or not value.is_meta:
                    continue
                if id(value) not in made:
                    before.append(value)
                    made[id(value)] = (f"{path}.{leaf}" if path else leaf), make(value)
                owner._parameters[leaf] = made[id(value)][1]
        left = [name for name, value in module.named_buffers() if value.is_meta]
        if left:
            raise PetuneError("a buffer has no memory; this is a fault of petune", where=left[0])
    return list(made.values())


def fill_whole(model: nn.Module, contents: Contents) -> list[str]:
    """Fill all of `model`, in place, on the CPU. Returns what `Contents.fill` does."""
    contents.remember(model)

    def make(value: nn.Parameter) -> nn.Parameter:
        return nn.Parameter(torch.empty_like(value, device="cpu"), requires_grad=value.requires_grad)

    made = allocate([model], make)
    return contents.fill(TensorPart(name, value.data, (0,) * value.dim()) for name, value in made)


@torch.no_grad()
def make_buffers(model: nn.Module, contents: Contents) -> None:
    """Give the buffers of `model` that are on the meta device memory and their values: what transformers
    computes, and what the files hold."""
    read: list[TensorPart] = []
    for path, module in model.named_modules():
        names = [name for name, value in module._buffers.items() if value is not None and value.is_meta]
        for name in names:
            made = module._buffers[name] = torch.zeros_like(module._buffers[name], device="cpu")
            full = f"{path}.{name}" if path else name
            if full in contents.plan.pieces:
                read.append(TensorPart(full, made, (0,) * made.dim()))
        if names and (law := initialiser(model, path)) is not None:
            law._init_weights(module)
    contents.fill(read)
