"""The boundary of a sub-layer that is cut across ranks: what they say to one another as it is entered and as
it is left, each as a function and its adjoint.

Attention or an MLP cut by heads or columns is entered with hidden states that every rank needs whole, and
left with one term of a sum. What lies between two of them is whole on every rank, or cut by sequence:

    connection   enter        its adjoint      leave            its adjoint
    whole        nothing      all-reduce       all-reduce       nothing
    sequence     all-gather   reduce-scatter   reduce-scatter   all-gather

Tensors in, tensors out, no autograd: hooks around the model's own modules call the functions by an autograd
function, a fused block calls them in both of its passes. A sub-layer that is not cut has no boundary.

A head that is cut by vocabulary has a slice instead: what its loss needs of the ranks that hold the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Literal, Protocol, Self

import torch
from torch import Tensor

from petune.models.note import Note

Connection = Literal["whole", "sequence"]  # how ranks hold what lies between sub-layers


class Boundary(Protocol):
    """Both ends of one sub-layer. Tensors are [batch, tokens, ...]; where the connection is whole, of any
    shape.

    connection: how ranks hold what lies around it. first: the number in the whole model of the first feature
    that this rank's part of the way out reads. overlapped: other work is to hide the communication. share:
    the part of all tokens that this rank has beyond it, where the connection is a sequence's. own: the caller
    has no more use for what it gives, which may be written over.
    """

    connection: ClassVar[Connection]
    first: int
    overlapped: bool
    share: float

    @property
    def split_turns(self) -> bool:
        """Whether passes that go in turns stop within long turns too, as ranks say two things with little
        work between (petune/kernels/block/turns.py)."""

    def here(self) -> Self:
        """The same for the running call, whose tokens lie as `running()` says: to be kept for its backward
        pass."""

    def enter(self, x: Tensor) -> Tensor:
        """Hidden states as the sub-layer reads them, of all tokens."""

    def enter_backward(self, dx: Tensor, own: bool = False) -> Tensor:
        """The sum over the ranks of what each makes of the gradient of what has entered."""

    def leave(self, y: Tensor, own: bool = False) -> Tensor:
        """The sum over the ranks of what each has made, as the connection holds it."""

    def leave_backward(self, dy: Tensor) -> Tensor:
        """The gradient of every rank's term of that sum."""

    def room_bytes(self, nbytes: int) -> tuple[int, int]:
        """Bytes that stand for what is said here, and bytes to come for hidden states of all tokens, of so
        many bytes."""

    def least(self, numbers: Sequence[int], device: torch.device) -> list[int]:
        """The least of each number among the ranks, on all of them; for what they have to agree on."""

    @property
    def recordable(self) -> bool:
        """Whether what is said here may be part of a recording."""

    def recorded(self) -> AbstractContextManager[None]:
        """What is said inside, at this boundary and all others of the same blocks, may become part of a
        recording, which all ranks replay in the same order."""


class VocabularySlice(Protocol):
    """The rows of a vocabulary that a head holds, of which other ranks hold the others. All call alike."""

    @property
    def first(self) -> int:
        """The number in the whole vocabulary of the first row."""

    @property
    def whole(self) -> int:
        """Rows of the whole vocabulary."""

    @property
    def widest(self) -> int:
        """The most rows that a rank holds."""

    def gather(self, x: Tensor) -> Tensor:
        """[ranks, ...]: what every rank gives, all [...]."""

    def enter_backward(self, dx: Tensor) -> Tensor:
        """The sum over the ranks of what each makes of the gradient of hidden states; `dx` may be written
        over."""

    def cross_entropy(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The cross-entropies in nats [n] of logits [n, rows of this slice] that are there. labels [n] are of
        the whole vocabulary; where one is negative the loss is 0."""


class SharedTokens(Protocol):
    """The tokens whose loss is made on this rank, where ranks have the same hidden states and labels of a
    call, and nothing behind the last block trains. All call alike."""

    def of_call(self, count: int) -> Self | None:
        """Those of the running call, whatever is called next, of which a head sees so many tokens; None where
        these are not all that have left the last stack, as then every rank makes the loss of all."""

    def part(self, x: Tensor) -> Tensor:
        """[b * all tokens, ...] -> own tokens of each row."""

    def total(self, loss: Tensor) -> Tensor:
        """The sum of a number of each rank; or of numbers of own tokens those of all, [b * all tokens]."""


class BoundaryHook:
    """A hook by which a model's own modules do what a fused block does itself."""


class SharedByCopies:
    """What a copy of the model has the same one of, as a process group cannot be copied; of hooks, one that
    knows nothing of the module it hangs on."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


_BOUNDARY = Note[Boundary]("boundary")  # of the module by which a sub-layer is entered that is cut
put_boundary, boundary_of = _BOUNDARY.put, _BOUNDARY.of
_SLICE = Note[VocabularySlice]("vocabulary_slice")  # of a head that holds a slice of its vocabulary
put_slice, slice_of = _SLICE.put, _SLICE.of
_TOKENS = Note[SharedTokens]("shared_tokens")  # of a head whose fused loss is made of own tokens on each rank
put_shared_tokens, shared_tokens_of = _TOKENS.put, _TOKENS.of
