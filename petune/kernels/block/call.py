"""What a fused block is made of, and one call of it: what its autograd node needs beside tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from petune.errors import UsageError
from petune.kernels.block.config import Frame, Kept
from petune.kernels.block.fp8 import Eight
from petune.kernels.block.linear import Bank, Base
from petune.kernels.block.packed_linear import Dropping, Group, Sink
from petune.kernels.block.postnorm import PostNorm
from petune.kernels.block.prenorm import PreNorm
from petune.kernels.configs import Rung
from petune.kernels.dispatch import Ops
from petune.kernels.memory.offload import Store
from petune.kernels.reference import Act
from petune.models.tuned_linear import LowRank
from petune.rng.dropout import Drop

UP = 2  # gate | up among the groups
Parts = tuple[tuple[LowRank, ...], ...]  # of each group
Where = tuple[nn.Module, str] | None  # an attribute of a module


@dataclass
class Spec:
    """What a block is made of, and what it is to keep.

    layers: of each group, in the order of petune.kernels.block.prenorm or .postnorm. norms: (module, name) of each norm tensor, None where
    the block has none. rung and tile may be changed between steps.
    """

    kind: type[PreNorm] | type[PostNorm]
    layers: Sequence[Sequence[nn.Module]]
    norms: Sequence[tuple[nn.Module, str] | None]
    heads: int
    kv_heads: int
    head_dim: int
    act: Act
    gated: bool
    eps: float
    scale: float
    causal: bool
    ops: Ops
    dropouts: tuple[Where, Where, Where] = (None, None, None)  # of attention and of the two connections, while training
    rung: Rung = field(default_factory=Rung)
    tile: int | None = None
    store: Store | None = None
    banks: list[Bank | None] = field(default_factory=list)
    inside: list[tuple[str, nn.Module]] = field(default_factory=list)  # the modules of the block, by name
    homes: list[tuple[nn.Module, str, nn.Module]] = field(default_factory=list)  # where each layer is: its parent, and the name there
    hooked: tuple[int, str | None] = (-1, None)  # hooks there had been in this process, and the module that had one
    arguments: tuple[str, ...] = ()  # of the block's forward after hidden states, by position
    said: set[str] = field(default_factory=set)  # reasons to run unfused, of all blocks of a stack

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return cast("Tensor", self.layers[0][0].weight).dtype

    @property
    def defers(self) -> bool:
        """Whether the activation may add the update of gate | up: its result must be no number of the narrow grid, as ReLU's is."""
        return self.act != "relu"

    @property
    def casts(self) -> bool:
        """Whether bf16 autocast may have the weights rounded anew in every pass, as it does with those of linears: where they are float32
        and none of them is frozen in a bank."""
        return self.dtype == torch.float32 and not any(self.banks)

    def computes_in(self, kind: str) -> torch.dtype:
        """What it computes in at this moment on a kind of device."""
        rounds = self.casts and torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) is torch.bfloat16
        return torch.bfloat16 if rounds else self.dtype

    @property
    def attention_dropout(self) -> float:
        """The probability as it is now."""
        return _probability(self.dropouts[0])

    @property
    def drops(self) -> tuple[float, float]:
        """Those of the two connections."""
        return _probability(self.dropouts[1]), _probability(self.dropouts[2])


def _probability(where: Where) -> float:
    """Of a dropout: a module, or a number."""
    value = 0.0 if where is None else getattr(*where)
    return float(value.p if isinstance(value, nn.Dropout) else value)


class Draws(NamedTuple):
    """What drops out in one call of a block, None where nothing does. groups: of the input of each part's update; attention: of its
    probabilities; connections: of the two that a post-norm block has."""

    groups: tuple[tuple[Drop | None, ...], ...]
    attention: Drop | None
    connections: tuple[Drop | None, Drop | None]

    @property
    def all(self) -> list[Drop]:
        """One after the other."""
        every = (*(draw for group in self.groups for draw in group), self.attention, *self.connections)
        return [draw for draw in every if draw is not None]

    def replaced(self, by: Iterator[Drop]) -> Draws:
        """Others in the places of `all`."""
        groups = tuple(tuple(draw and next(by) for draw in group) for group in self.groups)
        attention = self.attention and next(by)
        first, second = (draw and next(by) for draw in self.connections)
        return Draws(groups, attention, (first, second))


