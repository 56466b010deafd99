"""Experts as transformers keeps them: one module with the weights of all of them, which have an expert dim.

`gate_up_proj` [E, 2 columns, width], or `up_proj` [E, columns, width] where nothing gates, and `down_proj`
[E, width, columns]; transposed, and with a bias [E, out] each, in some families. The class says which by the
attributes that transformers' own grouped products read (transformers.integrations.moe); how gate and up make
one is its `_apply_gate`. A weight goes by the name of its parameter, "...mlp.experts.down_proj".
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from math import comb
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn

from petune.models.note import Note
from petune.models.routes import Routes
from petune.models.spec import Pieces, TensorSplit
from petune.models.tuned_linear import TunedLayer, TunedOfAnyClass
from petune.models.tuned_parts import LowRank

WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")
ROLES: Mapping[str, tuple[str, ...]] = {  # the weights that a role of a dense MLP means
    "experts": WEIGHTS,
    "gate": ("gate_up_proj",),
    "up": ("gate_up_proj", "up_proj"),
    "down": ("down_proj",),
}
_GATES = "transformers.integrations.moe"
_SAYS = ("has_gate", "has_bias", "is_transposed", "_apply_gate")


class Experts(nn.Module):
    """Stands for every class of experts where methods look up the form of a layer; nothing is made of it."""


class TunedExperts(TunedOfAnyClass):
    """Experts with a tuning that fused blocks compute."""

    @abstractmethod
    def low_ranks(self) -> dict[str, LowRank]:
        """Each weight with its update, of an expert dim in front each, by name."""

    @abstractmethod
    def tuned_splits(self) -> dict[str, TensorSplit]:
        """How each tensor of the tuning is cut when experts are, each by its columns."""


class RoutesHook:
    """A hook before experts, of (module, arguments), that is told which experts each token is sent to. Fused
    blocks tell it themselves: index [tokens, chosen] is all that it may read."""

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Hear of a call."""
        self.hear(module, args[1])

    def hear(self, module: nn.Module, index: Tensor) -> None:
        """Hear that tokens are sent to the experts index [tokens, chosen] of `module`."""
        raise NotImplementedError


class Way(NamedTuple):
    """Where the tokens of one call go, each once to a rank that has some of its experts: rows sent to each
    rank, rows that each sends here, the tokens of those sent, and the routes of tokens to ranks.

    Where nothing comes one row of zeros stands for it, so that no rank computes on nothing and all go the
    same way back.
    """

    sent: tuple[int, ...]
    received: tuple[int, ...]
    tokens: Tensor
    routes: Routes


class Spread(Protocol):
    """Where the experts of a mixture lie that are cut over ranks, and how tokens get there. Tensors in,
    tensors out, no autograd, as those of a boundary (petune.models.boundary). counts: experts of each rank;
    index: of this one."""

    counts: tuple[int, ...]
    index: int

    def way(self, index: Tensor) -> tuple[Way, Routes]:
        """The way of tokens to the experts index [tokens, chosen], and the routes of the rows that come here
        to the experts that are here, numbered from this rank's first."""

    def there(self, x: Tensor, way: Way) -> Tensor:
        """Rows of x [tokens, n] on the ranks of their experts: those that come here, [rows here, n]."""

    def back(self, y: Tensor, way: Way) -> Tensor:
        """The way back of y [rows here, n], summed over the ranks of a token [tokens, n]: the adjoint."""

    def least(self, numbers: Sequence[int], device: torch.device) -> list[int]:
        """As that of a boundary: the least of each number among the ranks."""


def reached(held: Sequence[int], chosen: int) -> list[float]:
    """Of each rank with so many experts, the share of tokens that have at least one of their `chosen` there,
    if all are chosen as often."""
    every = sum(held)
    return [1 - comb(every - own, chosen) / comb(every, chosen) for own in held]


_SPREAD = Note[Spread]("petune_spread")  # of experts: where all of the mixture lie, unless they are here
put_spread, spread_of = _SPREAD.put, _SPREAD.of


def number_of(module: nn.Module) -> int:
    """How many experts the mixture of a module of experts has, here and on other ranks."""
    spread = spread_of(module)
    return sum(spread.counts) if spread is not None else int(cast("Any", module).num_experts)


def is_experts(module: nn.Module) -> bool:
    """Whether `module` is one of experts whose products are known: without a norm behind them."""
    known = all(hasattr(module, name) for name in _SAYS)
    # what transformers 5.17 had no name for
    return known and not getattr(module, "has_post_expert_norm", False) and len(weights_of(module)) == 2


def weights_of(module: nn.Module) -> tuple[str, ...]:
    """The names of the weights with an expert dim, in the order in which they are used."""
    found = {name: module._parameters.get(name) for name in WEIGHTS}
    return tuple(name for name, value in found.items() if value is not None and value.dim() == 3)


def weight_at(model: nn.Module, name: str) -> tuple[nn.Module, str] | None:
    """The module of experts, and the name in it, of the weight that a full name means; None for others."""
    path, _, leaf = name.rpartition(".")
    if leaf not in WEIGHTS:
        return None
    try:
        module = model.get_submodule(path)
    except AttributeError:
        return None
    return (module, leaf) if is_experts(module) and leaf in weights_of(module) else None


def gates_plainly(module: nn.Module) -> bool:
    """Whether what gates experts is act(gate) * up of outputs gate | up."""
    own = cast("Any", module)
    return bool(getattr(own, "is_concatenated", True)) and own._apply_gate.__module__ == _GATES


def low_ranks_of(module: nn.Module) -> tuple[LowRank, LowRank] | None:
    """Both maps of experts that are gated: gate and up, and down, each with its bias [E, out] or None; None
    where they are others or their forward is not exactly known."""
    if not cast("Any", module).has_gate or "forward" in vars(module):
        return None
    if isinstance(module, TunedLayer) and not isinstance(module, TunedExperts):
        return None
    found = module.low_ranks() if isinstance(module, TunedExperts) else {}
    up, down = (
        (found.get(name) or LowRank(module.get_parameter(name)))._replace(
            bias=getattr(module, f"{name}_bias", None)
        )
        for name in weights_of(module)
    )
    return up, down


def splits_of(module: nn.Module) -> dict[str, TensorSplit]:
    """How each tensor of experts is cut when ranks have some columns of every expert: what gates and what
    goes up by its outputs, down by its inputs; its bias is one rank's."""
    up, down = weights_of(module)
    found: dict[str, TensorSplit] = {up: columns_of(module, up), down: columns_of(module, down)}
    if cast("Any", module).has_bias:
        found |= {f"{up}_bias": along(module, up, 1), f"{down}_bias": "owner"}
    return found | (module.tuned_splits() if isinstance(module, TunedExperts) else {})


def columns_of(module: nn.Module, name: str) -> TensorSplit:
    """Where the columns of a weight are."""
    turned, down = bool(cast("Any", module).is_transposed), name == "down_proj"
    return along(module, name, 1 if turned == down else 2)


def along(module: nn.Module, name: str, dim: int) -> Pieces:
    """The columns in a dim of a weight or of a tensor beside it: those of gate and of up are one behind the
    other, or two and two."""
    if name != "gate_up_proj":
        return Pieces(dim)
    return Pieces(dim, number=2) if getattr(module, "is_concatenated", True) else Pieces(dim, places=2)


def sizes_of(module: nn.Module, name: str) -> tuple[int, int, int]:
    """(experts, outputs, inputs) of a weight of a module of experts."""
    experts, outputs, inputs = module.get_parameter(name).shape
    return (experts, inputs, outputs) if cast("Any", module).is_transposed else (experts, outputs, inputs)
