"""How fast a recipe trains, and in how much memory: its own step, measured for the methods and memory
policies that are asked for.

A step is `OptimizerStep.take` on the rows a run would see, so clipping, update and the reading of the loss
are in it; nothing is scored or saved. Its FLOP (one multiply-add is two) are counted from the lengths of its
rows, padding left out. A linear of W weights costs a row of T tokens 2WT forward, 2WT more where the gradient
passes, and 2WT more where the weights themselves train: with N weights in the blocks, 4N a token for LoRA on
a frozen base and 6N for full fine-tuning. A head of V words adds 4hV for each token that is trained on, 6hV
where it trains itself. Attention forward, over heads of width d together, is A = 4dT for each of T tokens,
half of it if causal; backward 2A.

What a method adds to the base, and what is computed twice, is left out of these model FLOP (MFU) and counted
in the executed ones (HFU), where attention's backward is 2.5A and what is recomputed follows from what each
block kept.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast, get_args

import torch
from torch import nn

from petune.errors import MachineError, UsageError
from petune.estimate.footprint import first_trained
from petune.estimate.forecast import Sketch, sketch
from petune.kernels.block.module import FusedBlock
from petune.kernels.configs import KEEPS, OFFLOADS
from petune.kernels.memory.shaped_program import remade
from petune.methods.configs import METHODS
from petune.models.experts import weights_of
from petune.models.gated_delta import keys_of
from petune.models.sites import Site, ends_of, find_sites
from petune.models.spec import Role, StackName, StackRule
from petune.models.stack import Stack
from petune.models.tuned_linear import TunedModule
from petune.parallel import ParallelConfig
from petune.recipe import Recipe, load_recipe
from petune.run.build import choose_place, prepare
from petune.run.step import OptimizerStep
from petune.run.summary import peak_memory
from petune.tasks import Example

WARM_UP = 3.0  # seconds of steps before those that count, on a GPU: its clock falls while it warms
PROBE = 1.0  # seconds


class Again(NamedTuple):
    """What a block keeps, in a word, and so the roles whose products its backward pass makes again, and
    whether attention too."""

    name: str
    roles: frozenset[Role] = frozenset()
    attends: bool = False


AgainByBlock = Mapping[tuple[StackName, int], Again]  # by stack and number of a block
ALL = Again("all")  # a block of the model's own
CHECKPOINT = Again("checkpoint", frozenset(get_args(Role)), True)  # the same, run again as a whole


# ---------------------------------------------------------------- what a step computes


@dataclass(frozen=True)
class Linear:
    """One site: weights of the base, and those its method put beside it. source: the stack whose tokens pass
    it, which of cross-attention's keys is the encoder. width: of all heads, where attention leaves by it,
    else 0. reached: whether the gradient passes it. keys: of attention without scores, see `keys_of`; else
    0."""

    stack: StackName
    block: int
    source: StackName
    role: Role
    weights: int
    added: int
    width: int
    cross: bool
    causal: bool
    reached: bool
    trained: bool
    keys: int = 0


@dataclass(frozen=True)
class Flops:
    """The FLOP of rows, from a model's sites; `head`: weights of the output layer, 0 for a classifier's."""

    linears: tuple[Linear, ...]
    head: int
    head_trained: bool

    def model(self, example: Example) -> float:
        """What training on a row asks for, however it is done."""
        lengths = _lengths(example, {one.stack for one in self.linears})
        total = 2.0 * self.head * (2 + self.head_trained) * example.trained
        for one in self.linears:
            total += 2 * one.weights * (1 + one.reached + one.trained) * sum(lengths[one.source])
            total += _attention(one, lengths) * (1 + 2 * one.reached)
        return total

    def executed(self, example: Example, kept: AgainByBlock) -> float:
        """What is computed, the method's own work and what is made again included, where blocks keep
        `kept`."""
        lengths = _lengths(example, {one.stack for one in self.linears})
        total = self.model(example)
        for one in self.linears:
            again = kept[one.stack, one.block]
            tokens, twice = sum(lengths[one.source]), one.reached and one.role in again.roles
            total += 6 * one.added * tokens + 2 * (one.weights + one.added) * tokens * twice
            total += _attention(one, lengths) * one.reached * (0.5 + again.attends)
        return total


def flops_of(drawn: Sketch) -> Flops | None:
    """How to count the FLOP of a recipe's model; None for a model without a table."""
    family, model = drawn.family, drawn.model
    if family is None:
        return None
    sites = find_sites(model, family)
    first = first_trained(model, family)
    order = list(family.stacks)
    linears = []
    for site in sites:
        reached = first is not None and (order.index(site.stack), site.block) >= first
        rule = family.stacks[site.stack]
        linears.append(_linear(site, reached, rule.causal, _active(site, model), _keys(site, model, rule)))
    head = cast("Any", model).get_output_embeddings() if drawn.work.vocabulary_head else None
    return Flops(
        tuple(linears),
        head.weight.numel() if head is not None else 0,
        head is not None and head.weight.requires_grad,
    )


