"""How calls enter and leave a fused stack (stack_protocols.Edges): real tokens alone, in the dtype that
its blocks compute in."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from petune.kernels.block.layout import MASKS, MEMORY, is_no_mask
from petune.kernels.block.module import FusedBlock
from petune.kernels.block.varlen import Segments, pack, unpack
from petune.models.disentangled import by_distance
from petune.models.stack import Arguments, Stack
from petune.models.stack_protocols import Edges
from petune.rng.context import Running


class Unpadded(Edges):
    """Edges of a stack (stack_protocols.Edges) that leave padding outside, where `running().segments` says
    what is kept; else they do nothing.

    Inside, every argument of the call that has a row [t] for each row of the batch, or one for all of them,
    has [1, total] instead, `position_embeddings` and `position_ids` among them, and there is no attention
    mask, as there is none where rows have no padding: blocks have to attend within segments. Where
    `running().memory` says what the encoder kept, its hidden states are packed as well, and there is no mask
    of them. A ladder's carry is made from one that has entered.
    """

    def begin(self, stack: Stack, carry: Arguments, here: Running) -> tuple[Arguments, Running]:
        return carry | {"hidden_states": self.part(carry["hidden_states"], here)}, here

    def argument(self, stack: Stack, name: str, value: Tensor, here: Running) -> Tensor | None:
        """See stack_protocols.Edges: the encoder's hidden states have rows and padding of their own."""
        positions = stack.rule.positions
        if name in MASKS:  # beside segments attention that scores positions reads none either
            gone = is_no_mask(value) or (positions is not None and here.segments is not None)
            return None if gone else value
        if positions is not None and name in (positions.argument, *positions.handed):  # of no row
            apart = name == positions.distances and here.segments is not None
            return by_distance(value) if apart else value
        segments: Segments | None = here.memory if name == MEMORY else here.segments
        if segments is None or value.dim() < 2:
            return value
        rows, tokens = segments.shape
        return pack(value, segments) if len(value) in (1, rows) and value.shape[1] == tokens else value

    def part(self, hidden: Tensor, here: Running) -> Tensor:
        return hidden if here.segments is None else pack(hidden, here.segments)

    def leave(self, hidden: Tensor, here: Running) -> Tensor:
        return hidden if here.segments is None else unpack(hidden, here.segments)


class InDtype(Edges):
    """Edges of a stack (stack_protocols.Edges): under autocast a norm of the embeddings gives float32, as
    does an earlier stage that runs unfused, and blocks compute in a narrower dtype."""

    def begin(self, stack: Stack, carry: Arguments, here: Running) -> tuple[Arguments, Running]:
        """Hidden states in the dtype that autocast and the blocks compute in, where that is the same."""
        hidden: Tensor = carry["hidden_states"]
        device = hidden.device.type
        dtype = cast("FusedBlock", stack.blocks[0]).spec.computes_in(device)
        if torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == dtype:
            carry = carry | {"hidden_states": hidden.to(dtype)}
        return carry, here
