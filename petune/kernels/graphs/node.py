"""The autograd node of a stack that is replayed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from petune.errors import UsageError
from petune.kernels.graphs.graph import Graph
from petune.kernels.graphs.weights import Weights


class GraphPass:
    """One forward pass of a graph, until its backward pass has run or nobody can ask for it."""

    def __init__(self, graph: Graph, weights: Weights) -> None:
        self.graph, self.weights = graph, weights
        self.spent = False

    def spend(self) -> None:
        """Begin the backward pass. Raises UsageError where what it needs is gone."""
        if self.spent:
            raise UsageError(
                "a second backward pass through blocks that run as CUDA graphs: what the first one needed is"
                " gone",
                remedy=(
                    "call backward once, on the sum of the losses, or"
                    " petune.kernels.graphs.replay.ungraph(model) before training"
                ),
            )
        self.spent = True
        if self.weights.addresses() != self.weights.lay:
            raise UsageError(
                "weights were moved between the forward and the backward pass of blocks that run as CUDA"
                " graphs",
                remedy=(
                    "move them between steps, or petune.kernels.graphs.replay.ungraph(model) before training"
                ),
            )


class GraphNode(torch.autograd.Function):
    """One pass through a graph: Node.apply(turn, number of inputs, *inputs, *what trains)."""

    @staticmethod
    def forward(ctx: Any, turn: GraphPass, inputs: int, *values: Tensor) -> Tensor:
        ctx.turn, ctx.shapes = turn, [value.shape for value in values[:inputs]]
        # the graph reads them itself; autograd complains of those that have changed since
        ctx.save_for_backward(*turn.weights.all)
        return turn.graph.forward(*values[:inputs])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        turn: GraphPass = ctx.turn
        assert ctx.saved_tensors
        turn.spend()
        found, grads = turn.graph.backward(dy, ctx.shapes, ctx.needs_input_grad[2:])
        return None, None, *found, *grads
