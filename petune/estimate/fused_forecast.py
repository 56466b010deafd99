"""What fused blocks would keep and how long a step would take, on a device that need not be here.

The forecast's model without weights goes through the fuse pass of a run, and the policy that a run asks is
asked here, with a run's budget: what is foretold is what a run would choose. It is for batches of the
greatest length; shorter ones get policies of their own. Ranks that share blocks, or follow one another in a
pipeline, are taken to be linked GPUs of one host, which have rooms for what they say to one another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from petune.errors import UsageError
from petune.estimate.footprint import Held, footprint, held_by, standing
from petune.estimate.forecast import PROCESS, Forecast, Rank, Sketch, placed
from petune.estimate.message_rooms import message_rooms
from petune.kernels.block.call import Spec
from petune.kernels.configs import Level, MemoryConfig, Rung
from petune.kernels.dispatch import refusal
from petune.kernels.fuse import fuse_stages, fused_blocks
from petune.kernels.memory.block_cost import rates_of
from petune.kernels.memory.block_step import GIB, Alike, BlockStep
from petune.kernels.memory.outside import once, resident_bytes, vocabulary_of
from petune.kernels.memory.policy import Policy, choose, levels_of
from petune.kernels.memory.policy_hook import (
    kinds_of,
    late_bytes,
    pinnable,
    rounded,
    shape_of,
    typical,
    usable,
)
from petune.kernels.memory.shape import BlockShape
from petune.log import lines_once
from petune.methods.configs import method_of
from petune.models.stack import Stack
from petune.parallel import ParallelPlan
from petune.parallel.fsdp import is_light, weighed
from petune.parallel.mesh import Coordinate
from petune.parallel.plan import in_flight, waiting
from petune.parallel.tensor.hooks import put_boundaries
from petune.parallel.tensor.shard_params import Placed
from petune.parallel.tensor.vocabulary import hook_vocabulary, rows_of_ranks
from petune.recipe import Recipe
from petune.run.streaming import refuse_unfused, streams

CARDS = {"H200": 139.8, "H100": 79.2, "A100-80": 79.2, "A100-40": 39.4}  # GiB of memory as CUDA counts it
# times a device's memory is taken to be free in its host, where neither the machine nor memory.host says
HOST = 2
FIRST = Coordinate()


@dataclass(frozen=True)
class Outlook:
    """A forecast and what fused blocks make of it. policies: of its ranks, in order; none where blocks would
    not be fused."""

    forecast: Forecast
    policies: tuple[Policy, ...]
    lines: tuple[str, ...]


def on_device(recipe: Recipe, name: str, memory: Sequence[int] | None) -> tuple[Recipe, Sequence[int]]:
    """The recipe on CUDA devices called `name`, and their memory in bytes: `memory` where it is given, else
    that of CARDS.

    Raises UsageError for a recipe that is for the CPU, and for a device whose memory nobody says.
    """
    if recipe.device == "cpu":
        remedy = "set device=cuda, or leave --device out"
        raise UsageError(
            "the recipe is for the CPU, and this is a CUDA device",
            where="--device",
            found=name,
            remedy=remedy,
        )
    if memory is None:
        memory = [int(gib * GIB) for card, gib in CARDS.items() if card.lower() == name.lower()]
    if not memory:
        remedy = "say it: --memory 24GiB"
        raise UsageError(
            "the memory of this device is not known",
            where="--device",
            expected=", ".join(CARDS),
            found=name,
            remedy=remedy,
        )
    return recipe.model_copy(update={"device": "cuda"}), memory


def outlook(found: Forecast, device: str | None = None) -> Outlook:
    """`found` with what fused blocks keep in the place of its estimate. device: the name of every rank's;
    None: this machine's.

    Raises UsageError where a run would refuse the recipe's settings of kernels and memory.
    """
    if device is None and found.drawn.device == "cuda" and torch.cuda.is_available():
        device = torch.cuda.get_device_name()
        if (reason := unable(found.drawn)) is not None:
            return Outlook(found, (), (f"blocks   unfused: {reason}",))
    sizes = [(rank.rows, rank.limit, replace(rank.at, dp=0)) for rank in found.ranks]
    drawn, plan = found.drawn, found.plan
    with lines_once():
        chosen = {one: policy_for(drawn, plan, one[0], device, *one[1:]) for one in dict.fromkeys(sizes)}
    policies = []
    for size in sizes:
        policy = chosen[size]
        if isinstance(policy, str):
            climbs = method_of(found.drawn.recipe.method).ladder and policy.startswith("fused")
            return Outlook(_climbing(found) if climbs else found, (), (f"blocks   {policy}",))
        policies.append(policy)
    policies = _agreed(policies, found.plan.tp * found.plan.ep)
    ranks = tuple(_kept(rank, policy) for rank, policy in zip(found.ranks, policies, strict=True))
    return Outlook(replace(found, ranks=ranks), tuple(policies), tuple(_lines(found, policies, str(device))))


def _climbing(found: Forecast) -> Forecast:
    """`found` with what fused levels of ladders keep in the place of its estimate."""
    drawn, plan = found.drawn, found.plan

    def climbing(rank: Rank) -> Rank:
        at = replace(rank.at, dp=0)
        models = _fused(drawn, plan, at, held_by(drawn.model, drawn.family, plan, at).modules)
        if isinstance(models, str):
            return rank
        for spec in _specs(models):
            spec.rung = Rung(_of_ladders(drawn.recipe))
        held = Held(tuple(models), Placed(), is_light(weighed(drawn.model), plan))
        memory = footprint(held, drawn.model, drawn.family, plan, rank.at, drawn.work)
        return replace(rank, memory=replace(rank.memory, activations=memory.activations))

    return replace(found, ranks=tuple(map(climbing, found.ranks)))


def _of_ladders(recipe: Recipe) -> Level:
    """What blocks of a ladder keep, until a level is computed again."""
    asked = recipe.memory.keep
    return "all" if asked == "auto" or recipe.gradient_checkpointing else asked


def _agreed(policies: Sequence[Policy], together: int) -> list[Policy]:
    """What ranks keep of which so many, one after the other, share their blocks."""
    groups = (policies[at : at + together] for at in range(0, len(policies), together))
    return [policy for own in groups for policy in _sharing(own)]


def _sharing(own: Sequence[Policy]) -> list[Policy]:
    """What ranks keep that share their blocks: the least of theirs."""
    least = [min(column) for column in zip(*map(levels_of, own), strict=True)]
    return [policy.agreed(lambda _: least) for policy in own]


def _kept(rank: Rank, policy: Policy) -> Rank:
    """A rank whose activations are all of the policy's peak but for weights, gradients and states."""
    stands = rank.memory.total - rank.memory.activations
    return replace(rank, memory=replace(rank.memory, activations=policy.peak - stands))


