"""`parallelize`: a tuned model is cut and placed by a plan, axis by axis, in the one order in which that can
be done.

    stack       blocks become stacks, which recompute and draw dropout by themselves      (whole model, on the
                CPU)
    quantise    frozen weights take the form that they are held in
    cut         tensors are narrowed to this rank's slices, embedding and head by rows     tp, sp, ep
    stages      what other stages hold is taken out                                        pp
    move        what is left goes to the device; what has no memory gets it and is read there
    cross       what crosses ranks is hooked in
    shard       weights are spread over replicas, then read where they had no memory       dp with shard: true

Cutting comes before stages, as a slice is named in the whole model; hooks come after moving, as some hold
tensors. A model on the meta device with its contents (models/contents.py) takes the same way: all that is
done before is done to shapes, and each rank reads its own part.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from petune.errors import PetuneError
from petune.log import say
from petune.models import attention
from petune.models.contents import Contents, TensorPart, allocate, detach
from petune.models.damage import refuse_not_finite
from petune.models.load_errors import room_for
from petune.models.quantise import quantise_blocks
from petune.models.spec import Family
from petune.models.stack import own_stacks, unownable
from petune.parallel.fsdp import allocated, first_row, is_light, is_sharded, local, settle, shard, weighed
from petune.parallel.launch import process_group
from petune.parallel.mesh import Mesh
from petune.parallel.objective import trainable
from petune.parallel.pipeline.schedule import cut_stages
from petune.parallel.plan import ParallelPlan
from petune.parallel.spread import cross_experts, cut_experts
from petune.parallel.tensor.hooks import cross
from petune.parallel.tensor.shard_params import Placed, cut
from petune.parallel.tensor.vocabulary import cut_vocabulary, hook_vocabulary, refusal, rows_of_ranks

TunedOf = Callable[[nn.Module], Mapping[str, nn.Parameter]]  # what trains in a model, by name


@dataclass(frozen=True)
class Placement:
    """A model where its plan wants it. modules: the model, or this rank's stages of it.

    names: every tuned tensor of the whole model, in its order; shapes: of each of them, whole. tuned: this
    rank's parts of them, a subset where a stage lacks some. owned: whether stacks own the loop over blocks,
    so that recomputing and dropout are ours: where the family is known and its blocks can all be handed the
    same arguments. vocabulary: rows of embedding and head per rank of the tp axis, empty where they are
    whole. contents: what was read by ranges of files; None for a model that was in memory.
    """

    modules: list[nn.Module]
    family: Family | None
    plan: ParallelPlan
    mesh: Mesh
    names: tuple[str, ...]
    shapes: Mapping[str, tuple[torch.Size, torch.dtype]]
    tuned: dict[str, nn.Parameter]
    owned: bool
    placed: Placed = field(default_factory=Placed)
    vocabulary: tuple[int, ...] = ()
    contents: Contents | None = None


def parallelize(
    model: nn.Module,
    family: Family | None,
    plan: ParallelPlan,
    mesh: Mesh,
    tuned: TunedOf = trainable,
    *,
    recompute: bool = False,
    streams: bool = False,
    base_dtype: str | None = None,
) -> Placement:
    """Cut and place `model`, which is whole, on the CPU or on the meta device with its contents, in place.

    tuned: what trains in a model, by name. streams: it is left on the CPU, to be streamed. base_dtype: the
    form in which the linears of its blocks are held. Raises UsageError for a layer that says nothing of how
    it is cut, FileError for values that are not finite in what any rank has read, PetuneError if placing
    changed what trains.
    """
    whole, contents = tuned(model), detach(model)
    shapes = {name: (value.shape, value.dtype) for name, value in whole.items()}
    aliases = _aliases(model, whole)
    vocabulary = _vocabulary(model, plan)
    owned = _stack(model, family, plan, recompute)
    if base_dtype is not None:
        quantise_blocks(model, family, base_dtype, mesh.device)
    light = is_light(weighed(model), plan)
    placed = _cut(model, family, plan, mesh, vocabulary)
    modules = cut_stages(model, family, plan, mesh.at) if family is not None and plan.pp > 1 else [model]
    read = partial(_read, modules, contents, placed, mesh, streams)
    bad = read() if plan.sharding is None else []
    for module in modules:
        if plan.sharding is None and not streams:  # else it moves unit by unit, or as the stream says
            module.to(mesh.device)
        if family is not None:
            cross(module, family, mesh)
            cross_experts(module, mesh)
        if vocabulary:
            hook_vocabulary(module, vocabulary, mesh.groups["tp"], mesh.at.tp)
    for module in modules if plan.sharding is not None else ():
        shard(module, plan, mesh, tuned(module).values(), light)
    bad += read() if plan.sharding is not None else []
    refuse_together(bad, "" if contents is None else contents.place)
    here = _tuned_here(modules, tuned, aliases, tuple(whole))
    names = tuple(whole)
    return Placement(modules, family, plan, mesh, names, shapes, here, owned, placed, vocabulary, contents)


def _read(
    modules: list[nn.Module], contents: Contents | None, placed: Placed, mesh: Mesh, streams: bool
) -> list[str]:
    """Give what is on the meta device memory where it rests, and this rank's part of what it holds; names of
    what is not finite there."""
    if contents is None:
        return []
    sharding = mesh.plan.sharding
    offloads = sharding is not None and sharding.offload

    def make(value: nn.Parameter) -> nn.Parameter:
        rests_here = streams or (offloads and is_sharded(value))
        return allocated(value, torch.device("cpu") if rests_here else mesh.device)

    with room_for(contents.place):
        made = allocate(modules, make)
        bad = contents.fill(parts_of(made, placed, mesh))
    if sharding is not None:
        for module in modules:
            settle(module, sharding, mesh.device)
    return bad


@dataclass(frozen=True)
class ShardPlace:
    """Where a rank's part of a tensor lies in the whole: a box from `start` on; or in the dim `dim` several,
    (first, length) each, of which the part begins `start[dim]` behind the beginning of the first."""

    start: list[int]
    dim: int = 0
    spans: Sequence[tuple[int, int]] = ()

    def boxes(self, part: Tensor) -> Iterator[tuple[Tensor, list[int]]]:
        """The boxes of a tensor that lies so, as views, each with where it begins in the whole."""
        if not self.spans:
            yield part, self.start
            return
        begin, passed = self.start[self.dim], 0
        end = begin + part.shape[self.dim]
        for first, length in self.spans:
            low, high = max(begin, passed), min(end, passed + length)
            if low < high:
                start = [*self.start[: self.dim], first + low - passed, *self.start[self.dim + 1 :]]
                yield part.detach().narrow(self.dim, low - begin, high - low), start
            passed += length


def parts_of(named: Iterable[tuple[str, Tensor]], placed: Placed, mesh: Mesh) -> Iterator[TensorPart]:
    """What this rank holds of tensors of the model, by name, as what is to be filled."""
    return (
        TensorPart(name, box, start)
        for name, value in named
        for box, start in place_of(name, value, placed, mesh).boxes(local(value))
    )


def place_of(name: str, value: Tensor, placed: Placed, mesh: Mesh) -> ShardPlace:
    """Where this rank's part of a tensor lies: cut over tp or ep, then sharded over dp."""
    start = [0] * value.dim()
    cut_by = placed.slices.get(name)
    found = ShardPlace(start)
    if cut_by is not None and cut_by.dim != "owner":
        spans = cut_by.spans(mesh.index(cut_by.axis))
        if cut_by.pieces:
            found = ShardPlace(start, cut_by.dim, spans)
        else:
            start[cut_by.dim] = spans[0][0]
    if start:
        start[0] += first_row(value)
    return found


