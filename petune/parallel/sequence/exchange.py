"""How attention on some tokens of a sequence sees the others: one object per attention module, put there as
`module.exchange`.

    gather   every rank fetches all keys and values and attends with its own queries
    ulysses  tokens are traded for heads, so every rank attends with whole sequences and some heads, and
             traded back (arXiv:2309.14509)
    ring     keys and values travel from rank to rank, and the softmax is accumulated block by block
             (arXiv:2310.01889)
    cross    keys and values are another sequence, whole on every rank; own queries

All take what Hugging Face hands to an attention function, of own tokens: query [b, heads, own, head_dim], key
and value [b, kv_heads, own, head_dim] (cross: whole). Masks [b, 1 | heads, 1 | all, all] and `position_bias`
[1 | b, heads, all, all] are made by the model for the whole sequence and cut here. Out comes [b, own, heads,
head_dim]. `running().sizes` says how many tokens each rank holds; a rank may hold none. Where it is empty the
sequence is not cut, and attention is plain.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from petune.errors import DistributedError, UsageError
from petune.models.attention import Attend, Attended, causal, no_later
from petune.parallel.collectives import Group, Sizes, alone, gather_seq, transition
from petune.parallel.plan import apportion
from petune.parallel.sequence.ring import Trip, ring_attention
from petune.rng.context import running


class Exchange(Protocol):
    """Attention of a module that holds only some tokens."""

    def __call__(
        self,
        attend: Attend,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        **kw: Any,
    ) -> Attended: ...


@dataclass(frozen=True)
class _Among(ABC):
    """Rank `index` of the ranks of `group`. Copies share the group; it does not survive pickling, and then a
    cut sequence raises."""

    group: Group
    index: int

    def __call__(
        self,
        attend: Attend,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        **kw: Any,
    ) -> Attended:
        """See Exchange."""
        sizes = self._sizes()
        if alone(self.group) or not sizes:
            return attend(module, query, key, value, mask, **kw)
        query, key, value = _as_attended(query, key, value)
        return self.exchanged(sizes, attend, module, query, key, value, mask, **kw)

    @abstractmethod
    def exchanged(
        self,
        sizes: Sizes,
        attend: Attend,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        **kw: Any,
    ) -> Attended:
        """Attention over a sequence that is cut into `sizes`, with query, key and value of one dtype."""

    def __copy__(self) -> _Among:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> _Among:
        return self

    def __reduce__(self) -> tuple[type[_Among], tuple[None, int]]:
        return type(self), (None, self.index)

    def _sizes(self) -> Sizes:
        """Tokens per rank of this call. Raises DistributedError when they are for other ranks than the group
        has."""
        sizes = running().sizes
        ranks = 1 if self.group is None else dist.get_world_size(self.group)
        if len(sizes) not in (0, ranks):
            raise DistributedError(
                "this attention cannot reach the other parts of its sequence",
                expected=f"{len(sizes)} ranks",
                found=f"{ranks}",
            )
        return sizes


def _as_attended(*tensors: Tensor) -> list[Tensor]:
    """In the dtype to which attention under autocast casts them anyway: less travels, and all of them have
    the same."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return list(tensors)
    return [x if x.dtype is torch.float64 else x.to(torch.get_autocast_dtype(kind)) for x in tensors]


@dataclass(frozen=True)
class _Rows:
    """The queries [first, end) of `whole` that are here, which look at `keys` keys."""

    first: int
    end: int
    whole: int
    keys: int

    @property
    def own(self) -> int:
        return self.end - self.first

    def of(self, mask: Tensor | None) -> Tensor | None:
        """Own rows of a mask or bias [..., 1 | whole | own, keys]. Raises UsageError for one that was made
        for another part or length."""
        if mask is None:
            return None
        rows, keys = mask.shape[-2:]
        if keys != self.keys or rows not in (1, self.own, self.whole):
            raise UsageError(
                "an attention mask or bias does not fit the sequence it is for",
                expected=f"[..., {self.whole}, {self.keys}]",
                found=str(list(mask.shape)),
            )
        return mask.narrow(-2, self.first, self.own) if rows == self.whole else mask


def _rows(sizes: Sizes, index: int, keys: int | None = None) -> _Rows:
    """The rows of rank `index`, which look at the same sequence unless it is another of `keys` tokens."""
    first, whole = sum(sizes[:index]), sum(sizes)
    return _Rows(first, first + sizes[index], whole, whole if keys is None else keys)


class Gather(_Among):
    """Own queries over the keys and values of all."""

    def exchanged(
        self,
        sizes: Sizes,
        attend: Attend,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        **kw: Any,
    ) -> Attended:
        """What a causal mask would hide from all own queries is not attended to at all."""
        part = _rows(sizes, self.index)
        pair = torch.cat([key, value], -1).transpose(1, 2)  # one message instead of two
        key, value = (
            gather_seq(pair, sizes, self.group).transpose(1, 2).split([key.shape[-1], value.shape[-1]], -1)
        )
        bias = part.of(kw.pop("position_bias", None))
        if not causal(module, mask, kw.pop("is_causal", None)):
            return attend(
                module,
                query,
                key,
                value,
                part.of(mask),
                is_causal=False,
                position_bias=bias,
                first_query=part.first,
                **kw,
            )
        seen = None if bias is None else bias[..., : part.end]
        key, value, first = key[:, :, : part.end], value[:, :, : part.end], part.first
        if first == 0:  # SDPA has kernels for this case
            return attend(module, query, key, value, None, is_causal=True, position_bias=seen, **kw)
        mask = no_later(first, part.end, query.device)
        return attend(
            module, query, key, value, mask, is_causal=False, position_bias=seen, first_query=first, **kw
        )


