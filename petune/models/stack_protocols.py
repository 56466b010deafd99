"""What may stand at a stack, and be asked by it: a ladder beside its blocks, a wire to another process, edges
where calls enter and leave, ways through all blocks at once, and what blocks are known to give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

from petune.models.port import Arguments, StackPass
from petune.rng.context import Running

if TYPE_CHECKING:
    from petune.models.stack import Stack


class LadderLike(Protocol):
    """A narrow network that climbs beside the blocks (see methods/side.py)."""

    handed: Tensor | None  # an encoder's side state, on its way to the decoder's ladder
    config: Any  # of its blocks
    ops: Any  # the operations that its gates mix with, None for plain torch; set by who fuses its blocks

    @property
    def numbered(self) -> list[tuple[int, nn.Module]]:
        """Its blocks that are here, each with the number of the block that it is beside."""

    def has(self, number: int) -> bool:
        """Whether it has a level beside block `number`, here."""

    def reads(self, number: int) -> bool:
        """Whether that level reads what block `number` gives."""

    def begin(self, call: Arguments, arrived: Arguments | None) -> Arguments:
        """The ladder's carry of what enters the stack; `arrived` is its carry from an earlier stage."""

    def split(self, call: Arguments, now: StackPass) -> tuple[Arguments, Arguments]:
        """The arguments of one block, for the backbone and for the level beside it, without the ladder's
        carry."""

    def lower(self, levels: Tensor) -> Tensor:
        """What the gates mix in of all levels that are here, [levels, batch, seq, width / reduction], of what
        their blocks give."""

    def gate(self) -> tuple[Tensor, float]:
        """The gates of the levels that are here, [levels], and their temperature."""

    def call(self, index: int, call: Arguments) -> Arguments:
        """What the side block beside block `index` is handed."""

    def step(self, index: int, hidden: Tensor, call: Arguments, below: Tensor | None = None) -> Arguments:
        """One level: mix the output of block `index`, [batch, seq, hidden], into the side state and advance
        it. below: the level of `lower`, where it was asked. Returns the carry."""

    def end(self, hidden: Tensor, call: Arguments) -> Tensor:
        """What leaves the stack in place of the last block's output, same shape."""


@dataclass(frozen=True)
class Carried:
    """What travels from one pipeline stage to the next: a block's carry, and the ladder's own where there is
    one."""

    backbone: Arguments
    side: Arguments | None


class Wire(Protocol):
    """The ends of a stack that goes on in another process."""

    def receive(self) -> Carried | None:
        """What the stage before has sent; None where this stage begins the stack."""

    ends: bool  # whether the stack ends on this stage, and is left as it always is; nothing is sent then

    def send(self, carried: Carried) -> None:
        """Take what the next stage needs."""


class Edges(Protocol):
    """How calls enter and leave a stack that computes on other tensors inside: on some tokens of each row,
    say; who says nothing leaves them as they are. replays: whether blocks inside these edges may be replayed
    from recordings; least: tokens that a call must have."""

    replays: bool = True

    @property
    def least(self) -> int:
        """See the class."""
        return 1

    def begin(self, stack: Stack, carry: Arguments, here: Running) -> tuple[Arguments, Running]:
        """What the first block is handed by the one before, as it is inside, and where that lies in the
        whole."""

    def argument(self, stack: Stack, name: str, value: Tensor, here: Running) -> Tensor | None:
        """Any other argument of a block, as it is inside; asked once for each tensor of a pass."""
        return value

    def begin_side(self, stack: Stack, carry: Arguments, here: Running) -> Arguments:
        """A ladder's carry, made of one that is inside."""
        return carry

    def part(self, hidden: Tensor, here: Running) -> Tensor:
        """Hidden states as they are inside, of whole ones."""
        return hidden

    def leave(self, hidden: Tensor, here: Running) -> Tensor:
        """Hidden states made whole again, [batch, seq, width]."""
        return hidden


class Whole(Protocol):
    """A way through all blocks of a stack at once, or through all levels of the ladder beside it, where the
    arguments of all are alike (petune.models.port.alike)."""

    def takes(self, stack: Stack, call: Arguments) -> bool:
        """Whether a pass that begins with `call` may go this way."""

    def room_for(self, stack: Stack, hidden: Tensor, here: Running) -> int | None:
        """Tokens that it has room for, where a pass is to be computed as one of more tokens than it has; else
        None. hidden: of all tokens, before they are cut across ranks."""
        return None

    def __call__(
        self, stack: Stack, calls: Sequence[Arguments], here: Running, below: Tensor | None = None
    ) -> Arguments | None:
        """The first of `calls`, one for each block, advanced by all; None where they have to run one by one.
        below: of a ladder, what its gates mix in."""


class Beneath(Protocol):
    """A way through all blocks below a ladder at once, for what each of them gives, where the arguments of
    all are alike."""

    def takes(self, stack: Stack, call: Arguments) -> bool:
        """Whether a pass that begins with `call` may go this way."""

    def levels(self, stack: Stack, calls: Sequence[Arguments], here: Running) -> Tensor | None:
        """What every block gives, [blocks, batch, seq, width], or None where they have to run one by one."""

    def forget(self) -> None:
        """Let go of what it holds for the blocks, which leave memory."""


class Levels(Protocol):
    """What the blocks of a stack give for rows that were seen before (see methods/activation_cache.py).

    numbers: of the blocks that are here and whose answers somebody reads: those that a level of the ladder
    reads, and the last; none below a head that reads nothing of this stack, or a sum behind it. known: what
    they give for the rows of this pass, [numbers, batch, seq, width], and then no block runs; None where it
    has to be computed."""

    numbers: Sequence[int]
    known: Tensor | None

    @property
    def writes(self) -> bool:
        """Whether what blocks give in this pass is wanted."""

    def write(self, number: int, hidden: Tensor) -> Tensor | None:
        """Take what block `number` of `numbers` gives, [batch, seq, width]; what it will be read as, where
        that is rounded."""
