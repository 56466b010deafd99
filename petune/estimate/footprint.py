"""What one rank of a plan holds in memory, from a tuned model on the meta device: no weights are needed.

Weights, gradients and optimizer state follow from the tensors that are left once `cut`, `cut_vocabulary` and
`cut_stages` have acted, as they do in a run; activations are the estimate of petune.estimate.activations. Not
counted: single temporary tensors, and what the allocator wastes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from petune.estimate.activations import Extent, Saved, inputs_of, saved_by
from petune.kernels.block.module import FusedBlock
from petune.kernels.memory.buffers import STREAMED_BLOCKS, kept_bytes, states_bytes
from petune.kernels.memory.policy_hook import shape_of
from petune.models.copied import copied
from petune.models.spec import Family, StackName, StackRule
from petune.models.stack import Stack, own_stacks
from petune.parallel.fsdp import gathered, is_light, weighed, whole_where_light
from petune.parallel.mesh import Coordinate
from petune.parallel.pipeline.schedule import cut_stages
from petune.parallel.plan import Cut, ParallelPlan, apportion, in_flight
from petune.parallel.spread import cut_experts
from petune.parallel.tensor.shard_params import Placed, cut
from petune.parallel.tensor.vocabulary import cut_vocabulary, rows_of_ranks

MOMENTS = 2 * 4  # AdamW keeps two float32 numbers for each one that trains


@dataclass(frozen=True)
class ForwardPass:
    """A forward pass of all replicas: rows, tokens of each stack, bytes of an activation, dropout on
    probabilities and on hidden states, whether activations are computed again, whether the output is over the
    vocabulary, whether blocks stream from host memory: None for no, else whether their states are float32
    whatever the weights are; whether they leave memory once an activation cache knows all rows; whether it is
    one of GPUs."""

    rows: int
    tokens: Mapping[StackName, int]
    itemsize: int
    dropouts: tuple[float, float] = (0.0, 0.0)
    recompute: bool = False
    vocabulary_head: bool = False
    streamed: bool | None = None
    leaves: bool = False
    gpu: bool = True

    @property
    def dtype(self) -> torch.dtype:
        """Of an activation."""
        return torch.bfloat16 if self.itemsize == 2 else torch.float32


@dataclass(frozen=True)
class Footprint:
    """Bytes of one rank on its device. gathered: what FSDP puts together while a block runs; at_rest: what
    lies in host memory; leaving: of `frozen`, what is there until an activation cache knows all rows."""

    frozen: int = 0
    tuned: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    gathered: int = 0
    at_rest: int = 0
    leaving: int = 0

    @property
    def total(self) -> int:
        """Everything on the device."""
        return self.frozen + self.tuned + self.gradients + self.optimizer + self.activations + self.gathered


@dataclass(frozen=True)
class Held:
    """A rank's part of a model: its modules (the stages of a pipeline, else one), how their tensors lie
    across ranks, and whether a sharding plan leaves whole what trains (`is_light`)."""

    modules: tuple[nn.Module, ...]
    placed: Placed
    light: bool = False

    def tensors(self) -> list[Tensor]:
        """Every parameter and buffer, tied ones once."""
        return list(
            _once(value for module in self.modules for value in (*module.parameters(), *module.buffers()))
        )


def held_by(model: nn.Module, family: Family | None, plan: ParallelPlan, at: Coordinate) -> Held:
    """The part of `model`, which stays as it is, that the rank `at` holds. Raises UsageError where a run
    would."""
    own = copied(model)
    if family is None:
        return Held((own,), Placed(), is_light(weighed(model), plan))
    own_stacks(own, family)
    placed = cut(own, family, plan, at)
    placed.slices |= cut_experts(own, plan, at)
    if rows := rows_of_ranks(own, plan.cut):
        narrowed = cut_vocabulary(own, rows, at.tp)
        placed.slices |= narrowed.slices
        placed.partial |= narrowed.partial
    modules = tuple(cut_stages(own, family, plan, at)) if plan.pp > 1 else (own,)
    return Held(modules, placed, is_light(weighed(model), plan))


def footprint(
    held: Held, model: nn.Module, family: Family | None, plan: ParallelPlan, at: Coordinate, work: ForwardPass
) -> Footprint:
    """What the rank `at` needs for a forward pass `work` of all replicas; `model` is the whole one, `held`
    the rank's part of it."""
    activations = _activations(held, model, family, plan, at, work)
    activations += cast_bytes(held.tensors(), work.itemsize)
    blocks = (value for block in held_blocks(held) for value in block.parameters() if not value.requires_grad)
    leaving = _bytes(_once(blocks)) if work.leaves else 0
    return replace(standing(held, plan, work.streamed), activations=activations, leaving=leaving)