def _active(site: Site, model: nn.Module) -> float:
    """The share of a site's weights that a token goes through: of experts, those that are chosen for it."""
    if site.role != "experts":
        return 1.0
    return float(cast("Any", model).config.num_experts_per_tok) / float(cast("Any", site.module).num_experts)


def _keys(site: Site, model: nn.Module, rule: StackRule) -> int:
    """See Linear."""
    if rule.linear is None or site.region != rule.linear.region:
        return 0
    block = model.get_submodule(site.name.removesuffix(f".{rule.linear.region.sites[site.role]}"))
    return keys_of(cast("Any", block.get_submodule(rule.linear.at)).head_k_dim)


def _linear(site: Site, reached: bool, causal: bool, active: float, keys: int) -> Linear:
    module = cast("Any", site.module)
    names = weights_of(module) if site.role == "experts" else ("weight",)
    weights = [module.get_parameter(name) for name in names]
    added = module.tuned().values() if isinstance(module, TunedModule) else ()
    return Linear(
        stack=site.stack,
        block=site.block,
        source="encoder" if site.region.cross and site.role in ("k", "v") else site.stack,
        role=site.role,
        weights=int(active * sum(value.numel() for value in weights)),
        added=int(active * sum(value.numel() for value in added)),
        width=ends_of(module)[0] if site.role == "o" else 0,
        cross=site.region.cross,
        causal=causal,
        reached=reached,
        trained=weights[0].requires_grad,
        keys=keys,
    )


def _lengths(example: Example, stacks: set[StackName]) -> dict[StackName, list[int]]:
    """Tokens of each sequence of a row, by stack: several where rows are packed; a classifier's decoder reads
    what its encoder does."""
    whole = example.size
    if example.positions is None:
        read = [whole]
    else:
        starts = [at for at, position in enumerate(example.positions) if position == 0]
        read = [end - start for start, end in zip(starts, [*starts[1:], whole], strict=True)]
    target = [len(example.labels)] if len(stacks) > 1 and isinstance(example.labels, list) else read
    return {
        stack: target if stack == "decoder" and len(stacks) > 1 else read for stack in ("encoder", "decoder")
    }


def _attention(one: Linear, lengths: Mapping[StackName, Sequence[int]]) -> float:
    """FLOP of the attention that leaves by a site, forward."""
    if one.keys:
        return 4 * one.width * one.keys * sum(lengths[one.stack])
    keys = lengths["encoder"] if one.cross else lengths[one.stack]
    pairs = sum(length * other for length, other in zip(lengths[one.stack], keys, strict=True))
    return 4 * one.width * pairs * (0.5 if one.causal and not one.cross else 1)


# ---------------------------------------------------------------- what is measured


@dataclass(frozen=True)
class Case:
    """A recipe with one method and one memory policy; `memory` is None where the recipe's own is meant."""

    recipe: Recipe
    method: str
    memory: str | None


