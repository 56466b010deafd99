"""The output head and its cross-entropy in one step, so that the logits of a batch are never there all at
once.

The gradient is made in the forward pass: a chunk of rows becomes logits, the logits become their own gradient
in place, and from that come the chunk's part of every gradient; the backward pass only multiplies (Hsu et al.
2024, arXiv:2410.10989). Chunks are thousands of rows, as a matmul needs that many to run at full speed. Ranks
that hold slices of a vocabulary meet once a chunk, by three numbers a row, and once in the backward pass.
petune.kernels.head.hooks brings it to Hugging Face's models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from petune.kernels.dispatch import Ops
from petune.models.boundary import VocabularySlice

IGNORED = -100  # the label that Hugging Face gives to what does not count
ROWS = 4096  # of a chunk at most: more make no matmul faster
FEWEST = 1024  # and at least: fewer make it slower
BYTES = 2**30  # of a chunk's logits, between the two
ALIGNED = 8  # of columns a matmul has a multiple: 16 bytes of bf16

HeadUpdate = tuple[Tensor, Tensor, float]  # a [r, k], b [v, r], scale: + scale h a^T b^T
# logits [m, v], labels [m] -> losses [m]; the logits become their gradient
Entropy = Callable[[Tensor, Tensor], Tensor]

# ------------------------------------------------------------------ the step


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    ops: Ops,
    bias: Tensor | None = None,
    low: HeadUpdate | None = None,
    softcap: float = 0.0,
    smoothing: float = 0.0,
    chunk: int | None = None,
    trained: int | None = None,
    count: float | Tensor | None = None,
    part: VocabularySlice | None = None,
    each: bool = False,
) -> Tensor:
    """The summed cross-entropy in nats of hidden weight^T + bias + scale hidden a^T b^T: a scalar, float32
    (float64 for float64).

    hidden [n, k], weight [v, k], bias [v]; low: a [r, k], b [v, r] and scale; labels [n] int64, negative ones
    count nothing. softcap and smoothing as in `petune.kernels.reference.cross_entropy_`. The loss is divided
    by `count`, if there is one. Matmuls are in the dtype of autocast or else of `hidden`; gradients of
    weight, bias, a and b are summed in float32.

    chunk: rows of logits at a time. trained: the host's knowledge that at most so many labels count; if that
    is 7/8 of n or less, the other rows are left out before the matmul, and the loss is NaN if it was wrong.
    Labels on the CPU are counted here; on a device nobody counts, as it would have to be waited for, and
    ignored rows get a gradient of zero.

    part: weight, bias and b are a slice of the vocabulary and labels are of the whole of it; hidden, a and
    labels are the same on all ranks. The loss is the same for all slices, NaN if nobody holds a label, the
    gradient of hidden that of the whole; the gradient of a is this slice's term, which the caller sums.

    The gradient can be taken once: a second backward through a retained graph, or a derivative of it, raises
    RuntimeError.

    each: the losses [n] of all rows instead, 0 where a label is negative, for a loss that weighs them by what
    they are. What a row weighs is known in the backward pass alone, so that one makes the logits again, a
    chunk at a time: one matmul more, and nothing is kept but hidden states and labels.
    """
    number = len(labels)
    rows, missed = _rows_that_count(labels, trained)
    if rows is not None:
        labels, rows = labels.index_select(0, rows), rows.to(hidden.device, non_blocking=True)
        hidden = hidden.index_select(0, rows)
    labels = labels.to(hidden.device, non_blocking=True)
    dtype = _matmul_dtype(hidden)
    entropy: Entropy = partial(_entropy, ops, softcap, smoothing)
    if part is not None:
        entropy = partial(_entropy_of_slice, ops, softcap, smoothing, part)
    if chunk is None:  # the same for all slices, as their holders meet once a chunk
        columns = len(weight) if part is None else part.widest
        # the product is float32 on its way
        chunk = chunk_rows(columns, dtype.itemsize if low is None else 4 * dtype.itemsize)
    a, b = (None, None) if low is None else (low[0] * low[2], low[1])
    inputs = (hidden, _aligned(weight), _aligned(bias), a, _aligned(b))
    how = _How(partial(_inside, entropy, len(weight)), chunk, dtype, ops, part)
    found: Tensor
    if each:
        found = cast("Any", _TokenLosses).apply(how, labels, *inputs)
        found = found if rows is None else found.new_zeros(number).index_copy(0, rows, found)
    else:
        found = cast("Any", _LinearCrossEntropy).apply(how, torch.is_grad_enabled(), labels, *inputs)
    if missed is not None:
        found = found.masked_fill(missed.to(found.device, non_blocking=True), torch.nan)
    return found if count is None else found / count


def _rows_that_count(labels: Tensor, trained: int | None) -> tuple[Tensor | None, Tensor | None]:
    """(the rows that have labels, None where others are not left out; whether more than `trained` have)."""
    if trained is None and labels.device.type == "cpu":
        trained = int((labels >= 0).sum())
    if trained is None or 8 * trained > 7 * len(labels):
        return None, None
    # unlike a mask, it does not make the host wait for a size
    order = torch.argsort((labels < 0).to(torch.uint8), stable=True)
    return order[:trained], (labels.index_select(0, order[trained : trained + 1]) >= 0).any()


def _matmul_dtype(hidden: Tensor) -> torch.dtype:
    kind = hidden.device.type
    if hidden.dtype == torch.float64 or not torch.is_autocast_enabled(kind):
        return hidden.dtype
    return torch.get_autocast_dtype(kind)


def _aligned(value: Tensor | None) -> Tensor | None:
    """What a head has for each class, with zeros behind: of an odd number of classes (BART has 50,265) cuBLAS
    takes kernels that are several times as slow."""
    missing = 0 if value is None else -len(value) % ALIGNED
    return value if value is None or not missing else F.pad(value, (0, 0) * (value.dim() - 1) + (0, missing))


def _inside(entropy: Entropy, columns: int, logits: Tensor, labels: Tensor) -> Tensor:
    """By the classes that there are: the logits behind them, and their gradients, are zeros."""
    return entropy(logits[:, :columns], labels)


def chunk_rows(columns: int, itemsize: int = 2) -> int:
    """Rows of a chunk of logits at most, by the columns of the head and the bytes of an element."""
    return max(FEWEST, min(ROWS, BYTES // max(1, columns * itemsize) // 128 * 128))


def _entropy(ops: Ops, softcap: float, smoothing: float, logits: Tensor, labels: Tensor) -> Tensor:
    losses: Tensor = ops.cross_entropy_(logits, labels, softcap, smoothing)[0]
    return losses


def _entropy_of_slice(
    ops: Ops, softcap: float, smoothing: float, part: VocabularySlice, logits: Tensor, labels: Tensor
) -> Tensor:
    """The losses [m] of logits [m, v_r] that are cut by vocabulary, which become their gradient.

    A softmax over the whole is the slice's own, times the share exp(log_r - log) that the slice has of the
    partition sum. The label's entry is written anew from its score, as p_r - 1 has lost what a small p_r was;
    a row whose label is elsewhere takes class 0 in its stead. log_r says the largest score of a slice and its
    sum of exponentials in one number, so ranks meet once.
    """
    counts = labels >= 0
    own = (labels >= part.first) & (labels < part.first + logits.shape[1])
    at = (labels - part.first).masked_fill(~own, 0)
    # of which the operation leaves none
    scores, slope = _scores(logits, softcap) if smoothing else (None, None)
    losses: Tensor
    logs: Tensor
    losses, logs = ops.cross_entropy_(logits, at.masked_fill(~counts, IGNORED), softcap)
    hit = logs - losses
    facts = [logs, hit.masked_fill(~own, 0), own.to(hit.dtype)]
    every = part.gather(torch.stack(facts if scores is None else [*facts, scores]))
    log, sums = torch.logsumexp(every[:, 0], 0), every[:, 1:].sum(0)
    loss, entry = log - (1 - smoothing) * sums[0], torch.exp(hit - log) - (1 - smoothing) * own.to(hit.dtype)
    logits.mul_(torch.exp(logs - log)[:, None])
    if slope is not None:
        even = smoothing / part.whole
        loss, entry = loss - even * sums[2], entry - even
        logits.sub_((even * slope).masked_fill(~counts[:, None], 0))
    if softcap:
        entry = entry * (1 - (hit / softcap).square())
    logits.scatter_(1, at[:, None], entry.masked_fill(~counts, 0).to(logits.dtype)[:, None])
    return loss.masked_fill(sums[1] != 1, torch.nan).masked_fill(~counts, 0)


def _scores(logits: Tensor, softcap: float) -> tuple[Tensor, Tensor]:
    """The sum [m] of the scores of each row, and their slope [m, v] or [m, 1] in the logits."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if not softcap:
        return wide.sum(-1), wide.new_ones(len(wide), 1)
    bounded = torch.tanh(wide / softcap)
    return softcap * bounded.sum(-1), 1 - bounded.square()