def refuse_together(bad: list[str], place: str) -> None:
    """Raise FileError on every rank for parameters that any rank has found not to be finite, which all ranks
    call with their own."""
    if process_group.inside():
        told = process_group.gather(json.dumps(bad))
        bad = list(dict.fromkeys(name for text in told for name in json.loads(text)))
        if bad:
            process_group.read_by_all()
    refuse_not_finite(bad, place)


def _aliases(model: nn.Module, tuned: Mapping[str, nn.Parameter]) -> dict[str, str]:
    """Every name of a tuned tensor -> the one it goes by; a stage may keep only a tie's other end."""
    names = {id(value): name for name, value in tuned.items()}
    every = model.named_parameters(remove_duplicate=False)
    return {name: names[id(value)] for name, value in every if id(value) in names}


def _vocabulary(model: nn.Module, plan: ParallelPlan) -> tuple[int, ...]:
    """Rows of embedding and head per rank of the tp axis; empty where they are whole, which is said where the
    plan wants else."""
    if plan.cut is not None and plan.cut.vocabulary and (reason := refusal(model)) is not None:
        say(f"the vocabulary is not cut: {reason}")
    return rows_of_ranks(model, plan.cut)


def _stack(model: nn.Module, family: Family | None, plan: ParallelPlan, recompute: bool) -> bool:
    """Let stacks own the loop over blocks; whether they do."""
    cut_at_all = plan.cut is not None or plan.pp > 1 or plan.sharding is not None
    if family is None or not (cut_at_all or unownable(model) is None):
        if plan.world > 1 and isinstance(model, PreTrainedModel):
            attention.use(model, family)  # masks are drawn by index, which its own attention would not do
        return False
    recompute = _translated(model) or recompute
    attention.use(cast("PreTrainedModel", model), family)
    for stack in own_stacks(model, family).values():
        stack.recompute = recompute
    return True


def _translated(model: nn.Module) -> bool:
    """Whether Hugging Face's own checkpointing was on; the stacks recompute instead, as they know where in
    the batch they are."""
    # the second is the older transformers'
    names = ("is_activation_checkpointing", "is_gradient_checkpointing")
    if not getattr(model, next((name for name in names if hasattr(type(model), name)), ""), False):
        return False
    disable: Any = (
        getattr(model, "activation_checkpointing_disable", None) or model.gradient_checkpointing_disable
    )
    disable()
    return True


def _cut(
    model: nn.Module, family: Family | None, plan: ParallelPlan, mesh: Mesh, rows: tuple[int, ...]
) -> Placed:
    """Narrow what an axis cuts: linears and, by `rows`, the vocabulary over tp, experts over ep."""
    placed = Placed() if family is None else cut(model, family, plan, mesh.at)
    placed.slices |= cut_experts(model, plan, mesh.at)
    if rows:
        more = cut_vocabulary(model, rows, mesh.at.tp)
        placed.slices |= more.slices
        placed.partial |= more.partial
    return placed


def _tuned_here(
    modules: list[nn.Module], tuned: TunedOf, aliases: Mapping[str, str], names: tuple[str, ...]
) -> dict[str, nn.Parameter]:
    """This rank's tuned tensors by whole-model name. Raises PetuneError if placing changed what trains."""
    found = {aliases[name]: value for module in modules for name, value in tuned(module).items()}
    trains = {id(value) for module in modules for value in module.parameters() if value.requires_grad}
    if trains != {id(value) for value in found.values()} or not set(found) <= set(names):
        raise PetuneError("placing the model changed what trains; this is a fault of petune")
    return {name: found[name] for name in names if name in found}