@dataclass(frozen=True)
class Measured:
    """Steps of a case: tokens, seconds, and FLOP of the model and executed, where its family has a table.
    kept: what blocks kept, in words; peak: bytes on the device, None on a CPU; host: bytes resident and
    pinned there. `error` says why there are none."""

    case: Case
    tokens: tuple[int, ...] = ()
    seconds: tuple[float, ...] = ()
    flops: tuple[float, ...] = ()
    executed: tuple[float, ...] = ()
    kept: str = ""
    peak: int | None = None
    host: int = 0
    loss: float = 0.0
    error: str | None = None

    @property
    def speeds(self) -> list[float]:
        """Tokens per second of each step, padding not counted."""
        return [tokens / seconds for tokens, seconds in zip(self.tokens, self.seconds, strict=True)]

    @property
    def quartiles(self) -> tuple[float, float, float]:
        """First quartile, median and third quartile of `speeds`."""
        low, median, high = (
            statistics.quantiles(self.speeds, n=4) if len(self.seconds) > 1 else self.speeds * 3
        )
        return low, median, high

    def utilisation(self, rate: float) -> float | None:
        """MFU: model FLOP per second over `rate`; None where they cannot be counted."""
        return sum(self.flops) / sum(self.seconds) / rate if self.flops else None

    def hardware_utilisation(self, rate: float) -> float | None:
        """HFU: executed FLOP per second over `rate`; None where they cannot be counted."""
        return sum(self.executed) / sum(self.seconds) / rate if self.executed else None


def cases(recipe: Recipe, methods: Sequence[str] = (), policies: Sequence[str] = ()) -> list[Case]:
    """Every method under every policy (KEEP or KEEP/OFFLOAD), by default the recipe's own; its own method
    keeps its settings.

    Raises UsageError for a method or policy that does not exist, and for a recipe with a parallel plan.
    """
    if recipe.parallel != ParallelConfig():
        raise UsageError(
            "one process is measured at a time", where=recipe.where("parallel"), remedy="set parallel=none"
        )
    for name in methods:
        if name not in METHODS:
            raise UsageError(f"no method named {name!r}", where="--methods", expected=", ".join(METHODS))
    found = []
    for method in methods or (recipe.method_name,):
        tuned = recipe if method == recipe.method_name else load_recipe(recipe, {"method": method})
        for policy in policies or (None,):
            changed = tuned
            if policy is not None:
                memory = {**_policy(policy), "stream": tuned.memory.stream}
                changed = load_recipe(tuned, {"memory": memory})
            found.append(Case(changed, method, policy))
    return found


def _policy(text: str) -> dict[str, str]:
    """`memory` of a recipe for KEEP or KEEP/OFFLOAD."""
    keep, given, offload = text.partition("/")
    if keep not in KEEPS or (given and offload not in OFFLOADS):
        expected = f"one of {', '.join(KEEPS)}, and after a slash one of {', '.join(OFFLOADS)}"
        raise UsageError("this is no memory policy", where="--memory", expected=expected, found=text)
    return {"keep": keep, "offload": offload if given else "auto" if keep == "auto" else "none"}


def measure(case: Case, steps: int, warm: float | None = None) -> Measured:
    """Train for `steps` steps after a first one and `warm` seconds of others. Memory that runs out is a
    finding; all else is raised."""
    settled = load_recipe(case.recipe, {"schedule": "constant"})
    place = choose_place(settled)
    gc.collect()  # the model of the case before
    if place.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    if warm is None:
        warm = WARM_UP if place.device.type == "cuda" else 0.0
    try:
        step = OptimizerStep(prepare(settled))
        step.refer()
        return _measure(case, step, steps, warm)
    except MachineError as error:
        return Measured(case, error=str(error.problems[0].what))


