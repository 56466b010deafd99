"""The steps of heads: queries and keys turned by their positions, normed before that, and attention
itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from petune.kernels.block import attention as attending
from petune.kernels.block.attention import How
from petune.kernels.block.steps import Charge, Run, Step, Values
from petune.kernels.memory.op_cost import (
    attention,
    attention_backward,
    norm_rope,
    norm_rope_backward,
    rope_,
    rope_backward,
)
from petune.kernels.memory.shape import BlockShape


@dataclass(eq=False)
class Rotate(Step):
    """q | k | v with q and k turned by their positions, in place."""

    raw: str
    qkv: str
    heads: int  # that are turned

    def __post_init__(self) -> None:
        self.takes, self.gives, self.keeps = (self.raw,), (self.qkv,), {self.qkv: "projections"}
        self.over = self.raw

    def forward(self, run: Run, v: Values) -> None:
        """See Step."""
        v[self.qkv] = run.ops.rope_(v[self.raw], *_of(run.angles), self.heads)

    def backward(self, run: Run, v: Values) -> None:
        """See Step. The gradients come one by one from attention."""
        run.grads[self.raw] = run.ops.rope_backward(*run.grads.pop(self.qkv), *_of(run.angles))

    def grads(self, shape: BlockShape) -> dict[str, int]:
        """See Step."""
        return {self.raw: shape.qkv * shape.itemsize}

    def ahead(self, shape: BlockShape, rows: float, sequence: float) -> Iterator[Charge]:
        """See Step."""
        yield "memory", rope_(rows, shape.qkv, shape.itemsize)

    def back(self, shape: BlockShape, rows: float, sequence: float, found: bool) -> Iterator[Charge]:
        """See Step."""
        yield "memory", rope_backward(rows, shape.qkv, shape.itemsize)


@dataclass(eq=False)
class NormHeads(Step):
    """q | k | v, with the heads of q and of k normed and then turned by their positions, beside the original.
    at: place among the norms of q's, which k's follows; first: of their weights among the tensors."""

    raw: str
    qkv: str
    heads: int
    kv_heads: int
    eps: float
    at: int
    first: int
    cheap = True

    def __post_init__(self) -> None:
        self.takes, self.gives, self.reads, self.keeps = (self.raw,), (self.qkv,), (self.raw,), {}
        self.trained = (self.first, self.first + 1)

    def _weights(self, run: Run) -> tuple[Tensor, Tensor]:
        (q,), (k,) = run.norms[self.at : self.at + 2]
        return q, k

    def forward(self, run: Run, v: Values) -> None:
        """See Step."""
        v[self.qkv] = run.ops.norm_rope(
            v[self.raw], self._weights(run), self.eps, *_of(run.angles), self.heads, self.kv_heads
        )

    def backward(self, run: Run, v: Values) -> None:
        """See Step. The gradients come one by one from attention."""
        trains = any(run.sink.needs[place] for place in self.trained)
        given = (
            *run.grads.pop(self.qkv),
            v[self.raw],
            self._weights(run),
            self.eps,
            *_of(run.angles),
            trains,
        )
        run.grads[self.raw], *own = run.ops.norm_rope_backward(*given)
        for place, grad in zip(self.trained, own, strict=True):
            run.sink.add(place, grad)

    def sizes(self, shape: BlockShape) -> dict[str, int]:
        """See Step."""
        return {self.qkv: shape.qkv * shape.itemsize}

    def grads(self, shape: BlockShape) -> dict[str, int]:
        """See Step."""
        return {self.raw: shape.qkv * shape.itemsize}

    def ahead(self, shape: BlockShape, rows: float, sequence: float) -> Iterator[Charge]:
        """See Step."""
        yield "memory", norm_rope(rows, shape.qkv, shape.itemsize)

    def back(self, shape: BlockShape, rows: float, sequence: float, found: bool) -> Iterator[Charge]:
        """See Step."""
        yield "memory", norm_rope_backward(rows, shape.qkv, shape.itemsize)


def _of(angles: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
    assert angles is not None, "a block with rotary positions is given their angles"
    return angles


@dataclass(eq=False)
class Attend(Step):
    """a = softmax(scale q k^T) v. sources: the one value with q | k | v, or that of q and that of k | v. how:
    which of the calls' hows.

    turned: the next step back takes the gradients of q, k and v one by one.
    """

    sources: tuple[str, ...]
    a: str
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool
    scale: float
    how: int
    turned: bool = False
    drop: int | None = None  # which of the block's dropouts is that of its probabilities
    bias: str | None = None  # what is added to the scores
    window: int | None = None  # keys that a query sees, where no mask says so
    rows = False

    def __post_init__(self) -> None:
        self.lse = f"{self.a}.lse"
        self.takes = self.sources if self.bias is None else (*self.sources, self.bias)
        self.gives, self.reads = (self.a, self.lse), (self.a, self.lse, *self.takes)
        self.keeps = dict.fromkeys(self.gives, "attention")

    @property
    def crosses(self) -> bool:
        """Whether the keys are those of the memory."""
        return len(self.sources) > 1

    def split(self, v: Values) -> tuple[Tensor, Tensor, Tensor]:
        """Views q [m, heads, d], k and v [n, kv_heads, d]."""
        q, *rest = (v[name].unflatten(1, (-1, self.head_dim)) for name in self.sources)
        if rest:
            return q, *rest[0].split(self.kv_heads, 1)
        found: tuple[Tensor, Tensor, Tensor] = q.split([self.heads, self.kv_heads, self.kv_heads], 1)
        return found

    def _how(self, run: Run, v: Values) -> How:
        how = run.hows[self.how]
        return how if self.bias is None else replace(how, bias=v[self.bias])

    def forward(self, run: Run, v: Values) -> None:
        """See Step."""
        out, v[self.lse] = attending.forward(*self.split(v), self._how(run, v))
        v[self.a] = out.flatten(1)

    def backward(self, run: Run, v: Values) -> None:
        """See Step."""
        a = v[self.a]
        out = a.view(len(a), self.heads, self.head_dim)
        da = run.grads.pop(self.a).reshape(out.shape)
        dbias = None
        if self.bias is not None and self.bias in run.wants:
            dbias = torch.zeros_like(
                v[self.bias], dtype=torch.promote_types(v[self.bias].dtype, torch.float32)
            )
            run.give(self.bias, dbias)
        given = (da, *self.split(v), out, v[self.lse], self._how(run, v))
        grads = attending.backward(*given) if dbias is None else attending.backward(*given, dbias)
        if self.turned:
            run.grads[self.sources[0]] = grads  # type: ignore[assignment]
            return
        pieces = [grads] if len(self.sources) == 1 else [grads[:1], grads[1:]]
        for name, piece in zip(self.sources, pieces, strict=True):
            if name in run.wants:
                run.grads[name] = torch.cat(piece, 1).flatten(1) if len(piece) > 1 else piece[0].flatten(1)

    def sizes(self, shape: BlockShape) -> dict[str, int]:
        """See Step."""
        return {self.a: shape.queries * shape.itemsize, self.lse: 4 * shape.heads}

    def _columns(self, shape: BlockShape) -> list[int]:
        """Of each source."""
        keys = 2 * shape.kv_heads * shape.head_dim
        return [shape.queries + keys] if len(self.sources) == 1 else [shape.queries, keys]

    def grads(self, shape: BlockShape) -> dict[str, int]:
        """See Step."""
        return {
            name: columns * shape.itemsize
            for name, columns in zip(self.sources, self._columns(shape), strict=True)
        }

    def beside_back(self, shape: BlockShape, there: bool) -> int:
        """See Step. dq in float32 and a sum for each head; or, once those are gone, the gradients that are
        put side by side."""
        sums = 4 * (shape.queries + shape.heads)
        return sums if self.turned else max(sums, sum(self.grads(shape).values()))

    def ahead(self, shape: BlockShape, rows: float, sequence: float) -> Iterator[Charge]:
        """See Step."""
        heads = shape.heads, shape.kv_heads, shape.head_dim
        yield "attention", attention(rows, sequence, *heads, self.causal, shape.itemsize, window=self.window)

    def back(self, shape: BlockShape, rows: float, sequence: float, found: bool) -> Iterator[Charge]:
        """See Step."""
        heads = shape.heads, shape.kv_heads, shape.head_dim
        yield (
            "attention_backward",
            attention_backward(rows, sequence, *heads, self.causal, shape.itemsize, window=self.window),
        )
        if not self.turned:
            yield "memory", rope_backward(rows, sum(self._columns(shape)), shape.itemsize)
