"""What a recipe would cost, before a weight is fetched: the plan, the memory of every rank, what is sent, how
long ranks stand still.

Only the model's config is read (and the data's first rows where the recipe leaves the task open). The model
is built and tuned on the meta device and cut as a run would cut it, so weights, gradients and optimizer state
are exact; activations are an estimate for rows of the greatest length, see petune.estimate.activations, and a
run's peak lies above it by temporary tensors and what the allocator wastes. They are those of the model's own
blocks; petune.estimate.fused_forecast puts in what fused ones keep.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import nn

from petune.errors import MachineError, Problem, UsageError
from petune.estimate.comm_cost import (
    Load,
    Transition,
    bubble,
    of_experts,
    of_gradients,
    summed_over,
    transitions,
)
from petune.estimate.footprint import (
    Footprint,
    ForwardPass,
    Held,
    first_trained,
    footprint,
    held_blocks,
    held_by,
)
from petune.log import human
from petune.methods import count_parameters, describe, tune, tuned_parameters
from petune.methods.configs import method_of
from petune.methods.stack_levels import Stored, stack_bytes
from petune.methods.targets import head_modules
from petune.models import FAMILIES
from petune.models.experts import is_experts
from petune.models.loading import Head, kind_of, outline, packs, quiet, read_config
from petune.models.multimodal import settle_ties_here, whole_at
from petune.models.quantise import quantise_blocks
from petune.models.source import resolve_model
from petune.models.spec import Family, StackName
from petune.models.stack import own_stacks, stacks_in
from petune.parallel import ParallelConfig, ParallelPlan, make_plan
from petune.parallel import describe as describe_plan
from petune.parallel.fsdp import whole_where_light
from petune.parallel.mesh import Coordinate, coordinate
from petune.parallel.plan import apportion, attention_dropout, slow_columns
from petune.recipe import Recipe
from petune.run.build import positions_of
from petune.run.setup import blocks_of, experts_of
from petune.run.streaming import refuse_unstreamable, streams
from petune.tasks import TASKS, check_fit, detect_format, infer_task
from petune.tasks.configs import DEFAULT_MAX_LENGTH

# bytes a process needs by itself: the interpreter with torch; CUDA's context and workspaces
PROCESS = {"cpu": 2**28, "cuda": 2**30}
# what configs call the number of blocks of a stack
_DEPTHS = ("num_hidden_layers", "encoder_layers", "decoder_layers", "num_layers", "num_decoder_layers")


@dataclass(frozen=True)
class Sketch:
    """A recipe's tuned model without weights, and the forward pass it means."""

    recipe: Recipe
    model: nn.Module
    config: Any
    family: Family | None
    device: str
    work: ForwardPass
    note: str
    classes: int | None = None  # that are counted with, where a run asks its rows


@dataclass(frozen=True)
class Rank:
    """One rank of a forecast. blocks: by stack, [first, end) of each stretch. limit: bytes of its device,
    None where not known. experts: from the first to the last, None where they are not cut. room: share of
    what is left that rows of an activation cache may take."""

    rank: int
    at: Coordinate
    blocks: str
    heads: int | None
    columns: int | None
    experts: str | None
    tokens: int
    rows: int
    memory: Footprint
    process: int
    limit: int | None
    room: float = 0.0

    @property
    def held(self) -> int:
        """The most that rows of an activation cache take of what is left; 0 where that is not known."""
        left = 0 if self.limit is None else self.limit - self.total
        return int(self.room * max(0, left))

    @property
    def total(self) -> int:
        """Bytes in all, without rows of a cache, which take what is left."""
        return self.memory.total + self.process

    @property
    def fits(self) -> bool:
        """Whether the device has as much, as far as is known."""
        return self.limit is None or self.total <= self.limit


@dataclass(frozen=True)
class Forecast:
    """A plan with its price. drawn: what it is the price of. knobs: what would lower the memory of the
    fullest rank, with the bytes saved, best first."""

    drawn: Sketch
    facts: tuple[str, ...]
    plan: ParallelPlan
    ranks: tuple[Rank, ...]
    transitions: tuple[Transition, ...]
    bubble: float
    knobs: tuple[tuple[str, int], ...]

    def check(self) -> None:
        """Raise MachineError when a rank does not fit its device, with the numbers and what would help."""
        full = [rank for rank in self.ranks if not rank.fits]
        if not full:
            return
        remedy = "; ".join(f"{text} saves {human(saved)}" for text, saved in self.knobs) or None
        problems = [
            Problem(
                f"rank {rank.rank} does not fit its device",
                expected=f"at most {human(cast('int', rank.limit))}",
                found=_found(rank),
            )
            for rank in full[:4]
        ]
        problems[-1] = replace(problems[-1], remedy=remedy)
        more = [Problem(f"nor do {len(full) - 4} more ranks")] if len(full) > 4 else []
        raise MachineError([*problems, *more])


