"""The rows of a batch through fused blocks that ranks share, as two calls of each block, in turns: both
passes, and an autograd node of them. See turns.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from petune.kernels.block.call import Call, Spec, factors_of
from petune.kernels.block.node import fetched, flattened, park, rows_of, unflattened
from petune.kernels.block.packed_linear import Group
from petune.kernels.block.rows import Sink
from petune.kernels.block.turns import InTurns, Turns, together
from petune.kernels.memory.offload import Parked


def halves(rows: int, each: int = 1) -> tuple[slice, slice]:
    """Those of a batch, within a matrix that has so many rows for each of the batch's."""
    middle = (rows + 1) // 2 * each
    return slice(0, middle), slice(middle, rows * each)


def calls_of_halves(rows: int, apart: bool, call: Callable[[slice], Call]) -> tuple[Call, Call]:
    """What `call` makes of each half, once where both are the same. apart: whether rows differ in more than
    what drops out of them."""
    first, second = halves(rows)
    one = call(first)
    alike = 2 * first.stop == rows and not apart and not one.draws.all
    return one, one if alike else call(second)


class Kept(NamedTuple):
    """What a half keeps of a block: parked on the host; so many tensors; names of these."""

    parked: Parked | None
    tensors: int
    names: list[Any]


@dataclass
class BlockPass:
    """One block in a pass.

    make: calls for both halves, asked for once the first one comes, so that the device need not wait for
    those of all blocks, and let go then. count: of its tensors. needs: which of them train; given: whether
    its hidden states need a gradient. made: how many factors both calls make of A and B. kept: of each half.
    """

    spec: Spec
    make: Callable[[], tuple[Call, Call]] | None
    count: int
    needs: tuple[bool, ...] = ()
    given: bool = False
    made: int = 0
    kept: list[Kept | None] = field(default_factory=lambda: [None, None])

    @cached_property
    def calls(self) -> tuple[Call, Call]:
        """Of each half."""
        make, self.make = self.make, None
        assert make is not None
        return make()

    @property
    def back(self) -> bool:
        """Whether it has a backward pass."""
        return self.given or any(self.needs)


@dataclass
class BlockTensors:
    """The tensors of a block in a pass: its own, the factors of both calls once they are made, its groups
    while a half may ask for them again, what each half keeps; the halves that are still to come, and on the
    way back what both find, which `give` takes away where there is one."""

    own: Sequence[Tensor | None]
    factors: list[Tensor | None] | None = None
    groups: list[Group] | None = None
    kept: list[list[Tensor | None]] = field(default_factory=lambda: [[], []])
    sink: Sink | None = None
    to_come: int = 2
    grads: Sequence[Tensor | None] = ()
    give: Callable[[Sequence[Tensor | None]], None] | None = None

    def for_backward(self, block: BlockPass) -> BlockTensors:
        """Those of the pass back."""
        return replace(self, groups=None, sink=Sink(block.needs), to_come=2, grads=[None] * len(self.own))

    def come(self) -> bool:
        """Whether both halves are through now; a half says that it is."""
        self.to_come -= 1
        if not self.to_come:
            self.groups = None
        return not self.to_come


