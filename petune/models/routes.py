"""Routes: which rows go to which of several groups, each to as many as have chosen it: copies of tokens to
their experts, or tokens to the ranks that have some of these.

    index [tokens, chosen]    the groups of each token
    order [m]                 the copies, token by token, sorted by group

A token may have fewer than `chosen`: in the place of each that is missing stands the number of groups.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Routes(NamedTuple):
    """Which rows of tokens' copies go where, for at most `chosen` groups a token.

    order [m]: the copies, token by token, sorted by group; inverse [tokens * chosen]: the way back, -1 where
    there is none. ends [groups], int32: the sorted row before which each group's end.
    """

    order: Tensor
    inverse: Tensor
    ends: Tensor
    chosen: int

    @property
    def tokens(self) -> Tensor:
        """The token [m] of each sorted copy."""
        return self.order // self.chosen

    @property
    def groups(self) -> Tensor:
        """The group [m] of each sorted copy."""
        rows = torch.arange(len(self.order), device=self.order.device)
        return torch.searchsorted(self.ends, rows.int(), right=True)

    def sorted(self, share: Tensor) -> Tensor:
        """Shares [tokens, chosen] in the order of the copies, [m]."""
        return share.reshape(-1)[self.order]

    def unsorted(self, share: Tensor) -> Tensor:
        """Shares [m] by token, [tokens, chosen]; 0 where there is no copy. The adjoint of `sorted`."""
        if len(self.order) == len(self.inverse):
            return share[self.inverse].view(-1, self.chosen)
        found = share.new_zeros(len(self.inverse))
        return found.index_copy_(0, self.order, share).view(-1, self.chosen)


def routes_of(index: Tensor, groups: int, copies: int | None = None) -> Routes:
    """The routes of tokens to the groups index [tokens, chosen]; none is dropped, whoever is crowded.

    copies: how many there are, where some are missing: `groups` stands for these; None where none is.
    """
    ids, order = index.reshape(-1).sort(stable=True)
    inverse = torch.empty_like(order) if copies is None else torch.full_like(order, -1)
    order = order if copies is None else order[:copies].clone()  # and let the rest go
    inverse[order] = torch.arange(len(order), device=order.device)
    ends = torch.searchsorted(ids, torch.arange(groups, dtype=ids.dtype, device=ids.device), right=True)
    return Routes(order, inverse, ends.int(), index.shape[-1])