def _found(rank: Rank) -> str:
    memory = rank.memory
    parts = {
        "frozen": memory.frozen,
        "tuned": memory.tuned,
        "gradients": memory.gradients,
        "optimizer": memory.optimizer,
        "activations": memory.activations,
        "gathered": memory.gathered,
        "the process": rank.process,
    }
    return f"{human(rank.total)}: " + ", ".join(
        f"{name} {human(size)}" for name, size in parts.items() if size
    )


# ---------------------------------------------------------------- a model without weights


def sketch(recipe: Recipe, blocks: int | None = None, device: str = "meta") -> Sketch:
    """The tuned model of a recipe on the meta device, or on another, where its weights are drawn. Raises what
    `prepare` and `tune` raise for a recipe that cannot be.

    blocks: of each stack, at the most; None for all.
    """
    source = resolve_model(recipe.model, recipe.folder)
    config = read_config(source)
    if (holder := whole_at(source)) is not None:
        settle_ties_here(holder, config)
    kind, family = kind_of(config), FAMILIES.get(config.model_type)
    config = config if blocks is None else _shallow(config, family, blocks)
    task = TASKS[recipe.task or infer_task(detect_format(recipe.data, recipe.folder), kind)]
    check_fit(task.name, kind, recipe.data.packing, packs(config))
    cuda = recipe.device == "cuda" or (recipe.device == "auto" and torch.cuda.is_available())
    bf16 = recipe.dtype == "bf16" or (recipe.dtype == "auto" and cuda)
    refuse_unstreamable(recipe, torch.bfloat16 if bf16 else torch.float32)
    whole = method_of(recipe.method).trains_base and not streams(recipe)
    dtype = torch.bfloat16 if bf16 and not whole else torch.float32
    model: nn.Module = outline(source, config, cast("Head", task.head), dtype, device)
    with torch.device(device), quiet():
        for name in head_modules(model, family, "auto"):
            model.get_submodule(name).float()
        tune(model, recipe.method)
        for parameter in () if streams(recipe) else tuned_parameters(model).values():
            parameter.data = parameter.data.float()
        if recipe.base_dtype is not None:
            try:
                quantise_blocks(model, family, recipe.base_dtype)
            except UsageError as error:
                raise placed(error, recipe) from None
    work = ForwardPass(
        rows=min(recipe.batch_size, recipe.embed.cached or recipe.batch_size) * task.texts,
        tokens=_tokens(recipe, config, family),
        itemsize=2 if bf16 else 4,
        dropouts=_dropouts(
            config,
            open_probabilities=not cuda or any(name not in ("dp", "pp") for name in recipe.parallel.axes),
        ),
        recompute=recipe.gradient_checkpointing,
        vocabulary_head=task.over_vocabulary,
        streamed=recipe.memory.stream == "fp32" if streams(recipe) else None,
        # what is read whole is not read again
        leaves=bool(recipe.cache) and not (recipe.init_adapter or recipe.method.reads_weights),
        gpu=cuda,
    )
    classes = config.num_labels if task.names_classes else None
    note = source.note if holder is None else f"{source.note}, its text model (of a {holder.kind})"
    return Sketch(recipe, model, config, family, "cuda" if cuda else "cpu", work, note, classes)


def _classes(drawn: Sketch) -> list[str]:
    what = "as the model's config says; a run has as many as its rows name, which are not read"
    return [] if drawn.classes is None else [f"classes  {drawn.classes}, {what}"]


def placed(error: UsageError, recipe: Recipe) -> UsageError:
    """The same, where the recipe has the key it is about."""
    keys = [one.where or "memory" for one in error.problems]
    return UsageError(
        [
            replace(one, what=f"{key}: {one.what}", where=recipe.where(key))
            for key, one in zip(keys, error.problems, strict=True)
        ]
    )


