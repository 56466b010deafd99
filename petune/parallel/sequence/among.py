"""What exchanges have in common: among which ranks they are, and that they are called as attention is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from petune.errors import DistributedError
from petune.models.attention import Attended, AttentionCall
from petune.models.exchange import Exchanged, ExchangeKind
from petune.parallel.collectives import MaybeGroup, Sizes, alone
from petune.parallel.copy_engines import CopyEngines
from petune.parallel.link import Crossing
from petune.rng.context import running

Qkv = tuple[Tensor, Tensor, Tensor]  # query, key and value


@dataclass(frozen=True)
class Among(Crossing, ABC):
    """Rank `index` of the ranks of `group`. Copies share the group; it does not survive pickling, and then a
    cut sequence raises. shares, sizes, folded, overlapped: see petune.models.exchange.Exchange."""

    kind: ClassVar[ExchangeKind]
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

    def __deepcopy__(self, memo: dict[int, Any]) -> Among:
        return self

    def __reduce__(self) -> tuple[type[Among], tuple[None, int, Sizes]]:
        return type(self), (None, self.index, self.shares)

    def here(self) -> Self:
        return replace(self, sizes=self._sizes(), folded=running().folded)

    def described(self, kv_heads: int) -> Exchanged:
        return Exchanged(self.kind, self.shares, self.index)

    def room_bytes(self, queries: int, keys: int) -> tuple[int, int]:
        return 0, 0

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
