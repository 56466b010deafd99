"""The blocks below a ladder as one CUDA graph: the forward pass alone, for what every block gives.

Nothing of them trains, so nothing is kept inside; the ladder reads what each of them gives, which leaves the
recording as a copy, [blocks, batch, seq, width].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from petune.kernels.block.call import BlockLayers, Call
from petune.kernels.block.module import FusedBlock
from petune.kernels.configs import Rung
from petune.kernels.graphs.graph import Arrival, Graph, fill, taken
from petune.kernels.graphs.passes import RecordedBlock, Upwards
from petune.kernels.graphs.recorder import CudaRecorder
from petune.kernels.graphs.replay import Graphs
from petune.kernels.graphs.weights import Weights
from petune.models.stack import Arguments, Stack
from petune.rng.context import Running


class ForwardGraph(Graph):
    """A recording of the forward pass, whose outlet is what every block gives, [blocks, m, w]."""

    def calls(self, at: int, block: FusedBlock, parts: BlockLayers) -> tuple[Call, ...]:
        """See Graph; nothing is kept for a backward pass."""
        return tuple(replace(one, rung=Rung("input")) for one in super().calls(at, block, parts))

    def record(self, recorder: CudaRecorder, pieces: Sequence[RecordedBlock]) -> None:
        ahead = Upwards(pieces, self.inlets, self.outlet)
        with torch.no_grad(), torch.autocast(self.outlet.device.type, enabled=False):
            (self._forward,) = recorder.record(ahead.forward)

    def forward(self, *inputs: Tensor) -> Tensor:
        """What every block gives, [blocks, b, t, w], for `inputs_of`."""
        for room, value in zip(self.inlets, inputs, strict=True):
            fill(room, value)
        self._forward()
        return taken(self.outlet, torch.Size((len(self.outlet), *inputs[0].shape)))


class BeneathGraphs(Graphs):
    """A way through the blocks below a ladder (stack_protocols.Beneath) by recordings, as Graphs says."""

    kind = ForwardGraph

    def levels(self, stack: Stack, calls: Sequence[Arguments], here: Running) -> Tensor | None:
        """See stack_protocols.Beneath; the first call is one that `takes` took."""
        placed = self._placed(stack, calls, here)
        if placed is None:
            return None
        graph, arrival = placed
        with torch.no_grad():
            return graph.forward(*graph.inputs_of(arrival, cast("FusedBlock", stack.blocks[0])))

    def _is_for(self, stack: Stack) -> bool:
        return stack.ladder is not None

    def _reason(self, blocks: Sequence[FusedBlock], arrival: Arrival, weights: Weights) -> str | None:
        """See Graphs; of what only a backward pass asks for, nothing."""
        return arrival.refusal(blocks)

    def _outlet(self, arrival: Arrival) -> Tensor:
        """Room for what every block gives."""
        assert self.weights is not None
        return self._room("levels", arrival.hidden, arrival.inlet, len(self.weights.parts))
