"""What a fused block is made of, and one call of it: what its autograd node needs beside tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from petune.kernels.block import fold
from petune.kernels.block.attention import How
from petune.kernels.block.called import BoundCore, CalledCore, CoreCall
from petune.kernels.block.layout import MASKS
from petune.kernels.block.linear import Bank, at_hand
from petune.kernels.block.mixture import OF_MIXTURE, Mixture, MixturePart
from petune.kernels.block.packed_linear import Group
from petune.kernels.block.program import Program
from petune.kernels.block.rows import Sink
from petune.kernels.block.steps import BlockRun, Dropping, NormTensors, Values
from petune.kernels.block.turns import InTurns, Turns
from petune.kernels.configs import Rung
from petune.kernels.dispatch import Ops
from petune.kernels.memory.offload import Store
from petune.kernels.reference import wide
from petune.models.boundary import Boundary
from petune.models.exchange import Exchange
from petune.models.experts import Spread, spread_of, weights_of
from petune.models.tuned_parts import TENSORS, BottleneckPart, LowRank
from petune.rng.context import running
from petune.rng.dropout import Drop

FACTORS = 3  # what a group has made in a forward pass: `Group.factors`


class BlockLayers(NamedTuple):
    """The layers of a block as they are at one moment: the linears of each group, the bottlenecks, and the
    mixtures of experts."""

    groups: tuple[tuple[LowRank, ...], ...]
    bottlenecks: tuple[BottleneckPart, ...] = ()
    mixtures: tuple[MixturePart, ...] = ()


@dataclass
class Spec:
    """What a block is made of, and what it is to keep.

    layers: of each group of the program; behind: with its bottlenecks; mixtures: of experts. sinks, norms:
    (module, name) of those of each attention that has some, and of each norm tensor. dropouts: where each
    probability is, which counts while training. boundaries: of the sub-layers that are cut across ranks, by
    number. exchanges: of each attention, None where all its tokens are here. rung and tile may be changed
    between steps.
    """

    program: Program
    layers: Sequence[Sequence[nn.Module]]
    norms: Sequence[tuple[nn.Module, str]]
    dropouts: Sequence[tuple[nn.Module, str]]
    ops: Ops
    behind: Sequence[nn.Module] = ()
    mixtures: Sequence[Mixture] = ()
    sinks: Sequence[tuple[nn.Module, str]] = ()
    called: Sequence[CalledCore] = ()  # cores that are called as they are
    vectors: Sequence[tuple[nn.Module, str]] = ()  # that scale what sub-layers give
    boundaries: Mapping[int, Boundary] = field(default_factory=dict)
    exchanges: Sequence[Exchange | None] = ()
    rung: Rung = field(default_factory=Rung)
    tile: int | None = None
    store: Store | None = None
    banks: list[Bank | None] = field(default_factory=list)
    # the modules of the block that may be told to exchange tokens with other ranks
    attentions: Sequence[nn.Module] = ()
    inside: list[tuple[str, nn.Module]] = field(default_factory=list)  # the modules of the block, by name
    # where each layer is: its parent, and the name there
    homes: list[tuple[nn.Module, str, nn.Module]] = field(default_factory=list)
    # hooks there had been in this process, and the module that had one
    hooked: tuple[int, str | None] = (-1, None)
    arguments: tuple[str, ...] = ()  # of the block's forward after hidden states, by position
    carry: tuple[str, ...] = ("hidden_states",)  # what the block's forward returns, by name, "" for None
    # an attention, and in it the table of relative positions, which block 0 has
    distances: tuple[nn.Module, str] | None = None
    clamps: bool = False  # the block's own forward clamps what overflows in float16
    said: set[str] = field(default_factory=set)  # reasons to run unfused, of all blocks of a stack
    pairs: bool = False  # called attention that scores positions makes scores of all pairs of tokens

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        layer = self.layers[0][0]
        weight = layer._parameters.get("weight")  # past nn.Module's own look-up: every call asks
        return cast("Tensor", layer.weight if weight is None else weight).dtype

    @property
    def learns(self) -> bool:
        """Whether a weight of its linears or experts trains."""
        experts = (mixture.experts for mixture in self.mixtures)
        own = [layer.weight for layer in chain(*self.layers)]
        own += [one.get_parameter(name) for one in experts for name in weights_of(one)]
        return any(cast("Tensor", weight).requires_grad for weight in own)

    @property
    def by_sequence(self) -> bool:
        """Whether a block is handed one rank's tokens of a sequence, of which a sub-layer reads all."""
        return any(self.exchanges) or any(
            boundary.connection == "sequence" for boundary in self.boundaries.values()
        )

    @property
    def peers(self) -> Boundary | Exchange | Spread | None:
        """What the ranks that share the block agree by; None where it is whole."""
        spreads = (spread_of(mixture.experts) for mixture in self.mixtures)
        return next((one for one in (*self.crossings, *spreads) if one is not None), None)

    @property
    def overlapped(self) -> bool:
        """Whether its communication is to be hidden behind other work."""
        return any(crossing.overlapped for crossing in self.crossings)

    @property
    def split_turns(self) -> bool:
        """Whether halves that go through in turns stop within long turns too: see turns.py."""
        return any(crossing.split_turns for crossing in self.crossings)

    @property
    def crossings(self) -> list[Boundary | Exchange]:
        """Where it talks to the ranks that it is cut across."""
        exchanges = (exchange for exchange in self.exchanges if exchange is not None)
        return [*self.boundaries.values(), *exchanges]

    def unhalved(self, rows: int, given: Mapping[str, Any]) -> str | None:
        """Why halves of so many rows may not go through in turns, or None. given: the call's arguments."""
        if self.program.inputs != ("x",) or self.program.meets:
            return "its blocks read more than hidden states, or lend their keys"
        if self.called:
            return "its blocks call modules of the model's own"
        if running().segments is not None or any(given.get(name) is not None for name in MASKS):
            return "there is padding in them"
        return None if rows > 1 else "one row has no halves"

    def goes_in_halves(self, rows: int, given: Mapping[str, Any]) -> bool:
        """Whether halves of so many rows go through in turns."""
        return self.overlapped and torch.is_grad_enabled() and self.unhalved(rows, given) is None

    @property
    def padded(self) -> str | None:
        """Why it computes on padding too, where there is any, or None."""
        if self.called and self.called[0].table.positions is None:
            return "its mixers carry a state through whole rows"
        for step, exchange in zip(self.program.attends, self.exchanges, strict=False):
            if exchange is not None and exchange.kind == "ring":
                return "keys and values go round in rows of equal length"
            if exchange is not None and step.bias is not None:
                return "its bias of relative positions is one of whole rows where a sequence is cut"
            if exchange is not None and step.window is not None and not step.causal:
                return "its windows reach to both sides, and of whole rows alone where a sequence is cut"
        return None

    @property
    def defers(self) -> bool:
        """Whether the activation may add the update of gate | up, and multiply by what scales them: its
        result must be no number of the narrow grid, as ReLU's is, a gate have an update of its own, and
        nothing have been scaled before."""
        up = [group for group in self.program.groups if group.kind == "up"]
        other = any(group.scaled or group.roles == ("gate_up",) for group in up)
        return self.program.sizes.act != "relu" and not other

    @property
    def casts(self) -> bool:
        """Whether bf16 autocast may have the weights rounded anew in every pass, as it does with those of
        linears: where they are float32 and none of them is frozen in a bank."""
        return self.dtype == torch.float32 and not any(self.banks)

    @property
    def unstreamed(self) -> str | None:
        """Why its weights may not rest in host memory, or None."""
        if self.called:
            return "modules that blocks call do not stream"
        return "experts do not stream yet" if self.mixtures else None

    def overflows(self, dtype: torch.dtype) -> str | None:
        """Why it cannot be fused in this dtype, or None."""
        clamped = self.clamps and dtype == torch.float16
        if not clamped:
            return None
        return "in float16 its own forward clamps what overflows, which a fused one does not"

    def computes_in(self, kind: str) -> torch.dtype:
        """What it computes in at this moment on a kind of device."""
        rounds = kind != "meta" and torch.is_autocast_enabled(kind)
        rounds = rounds and torch.get_autocast_dtype(kind) is torch.bfloat16
        return torch.bfloat16 if rounds and self.casts else self.dtype

    @property
    def probabilities(self) -> list[float]:
        """Of its dropouts, as they are now."""
        return [_probability(*where) for where in self.dropouts]

    @property
    def attention_dropouts(self) -> tuple[float, ...]:
        """The probability of each of its attentions."""
        drops = [attend.drop for attend in self.program.attends]
        return tuple(0.0 if drop is None else _probability(*self.dropouts[drop]) for drop in drops)