def _shallow(config: Any, family: Family | None, blocks: int) -> Any:
    """A copy of a model's config with so many blocks in each stack, at the most."""
    found = copy.deepcopy(config)
    for part in [found] if family is None else [found, *(family.part(found, one) for one in family.stacks)]:
        for name in _DEPTHS:
            if isinstance(depth := getattr(part, name, None), int):
                setattr(part, name, min(depth, blocks))
        if isinstance(kinds := getattr(part, "layer_types", None), list):
            part.layer_types = kinds[:blocks]
    return found


def _tokens(recipe: Recipe, config: Any, family: Family | None) -> dict[StackName, int]:
    """The most tokens of a row in each stack, as in encoding; a classifier's decoder reads what its encoder
    does."""
    data, positions = recipe.data, positions_of(config)
    limit = data.max_length or min(DEFAULT_MAX_LENGTH, positions or DEFAULT_MAX_LENGTH)
    target = min(data.max_target_length or limit, positions or limit)
    if family is not None and (signal := family.signal) is not None:
        limit = signal.tokens(config, signal.shape(config))
    stacks: Sequence[StackName] = tuple(family.stacks) if family else ("decoder",)
    return {stack: target if stack == "decoder" and len(stacks) > 1 else limit for stack in stacks}


def cached_row(drawn: Sketch, plan: ParallelPlan) -> int:
    """Bytes of a longest row in the activation cache of a recipe that has one, on all ranks."""
    stored: Stored = "auto" if drawn.recipe.cache is True else cast("Stored", drawn.recipe.cache)
    work = drawn.work
    return sum(
        stack_bytes(
            drawn.model, stack, stored, work.dtype, work.tokens[stack.name], 1, plan.lasts(stack.name)
        )
        for stack in stacks_in(drawn.model).values()
    )


def _dropouts(config: Any, open_probabilities: bool) -> tuple[float, float]:
    """The config's dropout on attention probabilities, where they are computed openly, and on hidden
    states."""
    names = ("hidden_dropout_prob", "dropout", "dropout_rate")
    hidden = next((value for name in names if (value := getattr(config, name, None)) is not None), 0.0)
    return attention_dropout(config) if open_probabilities else 0.0, float(hidden)


# ---------------------------------------------------------------- the forecast


def forecast(
    recipe: Recipe,
    world: int | None = None,
    memory: Sequence[int] | None = None,
    parallel: ParallelConfig | None = None,
) -> Forecast:
    """What training `recipe` would cost on `world` processes, or on as many as it asks for.

    memory: bytes of every rank's device, or one number for all; None: those of this machine, as far as it has
    them. parallel: axes in place of the recipe's. Raises UsageError for a plan that cannot be; one that does
    not fit is returned, see `Forecast.check`.
    """
    return priced(sketch(recipe), parallel or recipe.parallel, world, memory)


def priced(
    drawn: Sketch, parallel: ParallelConfig, world: int | None, memory: Sequence[int] | None
) -> Forecast:
    """`forecast` of a recipe that is sketched already."""
    if parallel.auto:
        remedy = "choose it: petune plan --auto"
        raise UsageError("the plan of this recipe is yet to be chosen", where="parallel", remedy=remedy)
    available = max(2, torch.cuda.device_count()) if drawn.device == "cuda" else 2
    work = drawn.work
    plan = make_plan(
        parallel,
        drawn.family,
        drawn.config,
        world,
        work.rows,
        available,
        work.vocabulary_head,
        method_of(drawn.recipe.method).head_alone,
    )
    if work.streamed is not None and plan.world > 1:
        remedy = "set parallel=none, or memory.stream=none"
        raise UsageError(
            "memory.stream is for one process",
            where="memory.stream",
            found=describe_plan(plan),
            remedy=remedy,
        )
    limits = limits_of(plan.world, drawn.device, memory)
    held: dict[Coordinate, Held] = {}
    ranks = []
    for rank in range(plan.world):
        at = coordinate(plan, rank)
        if (kind := replace(at, dp=0)) not in held:  # replicas hold the same, but for experts
            held[kind] = held_by(drawn.model, drawn.family, plan, at)
        ranks.append(_rank(rank, at, held[kind], drawn, plan, limits[rank]))
    trained, total = count_parameters(drawn.model)
    facts: tuple[str, ...] = (
        f"model    {drawn.note}",
        f"method   {describe(drawn.model)}",
        *_classes(drawn),
        f"plan     {describe_plan(plan)}",
        (
            f"pass     {work.rows} rows of up to"
            f" {' and '.join(str(n) for n in dict.fromkeys(work.tokens.values()))} tokens,"
            f" {'bf16' if work.itemsize == 2 else 'fp32'} on {drawn.device}"
        ),
    )
    if drawn.device == "cuda" and (line := slow_columns(plan.cut)) is not None:
        facts = (*facts, f"note     {line}")
    sent = _transitions(drawn, plan, held[Coordinate()])
    return Forecast(
        drawn,
        facts,
        plan,
        tuple(ranks),
        sent,
        bubble(plan, trained / total),
        _knobs(drawn, plan, held, ranks),
    )