def standing(held: Held, plan: ParallelPlan, streamed: bool | None = None) -> Footprint:
    """What a rank needs whatever it computes: `footprint` without activations. streamed: see ForwardPass."""
    own = held.tensors()
    if plan.sharding is not None:
        return _sharded(held, own, plan)
    if streamed is not None:
        return _streamed(held, own, streamed)
    tuned = _bytes(value for value in own if value.requires_grad)
    return Footprint(
        frozen=_bytes(own) - tuned,
        tuned=tuned,
        gradients=tuned,
        optimizer=MOMENTS * sum(value.numel() for value in own if value.requires_grad),
    )


def _streamed(held: Held, own: list[Tensor], wide: bool) -> Footprint:
    """The same where blocks rest in host memory, with their states and those of all else; STREAMED_BLOCKS of
    the largest are here."""
    blocks = [list(_once(block.parameters())) for block in held_blocks(held)]
    inside = {id(value) for block in blocks for value in block}
    outside = [value for value in own if id(value) not in inside]
    trained = [value for value in outside if value.requires_grad]
    largest = max(blocks, key=_bytes, default=[])
    here, tuned = STREAMED_BLOCKS * _bytes(largest), _bytes(trained)
    return Footprint(
        frozen=_bytes(outside) - tuned,
        tuned=tuned + here,
        gradients=tuned + here,
        optimizer=STREAMED_BLOCKS * _states(largest, wide),
        at_rest=sum(_bytes(block) + _states(block, wide) for block in blocks) + _states(trained, wide),
    )


def _bytes(values: Iterable[Tensor]) -> int:
    return sum(value.nbytes for value in values)


def _states(values: Iterable[Tensor], wide: bool) -> int:
    return sum(value.numel() * states_bytes(value.element_size(), wide) for value in values)