@dataclass(frozen=True)
class Call:
    """One call of a block: what the node needs beside tensors. dtype: of the computation; angles: cos and sin [p, d] of a pre-norm block's
    rotation."""

    spec: Spec
    frame: Frame
    parts: Parts
    draws: Draws
    angles: tuple[Tensor, Tensor] | tuple[None, None]
    dtype: torch.dtype

    def groups(self, tensors: Sequence[Tensor | None], factors: Sequence[Tensor | None] = ()) -> list[Group]:
        """The groups with `tensors` in them; `factors` are what an earlier call of this has made of A and B."""
        found, first = [], 0
        for at, (parts, draws) in enumerate(zip(self.parts, self.draws.groups, strict=True)):
            drops = [self._dropping(draw) for draw in draws]
            own = [part.with_tensors(tensors[first + 4 * k : first + 4 * k + 4]).to(self.dtype) for k, part in enumerate(parts)]
            base = _base(self.spec.banks[at], own)
            a, b = factors[2 * at : 2 * at + 2] or (None, None)
            made = None if a is None or b is None else (a, b)
            found.append(Group(own, self.dtype, first, self.spec.ops, base, drops, made, self.spec.defers and at == UP))
            first += 4 * len(own)
        return found

    def forward(self, x: Tensor, tensors: Sequence[Tensor | None]) -> tuple[Tensor, Kept, list[Tensor | None]]:
        """(the block's output for x [m, width], what its rung keeps, its stacked factors); autocast must be off."""
        groups = self.groups(tensors)
        y, kept = self.run(groups, tensors).forward(x)
        return y, kept, [value for group in groups for value in group.factors]

    def backward(
        self,
        dy: Tensor,
        kept: Kept,
        factors: Sequence[Tensor | None],
        tensors: Sequence[Tensor | None],
        needs: Sequence[bool],
        needs_x: bool,
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        """(dx, or None where nobody needs it; the gradients of `tensors`, None for those that do not need one); kept and factors are what
        `forward` gave."""
        sink, groups = Sink(needs), self.groups(tensors, factors)
        dx = self.run(groups, tensors).backward(dy, kept, needs_x, sink)
        return dx, self.gradients(groups, tensors, sink)

    def run(self, groups: Sequence[Group], tensors: Sequence[Tensor | None]) -> PreNorm | PostNorm:
        """The block of these groups."""
        first, second = self.draws.connections
        extra = (self._dropping(first), self._dropping(second)) if self.spec.kind is PostNorm else self.angles
        return self.spec.kind(self.frame, groups, tensors[4 * sum(map(len, self.parts)) :], cast("Any", extra))

    def _dropping(self, draw: Drop | None) -> Dropping | None:
        """`draw` as a function of a matrix and of which rows of the whole it is."""
        if draw is None:
            return None

        def drop(x: Tensor, rows: slice | None) -> Tensor:
            dropped: Tensor = self.spec.ops.drop(x, draw if rows is None else draw._replace(numbers=draw.numbers[rows]))
            return dropped

        return drop

    def gradients(self, groups: Sequence[Group], tensors: Sequence[Tensor | None], sink: Sink) -> list[Tensor | None]:
        """Those of `tensors` that a backward pass has left in `sink`, in their dtypes; None for what does not train."""
        grads = [grad for group in groups for grad in group.gradients(sink)]
        grads += [sink.found.get(at) if sink.needs[at] else None for at in range(len(grads), len(tensors))]
        return [None if value is None or tensor is None else value.to(tensor.dtype) for value, tensor in zip(grads, tensors, strict=True)]


def _base(bank: Bank | None, parts: Sequence[LowRank]) -> Base | None:
    """The frozen weights of `parts` as one product, where they still lie in their bank."""
    if bank is None:
        return None
    eight = bank.base if isinstance(bank.base, Eight) else None
    if not bank.intact(parts):
        if eight is not None:
            remedy = "move the model before petune.wrap(..., base_dtype='fp8')"
            raise UsageError("weights were moved or replaced after they were quantised", where="base_dtype", remedy=remedy)
        return None
    if eight is not None:
        eight.refresh(tuple(part.weight._version for part in parts))
    return bank.base