class Halves(torch.autograd.Function):
    """Halves.apply(blocks, hidden states [b, t, width], *the tensors of each block).

    While a half waits for what ranks say behind one block, the other may be in the block before. What trains
    is summed over both halves in float32, as over tiles. Blocks that read an encoder or hand on a bias do not
    go in halves.
    """

    @staticmethod
    def forward(ctx: Any, blocks: Sequence[BlockPass], hidden: Tensor, *tensors: Tensor | None) -> Tensor:
        given, needs, own = ctx.needs_input_grad[1], iter(ctx.needs_input_grad[2:]), iter(tensors)
        for block in blocks:
            block.given, block.needs = given, tuple(islice(needs, block.count))
            given = block.back
        held, rows = [BlockTensors(list(islice(own, block.count))) for block in blocks], halves(len(hidden))
        with torch.autocast(hidden.device.type, enabled=False):
            found = both_ahead(blocks, held, [rows_of(hidden[half]) for half in rows])
        for block, one in zip(blocks, held, strict=True):
            block.made = len(one.factors or ())
        kept = (value for one in held for part in (one.factors or (), *one.kept) for value in part)
        ctx.save_for_backward(*tensors, *kept)
        ctx.blocks, ctx.dtype = blocks, hidden.dtype
        return torch.cat(found).view(hidden.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        blocks: Sequence[BlockPass] = ctx.blocks
        held = _held(blocks, iter(ctx.saved_tensors))
        ctx.maybe_clear_saved_tensors()  # so that what a block has kept is freed behind it
        rows = halves(len(dy))
        with torch.autocast(dy.device.type, enabled=False):
            found = both_back(blocks, held, [rows_of(dy[half]) for half in rows])
        parts = [part for part in found if part is not None]
        dx = torch.cat(parts).view(dy.shape).to(ctx.dtype) if parts else None
        return None, dx, *(grad for one in held for grad in one.grads)


def _held(blocks: Sequence[BlockPass], saved: Iterator[Tensor | None]) -> list[BlockTensors]:
    """What `forward` has saved of each block."""
    held = [BlockTensors(list(islice(saved, block.count))).for_backward(block) for block in blocks]
    for block, one in zip(blocks, held, strict=True):
        one.factors = list(islice(saved, block.made))
        one.kept = [list(islice(saved, kept.tensors if kept else 0)) for kept in block.kept]
    return held


def both_ahead(
    blocks: Sequence[BlockPass], held: Sequence[BlockTensors], both: Sequence[Tensor]
) -> list[Tensor]:
    """Both halves, [m, width] each, through all blocks, in turns."""
    split, device = blocks[0].spec.split_turns, both[0].device
    passes = [_ahead(blocks, held, at, half, Turns(device, split)) for at, half in enumerate(both)]
    found = together(*passes, ahead=int(split))
    for block, one in zip(blocks, held, strict=True):
        if not block.back:
            one.factors = None
    return found


def both_back(
    blocks: Sequence[BlockPass], held: Sequence[BlockTensors], both: Sequence[Tensor]
) -> list[Tensor | None]:
    """The gradients [m, width] of both halves from the last block to the first, None where nothing below
    needs them; those of the blocks' tensors are in `held` then."""
    split, device = blocks[0].spec.split_turns, both[0].device
    # what was parked last comes back first
    passes = [_back(blocks, held, at, both[at], Turns(device, split)) for at in (1, 0)]
    second, first = together(*passes, ahead=int(split))
    return [first, second]


def _ahead(
    blocks: Sequence[BlockPass], held: Sequence[BlockTensors], at: int, x: Tensor, turns: Turns
) -> InTurns[Tensor]:
    """Half number `at`, [m, width], through all blocks."""
    for block, one in zip(blocks, held, strict=True):
        call = block.calls[at]
        x, kept = yield from call.forward([x], _groups(block, one, at), one.own, turns)
        one.come()
        if block.back:
            parked = park(call, kept)
            one.kept[at], names = flattened(kept)
            block.kept[at] = Kept(parked, len(one.kept[at]), names)
    return x


def _back(
    blocks: Sequence[BlockPass], held: Sequence[BlockTensors], at: int, grad: Tensor, turns: Turns
) -> InTurns[Tensor | None]:
    """The gradient [m, width] of half number `at`, last block to first; None where nothing below needs it."""
    found: Tensor | None = grad
    for block, one in zip(reversed(blocks), reversed(held), strict=True):
        state = block.kept[at]
        if state is None or found is None:
            return None
        call = block.calls[at]
        kept = fetched(call, unflattened(one.kept[at], state.names), state.parked)
        block.kept[at] = state._replace(parked=None)  # its host memory is for the next step
        one.kept[at] = []
        groups, sink = _groups(block, one, at), one.sink
        (found,), _ = yield from call.backward(
            found, kept, groups, one.own, block.needs, (block.given,), turns, sink
        )
        if one.come():
            assert sink is not None
            one.grads, one.sink = call.gradients(groups, one.own, sink), None
            if one.give is not None:
                one.give(one.grads)
                one.grads = ()
    return found


def _groups(block: BlockPass, one: BlockTensors, at: int) -> list[Group]:
    """The groups of half number `at`: those of the other one where both calls are the same. What they make of
    A and B is made once."""
    first, second = block.calls
    if one.groups is None or first is not second:
        one.groups = block.calls[at].groups(one.own, one.factors or ())
        one.factors = factors_of(one.groups)
    return one.groups
