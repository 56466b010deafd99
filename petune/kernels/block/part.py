"""One rank's part of attention on a sequence that is cut across ranks: which queries and heads it has, which
keys they see, and through what it sees them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, cast

from torch import Tensor

from petune.models.exchange import Crossed, Exchange, QueryRows, Travelling, some_heads


class Heads(NamedTuple):
    """The heads [first, first + held) of `whole`."""

    whole: int
    first: int
    held: int


@dataclass(frozen=True)
class AttentionPart:
    """Of one attention in one call. exchange: as it is in that call. rows: the queries, and how many keys
    there are. heads: None where all are here. seen: the keys [first, end) that own queries see, of each row
    or of all segments; None for all, as where a mask says it."""

    exchange: Exchange
    rows: QueryRows
    heads: Heads | None = None
    seen: tuple[int, int] | None = None

    @property
    def apart(self) -> bool:
        """Whether own queries are two pieces of a row, which see unlike keys."""
        return self.seen is not None and len(self.rows.pieces) > 1

    @property
    def crossed(self) -> Crossed:
        """The exchange, of a kind that has a step before attention."""
        return cast("Crossed", self.exchange)

    @property
    def travelling(self) -> Travelling:
        """The exchange, of the kind that attends."""
        return cast("Travelling", self.exchange)

    def of(self, x: Tensor | None) -> Tensor | None:
        """What is read here of a mask or a bias [1 | b, 1 | heads, 1 | q, k] of all queries and keys, a view.
        Raises UsageError for one of another length."""
        if x is None:
            return None
        assert x.dim() == 4, "a bias by distance is one of whole rows or segments"
        found = self.rows.of(x)
        found = found if self.heads is None else some_heads(found, *self.heads)
        return found if found is None or self.seen is None else found[..., slice(*self.seen)]
