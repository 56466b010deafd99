"""How attention on one rank's tokens of a sequence sees the others', as a fused block asks for it: what ranks
say to one another inside of attention, each as a function and its adjoint.

    kind      before attention               its adjoint         behind it           its adjoint
    gather    k | v: all-gather              reduce-scatter      nothing             nothing
    ulysses   q | k | v: tokens for heads    heads for tokens    heads for tokens    tokens for heads
    ring      nothing: k | v, and on the way back their gradients, travel while attention is computed
    cross     nothing: k | v are those of another sequence, which every rank holds whole

Ranks have their tokens in a row, or folded: a piece from the front of the sequence and one from its back,
such that the queries of each rank see as many keys where attention is causal. Segments, which lie one behind
the other, are in a row: each rank has some of them.

        tokens of three ranks, folded:   0 0 1 1 2 2 2 2 1 1 0 0

An exchange is the attribute `exchange` of an attention module. Tensors in, tensors out, no autograd, as those
of a boundary (petune.models.boundary); the model's own modules attend through the same object
(petune.models.attention).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, Self, cast

import torch
from torch import Tensor, nn

from petune.errors import UsageError
from petune.rng.context import TokenSpan, pieces_of

ExchangeKind = Literal["gather", "ulysses", "ring", "cross"]
Sizes = tuple[int, ...]  # one number for each rank


@dataclass(frozen=True)
class Exchanged:
    """What the steps of a block depend on of its exchange. shares: tokens of each rank, as a ratio; index: of
    this one; kv_heads: of each rank where tokens are traded for heads, else empty."""

    kind: ExchangeKind
    shares: Sizes
    index: int
    kv_heads: Sizes = ()

    @property
    def share(self) -> float:
        """Own tokens of all."""
        return self.shares[self.index] / sum(self.shares)

    def whole(self, own: int) -> int:
        """Of so many for own tokens as many for all, rounded up."""
        return -(-own * sum(self.shares) // self.shares[self.index])

    def own(self, whole: int) -> int:
        """The other way round."""
        return -(-whole * self.shares[self.index] // sum(self.shares))


class Exchange(ABC):
    """The exchange of rank `index`, which other ranks are not asked for unless it says so. sizes: tokens of
    each rank in the call that it is for, empty where the sequence is not cut; folded: see the file. shares:
    of each rank as the plan says, a ratio. overlapped: other work is to hide the communication. split_turns:
    as that of a boundary."""

    kind: ClassVar[ExchangeKind]
    split_turns: ClassVar[bool] = False
    index: int
    shares: Sizes
    sizes: Sizes
    overlapped: bool
    folded: bool

    @abstractmethod
    def here(self) -> Self:
        """The same for the running call, whose tokens lie as `running()` says: to be kept for its backward
        pass."""

    def described(self, kv_heads: int) -> Exchanged:
        """What steps depend on, for attention with so many heads of keys and values."""
        return Exchanged(self.kind, self.shares, self.index)

    def room_bytes(self, queries: int, keys: int) -> tuple[int, int]:
        """As that of a boundary, for queries and keys of so many bytes, of all tokens; values have as many as
        keys."""
        return 0, 0

    def least(self, numbers: Sequence[int], device: torch.device) -> list[int]:
        """As that of a boundary: the least of each number among the ranks."""
        return list(numbers)

    @property
    def recordable(self) -> bool:
        """As that of a boundary."""
        return False

    def recorded(self) -> AbstractContextManager[None]:
        """As that of a boundary."""
        return nullcontext()


class Crossed(Protocol):
    """What kinds with a step before or behind attention have. columns: of the matrices that lie side by side
    in x, each by rank, where heads are traded."""

    def enter(self, x: Tensor, columns: Sequence[Sizes]) -> Tensor:
        """x [batch, own tokens, columns] as attention reads it."""

    def enter_backward(self, dy: Tensor, columns: Sequence[Sizes]) -> Tensor:
        """The gradient of own tokens, of that of what attention has read on every rank."""

    def leave(self, y: Tensor, columns: Sequence[Sizes]) -> Tensor:
        """What attention gives, [batch, own tokens, columns]."""

    def leave_backward(self, dx: Tensor, columns: Sequence[Sizes]) -> Tensor:
        """The gradient of what attention gave here."""


class Travelling(Protocol):
    """What a ring has: attention itself. q [batch, heads, own tokens, d], k and v [batch, kv_heads, own
    tokens, d]; bias [1 | batch, 1 | heads, own tokens, all], mask [batch, 1 | heads, 1 | own tokens, all];
    causal: later keys are hidden though no mask says so; scale: of q k^T."""

    def attend(
        self,
        qkv: tuple[Tensor, Tensor, Tensor],
        bias: Tensor | None,
        mask: Tensor | None,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """(output, as q; what the way back needs beside it)."""

    def attend_backward(
        self,
        dout: Tensor,
        qkv: tuple[Tensor, Tensor, Tensor],
        bias: Tensor | None,
        mask: Tensor | None,
        causal: bool,
        scale: float,
        out: Tensor,
        kept: tuple[Tensor, ...],
        dbias: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of q, k and v; that of the bias, where asked for, is added to `dbias`."""