def _probability(owner: nn.Module, name: str) -> float:
    """Of a dropout: a module, or a number."""
    value = getattr(owner, name)
    return float(value.p if isinstance(value, nn.Dropout) else value)


class Draws(NamedTuple):
    """What drops out in one call of a block, None where nothing does. groups: of the input of each part's
    update; drops: of each of the program's dropouts; bottlenecks: within each; cores: of each that runs."""

    groups: tuple[tuple[Drop | None, ...], ...]
    drops: tuple[Drop | None, ...]
    bottlenecks: tuple[Drop | None, ...] = ()
    cores: tuple[tuple[Drop, ...], ...] = ()

    @classmethod
    def nothing(cls, parts: BlockLayers, program: Program) -> Draws:
        """What is drawn where nothing drops out."""
        groups = tuple((None,) * len(group) for group in parts.groups)
        drops, within = (None,) * len(program.dropouts), (None,) * len(program.bottlenecks)
        return cls(groups, drops, within, ((),) * len(program.called))

    @property
    def all(self) -> list[Drop]:
        """One after the other."""
        groups, cores = chain(*self.groups), chain(*self.cores)
        every = (*groups, *self.drops, *self.bottlenecks, *cores)
        return [draw for draw in every if draw is not None]

    def replaced(self, by: Iterator[Drop]) -> Draws:
        """Others in the places of `all`."""
        groups = tuple(tuple(draw and next(by) for draw in group) for group in self.groups)
        drops, behind = (tuple(draw and next(by) for draw in own) for own in (self.drops, self.bottlenecks))
        return Draws(groups, drops, behind, tuple(tuple(next(by) for _ in own) for own in self.cores))


