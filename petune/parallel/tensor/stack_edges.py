"""The edges of a stack whose sequence is cut across ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor, nn

from petune.errors import UsageError
from petune.models.boundary import SharedByCopies
from petune.models.exchange import fold, own_pieces, unfold
from petune.models.stack import Arguments, Stack
from petune.parallel.collectives import Sizes, copy, gather_shared, split_shared
from petune.parallel.plan import Cut, apportion, foldable
from petune.parallel.tensor.own_tokens import OwnTokens
from petune.rng.context import Running, pieces_of


@dataclass
class StackEdges(SharedByCopies):
    """Edges of a stack (stack_protocols.Edges): where the connection is cut by sequence, each rank takes its
    tokens and gives them back."""

    replays = True
    plan: Cut
    group: dist.ProcessGroup
    rank: int
    tokens: OwnTokens | None = None  # whose loss the head right behind it makes

    @property
    def least(self) -> int:
        return 1 if self.plan.connection == "whole" else len(self.plan.sequence)

    def begin(self, stack: Stack, carry: Arguments, here: Running) -> tuple[Arguments, Running]:
        if self.plan.connection == "whole":
            return carry, here
        length = carry["hidden_states"].shape[1]
        if length < self.least:
            what, found = "a sequence cut across ranks needs a token for each", f"{length} of {self.least}"
            raise UsageError(what, found=found, remedy="pad the rows")
        sizes, laid = self._sizes(length, stack.room_for(carry["hidden_states"], here))
        folded = self.plan.folds and foldable(stack.rule) and here.segments is None and min(sizes) > 1
        first = pieces_of(sizes, self.rank, folded)[0][0]
        here = replace(here, sizes=sizes, rank=self.rank, laid=laid, folded=folded, token=first)
        carry = carry | {"hidden_states": self.part(carry["hidden_states"], here)}
        if self.plan.attention == "sequence":
            carry |= self._bias(stack, stack.blocks[0], carry, length)
        return carry, here

    def _sizes(self, length: int, room: int | None) -> tuple[Sizes, Sizes]:
        """(tokens of each rank, at least one; those that it has in a recording with room for so many, where
        ranks are filled from the first on, so that what they gather lies in one piece)."""
        if room is not None:
            laid = apportion(room, self.plan.sequence)
            sizes = tuple(
                min(end, length) - min(end - own, length)
                for own, end in zip(laid, accumulate(laid), strict=True)
            )
            if all(sizes):
                return sizes, laid
        return apportion(length, self.plan.sequence), ()

    def argument(self, stack: Stack, name: str, value: Tensor, here: Running) -> Tensor | None:
        """See stack_protocols.Edges: own positions for attention on own tokens."""
        by_sequence = self.plan.connection == "sequence"
        if any(one.per_token is not None and one.per_token.argument == name for one in stack.rule.sublayers):
            return self.part(value, here)
        positions = stack.rule.positions
        if positions is not None and name == positions.argument:
            # one sum for all blocks; a ladder reads it beside a backbone that has no gradient
            return copy(value, self.group) if self.plan.attention == "heads" else value
        if name == "encoder_hidden_states" and (by_sequence or stack.ladder is None):
            # One sum for all blocks, as every consumer is cut; a ladder beside a whole connection is not, and
            # its backbone has no gradient
            return copy(value, self.group)
        if self.plan.attention != "sequence" or name not in ("position_ids", "position_embeddings"):
            return value
        pieces = pieces_of(here.sizes, self.rank, here.folded)
        return own_pieces(value, pieces, 1 if name == "position_embeddings" else -1)

    def _bias(self, stack: Stack, first: nn.Module, carry: Arguments, length: int) -> Arguments:
        """A learned position bias is made by the first block from the lengths it sees: that of the whole
        sequence instead."""
        if stack.rule.bias is None or carry.get("position_bias") is not None:
            return {}
        makers = [one for one in first.modules() if getattr(one, "has_relative_attention_bias", False)]
        if not makers:  # what it is handed, a stage before has made
            return {}
        device = carry["hidden_states"].device
        return {"position_bias": cast("Any", makers[0]).compute_bias(length, length, device=device)}

    def begin_side(self, stack: Stack, carry: Arguments, here: Running) -> Arguments:
        beside = cast("Any", stack._modules["side"]).numbered
        if self.plan.connection == "whole" or not beside:
            return carry
        return carry | self._bias(stack, beside[0][1], carry, sum(here.sizes))

    def part(self, hidden: Tensor, here: Running) -> Tensor:
        hidden = fold(hidden, here.sizes) if here.folded else hidden
        return split_shared(hidden, here.sizes, self.group) if self.plan.connection == "sequence" else hidden

    def leave(self, hidden: Tensor, here: Running) -> Tensor:
        if self.tokens is not None:
            self.tokens.leave(hidden, here)
        if self.plan.connection == "sequence":
            hidden = gather_shared(hidden, here.sizes, self.group)
        return unfold(hidden, here.sizes) if here.folded else hidden