def _lines(found: Forecast, policies: Sequence[Policy], device: str) -> Iterator[str]:
    rates = "measured" if rates_of(device).measured else "assumed"
    yield f"blocks   fused on {device}, whose rates are {rates}"
    different = list(dict.fromkeys(policies))
    for policy in different:
        if len(different) > 1:
            ranks = [rank.rank for rank, own in zip(found.ranks, policies, strict=True) if own == policy]
            yield f"ranks    {', '.join(map(str, ranks))}"
        yield from policy.lines()
    rows = sum(rank.rows for rank in found.ranks if rank.at == replace(rank.at, tp=0, pp=0))
    tokens, pieces = rows * list(found.drawn.work.tokens.values())[-1], found.plan.microbatches
    seconds = pieces * max(policy.seconds for policy in policies) / (1 - found.bubble)
    roofline = pieces * max(policy.roofline for policy in policies)
    predicted = f"{tokens / seconds:,.0f} tokens/s predicted, {tokens / roofline:,.0f} at the roofline"
    yield f"speed    {predicted}; of the devices alone, for the longest rows"


# ---------------------------------------------------------------- the policy of a rank


def policy_for(
    drawn: Sketch,
    plan: ParallelPlan,
    rows: int,
    device: str | None,
    memory: int | None,
    at: Coordinate = FIRST,
) -> Policy | str:
    """What a run of this plan chooses for `rows` rows of the greatest length on a device of `memory` bytes;
    or, in words, why nothing.

    device: a name that tells its rates; None where there is no CUDA device. at: which blocks the device has,
    and which part of them. Under a pipeline seconds are of one piece. Raises UsageError where a run would.
    """
    if (reason := _unasked(drawn.recipe)) is not None:
        return f"unfused: {reason}"
    own = held_by(drawn.model, drawn.family, plan, at)
    stands = standing(own, plan).total
    fused = _fused(drawn, plan, at, own.modules)
    if isinstance(fused, str):
        return f"unfused: {fused}"
    if method_of(drawn.recipe.method).head_alone:
        return "fused: they keep nothing, as no gradient goes back through them"
    if method_of(drawn.recipe.method).ladder:
        again, keep = drawn.recipe.gradient_checkpointing, _of_ladders(drawn.recipe)
        kept = "levels are computed again" if again else keep
        return f"fused: the backbone's keep nothing, the ladder's {kept}"
    if device is None:
        return _without_device(drawn.recipe)
    if memory is None:
        return "fused, but the memory of the devices is not known: give --memory"
    recipe, specs = drawn.recipe, _specs(fused)
    alike = [spec for spec in specs if len(spec.program.steps) == len(specs[-1].program.steps)]
    config = replace(recipe.memory, keep="input") if recipe.gradient_checkpointing else recipe.memory
    # of all stacks, with blocks as those of the last one, which are no smaller
    longest, rows = max(drawn.work.tokens.values()), -(-rows // plan.microbatches)
    rates = rates_of(device)
    itemsize, passes = drawn.work.itemsize, in_flight(plan, at.pp, fused=True)
    shape = shape_of(typical(alike), drawn.work.dtype, rounded(longest, 128))
    tokens = rounded(rows * longest)
    fixed = resident_bytes(fused[0]) if streams(recipe) else stands
    assert drawn.family is not None
    sizes, stacks = drawn.family.shape(drawn.config), len(drawn.work.tokens)
    fixed += message_rooms(plan, sizes, tokens * sizes.width * itemsize, stacks)
    # rows that are no windows are padded, and then go at once
    halved = specs[0].overlapped and specs[0].unhalved(rows, {}) is None and recipe.data.chunk
    late = 0.0 if halved else waiting(plan, at.pp) * len(specs)
    fixed += late_bytes(late, specs, len(fused), shape, tokens)
    step = BlockStep(
        shape,
        len(specs),
        tokens,
        min(rounded(longest, 128), tokens),
        max(vocabulary_of(one) if hasattr(one, "lm_head") else 0 for one in fused),
        rates,
        fixed,
        drawn.work.streamed,
        passes if passes * len(fused) > 1 else 1,
        tuple(_kinds(drawn, fused, rows)),
        sum(once(one, rates, plan.microbatches) for one in fused),
    )
    budget = _budget(config, memory, fixed, plan.sharding is not None)
    try:
        return choose(step, config, budget, _host(config, memory, device))
    except UsageError as error:
        raise placed(error, recipe) from None


def _kinds(drawn: Sketch, fused: Sequence[nn.Module], rows: int) -> list[Alike]:
    """The blocks of all stacks, each over the tokens of its own, a decoder's beside those of the encoder."""
    dtype, found = drawn.work.dtype, list[Alike]()
    for stack in (one for model in fused for one in model.modules() if isinstance(one, Stack)):
        own, encoder = drawn.work.tokens[stack.name], drawn.work.tokens.get("encoder", 0)
        memory = (encoder / own, rounded(encoder, 128)) if encoder and stack.name != "encoder" else None
        specs = [block.spec for block in fused_blocks(stack)]
        found += kinds_of(specs, dtype, rounded(rows * own), rounded(own, 128), memory)
    return found


def block_shapes(drawn: Sketch, plan: ParallelPlan, held: Sequence[nn.Module]) -> list[BlockShape]:
    """Those of the blocks that a run on GPUs would fuse on the first rank of `plan`, in order; none where it
    would not fuse them all, and where they have no backward pass. held: that rank's modules, which are
    changed."""
    if drawn.device != "cuda" or method_of(drawn.recipe.method).still or unable(drawn) is not None:
        return []
    fused = _fused(drawn, plan, FIRST, held)
    if isinstance(fused, str):
        return []
    stacks = [stack for model in fused for stack in model.modules() if isinstance(stack, Stack)]
    specs = _specs(fused)
    if len(specs) < sum(len(stack.blocks) for stack in stacks):
        return []
    longest = max(drawn.work.tokens.values())
    return [shape_of(spec, drawn.work.dtype, longest) for spec in specs]


def unable(drawn: Sketch) -> str | None:
    """Why this machine's GPU cannot run fused blocks; None where it can, where there is none, and where the
    recipe asks for reference kernels."""
    if drawn.recipe.kernels == "reference" or not torch.cuda.is_available():
        return None
    return refusal(torch.device("cuda", torch.cuda.current_device()), torch.float32)


def _without_device(recipe: Recipe) -> str:
    auto = "refused" if streams(recipe) else "unfused"
    would = {"auto": auto, "reference": "fused, their memory not planned,", "triton": "refused"}[
        recipe.kernels
    ]
    return (
        f"{would} on a CPU with kernels: {recipe.kernels}; --device H200 tells what a run on one would keep"
        " and how fast it would be"
    )


def _budget(config: MemoryConfig, memory: int, fixed: int, sharded: bool) -> int:
    """Bytes a run may fill of a device that nobody else uses."""
    free = fixed + usable(sharded) * (memory - PROCESS["cuda"] - fixed)
    return int(free if config.budget is None else min(free, config.budget * GIB))


def _host(config: MemoryConfig, memory: int, device: str) -> int:
    """Bytes of host memory that may be pinned."""
    here = torch.cuda.is_available() and torch.cuda.get_device_name() == device
    return pinnable(config) if here or config.host is not None else HOST * memory


# ---------------------------------------------------------------- what would be fused


def _unasked(recipe: Recipe) -> str | None:
    """Why nobody fuses blocks, whatever they are; or None."""
    if recipe.kernels == "off" or recipe.compile:
        return "kernels: off" if recipe.kernels == "off" else "compile: true"
    return None


def _fused(
    drawn: Sketch, plan: ParallelPlan, at: Coordinate, models: Sequence[nn.Module]
) -> Sequence[nn.Module] | str:
    """What a rank holds, `models`, as a run would fuse it, or why it would not. Raises UsageError where the
    recipe asks by name for what cannot be."""
    recipe = drawn.recipe
    if (reason := _unasked(recipe)) is not None:
        return reason
    if drawn.family is not None and plan.cut is not None:
        rows = rows_of_ranks(drawn.model, plan.cut)
        for own in models:
            put_boundaries(own, drawn.family, plan.cut, at.tp)
            hook_vocabulary(own, rows, None, at.tp)
    try:
        done = fuse_stages(models, drawn.family, "reference", recipe.memory)
    except UsageError as error:
        if recipe.kernels != "auto" or streams(recipe):
            raise placed(error, recipe) from None
        return str(error.problems[0].found)
    if not done.blocks:
        return "; ".join(done.reasons)
    declined = _declined(_specs(models)[0], drawn)
    refuse_unfused(recipe, declined or "")
    return declined or models


def _specs(models: Sequence[nn.Module]) -> list[Spec]:
    return [block.spec for model in models for block in fused_blocks(model)]


def _declined(spec: Spec, drawn: Sketch) -> str | None:
    """Why fused blocks hand all calls of this training to what they were before, or None."""
    size = shape_of(spec).itemsize
    if size != drawn.work.itemsize and not spec.casts:
        return f"weights have {size} bytes, and autocast computes in {drawn.work.itemsize}"
    return None
