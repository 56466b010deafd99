"""How evenly the routers of a mixture send tokens to its experts, counted while it trains."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from petune.methods.row_keys import packed_ends
from petune.models.experts import RoutesHook, is_experts, number_of
from petune.rng.context import running


class ExpertLoad:
    """Counts of tokens by expert, of every mixture of `models` in training mode, since `take`. Padding and
    rows that only fill a batch up are not counted, as it depends on the plan how many there are."""

    def __init__(self, models: Iterable[nn.Module]) -> None:
        models = list(models)
        found = [module for model in models for module in model.modules() if is_experts(module)]
        self.sizes = [number_of(module) for module in found]
        self.counts: list[Tensor | None] = [None] * len(found)
        self.mask: Tensor | None = None
        for at, module in enumerate(found):
            # before tokens are sent to other ranks
            module.register_forward_pre_hook(_Count(self, at), prepend=True)
        for model in models if found else ():
            model.register_forward_pre_hook(self._look, with_kwargs=True)

    def _look(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """Remember which tokens of this call are real."""
        mask, rows = kwargs.get("attention_mask"), running().rows
        pad = getattr(model.config, "pad_token_id", None)
        if mask is None and kwargs.get("position_ids") is not None and pad is not None:
            ids = kwargs["input_ids"]  # of packed rows, whose padding no mask shows
            ends = packed_ends(ids, kwargs["position_ids"], pad)
            mask = torch.arange(ids.shape[1], device=ids.device) < ends[:, None]
        self.mask = mask if isinstance(mask, Tensor) and mask.dim() == 2 else None
        if self.mask is not None and rows is not None and len(rows) == len(self.mask):
            self.mask = self.mask * (rows >= 0)[:, None]

    def add(self, at: int, index: Tensor) -> None:
        """Count the experts index [tokens, chosen] of the mixture number `at`."""
        ends = torch.arange(self.sizes[at], device=index.device)  # a bincount would wait for a GPU
        hits = index[..., None] == ends
        if self.mask is not None and self.mask.numel() == len(index):  # else padding is left out
            hits = hits & self.mask.reshape(-1, 1, 1).bool()
        found = hits.sum((0, 1))
        before = self.counts[at]
        self.counts[at] = found if before is None else before + found

    def take(self, add: Callable[[Sequence[float]], list[float]]) -> float | None:
        """The load of the busiest expert over that of the mean one, averaged over mixtures: 1 is even. None
        where no token was counted: without experts, and in a frozen model beside a side network. `add` sums
        numbers over replicas, of which one may have had no rows."""
        if not self.sizes:
            return None
        counts = zip(self.counts, self.sizes, strict=True)
        own = [float(n) for one, size in counts for n in ([0] * size if one is None else one.tolist())]
        self.counts = [None] * len(self.sizes)
        whole = torch.tensor(add(own), dtype=torch.float64).split(self.sizes)
        loads = [one.max() / one.mean() for one in whole if one.any()]
        return float(torch.stack(loads).mean()) if loads else None


class _Count(RoutesHook):
    """Counts for the mixture number `at` of a load."""

    def __init__(self, load: ExpertLoad, at: int) -> None:
        self.load, self.at = load, at

    def hear(self, module: nn.Module, index: Tensor) -> None:
        if module.training:
            self.load.add(self.at, index)
