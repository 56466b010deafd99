"""How attention on some tokens of a sequence sees the others: one object per attention module, put there as
`module.exchange`.

    gather   every rank fetches all keys and values and attends with its own queries
    ulysses  tokens are traded for heads, so every rank attends with whole sequences and some heads, and
             traded back (arXiv:2309.14509)
    ring     keys and values travel from rank to rank, and the softmax is accumulated block by block
             (arXiv:2310.01889)
    cross    keys and values are another sequence, whole on every rank; own queries

Each has two faces. Called, it is the attention function of the model's own modules, with autograd. What a
fused block asks of it (petune.models.exchange) are the plain functions of which those are made.

All take what Hugging Face hands to an attention function, of own tokens: query [b, heads, own, head_dim], key
and value [b, kv_heads, own, head_dim] (cross: whole). Masks [b, 1 | heads, 1 | all, all] and `position_bias`
[1 | b, heads, all, all] are made by the model for the whole sequence and cut here. Out comes [b, own, heads,
head_dim]. `running().sizes` says how many tokens each rank holds; a rank may hold none. Where it is empty the
sequence is not cut, and attention is plain.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from petune.errors import DistributedError, UsageError
from petune.models.attention import Attended, AttentionCall, causal, no_later
from petune.models.exchange import Exchange, Exchanged, all_rows, rows_of, some_heads, unfold
from petune.models.transition import transition
from petune.parallel.collectives import MaybeGroup, Sizes, alone, gather_seq
from petune.parallel.copy_engines import CopyEngines
from petune.parallel.link import Crossing, Link
from petune.parallel.plan import apportion
from petune.parallel.sequence import ring
from petune.parallel.sequence.ring import Trip, ring_attention
from petune.parallel.sequence.trade import AllToAll
from petune.rng.context import running

Qkv = tuple[Tensor, Tensor, Tensor]  # query, key and value


@dataclass(frozen=True)
class Among(Crossing, Exchange):
    """Rank `index` of the ranks of `group`. Copies share the group; it does not survive pickling, and then a
    cut sequence raises."""

    split_turns: ClassVar[bool] = True
    group: MaybeGroup
    index: int
    shares: Sizes = ()
    sizes: Sizes = ()
    overlapped: bool = False
    engines: CopyEngines | None = None
    folded: bool = False

    def __call__(
        self,
        attend: AttentionCall,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        **kw: Any,
    ) -> Attended:
        """Attention of a module that holds only some tokens, as petune.models.attention has it called."""
        sizes = self._sizes()
        if alone(self.group) or not sizes:
            return attend(module, query, key, value, mask, **kw)
        qkv = _as_attended(query, key, value)
        return self.exchanged(sizes, attend, module, qkv, mask, **kw)

    @abstractmethod
    def exchanged(
        self, sizes: Sizes, attend: AttentionCall, module: nn.Module, qkv: Qkv, mask: Tensor | None, **kw: Any
    ) -> Attended:
        """Attention over a sequence that is cut into `sizes`. qkv: query, key and value, of one dtype."""

    def __copy__(self) -> Among:
        return self

    def __reduce__(self) -> tuple[type[Among], tuple[None, int, Sizes]]:
        return type(self), (None, self.index, self.shares)

    def here(self) -> Self:
        return replace(self, sizes=self._sizes(), folded=running().folded)

    def _largest(self, whole: int) -> int:
        """Bytes of the rank with most tokens, of those of all."""
        return whole * max(self.shares) // sum(self.shares)

    def _sizes(self) -> Sizes:
        """Tokens per rank of this call. Raises DistributedError when they are for another number of ranks."""
        sizes = running().sizes
        ranks = 1 if self.group is None else dist.get_world_size(self.group)
        if len(sizes) not in (0, ranks):
            what = "this attention cannot reach the other parts of its sequence"
            raise DistributedError(what, expected=f"{len(sizes)} ranks", found=f"{ranks}")
        return sizes


def _as_attended(*qkv: Tensor) -> Qkv:
    """In the dtype to which attention under autocast casts them anyway: less travels, all alike."""
    kind = qkv[0].device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        qkv = tuple(x if x.dtype is torch.float64 else x.to(dtype) for x in qkv)
    query, key, value = qkv
    return query, key, value


class GatherExchange(Among):
    """Own queries over the keys and values of all."""

    kind = "gather"

    def room_bytes(self, queries: int, keys: int) -> tuple[int, int]:
        """See petune.models.exchange.Exchange. Every rank writes to the one with most tokens."""
        return self.link.room_bytes(self._largest(2 * keys) * self.link.terms)

    def enter(self, x: Tensor, columns: Sequence[Sizes]) -> Tensor:
        return self.link.gather(x, self.sizes)

    def enter_backward(self, dy: Tensor, columns: Sequence[Sizes]) -> Tensor:
        return self.link.reduce_scatter(dy, self.sizes)

    def leave(self, y: Tensor, columns: Sequence[Sizes]) -> Tensor:
        """See petune.models.exchange.Crossed: nothing is said."""
        return y

    def leave_backward(self, dx: Tensor, columns: Sequence[Sizes]) -> Tensor:
        """See petune.models.exchange.Crossed: nothing is said."""
        return dx

    def exchanged(
        self, sizes: Sizes, attend: AttentionCall, module: nn.Module, qkv: Qkv, mask: Tensor | None, **kw: Any
    ) -> Attended:
        """What a causal mask would hide from all own queries is not attended to at all."""
        (query, key, value), folded = qkv, running().folded
        part = rows_of(sizes, self.index, folded=folded)
        pair = torch.cat([key, value], -1).transpose(1, 2)  # one message instead of two
        whole = gather_seq(pair, sizes, self.group)
        whole = (unfold(whole, sizes) if folded else whole).transpose(1, 2)
        key, value = whole.split([key.shape[-1], value.shape[-1]], -1)
        hides = causal(module, mask, kw.pop("is_causal", None))
        bias, found, drawn = kw.pop("position_bias", None), [], running().drawn
        for own, (first, end) in zip(query.split(part.lengths, 2), part.pieces, strict=True):
            running().drawn = drawn  # what drops out of both pieces is one draw
            rows, seen = replace(part, pieces=((first, end),)), end if hides else part.keys
            # where a row begins SDPA has kernels
            shown = rows.of(mask) if not hides or not first else no_later(first, end, query.device)
            near = rows.of(bias)
            kw["position_bias"] = None if near is None else near[..., :seen]
            kw |= {"is_causal": hides and not first, "first_query": first}
            found.append(attend(module, own, key[:, :, :seen], value[:, :, :seen], shown, **kw)[0])
        return found[0] if len(found) == 1 else torch.cat(found, 1), None


@dataclass(frozen=True)
class Cross(Exchange):
    """Own queries over a whole sequence of another stack. `index` is this rank's place along the cut of the
    queries, of which rows they are follows from all lengths: no recording knows it."""

    kind = "cross"
    index: int
    shares: Sizes = ()
    sizes: Sizes = ()
    overlapped: bool = False
    folded: bool = False

    def here(self) -> Self:
        return replace(self, sizes=running().sizes)

    def __call__(
        self,
        attend: AttentionCall,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        **kw: Any,
    ) -> Attended:
        """Attention of own queries; nothing is exchanged."""
        sizes = running().sizes
        if not sizes:
            return attend(module, query, key, value, mask, **kw)
        part = rows_of(sizes, self.index, keys=key.shape[2])
        kw |= {"is_causal": False, "position_bias": part.of(kw.get("position_bias"))}
        return attend(module, query, key, value, part.of(mask), first_query=part.first, **kw)


# ------------------------------------------------------------------ ulysses


def ulysses_heads(heads: int, kv_heads: int, ranks: int) -> tuple[Sizes, Sizes]:
    """Query heads and key and value heads of each rank, as evenly as groups that share keys allow."""
    shared = apportion(kv_heads, (1,) * ranks)
    return tuple(count * (heads // kv_heads) for count in shared), shared


class Ulysses(Among):
    """Whole sequences of some heads. Every rank has at least one head of keys, see `ulysses_heads`."""

    kind = "ulysses"

    def room_bytes(self, queries: int, keys: int) -> tuple[int, int]:
        """See petune.models.exchange.Exchange. A part is one of as many heads as any rank has."""
        return self.link.room_bytes(self._largest(queries + 2 * keys), swapped=True)

    def described(self, kv_heads: int) -> Exchanged:
        _, shared = ulysses_heads(kv_heads, kv_heads, len(self.shares))
        return Exchanged(self.kind, self.shares, self.index, shared)

    def enter(self, x: Tensor, columns: Sequence[Sizes]) -> Tensor:
        return self._trade(columns).to_heads(x)

    def enter_backward(self, dy: Tensor, columns: Sequence[Sizes]) -> Tensor:
        return self._trade(columns).to_tokens(dy)

    def leave(self, y: Tensor, columns: Sequence[Sizes]) -> Tensor:
        return self._trade(columns).to_tokens(y)

    def leave_backward(self, dx: Tensor, columns: Sequence[Sizes]) -> Tensor:
        return self._trade(columns).to_heads(dx)

    def _trade(self, columns: Sequence[Sizes]) -> AllToAll:
        return AllToAll(self.sizes, columns, self.link, self.index)

    def exchanged(
        self, sizes: Sizes, attend: AttentionCall, module: nn.Module, qkv: Qkv, mask: Tensor | None, **kw: Any
    ) -> Attended:
        """Queries travel in one message with the keys and values that they share."""
        (query, key, value), count = qkv, qkv[0].shape[1]
        heads, kv_heads = ulysses_heads(count, key.shape[1], len(sizes))
        first, held = sum(heads[: self.index]), heads[self.index]
        sides = ((query, heads), (key, kv_heads), (value, kv_heads))
        columns = [tuple(one * x.shape[3] for one in shared) for x, shared in sides]
        trade = AllToAll(sizes, columns, Link(self.group), self.index)
        message = torch.cat([x.transpose(1, 2).flatten(2) for x, _ in sides], -1)
        message = transition(message, trade.to_heads, trade.to_tokens)
        query, key, value = (
            own.unflatten(-1, (shared[self.index], -1)).transpose(1, 2)
            for own, (_, shared) in zip(
                message.split([own[self.index] for own in columns], -1), sides, strict=True
            )
        )
        part = all_rows(sum(sizes))
        kw["position_bias"] = some_heads(part.of(kw.get("position_bias")), count, first, held)
        kw["first_head"] = getattr(module, "first_head", 0) + first
        output, _ = attend(module, query, key, value, some_heads(part.of(mask), count, first, held), **kw)
        width = output.shape[3]
        trade = AllToAll(sizes, [tuple(one * width for one in heads)], Link(self.group), self.index)
        output = transition(output.flatten(2), trade.to_tokens, trade.to_heads)
        return output.unflatten(-1, (count, width)), None


# ------------------------------------------------------------------ ring


class Ring(Among):
    """Blocks of keys and values travel round the ranks; a rank holds two of them at a time. Attention dropout
    is not possible here."""

    kind = "ring"
    recordable = False  # its transfers are under way while kernels run

    def attend(
        self, qkv: Qkv, bias: Tensor | None, mask: Tensor | None, causal: bool, scale: float
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        return ring.ahead(*qkv, bias, mask, self._trip(causal, scale))

    def attend_backward(
        self,
        dout: Tensor,
        qkv: Qkv,
        bias: Tensor | None,
        mask: Tensor | None,
        causal: bool,
        scale: float,
        out: Tensor,
        kept: tuple[Tensor, ...],
        dbias: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        return ring.back(dout, *qkv, bias, mask, out, kept, self._trip(causal, scale), dbias)

    def _trip(self, hides_later: bool, scale: float) -> Trip:
        return Trip(self.sizes, self.group, self.index, hides_later, scale)

    def exchanged(
        self, sizes: Sizes, attend: AttentionCall, module: nn.Module, qkv: Qkv, mask: Tensor | None, **kw: Any
    ) -> Attended:
        """Raises UsageError for attention dropout."""
        if kw.get("dropout"):
            what = "exchange: ring cannot drop attention probabilities, as no rank sees a whole row of them"
            remedy = "use exchange: gather, or set the model's attention dropout to 0"
            raise UsageError(what, found=f"dropout {kw['dropout']}", remedy=remedy)
        part = rows_of(sizes, self.index)
        scale = qkv[0].shape[-1] ** -0.5 if kw.get("scaling") is None else kw["scaling"]
        trip = Trip(sizes, self.group, self.index, causal(module, mask, kw.get("is_causal")), scale)
        output = ring_attention(*qkv, part.of(kw.get("position_bias")), part.of(mask), trip)
        return output.transpose(1, 2).contiguous(), None