@dataclass(frozen=True)
class Call:
    """One call of a block: what the node needs beside tensors. hows: of each attention; angles: cos and sin
    [p, d] of rotary positions, where the program reads them; dtype: of the computation; boundaries: of the
    sub-layers that are cut, as they are in this call; called: of the cores that are called; reach: see
    BlockRun."""

    spec: Spec
    hows: tuple[How, ...]
    rung: Rung
    tile: int | None
    parts: BlockLayers
    draws: Draws
    angles: tuple[Tensor, Tensor] | None
    dtype: torch.dtype
    boundaries: Mapping[int, Boundary] = field(default_factory=dict)
    called: Sequence[CoreCall] = ()
    reach: Tensor | None = None

    def groups(self, tensors: Sequence[Tensor | None], factors: Sequence[Tensor | None] = ()) -> list[Group]:
        """The groups with `tensors` in them; `factors` are what `factors_of` earlier ones gives."""
        found = []
        for at, (place, parts, draws) in enumerate(
            zip(self.spec.program.groups, self.parts.groups, self.draws.groups, strict=True)
        ):
            first = place.first
            own = [
                part.with_tensors(tensors[first + TENSORS * k : first + TENSORS * (k + 1)]).to(self.dtype)
                for k, part in enumerate(parts)
            ]
            base = at_hand(self.spec.banks[at], own, self.spec.ops)
            made = factors[FACTORS * at : FACTORS * (at + 1)]
            gates = self.spec.defers and place.kind == "up"
            found.append(Group(own, self.dtype, first, self.spec.ops, base, draws, made, gates))
        return found

    def forward(
        self,
        inputs: Sequence[Tensor | None],
        groups: Sequence[Group],
        tensors: Sequence[Tensor | None],
        turns: Turns | None = None,
    ) -> InTurns[tuple[Tensor, Values]]:
        """(the block's output for inputs [m, width], what its rung keeps), in turns with another call where
        there is one; autocast must be off. groups: those of `tensors`."""
        run = self.run(groups, tensors, turns)
        return (yield from fold.forward(self.spec.program, run, inputs, self.rung.keep, self.tile))

    def backward(
        self,
        dy: Tensor,
        kept: Values,
        groups: Sequence[Group],
        tensors: Sequence[Tensor | None],
        needs: Sequence[bool],
        given: Sequence[bool],
        turns: Turns | None = None,
        sink: Sink | None = None,
        lent: Tensor | None = None,
    ) -> InTurns[tuple[list[Tensor | None], list[Tensor | None]]]:
        """(the gradients of the inputs, those of `tensors`), None for what needs none, by `given` and
        `needs`; kept is what `forward` gave; lent: the gradient of what it lends. sink: of all calls that go
        in turns; the gradients of `tensors` are left in it then."""
        run = self.run(groups, tensors, turns)
        grads = yield from fold.backward(
            self.spec.program, run, dy, kept, needs, given, self.rung.keep, self.tile, sink, lent
        )
        return grads, self.gradients(groups, tensors, run.sink) if sink is None else []

    def run(
        self, groups: Sequence[Group], tensors: Sequence[Tensor | None], turns: Turns | None = None
    ) -> BlockRun:
        """A pass of these groups."""
        own, norms = iter(tensors[TENSORS * sum(map(len, self.parts.groups)) :]), list[NormTensors]()
        behind = [
            (part.with_tensors([next(own) for _ in range(4)], self.dtype), self._dropping(draw))
            for part, draw in zip(self.parts.bottlenecks, self.draws.bottlenecks, strict=True)
        ]
        mixtures = [
            part.with_tensors([next(own) for _ in range(OF_MIXTURE)], self.dtype)
            for part in self.parts.mixtures
        ]
        sinks = [cast("Tensor", next(own)) for _ in self.spec.program.sinks]
        called = [BoundCore(one, [cast("Tensor", next(own)) for _ in one.core.names]) for one in self.called]
        vectors = [cast("Tensor", next(own)) for _ in self.spec.program.vectors]
        for norm in self.spec.program.norms:
            weight = cast("Tensor", next(own))
            norms.append((weight,) if norm.kind == "rms" else (weight, next(own)))
        norms = _shifted(norms, [norm.offset for norm in self.spec.program.norms])
        drops = [self._dropping(draw) for draw in self.draws.drops]
        return BlockRun(
            self.spec.ops,
            groups,
            norms,
            drops,
            self.hows,
            self.angles,
            bottlenecks=behind,
            mixtures=mixtures,
            boundaries=self.boundaries,
            batch=self.hows[0].batch if self.hows else 1,
            sinks=sinks,
            turns=turns,
            called=called,
            vectors=vectors,
            reach=self.reach,
        )

    def _dropping(self, draw: Drop | None) -> Dropping | None:
        """`draw` as a function of a matrix and of which rows of the whole it is."""
        if draw is None:
            return None

        def drop(x: Tensor, rows: slice | None) -> Tensor:
            dropped: Tensor = self.spec.ops.drop(
                x, draw if rows is None else draw._replace(numbers=draw.numbers[rows])
            )
            return dropped

        return drop

    def gradients(
        self, groups: Sequence[Group], tensors: Sequence[Tensor | None], sink: Sink
    ) -> list[Tensor | None]:
        """Those of `tensors` that a backward pass has left in `sink`, in their dtypes; None for what does not
        train."""
        grads = [grad for group in groups for grad in group.gradients(sink)]
        grads += [sink.found.get(at) if sink.needs[at] else None for at in range(len(grads), len(tensors))]
        return [
            None if value is None or tensor is None else value.to(tensor.dtype)
            for value, tensor in zip(grads, tensors, strict=True)
        ]


def factors_of(groups: Sequence[Group]) -> list[Tensor | None]:
    """What groups make of A and B, which is the same in both passes."""
    return [value for group in groups for value in group.factors]


def _shifted(norms: list[NormTensors], offsets: Sequence[float]) -> list[NormTensors]:
    """What norms multiply by: a weight, or weight + offset, in float32 or wider, which are the digits that
    Gemma's own norms multiply by. All of them are made by three kernels."""
    at = [place for place, offset in enumerate(offsets) if offset]
    if not at:
        return norms
    weights = [norms[place][0] for place in at]
    sums = wide(torch.cat(weights)).split([len(weight) for weight in weights])
    torch._foreach_add_(sums, [offsets[place] for place in at])
    made = dict(zip(at, sums, strict=True))
    return [(made[place], *norm[1:]) if place in made else norm for place, norm in enumerate(norms)]