@dataclass(frozen=True)
class Cross:
    """Own queries over a whole sequence of another stack. `index` is this rank's place along the cut of the
    queries."""

    index: int

    def __call__(
        self,
        attend: Attend,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        **kw: Any,
    ) -> Attended:
        """See Exchange; nothing is exchanged."""
        sizes = running().sizes
        if not sizes:
            return attend(module, query, key, value, mask, **kw)
        part = _rows(sizes, self.index, keys=key.shape[2])
        kw |= {"is_causal": False, "position_bias": part.of(kw.get("position_bias"))}
        return attend(module, query, key, value, part.of(mask), first_query=part.first, **kw)


# ------------------------------------------------------------------ ulysses


def ulysses_heads(heads: int, kv_heads: int, ranks: int) -> tuple[Sizes, Sizes]:
    """Query heads and key and value heads of each rank, as evenly as groups that share keys allow. Raises
    UsageError when some get none."""
    if kv_heads < ranks:
        raise UsageError(
            "exchange: ulysses gives every rank at least one head of keys and values",
            expected=f"at most {kv_heads} ranks",
            found=str(ranks),
            remedy="use fewer ranks, or exchange: gather",
        )
    shared = apportion(kv_heads, (1,) * ranks)
    return tuple(count * (heads // kv_heads) for count in shared), shared


class Ulysses(_Among):
    """Whole sequences of some heads. Every rank has at least one head of keys, see `ulysses_heads`."""

    def exchanged(
        self,
        sizes: Sizes,
        attend: Attend,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        **kw: Any,
    ) -> Attended:
        """Queries travel in one message with the keys and values that they share."""
        count, width, kv = query.shape[1], query.shape[3], key.shape[1]
        heads, kv_heads = ulysses_heads(count, kv, len(sizes))
        first, held = sum(heads[: self.index]), heads[self.index]
        # [b, kv_heads, own, queries of a group]
        folded = query.unflatten(1, (kv, count // kv)).transpose(2, 3).flatten(3)
        trade = _Trade(sizes, kv_heads, self.group, self.index)
        message = transition(torch.cat([folded, key, value], -1), trade.to_heads, trade.to_tokens)
        folded, key, value = message.split([folded.shape[-1], key.shape[-1], value.shape[-1]], -1)
        query = folded.unflatten(-1, (count // kv, width)).transpose(2, 3).flatten(1, 2)
        part = _Rows(0, sum(sizes), sum(sizes), sum(sizes))
        kw["position_bias"] = _some_heads(part.of(kw.get("position_bias")), count, first, held)
        kw["first_head"] = getattr(module, "first_head", 0) + first
        output, _ = attend(module, query, key, value, _some_heads(part.of(mask), count, first, held), **kw)
        trade = _Trade(sizes, heads, self.group, self.index)
        output = transition(output.transpose(1, 2), trade.to_tokens, trade.to_heads)
        return output.transpose(1, 2).contiguous(), None


def _some_heads(mask: Tensor | None, count: int, first: int, held: int) -> Tensor | None:
    """Of a mask or bias [.., 1 | count, q, k] the heads [first, first + held)."""
    return mask if mask is None or mask.shape[1] != count else mask.narrow(1, first, held)


@dataclass(frozen=True)
class _Trade:
    """Tokens and heads of each rank, between which tensors are traded. A trade only moves elements, so its
    adjoint is the way back."""

    sizes: Sizes
    heads: Sizes
    group: Group
    index: int

    def to_heads(self, x: Tensor) -> Tensor:
        """[b, all heads, own tokens, d] -> [b, own heads, all tokens, d]."""
        batch, _, _, width = x.shape
        shapes = [(batch, self.heads[self.index], size, width) for size in self.sizes]
        return torch.cat(self._swapped(x.split(list(self.heads), 1), shapes), 2)

    def to_tokens(self, x: Tensor) -> Tensor:
        """[b, own heads, all tokens, d] -> [b, all heads, own tokens, d]."""
        batch, _, _, width = x.shape
        shapes = [(batch, count, self.sizes[self.index], width) for count in self.heads]
        return torch.cat(self._swapped(x.split(list(self.sizes), 2), shapes), 1)

    def _swapped(self, parts: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        """Part r goes to rank r; what came from rank r has shape r."""
        flat = torch.cat([part.reshape(-1) for part in parts])
        counts = [math.prod(shape) for shape in shapes]
        found = flat.new_empty(sum(counts))
        dist.all_to_all_single(found, flat, counts, [part.numel() for part in parts], group=self.group)
        return [part.view(shape) for part, shape in zip(found.split(counts), shapes, strict=True)]


# ------------------------------------------------------------------ ring


class Ring(_Among):
    """Blocks of keys and values travel round the ranks; a rank holds two of them at a time. Attention dropout
    is not possible here."""

    def exchanged(
        self,
        sizes: Sizes,
        attend: Attend,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        **kw: Any,
    ) -> Attended:
        """Raises UsageError for attention dropout."""
        if kw.get("dropout"):
            raise UsageError(
                "exchange: ring cannot drop attention probabilities, as no rank sees a whole row of them",
                found=f"dropout {kw['dropout']}",
                remedy="use exchange: gather, or set the model's attention dropout to 0",
            )
        part = _rows(sizes, self.index)
        scale = query.shape[-1] ** -0.5 if kw.get("scaling") is None else kw["scaling"]
        trip = Trip(sizes, self.group, self.index, causal(module, mask, kw.get("is_causal")), scale)
        output = ring_attention(query, key, value, part.of(kw.get("position_bias")), part.of(mask), trip)
        return output.transpose(1, 2).contiguous(), None
