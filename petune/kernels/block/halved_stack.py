"""Both halves of a batch through all fused blocks of a stack, as one autograd node: see halves.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from torch import Tensor

from petune.kernels.block.halves import Halves
from petune.kernels.block.layout import BIAS
from petune.kernels.block.module import FusedBlock
from petune.kernels.block.watchers import block_by_block, hooked
from petune.models.stack import Arguments, Stack
from petune.models.stack_protocols import Whole
from petune.rng.context import Running, bound_to


class HalvedStack(Whole):
    """A way through a fused stack (stack_protocols.Whole) whose blocks ranks share, where what they say
    is to be hidden: what a half says last in one block is hidden behind the other's last turn there and its
    own first one in the next.

    Only in training with gradients, without a ladder, padding or hooks on blocks. Everything else goes block
    by block. What ranks say has another order then, so hooks on blocks must be on all ranks that share them.
    """

    def takes(self, stack: Stack, call: Arguments) -> bool:
        hidden = call["hidden_states"]
        return (
            stack.ladder is None
            and type(hidden) is Tensor
            and all(
                isinstance(block, FusedBlock) and block.spec.goes_in_halves(len(hidden), call)
                for block in stack.blocks
            )
            and not hooked(stack.blocks)
            and not block_by_block()
        )

    def __call__(
        self, stack: Stack, calls: Sequence[Arguments], here: Running, below: Tensor | None = None
    ) -> Arguments | None:
        """See stack_protocols.Whole; the first call is one that `takes` took."""
        hidden, numbered = calls[0]["hidden_states"], cast("list[tuple[int, FusedBlock]]", stack.numbered)
        with bound_to(here):
            if any(block.declines(hidden, call) for (_, block), call in zip(numbered, calls, strict=True)):
                return None  # a block that declines says so itself
        blocks, tensors = [], []
        for (number, block), call in zip(numbered, calls, strict=True):
            with bound_to(stack.at(number, here)):
                halved, own = block.halved(hidden, call)
            blocks.append(halved)
            tensors += own
        out = Halves.apply(blocks, hidden, *tensors)  # type: ignore[no-untyped-call]  # torch's
        return {"hidden_states": out, BIAS: None}
