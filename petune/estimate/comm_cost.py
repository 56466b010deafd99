"""What a plan sends: the transitions between layouts, block by block, and how long a pipeline stands still.

Sizes are bytes that one rank sends for a forward pass of one replica, by the volumes of ring algorithms on n
ranks, f = (n - 1) / n: an all-reduce of M bytes sends 2 f M, an all-gather or a reduce-scatter of M in all f
M, an all-to-all f M / n. Uneven shares are padded to the largest, so f M becomes (n - 1) times the largest
share. M is T = rows * tokens * width * bytes for hidden states.

        region      layout     connection   forward                     backward
        any         heads      whole        all-reduce                  all-reduce
        any         heads      sequence     all-gather, reduce-scatter  reduce-scatter, all-gather
        attention   sequence   sequence     keys and values: all-gather; all-to-all twice; or a ring    the
                    adjoint
        mlp         sequence   sequence     nothing                     nothing
        experts     on several ranks        all-to-all twice            all-to-all twice

Where nothing trains below, nothing is sent backward: not below the lowest block that trains, and nowhere in a
backbone beside a ladder.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from petune.models.experts import reached
from petune.models.spec import Family, Region, Shape, StackName
from petune.parallel.plan import Cut, ParallelPlan

SUM = "all-reduce"
# When an exchange happens. Of a region: as it is entered, as it is left, at one end forward and at the other
# backward, or inside; then of a stack, of all stacks, between stages, and of a whole step.
When = (
    Literal["enter", "leave", "ends", "within"]
    | Literal["entry", "exit", "states"]
    | Literal["vocabulary", "stage", "weights", "gradients"]
)


@dataclass(frozen=True)
class Transition:
    """One exchange: where it happens and how many times per forward pass, and what is sent each time, forward
    and backward.

    operations: as `all-gather / reduce-scatter`, forward / backward. Bytes are per rank that takes part; 0
    where nothing is sent.
    """

    where: str
    operations: str
    times: int
    forward: int
    backward: int
    when: When = field(compare=False)


@dataclass(frozen=True)
class Load:
    """The forward pass of one replica: rows, tokens of each stack, bytes of an activation, and whether
    gradients flow through blocks."""

    rows: int
    tokens: Mapping[StackName, int]
    itemsize: int
    backward: bool = True

    def hidden(self, stack: StackName, width: int) -> int:
        """Bytes of hidden states of a stack, whole."""
        return self.rows * self.tokens[stack] * width * self.itemsize

    def back(self, size: int) -> int:
        """Bytes of `size` that are sent on the way back."""
        return size * self.backward


def transitions(
    plan: ParallelPlan, family: Family, shape: Shape, depth: Mapping[StackName, int], load: Load
) -> tuple[Transition, ...]:
    """Everything blocks and stages exchange in a forward pass and its backward pass, all micro-batches
    together.

    What replicas and shards exchange depends on what trains: see petune.estimate.forecast.
    """
    found: list[Transition] = []
    stacks = [stack for stack in family.stacks if depth.get(stack)]
    if plan.cut is not None:
        for stack in stacks:
            found += _of_stack(
                plan.cut,
                plan.tp,
                family,
                stack,
                shape,
                depth,
                load,
                crossed=stack == "decoder" and "encoder" in stacks,
            )
            found += _around(plan, stack, load, shape)
        if plan.cut.vocabulary:
            size = summed_over(plan.tp, load.hidden(stacks[-1], shape.width))
            found.append(
                Transition("vocabulary", "all-reduce / all-reduce", 1, size, load.back(size), "vocabulary")
            )
    found += _between_stages(plan, family, shape, load)
    return tuple(one for one in found if one.forward or one.backward)


def _of_stack(
    cut: Cut,
    ranks: int,
    family: Family,
    stack: StackName,
    shape: Shape,
    depth: Mapping[StackName, int],
    load: Load,
    *,
    crossed: bool,
) -> Iterator[Transition]:
    hidden = load.hidden(stack, shape.width)
    gathered, summed = _gathered(cut.sequence or (1,) * ranks, hidden), summed_over(ranks, hidden)
    for where, region in regions_of(family, stack, crossed=crossed):
        if cut.layout(region.kind) == "whole":
            continue
        times = depth[stack] - shape.mixers * (region.kind == "attention")
        if cut.layout(region.kind) == "sequence":
            yield from _keys_and_values(cut, ranks, region, where, shape, times, stack, load)
        elif cut.connection == "whole":
            yield Transition(where, "all-reduce / all-reduce", times, summed, load.back(summed), "ends")
        else:
            sizes = times, gathered, load.back(gathered)
            yield Transition(where, "all-gather / reduce-scatter", *sizes, "enter")
            yield Transition(where, "reduce-scatter / all-gather", *sizes, "leave")
    if crossed:  # encoder states enter the decoder once, and every rank's share of their gradient is summed
        states = load.back(summed_over(ranks, load.hidden("encoder", shape.width)))
        yield Transition("decoder, encoder states", "nothing / all-reduce", 1, 0, states, "states")


def of_experts(
    plan: ParallelPlan, mixtures: int, chosen: int, rows: Sequence[int], shape: Shape, load: Load
) -> Iterator[Transition]:
    """Tokens to the ranks of their experts and back, each once to a rank, from the rank that sends most, if
    all experts of so many mixtures are chosen as often, `chosen` a token. rows: of each replica."""
    if plan.ep == 1:
        return
    each = load.tokens["decoder"] * shape.width * load.itemsize
    parts, most = reached(plan.experts, chosen), 0.0
    for first in range(0, plan.dp, plan.ep):  # own tokens that leave, and others' that go back
        group = rows[first : first + plan.ep]
        sent = (
            own * (sum(parts) - part) + (sum(group) - own) * part
            for own, part in zip(group, parts, strict=True)
        )
        most = max(most, *sent)
    size = int(most * each)
    yield Transition("decoder experts", "all-to-all / all-to-all", mixtures, size, load.back(size), "within")


def regions_of(family: Family, stack: StackName, *, crossed: bool) -> Iterator[tuple[str, Region]]:
    """The regions of a stack's blocks in the order in which a block runs them, each with its name in a
    forecast. crossed: whether there is an encoder to attend to."""
    for region in family.stacks[stack].regions:
        if crossed or not region.cross:
            yield f"{stack} {'cross-attention' if region.cross else region.kind}", region


def _around(plan: ParallelPlan, stack: StackName, load: Load, shape: Shape) -> Iterator[Transition]:
    """Where a stack begins or comes from another stage each rank takes its tokens; where it ends or goes on
    they are put together."""
    if plan.cut is None or plan.cut.connection == "whole":
        return
    times = sum(stack in stage.blocks for stage in plan.stages) or 1
    size = _gathered(plan.cut.sequence, load.hidden(stack, shape.width))
    yield Transition(f"{stack} entry", "slice / all-gather", times, 0, load.back(size), "entry")
    yield Transition(f"{stack} exit", "all-gather / slice", times, size, 0, "exit")


def _keys_and_values(
    cut: Cut, ranks: int, region: Region, where: str, shape: Shape, times: int, stack: StackName, load: Load
) -> Iterator[Transition]:
    if region.kind != "attention" or region.cross:  # across, every rank has all encoder states
        return
    queries, keys = (
        load.hidden(stack, shape.heads * shape.head_dim),
        load.hidden(stack, shape.kv_heads * shape.head_dim),
    )
    if cut.exchange == "ulysses":
        size = (2 * queries + 2 * keys) * (ranks - 1) // ranks**2
        yield Transition(where, "all-to-all / all-to-all", times, size, load.back(size), "within")
        return
    size = _gathered(cut.sequence, 2 * keys)
    if cut.exchange == "ring":  # backward, keys and values go round again, and their gradients with them
        yield Transition(where, "ring / ring", times, size, load.back(2 * size), "within")
        return
    yield Transition(where, "all-gather / reduce-scatter", times, size, load.back(size), "within")


def _between_stages(plan: ParallelPlan, family: Family, shape: Shape, load: Load) -> Iterator[Transition]:
    """Hidden states from stage to stage; into a decoder's stages also the encoder's, and T5's position
    bias."""
    for index, (before, after) in enumerate(zip(plan.stages, plan.stages[1:], strict=False)):
        on = [stack for stack in family.stacks if stack in before.blocks and stack in after.blocks]
        size = sum(load.hidden(stack, shape.width) for stack in on)
        if family.kind == "encoder-decoder" and "encoder" not in on:
            size += load.hidden("encoder", shape.width)
        back = size
        for stack in on:
            if family.stacks[stack].bias:
                size += plan.microbatches * shape.heads * load.tokens[stack] ** 2 * load.itemsize
        yield Transition(f"stage {index} to {index + 1}", "send / send", 1, size, load.back(back), "stage")


def _gathered(shares: Sequence[int], size: int) -> int:
    """Bytes a rank sends to gather or reduce-scatter what is `size` in all, cut by `shares` and padded to the
    largest."""
    return (len(shares) - 1) * size * max(shares) // sum(shares)


def summed_over(ranks: int, size: int) -> int:
    """Bytes a rank sends to all-reduce tensors of `size` bytes."""
    return 2 * size * (ranks - 1) // ranks


def messages(operation: str, ranks: int) -> int:
    """Messages one after the other of a collective in a ring."""
    return 2 * (ranks - 1) if operation == SUM else ranks - 1


def of_gradients(where: str, ranks: int, size: int) -> Transition:
    """The sum over `ranks` of gradients of `size` bytes, once a step."""
    sent = summed_over(ranks, size)
    return Transition(f"gradients over {where}, once a step", "- / all-reduce", 1, 0, sent, "gradients")


# ---------------------------------------------------------------- pipelines


def bubble(plan: ParallelPlan, trained: float = 0.0) -> float:
    """The part of a step in which a rank of a pipeline waits, if all stages are equal: (p - 1) / (v m + p -
    1) with v stages on a rank.

    For zero-bubble the passes for weights fill some of it (ZB-H1 of Qi et al. 2024, arXiv:2401.10241): with
    passes of one unit forward, one for inputs and `trained` for weights, (p - 1)(2 - trained) instead of (p -
    1)(2 + trained). A frozen base leaves nothing to fill with.
    """
    if plan.pp == 1:
        return 0.0
    ramp = (plan.pp - 1) * plan.pp / len(plan.stages)
    if plan.schedule == "zero-bubble":
        ramp *= (2 - trained) / (2 + trained)
    return ramp / (plan.microbatches + ramp)
