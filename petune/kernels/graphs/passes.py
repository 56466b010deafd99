"""Both passes of a stack over buffers that stay where they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from petune.kernels.block.call import Call, Spec, factors_of
from petune.kernels.block.halves import BlockPass, BlockTensors, both_ahead, both_back, halves
from petune.kernels.block.lent_steps import KEYS, OF_ONE, TOKENS
from petune.kernels.block.node import without_lent
from petune.kernels.block.steps import Values
from petune.kernels.block.turns import alone, join
from petune.kernels.dispatch import Ops


@dataclass(frozen=True)
class Gate:
    """Where a state is mixed before a block. below: what with, [m, w], which its gradient replaces; gate,
    dgate: [], the number that says how much, and room for its gradient."""

    below: Tensor
    gate: Tensor
    dgate: Tensor
    temperature: float

    def forward(self, state: Tensor, ops: Ops) -> Tensor:
        """What the block is given."""
        return cast("Tensor", ops.mix(state, self.below, self.gate, self.temperature))

    def backward(self, dy: Tensor, state: Tensor, ops: Ops) -> Tensor:
        """The gradient of the state."""
        dstate, dbelow, dgate = ops.mix_backward(dy, state, self.below, self.gate, self.temperature)
        self.below.copy_(dbelow)
        self.dgate.copy_(dgate)
        return cast("Tensor", dstate)


@dataclass(frozen=True)
class RecordedBlock:
    """One block of the two passes. calls: one, or one for each half of the rows; needs: which of its tensors
    train; rooms: where their gradients go; given: which of its inputs need a gradient, the first of them
    because something below it trains; gate: before it, on a ladder. vectors: of its tokens, [m, f], which
    their gradient replaces; lender: the number of the block whose keys and values it reads."""

    calls: tuple[Call, ...]
    tensors: Sequence[Tensor | None]
    needs: Sequence[bool]
    rooms: Sequence[Tensor]
    given: Sequence[bool]
    gate: Gate | None = None
    vectors: Tensor | None = None
    lender: int | None = None

    @property
    def spec(self) -> Spec:
        """Of the block."""
        return self.calls[0].spec

    def of_halves(self) -> tuple[Call, Call]:
        """The calls of both halves."""
        first, second = self.calls
        return first, second

    def give(self, grads: Sequence[Tensor | None]) -> None:
        """Put gradients of its tensors into their rooms."""
        found = [grad for grad in grads if grad is not None]
        if found:
            assert len(found) == len(self.rooms), "all that trains has a gradient"
            torch._foreach_copy_(list(self.rooms), found)


class Passes:
    """The blocks one after the other, from inlets to outlet and, with a gradient in the place of each, back.

    inlets: hidden states [m, w], then what all blocks read beside them; outlet: [m, w].
    """

    def __init__(self, pieces: Sequence[RecordedBlock], inlets: Sequence[Tensor], outlet: Tensor) -> None:
        self.pieces, self.inlets, self.outlet = pieces, inlets, outlet
        own = pieces[0].spec.program.inputs
        self.beside = dict(zip((name for name in own if name not in OF_ONE), inlets, strict=True))
        # factors stacked by the forward pass, what it keeps, and the state that met a gate
        self.kept: list[tuple[RecordedBlock, list[Tensor | None], Values, Tensor]] = []
        self.lent: dict[int, Tensor] = {}  # keys and values by the number of their block; on the way back
        # their gradients

    def _said(self) -> AbstractContextManager[None]:
        """Around what blocks say to other ranks, if they do."""
        crossing = next((one for piece in self.pieces for one in piece.spec.crossings), None)
        return nullcontext() if crossing is None else crossing.recorded()

    def forward(self) -> None:
        """What the backward pass needs of this rests here until it has run."""
        with self._said():
            self._ahead()

    def backward(self) -> None:
        """Gradients of what trains go into their rooms, those of the inputs into the inlets."""
        with self._said():
            self._back()

    def _ahead(self) -> None:
        self.kept.clear()
        self.lent.clear()
        x = self.inlets[0]
        for at, piece in enumerate(self.pieces):
            state = x
            if piece.gate is not None:
                x = piece.gate.forward(state, piece.spec.ops)
            (call,) = piece.calls
            groups = call.groups(piece.tensors)
            x, kept = alone(call.forward(self._inputs(piece, x), groups, piece.tensors))
            lent, kept = without_lent(kept)
            if lent is not None:
                self.lent[at] = lent
            self.kept.append((piece, factors_of(groups), kept, state))
        self.outlet.copy_(x)

    def _inputs(self, piece: RecordedBlock, x: Tensor) -> list[Tensor]:
        """What the program of a block is given."""
        keys = None if piece.lender is None else self.lent[piece.lender]
        found = self.beside | {"x": x, TOKENS: piece.vectors, KEYS: keys}
        return [cast("Tensor", found[name]) for name in piece.spec.program.inputs]

    def _back(self) -> None:
        dx: Tensor | None = self.outlet
        sums: dict[str, Tensor | None] = dict.fromkeys(self.beside)
        keys, self.lent = self.lent, {}
        while self.kept:
            piece, factors, kept, state = self.kept.pop()
            if dx is None:
                continue
            (call,) = piece.calls
            groups = call.groups(piece.tensors, factors)
            lent = self.lent.pop(len(self.kept), None)
            if lent is None and len(self.kept) in keys:  # which nobody has read
                lent = torch.zeros_like(keys[len(self.kept)])
            found, grads = alone(
                call.backward(dx, kept, groups, piece.tensors, piece.needs, piece.given, lent=lent)
            )
            dx = self._taken(piece, found, sums)
            piece.give(grads)
            if piece.gate is not None and dx is not None:
                dx = piece.gate.backward(dx, state, piece.spec.ops)
            if not piece.given[0]:
                dx = None
        for inlet, grad in zip(self.inlets, (sums | {"x": dx}).values(), strict=True):
            if grad is not None:
                inlet.copy_(grad)

    def _taken(
        self, piece: RecordedBlock, found: Sequence[Tensor | None], sums: dict[str, Tensor | None]
    ) -> Tensor | None:
        """The gradient of a block's hidden states, of what its inputs have; those of the others are put where
        they go, `sums` for those that all blocks read."""
        by_name = dict(zip(piece.spec.program.inputs, found, strict=True))
        dx, vectors, keys = by_name.pop("x"), by_name.pop(TOKENS, None), by_name.pop(KEYS, None)
        if vectors is not None and piece.vectors is not None:
            piece.vectors.copy_(vectors)
        if keys is not None and piece.lender is not None:  # as autograd adds them
            other = self.lent.get(piece.lender)
            self.lent[piece.lender] = keys if other is None else other + keys
        for name, grad in by_name.items():
            sums[name] = _added(sums[name], grad, self.beside[name])
        return dx


class Upwards(Passes):
    """The forward pass of blocks of which nothing trains; outlet: what every block gives, [blocks, m, w]."""

    def _ahead(self) -> None:
        x = self.inlets[0]
        for piece, level in zip(self.pieces, self.outlet, strict=True):
            (call,) = piece.calls
            x, _ = alone(call.forward(self._inputs(piece, x), call.groups(piece.tensors), piece.tensors))
            level.copy_(x)


class HalvedPasses(Passes):
    """`Passes` of blocks that read hidden states alone, whose rows go through in two halves, in turns. rows:
    of the inlet, [rows, tokens] as a matrix."""

    def __init__(
        self, pieces: Sequence[RecordedBlock], inlets: Sequence[Tensor], outlet: Tensor, rows: int
    ) -> None:
        super().__init__(pieces, inlets, outlet)
        (self.inlet,) = inlets
        self.halves = halves(rows, len(outlet) // rows)
        self.blocks, self.held = list[BlockPass](), list[BlockTensors]()

    @contextmanager
    def _said(self) -> Iterator[None]:
        with super()._said():
            try:
                yield
            except BaseException:
                join(self.outlet.device)
                raise

    def _ahead(self) -> None:
        self.blocks = [
            BlockPass(piece.spec, piece.of_halves, len(piece.tensors), tuple(piece.needs), piece.given[0])
            for piece in self.pieces
        ]
        self.held = [BlockTensors(piece.tensors, give=piece.give) for piece in self.pieces]
        found = both_ahead(self.blocks, self.held, [self.inlet[half] for half in self.halves])
        for half, y in zip(self.halves, found, strict=True):
            self.outlet[half].copy_(y)

    def _back(self) -> None:
        held = [one.for_backward(block) for one, block in zip(self.held, self.blocks, strict=True)]
        self.held = []
        found = both_back(self.blocks, held, [self.outlet[half] for half in self.halves])
        for half, grad in zip(self.halves, found, strict=True):
            if grad is not None:
                self.inlet[half].copy_(grad)


def _added(found: Tensor | None, grad: Tensor | None, like: Tensor) -> Tensor | None:
    """The sum of what blocks find for an input that all of them read, in float32 or wider."""
    if grad is None:
        return found
    grad = grad.view(like.shape).to(torch.promote_types(like.dtype, torch.float32))
    return grad if found is None else found.add_(grad)