class _How(NamedTuple):
    """How losses and their gradients are made, `chunk` rows at a time; dtype: of the matmuls."""

    entropy: Entropy
    chunk: int
    dtype: torch.dtype
    ops: Ops
    part: VocabularySlice | None


class _LinearCrossEntropy(Function):
    """inputs: hidden, weight, bias, a and b; of `_TokenLosses` too."""

    @staticmethod
    def forward(ctx: Any, how: _How, differentiated: bool, labels: Tensor, *inputs: Tensor | None) -> Tensor:
        needs = ctx.needs_input_grad[3:] if differentiated else (False,) * len(inputs)
        ctx.part, ctx.found = how.part, _room(inputs, needs, how.dtype)
        ctx.dtypes = [None if value is None else value.dtype for value in inputs]
        return _chunks(inputs, labels, how, ctx.found).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        found, ctx.found = ctx.found, None
        if found is None:
            raise RuntimeError(
                "the gradient of linear_cross_entropy is made in the forward pass and given away once: run"
                " that again"
            )
        scaled = [
            None if value is None else _scale_(value, grad).to(dtype)
            for value, dtype in zip(found, ctx.dtypes, strict=True)
        ]
        if ctx.part is not None and scaled[0] is not None:
            scaled[0] = ctx.part.enter_backward(scaled[0])
        return None, None, None, *scaled