def _measure(case: Case, step: OptimizerStep, steps: int, warm: float) -> Measured:
    began, device = None, step.place.device
    while began is None or time.perf_counter() - began < warm:
        step.take()
        began = began or time.perf_counter()  # the first step may compile
    first = step.progress.step
    seconds = tuple(_timed(step) for _ in range(steps))
    rows = [step.rows_of(number) for number in range(first, first + steps)]
    counted = flops_of(sketch(case.recipe))
    kept = _kept(step, counted.linears) if counted else {}
    return Measured(
        case,
        tokens=tuple(sum(example.tokens for example in row) for row in rows),
        seconds=seconds,
        flops=tuple(sum(map(counted.model, row)) for row in rows) if counted else (),
        executed=tuple(sum(counted.executed(example, kept) for example in row) for row in rows)
        if counted
        else (),
        kept=", ".join(
            f"{name} {count}" for name, count in Counter(one.name for one in kept.values()).items()
        ),
        peak=peak_memory(device) if device.type == "cuda" else None,
        host=_on_host(device),
        loss=step.progress.last_loss or 0.0,
    )


def _timed(step: OptimizerStep) -> float:
    _wait(step.place.device)
    began = time.perf_counter()
    step.take()
    _wait(step.place.device)
    return time.perf_counter() - began


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _kept(step: OptimizerStep, linears: Sequence[Linear]) -> AgainByBlock:
    """What each block kept in the last step."""
    found = dict.fromkeys(
        ((one.stack, one.block) for one in linears), CHECKPOINT if step.recipe.gradient_checkpointing else ALL
    )
    if step.recipe.gradient_checkpointing:
        return found
    for stack in (module for module in step.model.modules() if isinstance(module, Stack)):
        for number, block in stack.numbered:
            if isinstance(block, FusedBlock) and not block.spec.said:
                keep = block.spec.rung.keep
                found[stack.name, number] = Again(keep, *remade(block.spec.program, keep))
    return found


def _on_host(device: torch.device) -> int:
    """Bytes of this process in host memory: resident ones (where the system does not tell, the most there
    were), and pinned ones."""
    pinned = (
        int(torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)) if device.type == "cuda" else 0
    )
    if sys.platform != "linux":
        return peak_memory(torch.device("cpu")) + pinned
    import resource  # not on every system

    return (
        int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * resource.getpagesize() + pinned
    )


def probe(recipe: Recipe, seconds: float = PROBE) -> float:
    """FLOP per second of large matmuls on the recipe's device, in its dtype, after as long a warm-up."""
    place = choose_place(recipe)
    size = 8192 if place.device.type == "cuda" else 512
    left, right = (torch.randn(size, size, device=place.device, dtype=place.dtype) for _ in range(2))
    calls = 0
    for _ in range(2):
        calls, began = 0, time.perf_counter()
        while time.perf_counter() - began < seconds:
            torch.mm(left, right)
            _wait(place.device)
            calls += 1
        spent = time.perf_counter() - began
    return 2 * size**3 * calls / spent


# ---------------------------------------------------------------- a picture


def draw(found: Sequence[Measured], rate: float, picture: Path) -> None:
    """Speed over memory, one point a case, beside the speed its model FLOP allow at `rate`. Raises
    MachineError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MachineError(
            "a picture needs matplotlib", where="--plot", remedy="pip install 'petune[plot]'"
        ) from None
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for at, one in enumerate(one for one in found if one.error is None):
        low, median, high = one.quartiles
        memory = (one.host if one.peak is None else one.peak) / 2**30
        name = " ".join(filter(None, (one.case.method, one.case.memory)))
        axes.errorbar(
            memory,
            median,
            [[median - low], [high - median]],
            marker="o",
            capsize=3,
            color=f"C{at % 10}",
            label=name,
        )
        if one.flops:
            axes.plot(
                memory,
                sum(one.tokens) / sum(one.flops) * rate,
                marker="_",
                markersize=18,
                color=f"C{at % 10}",
                linestyle="none",
            )
    axes.set(
        xlabel="memory, GiB",
        ylabel="tokens/s",
        title=f"dashes: the model FLOP at {rate / 1e12:.3g} TFLOP/s, nothing else",
    )
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    if axes.has_data():
        axes.legend()
    figure.savefig(picture, dpi=120)
