"""Linear layers that share one input computed as one, forward and backward, with their LoRA updates.

LoRA's forward is y = x W^T + s b^T with s = x a^T, where a = scale * A and b = B in the dtype of the
computation; q, k and v stack their factors: s is then [m, sum of ranks] and b block-diagonal. The backward
pass needs x, s and the gradient of y:

        ds = dy b        dx = dy W + ds a        dA = scale * ds^T x        dB = dy^T s        (dW = dy^T x
                         where W trains)

No intermediate is ever as large as W. What trains gets its gradient in float32, whatever the dtype of the
computation. Results and inputs may be scaled by vectors that train (petune/kernels/block/scaling.py), around
all that. x W^T and s b^T meet in float32 and are rounded once: within one product, where the weight has
room for b behind it, else in `Ops.linear_low`, or in the registers of an activation, whose result lies on no
grid that the product was rounded to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import torch
from torch import Tensor

from petune.kernels.block.dense import Dense, PackedWeight, matmul32
from petune.kernels.block.rows import LinearInput, Sink
from petune.kernels.block.scaling import columns_of, over_vector, own_of, scaled_inputs
from petune.kernels.dispatch import Ops
from petune.kernels.reference import Added, LowFactors, Scale, wide
from petune.models.tuned_parts import TENSORS, LowRank
from petune.rng.dropout import Drop

FOLDED = 64  # the largest rank that the element-wise kernels add or read on their way
SUMMED = 32  # the largest rank whose gradients the backward pass of an activation sums on its way


class Group:
    """Linears of one input, as their parts are at this moment: [m, k] -> [m, sum of outputs].

    `first` is the place of its first tensor among a block's; `base` its frozen part, where that is one
    product. With `drops`, one per part, each update reads its own dropout of the input. gates: an activation
    reads these, which can add their update and scale the sum.
    """

    def __init__(
        self,
        parts: Sequence[LowRank],
        dtype: torch.dtype,
        first: int,
        ops: Ops,
        base: PackedWeight | None = None,
        drops: Sequence[Drop | None] = (),
        factors: Sequence[Tensor | None] = (),
        gates: bool = False,
    ) -> None:
        self.parts, self.first, self.ops = tuple(_in_dtype(part, dtype) for part in parts), first, ops
        self.widths = [part.outputs for part in parts]
        self.ranks = [0 if part.a is None else len(part.a) for part in parts]
        alone = all(not part.leads for part in self.parts[1:])  # one weight, of all parts
        self.whole = base or (Dense(self.parts[0].upright, self.parts[0].bias) if alone else None)
        self.tuned = any(self.ranks)
        self.drops = tuple(drops) if any(drop is not None for drop in drops) else ()
        self.rows: slice | None = None  # which of the call's rows a tile is, for dropout
        first_part = self.parts[0]
        self.entry = first_part.by if first_part.scaling == "inputs" else None  # what scales the input
        a, b, self.columns = factors or (None, None, None)  # the last scales the result
        if self.tuned:
            self.a, self.b = (
                (self._stacked(dtype), self._diagonal(dtype)) if a is None or b is None else (a, b)
            )
        if not factors:
            self.columns = columns_of(parts, self._factors_of, ops)
        self.scales = self.columns is not None and not gates  # before the result is rounded
        self.defers = gates and 0 < sum(self.ranks) <= FOLDED and (self.paired or len(parts) == 1)

    def _stacked(self, dtype: torch.dtype) -> Tensor:
        """[sum of ranks, k]: the factors A, each times its scale."""
        first = self.parts[0]
        out = torch.empty(sum(self.ranks), first.inputs, dtype=dtype, device=first.weight.device)
        for part, ranks in zip(self.parts, spans(self.ranks), strict=True):
            if part.a is not None:
                torch.mul(part.a, part.scale, out=out[ranks])  # scaled and rounded in one pass
        return out

    def _diagonal(self, dtype: torch.dtype) -> Tensor:
        """[sum of outputs, sum of ranks]: the factors B on the diagonal."""
        if len(self.parts) == 1:
            b = _upright(self.parts[0])
            assert b is not None
            return b.to(dtype).contiguous()
        out = torch.zeros(sum(self.widths), sum(self.ranks), dtype=dtype, device=self.parts[0].weight.device)
        for part, rows, columns in zip(self.parts, spans(self.widths), spans(self.ranks), strict=True):
            if (b := _upright(part)) is not None:
                out[rows, columns] = b
        return out

    def _factors_of(self, at: int) -> tuple[Tensor, Tensor]:
        ranks = spans(self.ranks)[at]
        return self.a[ranks], self.b[spans(self.widths)[at], ranks]

    @property
    def factors(self) -> tuple[Tensor | None, ...]:
        """a, b and what scales the result, to be handed to the same group later."""
        return *((self.a, self.b) if self.tuned else (None, None)), self.columns

    @cached_property
    def scale(self) -> Scale | None:
        """What scales the result, here or in an activation; None for nothing."""
        return None if self.columns is None else Scale(self.columns, own_of(self.parts, self.columns))

    @property
    def deferred_scale(self) -> Scale | None:
        """What `product` has left to the activation to scale; None for nothing."""
        return None if self.scales else self.scale

    @property
    def paired(self) -> bool:
        """Whether two linears have updates of the same rank, so that each may read its half of s alone."""
        return len(self.ranks) == 2 and self.ranks[0] == self.ranks[1] > 0

    @property
    def folds_input(self) -> bool:
        """Whether a kernel that makes or reads this group's input may compute s and add ds a on its way."""
        return self.tuned and sum(self.ranks) <= FOLDED and len(self.parts) == 1

    # ------------------------------------------------------------ forward

    def inlet(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Where a kernel writes the input that it makes of x [m, ...]: (a matrix [m, k], what `__call__`
        takes beside it)."""
        k = self.parts[0].inputs
        whole = None
        if self.whole is not None and self.tuned and not self.defers and not self.scales:
            whole = self.whole.inlet(len(x), sum(self.ranks))
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
            _linear_into(out, x, part.upright, part.bias)
        return y

    def __call__(self, x: Tensor, inlet: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """(y, s), the update in y unless it is `deferred`. inlet: what `inlet` gave, if x lies there."""
        s = self.low(x)
        return self.product(x, s, inlet), s

    def product(self, x: Tensor, s: Tensor | None, inlet: Tensor | None = None) -> Tensor:
        """x W^T + bias + s b^T, scaled as the group is, rounded once; without the update where it is
        `deferred`, and not scaled where that is."""
        if self.entry is not None:
            x = scaled_inputs(x, self.entry)
        if self.scales and self.scale is not None:
            return self._scaled(x, s, *self.scale)
        if s is None or self.defers:
            return self.base(x)
        if self.whole is not None:
            return self.whole.linear_low(x, (s, self.b), self.ops, inlet)
        y = x.new_empty(len(x), sum(self.widths))
        for part, rows, ranks in zip(self.parts, spans(self.widths), spans(self.ranks), strict=True):
            if part.b is None:
                _linear_into(y[:, rows], x, part.upright, part.bias)
            else:
                low = s[:, ranks], self.b[rows, ranks]
                self.ops.linear_low(x, part.upright, part.bias, low, out=y[:, rows])
        return y

    def _scaled(self, x: Tensor, s: Tensor | None, columns: Tensor, own: Tensor | None) -> Tensor:
        """columns * (x W^T + bias - own + s b^T) + own."""
        wholes = (
            (self.whole,) if self.whole is not None else (Dense(one.upright, one.bias) for one in self.parts)
        )
        y, *rest = (one.linear32(x) for one in wholes)
        y, shift = torch.cat([y, *rest], 1) if rest else y, None if own is None else (1 - columns) * own
        if s is not None:
            low = s, torch.mul(columns[:, None], self.b, out=torch.empty_like(self.b))
            summed: Tensor = self.ops.add_low(None if shift is None else shift.expand_as(y), y, low, columns)
            return summed
        y.mul_(columns)
        return (y if shift is None else y.add_(shift)).to(x.dtype)

    def sum32(self, x: Tensor, s: Tensor | None) -> Tensor:
        """x W^T + bias + s b^T of a single linear, not rounded: float32, float64 for float64."""
        assert self.whole is not None and not self.defers
        y = self.whole.linear32(x)
        return y if s is None else y.add_(matmul32(s, self.b.T))

    def deferred(self, s: Tensor | None) -> LowFactors | None:
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

    def unscaled(self, sink: Sink, dy: Tensor, y: Tensor | None) -> Tensor:
        """The gradient of x W^T + bias + s b^T from that of the result y, which is read where that is scaled;
        adds those of what scales it, and of biases that are not scaled."""
        if not self.scales or self.scale is None:
            return dy
        dz, sums = self.ops.unscale(dy, y, *self.scale)
        self._learn_scale(sink, sums, lambda rows: _column_sums(dy[:, rows]))
        found: Tensor = dz
        return found

    def learn_scale(self, sink: Sink, sums: Tensor | None) -> None:
        """Add what `unscaled` does, of the sums that the way back through what reads the result has made."""
        if sums is not None:
            self._learn_scale(sink, sums[0], lambda rows: sums[1, rows])

    def _learn_scale(self, sink: Sink, sums: Tensor, of_bias: Callable[[slice], Tensor]) -> None:
        """sums: of dy * (y - own); of_bias: those of dy, of some columns."""
        for at, (part, rows) in enumerate(zip(self.parts, spans(self.widths), strict=True)):
            own = self.first + TENSORS * at
            if part.by is not None and part.scales_outputs and sink.needs[own + 4]:
                sink.add(own + 4, over_vector(sums[rows], part.by))
            if part.spares_bias and part.bias is not None and sink.needs[own + 1]:
                sink.add(own + 1, of_bias(rows))

    def rescaled(self, db: Tensor | None) -> Tensor | None:
        """dz^T s of dy^T s, a row for each result."""
        return db if db is None or not self.scales or self.columns is None else db.mul_(self.columns[:, None])

    def entered(self, x: LinearInput) -> LinearInput:
        """What the weights are multiplied with, of what enters."""
        entry = self.entry
        return x if entry is None else LinearInput.again(lambda: scaled_inputs(x.matrix(), entry))

    def unentered(self, sink: Sink, dx: Tensor, x: LinearInput) -> Tensor:
        """The gradient of what enters, x, from that of what the weights are multiplied with; adds that of
        what scales it."""
        if self.entry is None:
            return dx
        dx, sums = self.ops.unscale(dx, x.matrix(), wide(self.entry).flatten())
        sink.add(self.first + 4, sums.view(self.entry.shape))
        return dx

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
        dx: Tensor = pieces[0] @ self.parts[0].upright
        for piece, part in zip(pieces[1:], self.parts[1:], strict=True):
            dx.addmm_(piece, part.upright)
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
        x: LinearInput,
        s: Tensor | None,
        ds: Tensor | None,
        da: Tensor | None = None,
        db: Tensor | None = None,
    ) -> None:
        """Add the gradients of what trains; da = ds^T x, not scaled, and db = dy^T s where a kernel has made
        them already."""
        if s is not None and ds is not None:
            if any(sink.needs[self.first + TENSORS * at + 2] for at in self._tuned()):
                sink.add((self.first, "a"), self._da(x, ds) if da is None else self._scaled_(da))
            sink.add((self.first, "b"), matmul32(dy.T, s) if db is None else db)
        for at, (part, begins) in enumerate(zip(self.parts, spans(self.widths), strict=True)):
            own = self.first + TENSORS * at
            weight, bias = sink.needs[own : own + 2] if part.leads else (False, False)
            wide = part.outputs if part.transposed else len(part.weight)  # those of all parts that it leads
            rows = slice(begins.start, begins.start + wide)
            if weight and part.transposed:
                sink.learn(own, matmul32, x.matrix().T, dy[:, rows])
            elif weight:
                sink.learn(own, matmul32, dy[:, rows].T, x.matrix())
            if bias and not part.spares_bias:
                sink.add(own + 1, _column_sums(dy[:, rows]))

    def _da(self, x: LinearInput, ds: Tensor) -> Tensor:
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
            own = self.first + TENSORS * at
            values = [sink.found.get(own + k) for k in range(TENSORS)]
            if part.a is not None and db is not None:
                mine = db[rows, ranks] if whole else db[rows]
                values[2:4] = None if da is None else da[ranks], mine.T if part.turned else mine
            there = [sink.needs[own + k] and tensor is not None for k, tensor in enumerate(part.tensors)]
            found += [value if is_there else None for value, is_there in zip(values, there, strict=True)]
        return found


def _in_dtype(part: LowRank, dtype: torch.dtype) -> LowRank:
    """`part` with its bias in a dtype: one that trains is float32 beside a narrower weight."""
    return part if part.bias is None or part.bias.dtype == dtype else part._replace(bias=part.bias.to(dtype))


def _linear_into(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if bias is None:
        torch.mm(x, weight.T, out=out)
    else:
        torch.addmm(bias, x, weight.T, out=out)


def _upright(part: LowRank) -> Tensor | None:
    """B [n, r] of a part."""
    return part.b.T if part.turned and part.b is not None else part.b


def _column_sums(dy: Tensor) -> Tensor:
    return dy.sum(0, dtype=torch.promote_types(dy.dtype, torch.float32))


def spans(sizes: Sequence[int]) -> list[slice]:
    """Slices of the given sizes, one after the other."""
    ends = [sum(sizes[: at + 1]) for at in range(len(sizes))]
    return [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]