def exchange_of(module: nn.Module) -> Any:
    """The exchange through which an attention module attends, of whatever make; None where it has none."""
    return cast("Any", module.__dict__.get("exchange"))


# ------------------------------------------------------------------ which tokens are one rank's


def own_pieces(x: Tensor, pieces: Sequence[TokenSpan], dim: int) -> Tensor:
    """Of `x` the tokens of some pieces along `dim`, a view where it is one piece."""
    found = [x.narrow(dim, first, end - first) for first, end in pieces]
    return found[0] if len(found) == 1 else torch.cat(found, dim)


def fold(x: Tensor, sizes: Sizes) -> Tensor:
    """[b, t, ...], tokens in their order, as ranks have them folded one after the other. Tokens that are
    missing at the end are zeros."""
    lengths = [size - size // 2 for size in sizes] + [size // 2 for size in reversed(sizes)]
    count = next(at for at in range(len(lengths) + 1) if sum(lengths[:at]) == x.shape[1])
    parts = list(x.split(lengths[:count], 1))
    parts += [x.new_zeros(len(x), length, *x.shape[2:]) for length in lengths[count:]]
    return torch.cat([parts[at] for rank in range(len(sizes)) for at in (rank, -1 - rank)], 1)


def unfold(x: Tensor, sizes: Sizes, index: int = 0) -> Tensor:
    """What was folded in its order again, up to the last token of rank `index`; by default all."""
    parts = x.split([half for size in sizes for half in (size - size // 2, size // 2)], 1)
    return torch.cat([*parts[::2], *reversed(parts[1::2][index:])], 1)


@dataclass(frozen=True)
class QueryRows:
    """The queries of `whole` that are here, one or two `pieces`, which look at `keys` keys."""

    pieces: tuple[TokenSpan, ...]
    whole: int
    keys: int

    @property
    def first(self) -> int:
        return self.pieces[0][0]

    @property
    def end(self) -> int:
        return self.pieces[-1][1]

    @property
    def lengths(self) -> list[int]:
        """Of the pieces."""
        return [end - first for first, end in self.pieces]

    @property
    def own(self) -> int:
        return sum(self.lengths)

    def of(self, mask: Tensor | None) -> Tensor | None:
        """Own rows of a mask or bias [..., 1 | whole | own, keys]. Raises UsageError for one that was made
        for another part or length."""
        if mask is None:
            return None
        rows, keys = mask.shape[-2:]
        if keys != self.keys or rows not in (1, self.own, self.whole):
            what = "an attention mask or bias does not fit the sequence it is for"
            raise UsageError(what, expected=f"[..., {self.whole}, {self.keys}]", found=str(list(mask.shape)))
        return own_pieces(mask, self.pieces, -2) if rows == self.whole else mask


def rows_of(sizes: Sizes, index: int, keys: int | None = None, folded: bool = False) -> QueryRows:
    """The queries of rank `index`, which look at the same sequence unless it is another of `keys` tokens."""
    whole = sum(sizes)
    return QueryRows(pieces_of(sizes, index, folded), whole, whole if keys is None else keys)


def all_rows(whole: int) -> QueryRows:
    """All queries of a sequence, which look at it."""
    return QueryRows(((0, whole),), whole, whole)


def some_heads(mask: Tensor | None, count: int, first: int, held: int) -> Tensor | None:
    """Of a mask or bias [.., 1 | count, q, k] the heads [first, first + held)."""
    return mask if mask is None or mask.shape[1] != count else mask.narrow(1, first, held)
