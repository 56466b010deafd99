"""A step of fused blocks as a policy of memory sees it: what it is given, and what it takes whatever its
blocks keep."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from petune.kernels.memory import block_cost, buffers
from petune.kernels.memory.block_cost import Rates
from petune.kernels.memory.op_cost import Work, total
from petune.kernels.memory.shape import BlockShape

GIB = 2**30
WORTH = 5e-4  # the share of a step that a GiB of device memory has to save
WORKSPACE = 2**27  # bytes for the workspaces of libraries and for what the allocator rounds up


@dataclass(frozen=True)
class Alike:
    """Blocks of one shape: how many, and how many tokens each has, in sequences of how many."""

    shape: BlockShape
    number: int
    tokens: int
    sequence: int

    @cached_property
    def both(self) -> Work:
        """A forward and a backward pass of one of them, nothing computed again."""
        given = self.shape, self.tokens, self.sequence
        return block_cost.forward(*given) + block_cost.backward(*given)

    def update(self, rates: Rates) -> Work:
        """Of one of them, whose gradients come from a recording where that is worth while."""
        recorded = block_cost.launch_bound(self.shape, self.tokens, self.sequence, rates)
        return block_cost.update(self.shape, recorded)


@dataclass(frozen=True)
class BlockStep:
    """A step of `depth` blocks over `tokens` in sequences of `sequence`, and what all policies for it have in
    common.

    vocabulary: columns of the loss head, 0 for none. fixed: bytes of weights, gradients, optimizer state and
    embeddings on the device. wide: None; of blocks that stream, whether their AdamW states are float32: these
    rest in pinned host memory with the weights and are updated as the backward pass leaves them, so `fixed`
    is without both. passes: how many, of `tokens` each, keep what they keep at once; all seconds and FLOP are
    of one. kinds: of blocks, all `depth` of them; none where all are of `shape`. once: seconds of what stands
    outside blocks and head. worth: see WORTH.
    """

    shape: BlockShape
    depth: int
    tokens: int
    sequence: int
    vocabulary: int
    rates: Rates
    fixed: int = 0
    wide: bool | None = None
    passes: float = 1
    kinds: tuple[Alike, ...] = ()
    once: float = 0.0
    worth: float = field(default=WORTH, compare=False)  # of plans: options are priced without it

    def __post_init__(self) -> None:
        if self.depth < 1 or (self.wide is not None and not self.shape.trained):
            what = "a policy is for one block at least, and blocks stream only where their weights train"
            raise ValueError(what)

    @cached_property
    def own(self) -> int:
        """Tokens of this rank."""
        return self.shape.own(self.tokens)

    @cached_property
    def every(self) -> tuple[Alike, ...]:
        """The kinds of all its blocks."""
        return self.kinds or (Alike(self.shape, self.depth, self.own, self.sequence),)

    @cached_property
    def standing(self) -> int:
        """Bytes on the device throughout."""
        streaming = 0 if self.wide is None else buffers.streamed_device_bytes(self.shape, self.wide)
        return self.fixed + WORKSPACE + self.depth * buffers.standing_bytes(self.shape) + streaming

    @cached_property
    def pinned(self) -> int:
        """Bytes on the host throughout."""
        return 0 if self.wide is None else self.depth * buffers.streamed_host_bytes(self.shape, self.wide)

    @cached_property
    def head(self) -> int:
        """Bytes alive in the loss head."""
        return buffers.head_bytes(self.tokens, self.shape.width, self.vocabulary, self.shape.itemsize)

    @cached_property
    def _head_work(self) -> Work:
        trained = self.shape.weight_bytes * self.shape.trained
        sizes = self.tokens, self.shape.width, self.vocabulary, trained, self.shape.itemsize
        return block_cost.linear_cross_entropy(*sizes) if self.vocabulary else ()

    @cached_property
    def flop(self) -> float:
        """Of a step without recomputation."""
        return total(self._head_work).flop + sum(one.number * total(one.both).flop for one in self.every)

    @cached_property
    def other(self) -> float:
        """Seconds outside the passes of blocks."""
        updates = (
            one.number * self.rates.seconds(one.update(self.rates), one.sequence) for one in self.every
        )
        return self.once + self.rates.seconds(self._head_work, self.sequence) + sum(updates)

    @cached_property
    def roofline(self) -> float:
        """Seconds of a step without recomputation."""
        passing = (one.number * self.rates.seconds(one.both, one.sequence) for one in self.every)
        return self.other + sum(passing)

    @property
    def here(self) -> int:
        """How many blocks have a backward pass that follows at once, so that they are not offloaded: the last
        of a single pass."""
        return int(self.passes == 1)

    def seconds(self, work: Callable[[Alike], Work]) -> float:
        """Of what `work` says of a kind, on this step's device: the mean over its blocks."""
        each = (one.number * self.rates.seconds(work(one), one.sequence) for one in self.every)
        return sum(each) / self.depth

    def price(self, seconds: float, peak: int) -> float:
        """What the best plan has least of."""
        return seconds / self.roofline + self.worth * peak / GIB