class _TokenLosses(Function):
    @staticmethod
    def forward(ctx: Any, how: _How, labels: Tensor, *inputs: Tensor | None) -> Tensor:
        ctx.save_for_backward(*inputs, labels)
        ctx.how = how
        return _chunks(inputs, labels, how, [None] * len(inputs))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # grad: [n]
        *inputs, labels = ctx.saved_tensors
        found = _room(inputs, ctx.needs_input_grad[2:], ctx.how.dtype)
        _chunks(inputs, labels, ctx.how, found, grad)
        made = [
            None if value is None else value.to(own.dtype) for value, own in zip(found, inputs, strict=True)
        ]
        if ctx.how.part is not None and made[0] is not None:
            made[0] = ctx.how.part.enter_backward(made[0])
        return None, None, *made


def _room(inputs: Sequence[Tensor | None], wanted: Sequence[bool], dtype: torch.dtype) -> list[Tensor | None]:
    """Where the gradients of hidden, weight, bias, a and b go, those that are wanted: of the rows of hidden
    states each is written once, of the others a sum is taken."""
    sums = torch.promote_types(dtype, torch.float32)
    return [
        None
        if value is None or not want
        else torch.zeros_like(value, dtype=sums)
        if place
        else torch.empty_like(value, dtype=dtype)
        for place, (value, want) in enumerate(zip(inputs, wanted, strict=True))
    ]


def _chunks(
    inputs: Sequence[Tensor | None],
    labels: Tensor,
    how: _How,
    found: list[Tensor | None],
    weights: Tensor | None = None,
) -> Tensor:
    """The losses of the rows; what `found` has of the gradients of hidden, weight, bias, a and b is filled,
    with those of the sum of losses, each times its entry of `weights`."""
    hidden, weight, bias, a, b = (None if value is None else value.to(how.dtype) for value in inputs)
    assert hidden is not None and weight is not None
    dhidden, dweight, dbias, da, db = found
    losses = hidden.new_empty(len(hidden), dtype=torch.promote_types(hidden.dtype, torch.float32))
    pieces = max(1, -(-len(hidden) // how.chunk))
    rows = -(-len(hidden) // pieces)  # of one size, or the last might be a matmul of a few rows
    # a product with an update has a result of its own
    buffer = hidden.new_empty(rows if a is None else 0, len(weight))
    for start in range(0, len(hidden), max(1, rows)):
        now = slice(start, start + rows)
        x = hidden[now]
        logits, s = buffer[: len(x)], None
        if a is not None and b is not None:
            s = x @ a.T
            logits = how.ops.linear_low(x, weight, bias, (s, b))
        elif bias is None:
            torch.mm(x, weight.T, out=logits)
        else:
            torch.addmm(bias, x, weight.T, out=logits)
        losses[now] = how.entropy(logits, labels[now])
        if weights is not None:
            logits.mul_(weights[now, None])
        if dhidden is not None:
            torch.mm(logits, weight, out=dhidden[now])
        if dweight is not None:
            _add_product_(dweight, logits, x)
        if dbias is not None:
            dbias += logits.sum(0, dtype=dbias.dtype)
        if a is not None and b is not None and s is not None:
            ds = logits @ b
            if dhidden is not None:
                dhidden[now].addmm_(ds, a)
            if da is not None:
                _add_product_(da, ds, x)
            if db is not None:
                _add_product_(db, logits, s)
    return losses


def _add_product_(total: Tensor, x: Tensor, y: Tensor) -> None:
    """total += x^T y, never rounded to the dtype of x and y."""
    if x.is_cuda and x.dtype != total.dtype:
        torch.addmm(total, x.T, y, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(x.T.to(total.dtype), y.to(total.dtype))


def _scale_(values: Tensor, factor: Tensor) -> Tensor:
    """`values` times a scalar on their device, in place and rounded once: a narrow dtype would round the
    factor first."""
    if values.dtype == factor.dtype:
        return values.mul_(factor)
    for part in values.split(FEWEST):
        part.copy_(part.to(factor.dtype) * factor)
    return values
