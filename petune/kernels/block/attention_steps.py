"""The steps of heads: queries and keys turned by their positions, normed before, and attention itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from petune.kernels.block import attention as attending
from petune.kernels.block import pieces
from petune.kernels.block.attention import How, QkvGradients
from petune.kernels.block.lent_steps import KEYS
from petune.kernels.block.part import Heads
from petune.kernels.block.rotary_steps import angles_in
from petune.kernels.block.steps import BlockRun, Charge, Step, Values
from petune.kernels.memory import op_cost
from petune.kernels.memory.shape import BlockShape
from petune.models.exchange import Exchanged, ExchangeKind


@dataclass(eq=False)
class NormHeads(Step):
    """q | k | v, with the heads of q and of k normed and then turned by their positions, beside the original.
    at: place among the norms of q's, which k's follows; first: of their weights among the tensors. values:
    heads of v are normed too; keyed: of the keys, as the original is q | k alone. layer: they are LayerNorms
    with a row of weights for each head; neighbours: see Rotate. Without kv_heads they are queries alone."""

    raw: str
    qkv: str
    heads: int
    kv_heads: int
    eps: float
    at: int
    first: int
    values: bool = False
    keyed: bool = False
    layer: bool = False
    neighbours: bool = False
    cheap = True

    def __post_init__(self) -> None:
        self.takes, self.gives, self.reads, self.keeps = (self.raw,), (self.qkv,), (self.raw,), {}
        self.trained = (self.first, self.first + 1 + self.layer)  # behind the room for a bias
        self.trained = self.trained if self.kv_heads else (self.first,)

    def _weights(self, run: BlockRun) -> tuple[Tensor, Tensor]:
        q, *_ = run.norms[self.at]
        return q, run.norms[self.at + 1][0] if self.kv_heads else q

    def forward(self, run: BlockRun, v: Values) -> None:
        given = v[self.raw], self._weights(run), self.eps, *angles_in(run), self.heads, self.kv_heads
        v[self.qkv] = run.ops.norm_rope(*given, self.values, self.layer, self.neighbours)

    def backward(self, run: BlockRun, v: Values) -> None:
        """See Step. The gradients come one by one from attention."""
        trains = any(run.sink.needs[place] for place in self.trained)
        given = *run.grads.pop(self.qkv), v[self.raw], self._weights(run), self.eps, *angles_in(run)
        how = trains, self.values, self.layer, self.neighbours
        run.grads[self.raw], *own = run.ops.norm_rope_backward(*given, *how)
        for place, grad in zip(self.trained, own, strict=False):  # of no keys there is none
            run.sink.add(place, grad)

    def _columns(self, shape: BlockShape) -> int:
        return (self.heads + 2 * self.kv_heads) * shape.head_dim

    def sizes(self, shape: BlockShape) -> dict[str, int]:
        return {self.qkv: self._columns(shape) * shape.itemsize}

    def grads(self, shape: BlockShape) -> dict[str, int]:
        columns = self._columns(shape) - self.keyed * self.kv_heads * shape.head_dim
        return {self.raw: columns * shape.itemsize}

    def beside_back(self, shape: BlockShape, there: bool) -> int:
        """See Step. Sums of what weights of each head learn, one for as many rows as a kernel has at once."""
        heads = self.heads + self.kv_heads
        return heads * shape.head_dim**2 // 512 if self.layer and shape.trained else 0

    def ahead(self, shape: BlockShape, rows: float, sequence: float) -> Iterator[Charge]:
        yield "memory", op_cost.norm_rope(rows, self._columns(shape), shape.itemsize)

    def back(self, shape: BlockShape, rows: float, sequence: float, found: bool) -> Iterator[Charge]:
        yield "memory", op_cost.norm_rope_backward(rows, self._columns(shape), shape.itemsize)


@dataclass(eq=False)
class NormWidths(NormHeads):
    """The same with all heads of q normed as one, and all of k."""

    def _split(self, run: BlockRun, qkv: Tensor) -> tuple[Tensor, ...]:
        """q, k and v, each dense."""
        width = angles_in(run)[0].shape[-1]
        keys = self.kv_heads * width
        return tuple(part.contiguous() for part in qkv.split([self.heads * width, keys, keys], 1))

    def forward(self, run: BlockRun, v: Values) -> None:
        *parts, values = self._split(run, v[self.raw])
        weights = self._weights(run)
        normed = [run.ops.rms_norm(*one, self.eps)[0] for one in zip(parts, weights, strict=True)]
        qkv = torch.cat([*normed, values], 1)
        v[self.qkv] = run.ops.rope_(qkv, *angles_in(run), self.heads + self.kv_heads)

    def backward(self, run: BlockRun, v: Values) -> None:
        """See Step. The gradients come one by one from attention."""
        trains = any(run.sink.needs[place] for place in self.trained)
        turned = run.ops.rope_backward(*run.grads.pop(self.qkv), *angles_in(run))
        found, (*parts, _), (*grads, dv) = [], self._split(run, v[self.raw]), self._split(run, turned)
        for place, grad, part, weight in zip(self.trained, grads, parts, self._weights(run), strict=True):
            rstd = run.ops.rms_norm(part, weight, self.eps)[1]
            dpart, own = run.ops.rms_norm_backward(grad, part, weight, rstd, None, trains)
            found.append(dpart)
            run.sink.add(place, own)
        run.grads[self.raw] = torch.cat([*found, dv], 1)

    def beside(self, shape: BlockShape) -> int:
        return 2 * shape.qkv * shape.itemsize

    def beside_back(self, shape: BlockShape, there: bool) -> int:
        return 3 * shape.qkv * shape.itemsize

    def ahead(self, shape: BlockShape, rows: float, sequence: float) -> Iterator[Charge]:
        """See Step. Taken apart, normed, put together, turned."""
        yield from self._apart(shape, rows)
        for columns in self._normed(shape):
            yield "memory", op_cost.rms_norm(rows, columns, shape.itemsize)
        yield "memory", op_cost.copy(rows, shape.qkv, shape.itemsize)
        yield "memory", op_cost.rope_(rows, shape.qkv, shape.itemsize)

    def back(self, shape: BlockShape, rows: float, sequence: float, found: bool) -> Iterator[Charge]:
        """See Step. Both what was normed and its gradients are taken apart; norms give their roots again."""
        yield "memory", op_cost.rope_backward(rows, shape.qkv, shape.itemsize)
        for _ in range(2):
            yield from self._apart(shape, rows)
        for columns in self._normed(shape):
            yield "memory", op_cost.rms_norm(rows, columns, shape.itemsize)
            yield "memory", op_cost.rms_norm_backward(rows, columns, shape.itemsize)
        yield "memory", op_cost.copy(rows, shape.qkv, shape.itemsize)

    def _normed(self, shape: BlockShape) -> tuple[int, int]:
        """Columns of q and of k."""
        return shape.queries, shape.kv_heads * shape.head_dim

    def _apart(self, shape: BlockShape, rows: float) -> Iterator[Charge]:
        queries, keys = self._normed(shape)
        for columns in (queries, keys, keys):
            yield "memory", op_cost.copy(rows, columns, shape.itemsize)


@dataclass(eq=False)
class Attend(Step):
    """a = softmax(scale q k^T) v. sources: the one value with q | k | v, or that of q and that of k | v. how:
    which of the calls' hows.

    turned: the next step back takes the gradients of q, k and v one by one. exchange: through which it sees
    the tokens of other ranks. Where that gathers, q is the first columns of its source; where it trades
    tokens for heads, heads and kv_heads are those of this rank.
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
    window: int | None = None  # see How; where no mask says so
    exchange: Exchanged | None = None
    softcap: float | None = None  # of the scores
    sinks: tuple[int, int] | None = None  # their place among those of the block, and among its tensors
    rows = False

    def __post_init__(self) -> None:
        self.lse = f"{self.a}.lse"
        self.takes = self.sources if self.bias is None else (*self.sources, self.bias)
        self.gives, self.reads = (self.a, self.lse), (self.a, self.lse, *self.takes)
        self.keeps = dict.fromkeys(self.gives, "attention")

    def read_sinks(self, at: int, place: int) -> None:
        """Let them be number `at` of the block's, whose place among its tensors is this."""
        self.sinks, self.trained = (at, place), (place,)

    @property
    def crosses(self) -> bool:
        """Whether the keys are those of the memory."""
        return len(self.sources) > 1 and not self.gathered and not self.borrows

    @property
    def borrows(self) -> bool:
        """Whether the keys are those of an earlier block."""
        return KEYS in self.sources

    @property
    def gathered(self) -> bool:
        """Whether the keys are those of all ranks, and the queries own ones."""
        return self._kind("gather")

    def _kind(self, kind: ExchangeKind) -> bool:
        return self.exchange is not None and self.exchange.kind == kind

    @property
    def traded(self) -> Heads | None:
        """The heads that this rank has traded tokens for."""
        if self.exchange is None or not self.exchange.kv_heads:
            return None
        shares, group = self.exchange.kv_heads, self.heads // self.kv_heads
        return Heads(sum(shares) * group, sum(shares[: self.exchange.index]) * group, self.heads)

    def split(self, v: Values, seen: tuple[int, int] | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Views q [m, heads, d], k and v [n, kv_heads, d]. seen: of a memory's rows those that are read."""
        q, *rest = (v[name].unflatten(1, (-1, self.head_dim)) for name in self.sources)
        if rest:
            keys = rest[0] if seen is None else rest[0][slice(*seen)]
            return q[:, : self.heads], *keys.split(self.kv_heads, 1)
        found: tuple[Tensor, Tensor, Tensor] = q.split([self.heads, self.kv_heads, self.kv_heads], 1)
        return found

    def _seen(self, run: BlockRun) -> tuple[int, int] | None:
        """Of the memory's rows those that are read, None for all; of a sequence's own no others are here."""
        part = run.hows[self.how].part
        return None if part is None or not self.crosses else part.seen

    def _how(self, run: BlockRun, v: Values) -> How:
        how = run.hows[self.how]
        if self.sinks is not None:
            how = replace(how, sinks=run.sinks[self.sinks[0]])
        if self.bias is None:
            return how
        return replace(how, bias=v[self.bias] if how.part is None else how.part.of(v[self.bias]))

    def forward(self, run: BlockRun, v: Values) -> None:
        how = self._how(run, v)
        out, v[self.lse] = _form(how).forward(*self.split(v, self._seen(run)), how)
        v[self.a] = out.flatten(1)

    def backward(self, run: BlockRun, v: Values) -> None:
        a, how = v[self.a], self._how(run, v)
        out = a.view(len(a), self.heads, self.head_dim)
        da = run.grads.pop(self.a).reshape(out.shape)
        dbias = None
        if self.bias is not None and self.bias in run.wants:
            dbias = torch.zeros_like(
                v[self.bias], dtype=torch.promote_types(v[self.bias].dtype, torch.float32)
            )
            run.give(self.bias, dbias)
            dbias = dbias if how.part is None else how.part.of(dbias)
        seen = self._seen(run)
        given = (da, *self.split(v, seen), out, v[self.lse], how)
        dsinks = self._asked(run, how)
        grads: QkvGradients = _form(how).backward(*given, dbias, dsinks)
        if self.sinks is not None and dsinks is not None:
            run.sink.add(self.sinks[1], dsinks)
        if seen is not None:
            around = (0, 0, 0, 0, seen[0], len(v[self.sources[1]]) - seen[1])
            grads = grads[0], F.pad(grads[1], around), F.pad(grads[2], around)
        if self.turned and not self.borrows:
            run.grads[self.sources[0]] = grads
            return
        if self.borrows:  # the norm of queries takes them with those of no keys
            run.grads[self.sources[0]] = grads[0], grads[1][:, :0], grads[2][:, :0]
            if KEYS in run.wants:
                run.grads[KEYS] = torch.cat(grads[1:], 1).flatten(1)
            return
        pieces = [grads] if len(self.sources) == 1 else [grads[:1], grads[1:]]
        for name, piece in zip(self.sources, pieces, strict=True):
            if name in run.wants:
                run.grads[name] = torch.cat(piece, 1).flatten(1) if len(piece) > 1 else piece[0].flatten(1)

    def _asked(self, run: BlockRun, how: How) -> Tensor | None:
        """Room for the gradient of the sinks, where somebody needs it."""
        if self.sinks is None or how.sinks is None or not run.sink.needs[self.sinks[1]]:
            return None
        return torch.zeros_like(how.sinks, dtype=torch.promote_types(how.sinks.dtype, torch.float32))

    def sizes(self, shape: BlockShape) -> dict[str, int]:
        """See Step. A ring keeps the largest score and the sum of exponentials by themselves."""
        numbers = 4 * self.heads * (1 + self._kind("ring"))
        return {self.a: self._rows(self._queries * shape.itemsize), self.lse: self._rows(numbers)}

    @property
    def _queries(self) -> int:
        return self.heads * self.head_dim

    def _rows(self, own: int) -> int:
        """Of as many as there are for each token of which this rank has heads."""
        return own if self.exchange is None or self.traded is None else self.exchange.whole(own)

    def _columns(self, shape: BlockShape) -> list[int]:
        """Of each source, for each own token."""
        queries, keys = self._rows(self._queries), self._rows(2 * self.kv_heads * self.head_dim)
        if len(self.sources) == 1:
            return [queries + keys]
        if self.crosses:
            return [queries, int(keys * shape.across)]
        gathered = self.exchange if self.gathered else None
        return [queries, keys if gathered is None else gathered.whole(keys)]

    def grads(self, shape: BlockShape) -> dict[str, int]:
        return {
            name: columns * shape.itemsize
            for name, columns in zip(self.sources, self._columns(shape), strict=True)
        }

    def beside(self, shape: BlockShape) -> int:
        """See Step. What two pieces of own tokens get, before it lies in one."""
        return self._queries * shape.itemsize if self.gathered and self.causal else 0

    def beside_back(self, shape: BlockShape, there: bool) -> int:
        """See Step. dq in float32 and a sum for each head; or, once those are gone, the gradients that are
        put side by side."""
        sums = self._rows(4 * (self._queries + self.heads))
        return sums if self.turned and not self.borrows else max(sums, [*self.grads(shape).values()][-1])

    def ahead(self, shape: BlockShape, rows: float, sequence: float) -> Iterator[Charge]:
        work, given = self._work(rows, sequence), self._kernel | self._keys(shape)
        yield "attention", op_cost.attention(*work, self.causal, shape.itemsize, **given)

    def back(self, shape: BlockShape, rows: float, sequence: float, found: bool) -> Iterator[Charge]:
        work, given = self._work(rows, sequence), self._kernel | self._keys(shape)
        yield "attention_backward", op_cost.attention_backward(*work, self.causal, shape.itemsize, **given)
        if not self.turned:
            yield "memory", op_cost.rope_backward(rows, sum(self._columns(shape)), shape.itemsize)

    @property
    def _kernel(self) -> dict[str, Any]:
        """What decides which kernels compute it."""
        own = self.softcap is not None or self.bias is not None or self.sinks is not None
        return {"window": self.window, "own": own}

    def _keys(self, shape: BlockShape) -> dict[str, Any]:
        """Of each text of an encoder, those that queries see."""
        return {"keys": shape.memory[1]} if self.crosses and shape.memory is not None else {}

    def _work(self, rows: float, sequence: float) -> tuple[float, float, int, int, int]:
        """Tokens, those of a sequence, heads, and columns of one."""
        times = 1.0 if self.traded is None or self.exchange is None else 1 / self.exchange.share
        return rows * times, sequence, self.heads, self.kv_heads, self.head_dim


def _form(how: How) -> Any:
    """What computes a call's attention."""
    return attending if how.part is None or not how.part.apart else pieces