def _rank(
    rank: int, at: Coordinate, held: Held, drawn: Sketch, plan: ParallelPlan, limit: int | None
) -> Rank:
    cut, last = plan.cut, list(drawn.work.tokens)[-1]
    whole = drawn.work.tokens[last]
    shape = None
    if (family := drawn.family) is not None:  # of what works with these tokens
        shape = family.shape(family.part(drawn.config, list(family.stacks)[-1]))
    return Rank(
        rank=rank,
        at=at,
        blocks=blocks_of(plan, drawn.family, drawn.config, at.pp),
        heads=cut.heads[at.tp] if cut and cut.heads else shape.heads if shape else None,
        columns=cut.columns[at.tp] if cut and cut.columns else shape.columns if shape else None,
        experts=experts_of(plan, rank) if plan.experts else None,
        tokens=apportion(whole, cut.sequence)[at.tp] if cut and cut.sequence else whole,
        rows=apportion(drawn.work.rows, plan.shares)[at.dp],
        memory=footprint(held, drawn.model, drawn.family, plan, at, drawn.work),
        process=PROCESS[drawn.device],
        limit=limit,
        room=drawn.recipe.cache_room if drawn.recipe.cache and drawn.device == "cuda" else 0.0,
    )


def limits_of(world: int, device: str, memory: Sequence[int] | None) -> Sequence[int | None]:
    """Bytes of every rank's device. Raises UsageError for a list of another length."""
    if memory is not None:
        if len(memory) not in (1, world):
            raise UsageError(
                "one memory for all ranks, or one for each",
                where="--memory",
                expected=f"1 or {world}",
                found=str(len(memory)),
            )
        return list(memory) * (world if len(memory) == 1 else 1)
    if device == "cpu":
        return [_physical_memory() // world] * world
    if torch.cuda.device_count() < world:  # other machines' devices, which are not seen from here
        return [None] * world
    return [torch.cuda.get_device_properties(rank).total_memory for rank in range(world)]


def _physical_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


# ---------------------------------------------------------------- what is sent


def _transitions(drawn: Sketch, plan: ParallelPlan, held: Held) -> tuple[Transition, ...]:
    """Between blocks and stages, for a replica's rows; then what replicas and the ranks of a cut sum once a
    step."""
    found: list[Transition] = []
    family, work = drawn.family, drawn.work
    if family is not None and (plan.tp, plan.pp, plan.ep) != (1, 1, 1):
        rows = max(apportion(work.rows, plan.shares))
        shape, depth = family.shape(drawn.config), family.depth(drawn.config)
        load = Load(rows, work.tokens, work.itemsize, first_trained(drawn.model, family) is not None)
        found += transitions(plan, family, shape, depth, load)
        mixtures = sum(is_experts(module) for one in held.modules for module in one.modules())
        chosen = getattr(drawn.config, "num_experts_per_tok", 0)
        found += of_experts(plan, mixtures, chosen, apportion(work.rows, plan.shares), shape, load)
        if method_of(drawn.recipe.method).ladder:
            found += _of_ladder(plan, family, drawn, replace(load, itemsize=4, backward=True))
    trained = {
        id(value): value.numel() * value.element_size() for value in held.tensors() if value.requires_grad
    }
    names = {
        id(value): name
        for module in held.modules
        for name, value in module.named_parameters(remove_duplicate=False)
    }
    partial = sum(size for key, size in trained.items() if names.get(key) in held.placed.partial)
    found.append(of_gradients("the cut", plan.tp, partial))
    if plan.sharding is None:
        spread = {name for name, cut in held.placed.slices.items() if cut.axis == "ep"}
        own = sum(size for key, size in trained.items() if names.get(key) in spread)
        found.append(of_gradients("replicas", plan.dp, sum(trained.values()) - own))
        found.append(of_gradients("replicas, of experts", plan.edp, own))
    else:
        found += _of_shards(plan, held, sum(trained.values()))
    return tuple(one for one in found if one.forward or one.backward)


def _of_ladder(plan: ParallelPlan, family: Family, drawn: Sketch, load: Load) -> list[Transition]:
    """A ladder exchanges keys and values in each of its levels where the connection is cut by sequence, and
    goes from stage to stage beside the backbone."""
    narrow = family.shape(family.narrow(drawn.config, cast("Any", drawn.recipe.method).reduction))
    stacks = own_stacks(drawn.model, family)
    levels = {name: len(cast("Any", stack.ladder).numbered) for name, stack in stacks.items()}
    cut = plan.cut and replace(plan.cut, attention="sequence", mlp="sequence", vocabulary=())
    beside = replace(plan, cut=cut if cut and cut.connection == "sequence" else None)
    kept = [
        one
        for one in transitions(beside, family, narrow, levels, load)
        if "attention" in one.where or one.where.startswith("stage")
    ]
    return [replace(one, where=f"ladder, {one.where}") for one in kept]


def _of_shards(plan: ParallelPlan, held: Held, trained: int) -> list[Transition]:
    """FSDP2: every forward pass gathers, the backward pass again if blocks were freed, and sums gradients to
    their shards."""
    sharding = plan.sharding
    assert sharding is not None
    shards, light = plan.dp // sharding.replicas, held.light
    inside = {id(value) for block in held_blocks(held) for value in block.parameters()}

    def travels(value: torch.Tensor) -> bool:
        if whole_where_light(value):
            return not light and (value.requires_grad or sharding.frozen)
        return sharding.frozen and sharding.reshard and id(value) in inside  # others travel once in a run

    whole = sum(value.nbytes for value in held.tensors() if travels(value))
    gathered = whole * (shards - 1) // shards
    again = gathered * sharding.reshard
    found = [Transition("shards of weights", "all-gather / all-gather", 1, gathered, again, "weights")]
    if light:
        return [*found, of_gradients("replicas", plan.dp, trained)]
    own = trained * (shards - 1) // shards
    found.append(Transition("shards of gradients", "- / reduce-scatter", 1, 0, own, "gradients"))
    if sharding.replicas > 1:
        copies = summed_over(sharding.replicas, trained // shards)
        found.append(Transition("gradients over copies", "- / all-reduce", 1, 0, copies, "gradients"))
    return found


# ---------------------------------------------------------------- what would help


def _knobs(
    drawn: Sketch, plan: ParallelPlan, held: Mapping[Coordinate, Held], ranks: Sequence[Rank]
) -> tuple[tuple[str, int], ...]:
    """Settings that would lower the memory of the fullest rank, with the bytes each saves by itself."""
    worst = max(ranks, key=lambda rank: rank.total - (rank.limit or 0))
    part, recipe = held[replace(worst.at, dp=0)], drawn.recipe

    def saved(work: ForwardPass) -> int:
        return worst.memory.total - footprint(part, drawn.model, drawn.family, plan, worst.at, work).total

    options: dict[str, int] = {}
    if not recipe.gradient_checkpointing:
        options["gradient_checkpointing=true"] = saved(replace(drawn.work, recompute=True))
    if drawn.work.rows // 2 >= plan.dp:
        options[f"batch_size={recipe.batch_size // 2}"] = saved(
            replace(drawn.work, rows=drawn.work.rows // 2)
        )
    shorter: dict[StackName, int] = {stack: tokens // 2 for stack, tokens in drawn.work.tokens.items()}
    options[f"data.max_length={max(shorter.values())}"] = saved(replace(drawn.work, tokens=shorter))
    if drawn.work.itemsize == 4 and not method_of(recipe.method).trains_base:
        options["dtype=bf16"] = worst.memory.frozen // 2 + saved(replace(drawn.work, itemsize=2))
    if plan.dp > 1 and plan.sharding is None and drawn.family is not None:
        held_still = worst.memory.total - worst.memory.activations
        options["parallel.dp.shard=true"] = held_still - held_still // plan.dp
    if method_of(recipe.method).trains_base and not streams(recipe):
        trained = worst.memory.gradients + worst.memory.optimizer
        options["method=lora"] = int(0.95 * trained)
    return tuple(
        sorted(((text, size) for text, size in options.items() if size > 0), key=lambda one: -one[1])
    )
