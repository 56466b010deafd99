"""Linear layers that share one input computed as one, forward and backward, with their LoRA updates.

LoRA's forward is y = x W^T + s b^T with s = x a^T, where a = scale * A and b = B in the dtype of the
computation; q, k and v stack their factors: s is then [m, sum of ranks] and b block-diagonal. The backward
pass needs x, s and the gradient of y:

        ds = dy b        dx = dy W + ds a        dA = scale * ds^T x        dB = dy^T s        (dW = dy^T x
                         where W trains)

No intermediate is ever as large as W. What trains gets its gradient in float32, whatever the dtype of the
computation. x W^T and s b^T meet in float32 and are rounded once: within one product, where the weight has
room for b behind it, else in `Ops.linear_low`, or in the registers of an activation, whose result lies on no
grid that the product was rounded to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from petune.kernels.block.dense import Dense, matmul32
from petune.kernels.block.linear import PackedWeight
from petune.kernels.dispatch import Ops
from petune.kernels.reference import Added, Low
from petune.models.tuned_linear import LowRank
from petune.rng.dropout import Drop

FOLDED = 64  # the largest rank that the element-wise kernels add or read on their way
SUMMED = 32  # the largest rank whose gradients the backward pass of an activation sums on its way


class Sink:
    """Gradients of a block as its backward pass finds them, summed over tiles in float32."""

    def __init__(self, needs: Sequence[bool]) -> None:
        self.needs = needs
        self.found: dict[object, Tensor] = {}

    def add(self, key: object, value: Tensor | None) -> None:
        """Add to what was found under `key`."""
        if value is not None:
            self.found[key] = self.found[key].add_(value) if key in self.found else value


@dataclass(frozen=True)
class Rows:
    """A matrix x that entered a linear: at hand, or made again from what a norm read. normed: total, rstd and
    weight of an RMS norm."""

    matrix: Callable[[], Tensor]
    normed: tuple[Tensor, Tensor, Tensor] | None = None

    @staticmethod
    def of(x: Tensor) -> Rows:
        """The matrix itself."""
        return Rows(lambda: x)

    @staticmethod
    def again(make: Callable[[], Tensor], normed: tuple[Tensor, Tensor, Tensor] | None = None) -> Rows:
        """A matrix that is made when it is asked for, once."""
        return Rows(cache(make), normed)

    def times(self, ds: Tensor, product: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """product(ds [m, r], x [m, k]): ds^T x [r, k] in float32, or that of an x some of whose elements are
        zero.

        x = total * rstd * weight need not be made for it: scaling the few columns of ds does the same, but in
        float16, whose range ds * rstd may leave.
        """
        if self.normed is None or ds.dtype is torch.float16:
            return product(ds, self.matrix())
        total, rstd, weight = self.normed
        return product(torch.mul(ds, rstd[:, None], out=torch.empty_like(ds)), total).mul_(weight)


class Group:
    """Linears of one input, as their parts are at this moment: [m, k] -> [m, sum of outputs].

    `first` is the place of its first tensor among a block's; `base` its frozen part, where that is one
    product. With `drops`, one per part, each update reads its own dropout of the input. gates: an activation
    reads these, which can add their update.
    """

    def __init__(
        self,
        parts: Sequence[LowRank],
        dtype: torch.dtype,
        first: int,
        ops: Ops,
        base: PackedWeight | None = None,
        drops: Sequence[Drop | None] = (),
        factors: tuple[Tensor, Tensor] | None = None,
        gates: bool = False,
    ) -> None:
        self.parts, self.first, self.ops = tuple(parts), first, ops
        self.widths = [len(part.weight) for part in parts]
        self.ranks = [0 if part.a is None else len(part.a) for part in parts]
        self.whole = base or (Dense(self.parts[0].weight, self.parts[0].bias) if len(parts) == 1 else None)
        self.tuned = any(self.ranks)
        self.drops = tuple(drops) if any(drop is not None for drop in drops) else ()
        self.rows: slice | None = None  # which of the call's rows a tile is, for dropout
        self.defers = gates and 0 < sum(self.ranks) <= FOLDED and (self.paired or len(parts) == 1)
        if self.tuned:
            self.a, self.b = factors or (self._stacked(dtype), self._diagonal(dtype))

    def _stacked(self, dtype: torch.dtype) -> Tensor:
        """[sum of ranks, k]: the factors A, each times its scale."""
        weight = self.parts[0].weight
        out = torch.empty(sum(self.ranks), weight.shape[1], dtype=dtype, device=weight.device)
        for part, ranks in zip(self.parts, spans(self.ranks), strict=True):
            if part.a is not None:
                torch.mul(part.a, part.scale, out=out[ranks])  # scaled and rounded in one pass
        return out

    def _diagonal(self, dtype: torch.dtype) -> Tensor:
        """[sum of outputs, sum of ranks]: the factors B on the diagonal."""
        if len(self.parts) == 1:
            assert self.parts[0].b is not None
            return self.parts[0].b.to(dtype)
        out = torch.zeros(sum(self.widths), sum(self.ranks), dtype=dtype, device=self.parts[0].weight.device)
        for part, rows, columns in zip(self.parts, spans(self.widths), spans(self.ranks), strict=True):
            if part.b is not None:
                out[rows, columns] = part.b
        return out

    @property
    def factors(self) -> tuple[Tensor | None, Tensor | None]:
        """a and b, to be handed to the same group later."""
        return (self.a, self.b) if self.tuned else (None, None)

    @property
    def paired(self) -> bool:
        """Whether these are two linears with updates of the same rank, so that each may read its half of s
        alone."""
        return len(self.ranks) == 2 and self.ranks[0] == self.ranks[1] > 0

    @property
    def folds_input(self) -> bool:
        """Whether a kernel that makes or reads this group's input may compute s and add ds a on its way."""
        return self.tuned and sum(self.ranks) <= FOLDED and len(self.parts) == 1

    # ------------------------------------------------------------ forward

    def inlet(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Where a kernel writes the input that it makes of x [m, ...]: (a matrix [m, k], what `__call__`
        takes beside it)."""
        k = self.parts[0].weight.shape[1]
        whole = (
            self.whole.inlet(len(x), sum(self.ranks))
            if self.whole is not None and self.tuned and not self.defers
            else None
        )
        return (x.new_empty(len(x), k), None) if whole is None else (whole[:, :k], whole)

    def low(self, x: Tensor) -> Tensor | None:
        """s = x a^T, [m, sum of ranks]; None where nothing is tuned."""
        if not self.tuned:
            return None
        if not self.drops:
            return x @ self.a.T
        s: Tensor = self.ops.dropped_low(x, self.a, *self._drawn())
        return s

    def _tuned(self) -> list[int]:
        return [at for at, rank in enumerate(self.ranks) if rank]

    def _drawn(self) -> tuple[list[int], list[Drop | None]]:
        """(rank, what drops out of its input in the tile's rows) of each update."""
        return [self.ranks[at] for at in self._tuned()], [self.drawn(at) for at in self._tuned()]

    def drawn(self, at: int = 0) -> Drop | None:
        """What drops out of the input of a part's update, in the tile's rows."""
        drop = self.drops[at] if self.drops else None
        return drop if drop is None or self.rows is None else drop._replace(numbers=drop.numbers[self.rows])

    def base(self, x: Tensor) -> Tensor:
        """x W^T + bias, [m, sum of outputs]."""
        if self.whole is not None:
            return self.whole.linear(x)
        y = x.new_empty(len(x), sum(self.widths))
        for part, out in zip(self.parts, y.split(self.widths, 1), strict=True):
            if part.bias is None:
                torch.mm(x, part.weight.T, out=out)
            else:
                torch.addmm(part.bias, x, part.weight.T, out=out)
        return y

    def __call__(self, x: Tensor, inlet: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """(y, s), the update in y unless it is `deferred`. inlet: what `inlet` gave, if x was written
        there."""
        s = self.low(x)
        return self.product(x, s, inlet), s

    def product(self, x: Tensor, s: Tensor | None, inlet: Tensor | None = None) -> Tensor:
        """x W^T + bias + s b^T, rounded once; without the update where it is `deferred`."""
        if s is None or self.defers:
            return self.base(x)
        if self.whole is not None:
            return self.whole.linear_low(x, (s, self.b), self.ops, inlet)
        y = x.new_empty(len(x), sum(self.widths))
        for part, rows, ranks in zip(self.parts, spans(self.widths), spans(self.ranks), strict=True):
            if part.b is None:
                y[:, rows] = F.linear(x, part.weight, part.bias)
            else:
                y[:, rows] = self.ops.linear_low(
                    x, part.weight, part.bias, (s[:, ranks], self.b[rows, ranks])
                )
        return y

    def sum32(self, x: Tensor, s: Tensor | None) -> Tensor:
        """x W^T + bias + s b^T of a single linear, not rounded: float32, float64 for float64."""
        assert self.whole is not None and not self.defers
        y = self.whole.linear32(x)
        return y if s is None else y.add_(matmul32(s, self.b.T))

    def deferred(self, s: Tensor | None) -> Low | None:
        """The update that `product` has left to the activation."""
        return (s, self.b) if s is not None and self.defers else None

    def read(self, s: Tensor | None) -> Added | None:
        """What the activation's backward reads of the update, to make the gradient of b on its way; None
        where ranks are too large."""
        if s is None or self.defers:
            return self.deferred(s)
        rank = sum(self.ranks) // (1 + self.paired)
        return (s, None) if rank <= FOLDED else None

    # ------------------------------------------------------------ backward

    def dlow(self, dy: Tensor) -> Tensor | None:
        """ds = dy b alone."""
        return dy @ self.b if self.tuned else None

    def dproducts(self, dy: Tensor) -> tuple[Tensor, Tensor | None]:
        """(dy W [m, k], ds = dy b, None where nothing is tuned)."""
        if self.whole is not None and self.tuned:
            return self.whole.dlinear_with(dy, self.b)
        return self._dbase(dy), self.dlow(dy)

    def _dbase(self, dy: Tensor) -> Tensor:
        if self.whole is not None:
            return self.whole.dlinear(dy)
        pieces = dy.split(self.widths, 1)
        dx: Tensor = pieces[0] @ self.parts[0].weight
        for piece, part in zip(pieces[1:], self.parts[1:], strict=True):
            dx.addmm_(piece, part.weight)
        return dx

    def dupdated(self, dx: Tensor, ds: Tensor | None) -> Tensor:
        """dx + ds a, in place."""
        if ds is None:
            return dx
        if not self.drops:
            return dx.addmm_(ds, self.a)
        updated: Tensor = self.ops.add_dropped_low_(dx, ds, self.a, *self._drawn())
        return updated

    def learn(
        self,
        sink: Sink,
        dy: Tensor,
        x: Rows,
        s: Tensor | None,
        ds: Tensor | None,
        da: Tensor | None = None,
        db: Tensor | None = None,
    ) -> None:
        """Add the gradients of what trains; da = ds^T x, not scaled, and db = dy^T s where a kernel has made
        them already."""
        if s is not None and ds is not None:
            sink.add((self.first, "a"), self._da(x, ds) if da is None else self._scaled_(da))
            sink.add((self.first, "b"), matmul32(dy.T, s) if db is None else db)
        for at, rows in enumerate(spans(self.widths)):
            weight, bias = sink.needs[self.first + 4 * at : self.first + 4 * at + 2]
            if weight:
                sink.add(self.first + 4 * at, matmul32(dy[:, rows].T, x.matrix()))
            if bias:
                sink.add(
                    self.first + 4 * at + 1,
                    dy[:, rows].sum(0, dtype=torch.promote_types(dy.dtype, torch.float32)),
                )

    def _da(self, x: Rows, ds: Tensor) -> Tensor:
        """The gradients of the factors A, one below the other."""
        scales = [self.parts[at].scale for at in self._tuned()]
        if self.drops:
            return x.times(ds, lambda ds, x: self.ops.dropped_low_backward(ds, x, *self._drawn(), scales))
        if len(set(scales)) == 1:
            return x.times(ds, lambda ds, x: matmul32(ds.T, x, scales[0]))
        return self._scaled_(x.times(ds, lambda ds, x: matmul32(ds.T, x)))

    def _scaled_(self, da: Tensor) -> Tensor:
        """ds^T x as it is, times each part's scale, in place."""
        for part, ranks in zip(self.parts, spans(self.ranks), strict=True):
            if part.a is not None:
                da[ranks].mul_(part.scale)
        return da

    def gradients(self, sink: Sink) -> list[Tensor | None]:
        """The gradients of the parts' tensors in order, as they were summed; None for what does not train."""
        da, db = sink.found.get((self.first, "a")), sink.found.get((self.first, "b"))
        # else the blocks alone, one below the other
        whole = db is not None and db.shape[1] == sum(self.ranks)
        found: list[Tensor | None] = []
        for at, (part, rows, ranks) in enumerate(
            zip(self.parts, spans(self.widths), spans(self.ranks), strict=True)
        ):
            own = self.first + 4 * at
            values = [sink.found.get(own), sink.found.get(own + 1)]
            values += (
                [None, None]
                if part.a is None or da is None or db is None
                else [da[ranks], db[rows, ranks] if whole else db[rows]]
            )
            there = [sink.needs[own + k] and tensor is not None for k, tensor in enumerate(part.tensors)]
            found += [value if is_there else None for value, is_there in zip(values, there, strict=True)]
        return found


def spans(sizes: Sequence[int]) -> list[slice]:
    """Slices of the given sizes, one after the other."""
    ends = [sum(sizes[: at + 1]) for at in range(len(sizes))]
    return [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]
