"""Both passes of a stack over buffers that stay where they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from petune.kernels.block.call import Call
from petune.kernels.block.steps import Values


@dataclass(frozen=True)
class Piece:
    """One block of the two passes. needs: which of its tensors train; rooms: where their gradients go; given:
    which of its inputs need a gradient, the first of them because something below it trains."""

    call: Call
    tensors: Sequence[Tensor | None]
    needs: Sequence[bool]
    rooms: Sequence[Tensor]
    given: Sequence[bool]


class Passes:
    """The blocks one after the other, from inlets to outlet and, with a gradient in the place of each, back.

    inlets: hidden states [m, w], then what all blocks read beside them; outlet: [m, w].
    """

    def __init__(self, pieces: Sequence[Piece], inlets: Sequence[Tensor], outlet: Tensor) -> None:
        self.pieces, self.inlets, self.outlet = pieces, inlets, outlet
        # factors stacked by the forward pass, and what it keeps
        self.kept: list[tuple[Piece, list[Tensor | None], Values]] = []

    def forward(self) -> None:
        """What the backward pass needs of this rests here until it has run."""
        self.kept.clear()
        x, *others = self.inlets
        for piece in self.pieces:
            x, kept, factors = piece.call.forward([x, *others], piece.tensors)
            self.kept.append((piece, factors, kept))
        self.outlet.copy_(x)

    def backward(self) -> None:
        """Gradients of what trains go into their rooms, those of the inputs into the inlets."""
        dx: Tensor | None = self.outlet
        sums: list[Tensor | None] = [None for _ in self.inlets[1:]]
        while self.kept:
            piece, factors, kept = self.kept.pop()
            if dx is None:
                continue
            (dx, *others), grads = piece.call.backward(
                dx, kept, factors, piece.tensors, piece.needs, piece.given
            )
            sums = [_added(*one) for one in zip(sums, others, self.inlets[1:], strict=True)]
            found = [grad for grad in grads if grad is not None]
            if found:
                assert len(found) == len(piece.rooms), "all that trains has a gradient"
                torch._foreach_copy_(list(piece.rooms), found)
            if not piece.given[0]:
                dx = None
        for inlet, grad in zip(self.inlets, (dx, *sums), strict=True):
            if grad is not None:
                inlet.copy_(grad)


def _added(found: Tensor | None, grad: Tensor | None, like: Tensor) -> Tensor | None:
    """The sum of what blocks find for an input that all of them read, in float32 or wider."""
    if grad is None:
        return found
    grad = grad.view(like.shape).to(torch.promote_types(like.dtype, torch.float32))
    return grad if found is None else found.add_(grad)