def _sharded(held: Held, own: list[Tensor], plan: ParallelPlan) -> Footprint:
    """The same over shards."""
    sharding = plan.sharding
    assert sharding is not None
    shards = plan.dp // sharding.replicas
    cuts = {
        id(value)
        for value in own
        if value.dim()
        and isinstance(value, nn.Parameter)
        and (value.requires_grad or sharding.frozen)
        and not (held.light and whole_where_light(value))
    }

    def bytes_of(value: Tensor) -> int:
        return -(-value.nbytes // shards) if id(value) in cuts else value.nbytes

    tuned = sum(bytes_of(value) for value in own if value.requires_grad)
    frozen = sum(map(bytes_of, own)) - tuned
    moments = sum(MOMENTS * bytes_of(value) // value.element_size() for value in own if value.requires_grad)
    blocks = [
        [value for value in _once(block.parameters()) if id(value) in cuts] for block in held_blocks(held)
    ]
    inside = {id(value) for block in blocks for value in block}
    rest = [value for value in own if id(value) in cuts and id(value) not in inside]
    together = gathered(blocks, rest, sharding)
    if not sharding.offload:
        return Footprint(frozen, tuned, tuned, moments, gathered=together)
    # these have no shards that could rest elsewhere
    whole = sum(value.nbytes for value in own if id(value) not in cuts)
    return Footprint(frozen=whole, gathered=together, at_rest=frozen - whole + 2 * tuned + moments)


def _activations(
    held: Held, model: nn.Module, family: Family | None, plan: ParallelPlan, at: Coordinate, work: ForwardPass
) -> int:
    """Bytes kept for the backward pass, for all micro-batches that are on their way at once; 0 for a model
    without a table."""
    if family is None:
        return 0
    piece = -(-apportion(work.rows, plan.shares)[at.dp] // plan.microbatches)
    first = first_trained(model, family)
    kept, largest = 0.0, 0.0
    for module in held.modules:
        for stack in (part for part in module.modules() if isinstance(part, Stack)):
            blocks = [
                one.of(piece)
                for one in saved_in(stack, cast("Any", model).config, family, plan, at, work, first)
            ]
            if work.recompute and blocks:
                width = family.shape(family.part(cast("Any", model).config, stack.name)).width
                kept += (
                    len(blocks)
                    * inputs_of(width, plan.cut, _extent(stack.name, plan, at, work, 1), work.itemsize)
                    * piece
                )
                largest = max(largest, *blocks)
            else:
                kept += sum(blocks)
    logits = 0.0
    if work.vocabulary_head and at.pp == plan.pp - 1:
        head = cast("Any", held.modules[-1]).get_output_embeddings()
        if head is not None:  # logits, the same in float32, and their gradient
            logits = piece * list(work.tokens.values())[-1] * head.weight.shape[0] * (work.itemsize + 8)
    return int(kept * in_flight(plan, at.pp) + largest + logits)


def saved_in(
    stack: Stack,
    config: Any,
    family: Family,
    plan: ParallelPlan,
    at: Coordinate,
    work: ForwardPass,
    first: tuple[int, int] | None,
) -> Iterator[Saved]:
    """What each block that takes part in the backward pass saves, the ladder's levels included."""
    order = list(family.stacks).index(stack.name)
    shape = family.shape(family.part(config, stack.name))
    own_heads = plan.cut.heads[at.tp] if plan.cut is not None and plan.cut.heads else shape.heads
    ladder = cast("Any", stack._modules.get("side"))
    beside = _beside(plan.cut)
    for index, block in stack.numbered:
        if first is not None and (order, index) >= first:
            yield saved_by(
                block,
                stack.rule,
                plan.cut,
                _extent(stack.name, plan, at, work, own_heads),
                work.itemsize,
                work.dropouts,
            )
        if ladder is not None and ladder.has(index):
            extent = _extent(stack.name, plan, at, work, shape.heads)
            yield _saved_at(ladder.blocks[index], ladder.down[index + 1], stack.rule, beside, extent, work)


def _saved_at(
    block: nn.Module, down: nn.Module, rule: StackRule, beside: Cut | None, extent: Extent, work: ForwardPass
) -> Saved:
    """What a level of a ladder saves: what it goes down from, the two states that are mixed, where it reads
    the block beside it, and what its block saves, or keeps where it is fused."""
    tokens = extent.whole if beside is None else extent.own
    wide, narrow = (down.in_features, down.out_features) if isinstance(down, nn.Linear) else (0, 0)
    if isinstance(block, FusedBlock):
        shape = shape_of(block.spec, work.dtype, extent.whole)
        mixed = (wide + 2 * narrow) * work.itemsize
        return Saved(tokens * (mixed + kept_bytes(shape, block.spec.rung.keep)))
    mixed = wide * work.itemsize + 2 * narrow * 4
    return Saved(tokens * mixed) + saved_by(block, rule, beside, extent, work.itemsize, work.dropouts)


def _beside(cut: Cut | None) -> Cut | None:
    """How a ladder is cut: never by heads, and by sequence where the connection is."""
    if cut is None or cut.connection == "whole":
        return None
    return replace(cut, attention="sequence", mlp="sequence")


def _extent(stack: StackName, plan: ParallelPlan, at: Coordinate, work: ForwardPass, heads: int) -> Extent:
    whole = work.tokens[stack]
    by_sequence = plan.cut is not None and plan.cut.connection == "sequence"
    own = apportion(whole, plan.cut.sequence)[at.tp] if plan.cut is not None and by_sequence else whole
    across = work.tokens.get("encoder", 0)
    return Extent(whole, own, across, heads, routed(plan, at, work.rows), work.gpu)


def routed(plan: ParallelPlan, at: Coordinate, rows: int) -> float:
    """Copies of tokens that the experts of a rank see, for each that its own tokens make, if all experts are
    chosen as often; rows: of a pass of all replicas."""
    if plan.ep == 1:
        return 1.0
    own, first = apportion(rows, plan.shares), at.dp - at.ep
    together = sum(own[first : first + plan.ep])
    return plan.experts[at.ep] / sum(plan.experts) * together / max(1, own[at.dp])


def first_trained(model: nn.Module, family: Family) -> tuple[int, int] | None:
    """The place (stack, block) of the first block the backward pass goes through; None when it reaches
    none."""
    embeddings = cast("Any", model).get_input_embeddings()
    if any(value.requires_grad for value in embeddings.parameters()):
        return (0, 0)
    for name, stack in own_stacks(model, family).items():
        order = list(family.stacks).index(name)
        for index, block in stack.numbered:
            if any(value.requires_grad for value in block.parameters()):
                return (order, index)
    return None


def cast_bytes(own: Iterable[Tensor], itemsize: int) -> int:
    """Autocast keeps a copy of every float32 matrix that trains, in its own dtype, until the forward pass is
    over."""
    return sum(
        value.numel() * itemsize
        for value in own
        if value.requires_grad and value.dim() == 2 and value.element_size() > itemsize
    )


def held_blocks(held: Held) -> list[nn.Module]:
    """The blocks of every stack that a rank holds."""
    return [
        block
        for module in held.modules
        for part in module.modules()
        if isinstance(part, Stack)
        for block in part.blocks
    ]


def _once(values: Iterable[Tensor]) -> Iterator[Tensor]:
    yield from {id(value): value for value in values}.values()
