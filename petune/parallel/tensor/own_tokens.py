"""The loss of own tokens: where a sequence is cut, every rank has the hidden states of all tokens behind the
last block, and would make the same loss of them. If nothing trains there, the gradient of own tokens is all
that a rank needs, so a fused head makes the loss of these alone, and the ranks' losses are summed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from petune.models.behind import output_head
from petune.models.boundary import SharedByCopies, put_shared_tokens
from petune.models.stack import Stack
from petune.parallel.collectives import reduce
from petune.rng.context import Running, pieces_of


@dataclass
class OwnTokens(SharedByCopies):
    """A petune.models.boundary.SharedTokens of rank `rank` of `group`. here, batch: how tokens lie in the
    call whose hidden states have left the last stack, and how many rows they have there. still: whether
    nothing behind the blocks trains in the running call."""

    group: dist.ProcessGroup
    rank: int
    here: Running = field(default_factory=Running)
    batch: int = 0
    still: bool = True

    def leave(self, hidden: Tensor, here: Running) -> None:
        """Note which call it is whose hidden states [b, own tokens, ...] leave the stack now, for the head
        right behind it."""
        # without what the call was given, which would stay until the next one
        self.here = Running(sizes=here.sizes, folded=here.folded, segments=here.segments)
        self.batch = len(hidden)

    def of_call(self, count: int) -> OwnTokens | None:
        return replace(self) if self.still and count == self._every else None

    def part(self, x: Tensor) -> Tensor:
        return x.index_select(0, self._places(x.device))

    def total(self, loss: Tensor) -> Tensor:
        if loss.dim():
            loss = loss.new_zeros(self._every).index_copy(0, self._places(loss.device), loss)
        return reduce(loss, self.group)

    @property
    def _every(self) -> int:
        """Tokens of all rows around the stack, padding among these."""
        segments = self.here.segments
        return self.batch * sum(self.here.sizes) if segments is None else math.prod(segments.shape)

    def _places(self, device: torch.device) -> Tensor:
        """Where own tokens of all rows lie, [m] int64, among the flattened ones around the stack, padding
        among these."""
        sizes, segments = self.here.sizes, self.here.segments
        pieces = pieces_of(sizes, self.rank, self.here.folded)
        own = torch.cat([torch.arange(*piece, device=device) for piece in pieces])
        rows = torch.arange(self.batch, device=device) * sum(sizes)
        places = (rows[:, None] + own).flatten()
        return places if segments is None or segments.places is None else segments.places.to(device)[places]


def share_tokens(model: nn.Module, group: dist.ProcessGroup, rank: int) -> OwnTokens | None:
    """Let the head right behind the last stack of `model`, whose sequence is cut, make the loss of own
    tokens; None where it has to make that of all."""
    head = output_head(model)
    if head is None or not still_outside(model):
        return None
    share = OwnTokens(group, rank)
    put_shared_tokens(head, share)
    model.register_forward_pre_hook(EnterTokens(share))
    return share


@dataclass
class EnterTokens(SharedByCopies):
    """Looks, before a model's forward or that of its copy, whether what was frozen when it was placed trains
    now, on all ranks alike: that needs the loss of all tokens."""

    tokens: OwnTokens

    def __call__(self, model: nn.Module, args: Any) -> None:
        self.tokens.still = still_outside(model)


def still_outside(model: nn.Module) -> bool:
    """Whether nothing outside of the stacks of `model` trains."""
    if isinstance(model, Stack):
        return True
    own = (value for value in model._parameters.values() if value is not None)
    return not any(value.requires_grad for value in own) and all(map(still_outside, model.children()))
