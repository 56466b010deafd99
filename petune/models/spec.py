"""The vocabulary in which a model family is described; what looks a description up in a real model is
petune.models.sites.

A family is data: which module lists are its stacks, and of which sub-layers their blocks are made. Regions
and sites, which methods and backends read, and the steps of a fused block follow from the sub-layers, so a
family costs one table and no code. A rule that matches nothing raises and names what is there instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from torch import Tensor, nn

from petune.errors import UsageError
from petune.models.boundary import Connection
from petune.models.exchange import Exchanged
from petune.models.parts import Columns as Columns
from petune.models.parts import Config as Config
from petune.models.parts import CutKind as CutKind
from petune.models.parts import Input as Input
from petune.models.parts import Lending as Lending
from petune.models.parts import LinearGroup as LinearGroup
from petune.models.parts import Member as Member
from petune.models.parts import Norm as Norm
from petune.models.parts import Pairs as Pairs
from petune.models.parts import PerToken as PerToken
from petune.models.parts import Pieces as Pieces
from petune.models.parts import Positions as Positions
from petune.models.parts import Region as Region
from petune.models.parts import Role as Role
from petune.models.parts import Shape as Shape
from petune.models.parts import Signal as Signal
from petune.models.parts import TensorSplit as TensorSplit
from petune.models.parts import linears as linears

StackName = Literal["encoder", "decoder"]
ModelKind = Literal["encoder", "encoder-decoder", "decoder"]  # by the stacks that a model has
Pooling = Literal["every", "first", "last", "end", "mean", "first and mean"]


@dataclass(frozen=True)
class Attention:
    """Attention, entered by the module `at`. groups: one of q, k and v, or, with a memory, one of q and one
    of k and v.

    memory: the argument of `at` with the states of the encoder; None for self-attention. rotary: queries and
    keys are turned by their positions, or the attribute of `at` that says whether they are; pairs: of which
    columns, see Pairs; reach: what queries are multiplied by behind that, of `at` and positions [1 or b, t],
    in float32 and of their shape; None for nothing. window: the keys up to its own that a query sees and,
    where attention is not causal, as many from its own on, None for all; softcap: of the scores, None for
    none; exchange: how it sees other ranks' tokens of its sequence, None where all are here; no table says
    any of them, each block does. scale: of the scores; None for the `scaling` of `at`, a name for the
    attribute of it over whose root it is one. v_norm: of heads of values, which has no weight; without a
    linear of them, they are the keys before norm and positions. bias: the table of relative positions below
    `at`, which block 0 has. sinks: the attribute of `at` with the score, for each head, of one more key that
    has no value. positions, lending: see the classes. drop: the dropout of its probabilities, a module or a
    number that is an attribute of one. head_counts, kv_counts: see Region. gated: q makes for each head a
    query and, behind it, a gate, whose sigmoid scales the head's result. lacks: roles that a block may be
    without. called: parameters of `at`, where a fused block calls that as it is, 0 where steps compute it;
    tabled: such a call reads the table of `positions`; no table says them.
    """

    at: str
    groups: tuple[LinearGroup, ...]
    out: str
    memory: str | None = None
    rotary: bool | str = False
    pairs: Pairs = "halves"
    reach: Callable[[nn.Module, Tensor], Tensor] | None = None
    causal: bool = False
    window: int | None = None
    softcap: float | None = None
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    v_norm: Norm | None = None
    scale: float | str | None = None
    bias: str | None = None
    sinks: str | None = None
    positions: Positions | None = None
    drop: str | None = None
    head_counts: tuple[str, ...] = ()
    kv_counts: tuple[str, ...] = ()
    exchange: Exchanged | None = None
    gated: bool = False
    lacks: tuple[Role, ...] = ()
    lending: Lending | None = None
    called: int = 0
    tabled: bool = False

    def given(self, inner: int) -> int:
        """Features of a token that a backward pass reads of what all heads give, `inner`: gated, of its gates
        and of both in one too."""
        return (1 + 2 * self.gated) * inner

    @cached_property
    def region(self) -> Region:
        """Where it is entered and left."""
        groups = self.groups if self.positions is None else (*self.groups, self.positions.linears)
        by_head = {} if self.bias is None else {f"{self.bias}.weight": 1}
        by_head |= {} if self.sinks is None else {self.sinks: 0}
        rows = [{} if norm is None else norm.rows_below(self.at) for norm in (self.q_norm, self.k_norm)]
        return Region(
            kind="attention",
            enter=self.at,
            leave=self.out,
            sites=dict(member for group in groups for member in group.members) | {"o": self.out},
            inputs=("hidden_states",) if self.memory is None else ("hidden_states", self.memory),
            head_counts=self.head_counts,
            kv_counts=self.kv_counts,
            by_head=by_head | rows[0],
            by_kv_head=rows[1],
            cross=self.memory is not None,
            gated=self.gated,
            lacks=self.lacks,
        )


@dataclass(frozen=True)
class LinearAttention(Attention):
    """Attention without scores: a state goes through the tokens of a row in order. groups: one, of all that
    reads hidden states.

    full: the attention with scores that stands in its place in other blocks. form: what extends the class of
    `at`, so that no state goes from one sample of a row to the next (see models/linear_attention.py).
    """

    full: Attention | None = None
    form: type[nn.Module] | None = None

    @cached_property
    def region(self) -> Region:
        return replace(super().region, kind="mixer")


@dataclass(frozen=True)
class Mlp:
    """An MLP, entered by the module `at`: act(up) or, where the block has a gate, act(gate) * up. drop: the
    dropout before `down`. gated_act: of one with a gate, by its name, where it is another than the config's.
    columns: see Columns."""

    at: str
    up: LinearGroup
    down: str
    drop: str | None = None
    gated_act: str | None = None
    columns: Columns = "columns"

    @cached_property
    def region(self) -> Region:
        """Where it is entered and left."""
        sites = dict(self.up.members) | {"down": self.down}
        return Region(kind="mlp", enter=self.at, leave=self.down, sites=sites, columns=self.columns)


@dataclass(frozen=True)
class RoutedMlp:
    """A mixture of experts, entered by the module `at`: a token goes through the experts that the router
    chooses for it, and through the shared one where there is one.

    experts: the module that holds the weights of all of them (see models/experts.py). router: the module that
    scores them: the softmax of its product, of which the greatest are the shares of the chosen. normed: these
    are divided by their sum, or the attribute of the router that says so; rounded: to the dtype of the
    scores. act: of the experts, where it is another than the config's. gate: the linear whose sigmoid scales
    what the shared expert gives. dense: the MLP that stands in the place of all of it in blocks without
    experts. chosen: experts of a token; held: of each rank, where they are cut, and index: of this one; no
    table says them.
    """

    at: str
    experts: str
    router: str
    shared: Mlp | None = None
    gate: str | None = None
    dense: Mlp | None = None
    normed: bool | str = True
    rounded: bool = True
    act: Literal["clamped"] | None = None
    chosen: int = 0
    held: tuple[int, ...] = ()
    index: int = 0

    @cached_property
    def region(self) -> Region:
        """Where it is entered and left, and its one site: all the experts."""
        sites: dict[Role, str] = {"experts": self.experts}
        return Region(kind="mlp", enter=self.at, leave=self.experts, sites=sites, mixture=True)


@dataclass(frozen=True)
class SubLayer:
    """Attention or MLP with what a block puts around it:

        y = norm_after_sum(factor * (x + scale * drop(vector * norm_out(core(norm_in(x))))))

    where a norm, a vector, a factor or a dropout that is None does nothing. parallel: its core reads what
    that of the sub-layer before it reads, of the same norm, so that both stand beside one another.
    norm_first: the attribute of the block by which the norm after the sum stands before the core. scale: a
    number, or the attribute of the block that it is. vector: the path of a parameter with a number for each
    feature; learns: it trains. factor: the path of a buffer of one number, read in every pass. per_token:
    what is made of the sum before that, see the class. bottleneck: features of the bottleneck that a method
    has put behind the core's last linear, 0 without one; beside: it reads x; of_sum: it stands behind the
    sum, as the block would give it. scaled, entries: the roles of linears whose results, or inputs, a method
    multiplies by a vector. connection: how ranks that share the core hold what lies around it, None where it
    is whole. No table says these.
    """

    core: Attention | Mlp | RoutedMlp
    norm_in: Norm | None = None
    norm_out: Norm | None = None
    norm_after_sum: Norm | None = None
    parallel: bool = False
    norm_first: str | None = None
    drop: str | None = None
    scale: float | str = 1.0
    vector: str | None = None
    learns: bool = False
    factor: str | None = None
    per_token: PerToken | None = None
    bottleneck: int = 0
    beside: bool = False
    of_sum: bool = False
    scaled: frozenset[Role] = frozenset()
    entries: frozenset[Role] = frozenset()
    connection: Connection | None = None

    @property
    def behind(self) -> bool:
        """Whether its bottleneck acts on what the core gives, before the sum."""
        return self.bottleneck > 0 and not self.of_sum

    def bottleneck_at(self, of_sum: bool) -> str:
        """The path of the module that a bottleneck is part of: behind the sum the norm there, or the block;
        else what the core is left by, or a mixture."""
        if of_sum:
            return "" if self.norm_after_sum is None else self.norm_after_sum.path
        return self.core.at if isinstance(self.core, RoutedMlp) else self.core.region.leave


@dataclass(frozen=True)
class StackRule:
    """One stack of blocks. `blocks` is a path suffix below the base model; `carry` names what one block hands
    the next, and `besides` counts what it returns behind that. Cross-attention among the sub-layers may be
    absent from a block.

    `tail` is the norm after the last block, `rotary` the module that makes position embeddings, both beside
    the list; `bias` is the argument of the block's constructor that asks for a learned relative position bias
    in block 0. `clamps`: blocks clamp what overflows in float16, of which no sub-layer tells. `counted`:
    positions are counted along the mask by the model, where they are not given. `hides`: without a mask the
    model makes one of the tokens that are no padding. `uncut`: what blocks do that no sub-layer tells, why
    they are not cut by heads and columns. `between`: the field of the config above 0 where blocks mix tokens.
    """

    blocks: str
    sublayers: tuple[SubLayer, ...]
    carry: tuple[str, ...] = ("hidden_states",)
    besides: int = 0
    tail: str | None = None
    rotary: str | None = None
    bias: str | None = None
    clamps: bool = False
    counted: bool = False
    hides: bool = False
    uncut: str | None = None
    between: str | None = None

    @cached_property
    def cores(self) -> tuple[Attention | Mlp | RoutedMlp, ...]:
        """The cores of the sub-layers; of attention that takes turns, both."""
        cores = [sublayer.core for sublayer in self.sublayers]
        full = [core.full for core in cores if isinstance(core, LinearAttention) and core.full]
        return (*cores, *full)

    @cached_property
    def regions(self) -> tuple[Region, ...]:
        """Where the sub-layers are entered and left."""
        return tuple(core.region for core in self.cores)

    def sublayers_in(self, block: nn.Module) -> tuple[SubLayer, ...]:
        """The sub-layers that `block` has: with a dense MLP where it has no experts, with attention that has
        scores where it is that one's turn, without cross-attention where there is none, with the norm before
        the core where the block has it there, without it where it is an identity."""
        here = []
        for one in self.sublayers:
            if isinstance(one.core, LinearAttention) and one.core.full and not child_of(block, one.core.at):
                one = replace(one, core=one.core.full)
            if isinstance(one.core, RoutedMlp) and one.core.dense and not child_of(block, one.core.experts):
                one = replace(one, core=one.core.dense)
            if one.norm_first is not None and getattr(block, one.norm_first):
                one = replace(one, norm_in=one.norm_after_sum, norm_after_sum=None, norm_first=None)
            if one.norm_in is not None and _passes(block, one.norm_in.path):
                one = replace(one, norm_in=None)
            if child_of(block, one.core.at) or not one.core.region.cross:
                here.append(one)
        return tuple(here)

    def regions_in(self, block: nn.Module) -> tuple[Region, ...]:
        """Where the sub-layers of `block` are entered and left, a shared expert's besides."""
        cores = [sublayer.core for sublayer in self.sublayers_in(block)]
        shared = [core.shared for core in cores if isinstance(core, RoutedMlp) and core.shared]
        return tuple(core.region for core in (*cores, *shared))

    @cached_property
    def positions(self) -> Positions | None:
        """The positions that attention scores itself, None where no attention does."""
        scored = (core for core in self.cores if isinstance(core, Attention) and core.positions)
        return next((core.positions for core in scored), None)

    @cached_property
    def linear(self) -> LinearAttention | None:
        """The attention without scores, None where all have them."""
        return next((core for core in self.cores if isinstance(core, LinearAttention)), None)

    @property
    def causal(self) -> bool:
        """Whether no token sees a later one."""
        return any(isinstance(one.core, Attention) and one.core.causal for one in self.sublayers)


