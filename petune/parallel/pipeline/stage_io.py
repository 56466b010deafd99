"""What travels between the stages of a pipeline: where it leaves a stack and enters one, in which order, of
which shape.

From stage s to stage s + 1 go, as far as they exist:

    encoder goes on:   its carry (hidden states; T5: position bias), then its ladder's
    decoder goes on:   its carry, then its ladder's
    encoder is done:   its final hidden states [b, s, width], with the ladder's beside them, which every block
                       of the decoder reads

A tensor that passes through a stage gets back the sum of the gradients of all who read it. Hidden states are
whole, whatever the layout of the tp axis; a position bias has this rank's heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from petune.models import input_of, tokens_of
from petune.models.spec import StackName
from petune.models.stack_protocols import Carried
from petune.parallel.objective import Batch

# what of a block's carry goes to the next stage, see `Slot.shape`
TRAVELS = ("hidden_states", "position_bias")
# and what does not: zeros that a block makes where it is given none
MADE_ANEW = ("encoder_decoder_position_bias",)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Slot:
    """One place for a tensor in what travels. `name` is an argument of a block, or "encoder_states" for the
    finished encoder's output."""

    stack: StackName
    name: str
    side: bool = False

    def shape(self, sizes: tuple[int, ...], rows: int, lengths: dict[StackName, int]) -> tuple[int, ...]:
        """The shape for `rows` rows and sequences of `lengths`, where `sizes` is the shape it had for
        others. A position bias of two dims is one by distance (petune.kernels.block.distance)."""
        own = lengths[self.stack]
        if self.name != "position_bias":
            return (rows, own, sizes[2])
        return (*sizes[:2], own, own) if len(sizes) == 4 else (sizes[0], 2 * own - 1)


STATES = Slot("encoder", "encoder_states")


@dataclass
class StageWire:
    """A stack's wire (see stack_protocols.Wire): where the stack's two ends are, and what is between this
    stage and its neighbours."""

    begins: bool
    ends: bool
    inbox: Carried | None = None
    outbox: Carried | None = None

    def receive(self) -> Carried | None:
        arrived, self.inbox = self.inbox, None
        return arrived

    def send(self, carried: Carried) -> None:
        self.outbox = carried


@dataclass
class EncoderHandOff:
    """Hook on an encoder: final hidden states come from an earlier stage, go to a later one, or both."""

    arrives: bool
    leaves: bool
    inbox: Tensor | None = None
    outbox: Tensor | None = None

    def __call__(self, encoder: nn.Module, args: Any, output: Any) -> Any:
        """Replace what an encoder without blocks has made, and keep what goes on."""
        if self.arrives:
            output["last_hidden_state"], self.inbox = self.inbox, None
        if self.leaves:
            self.outbox = output["last_hidden_state"]
        return output


@dataclass
class Ends:
    """The ends of every stack on a stage, and the order in which tensors come in and go out.

    splits: whether torch can make its backward pass in two parts, for what came in and for what trains. It
    finds the second part behind each operation on what came in, and fails where those of two operations
    overlap: behind a stack that begins on a later stage than the first, beside what comes in. A frozen base
    leaves next to nothing for a second part, for which torch would run each of LoRA's nodes again.
    """

    splits: bool = True
    wires: dict[StackName, StageWire] = field(default_factory=dict)
    crossing: EncoderHandOff | None = None
    incoming: tuple[Slot, ...] = ()
    outgoing: tuple[Slot, ...] = ()

    def put(self, arrived: Sequence[Tensor | None]) -> None:
        """Lay out what came, in the order of `incoming`, for the stacks; None for an empty slot."""
        by_slot = dict(zip(self.incoming, arrived, strict=True))
        for stack, wire in self.wires.items():
            parts: list[dict[str, Any]] = [
                {
                    slot.name: value
                    for slot, value in by_slot.items()
                    if (slot.stack, slot.side) == (stack, side) and slot.name in TRAVELS
                }
                for side in (False, True)
            ]
            if parts[0]:
                wire.inbox = Carried(parts[0], parts[1] or None)
        if self.crossing is not None and self.crossing.arrives:
            self.crossing.inbox = by_slot[STATES]

    def collect(self) -> list[Tensor | None]:
        """What goes out, in the order of `outgoing`."""
        found = [self._one(slot) for slot in self.outgoing]
        for wire in self.wires.values():
            wire.outbox = None
        if self.crossing is not None:
            self.crossing.outbox = None
        return found

    def _one(self, slot: Slot) -> Tensor | None:
        if slot == STATES:
            assert self.crossing is not None
            return self.crossing.outbox
        carried = self.wires[slot.stack].outbox
        assert carried is not None
        part = carried.side if slot.side else carried.backbone
        return None if part is None else part.get(slot.name)


# ---------------------------------------------------------------- before it is made


@dataclass(frozen=True)
class TensorMeta:
    """What is known of a tensor that travels before it is made. sizes: those of the row that was tried."""

    dtype: torch.dtype
    differentiable: bool
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, value: Tensor | None) -> TensorMeta | None:
        """The kind of a tensor."""
        return None if value is None else cls(value.dtype, value.requires_grad, tuple(value.shape))


Kinds = tuple[TensorMeta | None, ...]  # one per slot, None where it stays empty
WORDS = 3 + 4  # how many sizes (0: empty), dtype, gradient, at most four sizes


def encoded(kinds: Kinds, device: torch.device) -> Tensor:
    """Kinds as a tensor [slots, WORDS] int64."""
    rows = [
        [0] * WORDS
        if kind is None
        else [
            len(kind.sizes),
            DTYPES.index(kind.dtype),
            int(kind.differentiable),
            *kind.sizes,
            *[0] * (4 - len(kind.sizes)),
        ]
        for kind in kinds
    ]
    return torch.tensor(rows, dtype=torch.int64, device=device)


def decoded(words: Tensor) -> Kinds:
    """Kinds of such a tensor."""
    rows = words.tolist()
    return tuple(
        TensorMeta(DTYPES[row[1]], bool(row[2]), tuple(row[3 : 3 + row[0]])) if row[0] else None
        for row in rows
    )


def lengths_of(model: nn.Module, batch: Batch, stacks: Sequence[StackName]) -> dict[StackName, int]:
    """Tokens of each stack's sequences. A decoder beside an encoder reads what is asked of it, its labels, or
    the input again."""
    tokens = tokens_of(model, input_of(batch))
    wanted = batch.get("decoder_input_ids", batch.get("labels")) if len(stacks) > 1 else None
    found: dict[StackName, int] = dict.fromkeys(stacks, tokens)
    if wanted is not None and wanted.dim() == 2:
        found["decoder"] = wanted.shape[1]
    return found


class OwnOutputs(Function):
    """A stage's outputs as tensors of their own: torch's schedules detach them in place, which a view or an
    input does not survive.

    constants: how many of the tensors are inputs without a gradient, which are answered with zeros; the rest
    is returned.
    """

    @staticmethod
    def forward(ctx: Any, constants: int, *tensors: Tensor) -> Any:
        """The outputs, each an alias."""
        ctx.constants = [value.new_zeros(()).expand(value.shape) for value in tensors[:constants]]
        ctx.set_materialize_grads(False)
        return tuple(value.detach() for value in tensors[constants:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        """Zeros for the constants, the gradients for the rest."""
        return None, *(zeros.contiguous() for zeros in ctx.constants), *grads