@dataclass(frozen=True)
class Family:
    """A model family: its stacks, its task heads, and its sizes as functions of the config.

    `heads` are the modules that train beside every method; `fresh` others that a checkpoint may lack, which
    then train too. `fixed` are parameters that no method trains, as Hugging Face's own model does not, by the
    ends of their names. `narrow(config, reduction)` returns a copy of the config whose blocks have every
    width divided by `reduction` and as many heads. `depth(config)` is the number of blocks of each stack, in
    the order data passes them. `caches`: whether a forward pass makes keys and values for the next one unless
    told not to. `bounded`: whether positions end. `packs`: whether the model tells samples that are packed in
    a row apart by their positions. `tied`: the field of the config that is false where a head over the
    vocabulary asks the embedding for its table. `unread`: ends of names of tables that nothing reads unless
    they are tied. `signal`: how it reads pictures or sounds; None for a model of text. `part(config, stack)`:
    the config that blocks of a stack are made of; it and `shape` take such a one too. `pools(config)`: what
    its head of classes reads, where that is not as in most of its kind. `refused(config)`: what models of it
    do not go with, `tuning`, `packing`, `fused` or the name of an axis, and why."""

    name: str
    kind: ModelKind
    stacks: Mapping[StackName, StackRule]
    heads: tuple[str, ...]
    shape: Callable[[Config], Shape]
    depth: Callable[[Config], Mapping[StackName, int]]
    narrow: Callable[[Config, int], Config]
    fresh: tuple[str, ...] = ()
    fixed: tuple[str, ...] = ()
    caches: bool = True
    bounded: bool = True
    packs: bool = True
    tied: str | None = None
    unread: tuple[str, ...] = ()
    part: Callable[[Config, StackName], Config] = lambda config, stack: config
    signal: Signal | None = None
    pools: Callable[[Config], Pooling] | None = None
    refused: Callable[[Config], Mapping[str, str]] = lambda config: {}

    @property
    def reads(self) -> Input:
        """What its inputs are made of."""
        return "text" if self.signal is None else self.signal.kind


def stack_paths(model: nn.Module, family: Family) -> dict[StackName, str]:
    """The full module name of each stack that `model` has.

    Raises UsageError when the model has none of the family's stacks, naming the module lists that are there.
    """
    lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    found: dict[StackName, str] = {}
    for stack, rule in family.stacks.items():
        matches = [name for name in lists if name == rule.blocks or name.endswith("." + rule.blocks)]
        # `layers` alone would also match T5's or BART's inner lists; the shortest path is the stack itself.
        if matches:
            found[stack] = min(matches, key=len)
    if not found:
        rules = ", ".join(repr(rule.blocks) for rule in family.stacks.values())
        what = f"the {family.name} table does not fit {type(model).__name__}: no module list named {rules}"
        raise UsageError(what, found=", ".join(lists) or "no module list at all")
    return found


def _passes(block: nn.Module, path: str) -> bool:
    found = child_of(block, path)
    return found is not None and isinstance(found[1], nn.Identity)


def child_of(block: nn.Module, path: str) -> tuple[str, nn.Module] | None:
    """The submodule of `block` that `path` means, with the choice that exists; None when none does."""
    for choice in path.split("|"):
        try:
            return choice, block.get_submodule(choice)
        except AttributeError:
            continue
    return None
