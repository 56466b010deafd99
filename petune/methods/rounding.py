"""How merged weights are rounded, to nearest or stochastically, and what that costs of the update.

Stochastic rounding takes the neighbour above with the probability that makes the mean right (Gupta et al.
2015, arXiv:1502.02551): an update that is smaller than the spacing of bfloat16 survives in the mean over a
weight's entries, at the price of noise.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from petune.errors import UsageError
from petune.kernels.memory.adamw import random_bits, random_words, rounded
from petune.models.frozen_weight import dense_of
from petune.models.tuned_linear import TunedLayer, WeightChange

AT_ONCE = 1 << 22  # numbers that are rounded stochastically at once


def merged_tensors(
    name: str, layer: TunedLayer, dtype: torch.dtype | None = None, seed: int | None = None
) -> dict[str, Tensor]:
    """What merging makes of a layer's tensors, as `TunedLayer.merged_tensors`; with a seed, those in bfloat16
    are rounded stochastically.

    name: of the layer in its model. Bits follow from the seed, the tensor's name and a number's place in it.
    Numbers that the update leaves as they are, in float32, are rounded to nearest.
    """
    nearest = layer.merged_tensors(dtype)
    if seed is None or all(value.dtype is not torch.bfloat16 for value in nearest.values()):
        return nearest
    exact = layer.merged_tensors(torch.float32)
    return {
        own: _stochastic(exact[own], dense_of(getattr(layer, own).detach()), value, f"{name}.{own}", seed)
        if value.dtype is torch.bfloat16
        else value
        for own, value in nearest.items()
    }


def rounded_bias(
    name: str, trained: Tensor, base: Tensor, dtype: torch.dtype, seed: int | None = None
) -> Tensor:
    """A bias of the base that has trained, in `dtype`; rounded as `merged_tensors` does weights. name: in its
    model. base: what it began as."""
    nearest = trained.detach().to(dtype)
    if seed is None or dtype is not torch.bfloat16:
        return nearest
    return _stochastic(trained.detach().float(), base, nearest, name, seed)


@torch.no_grad()
def _stochastic(exact: Tensor, base: Tensor, nearest: Tensor, name: str, seed: int) -> Tensor:
    """`exact`, float32, as bfloat16 where it is not what `base` is, else `nearest`; all of one shape."""
    words, found = random_words(seed, 0, name), nearest.flatten()
    sums, before = exact.reshape(-1), base.reshape(-1)
    for at in range(0, len(sums), AT_ONCE):
        own = sums[at : at + AT_ONCE]
        bits, _ = random_bits(words, at, len(own), own.device)
        changed = own != before[at : at + AT_ONCE].float()
        found[at : at + AT_ONCE] = torch.where(
            changed, rounded(own, bits, nearest.dtype), found[at : at + AT_ONCE]
        )
    return found.view(nearest.shape)


def refuse_unrounded(layers: Iterable[TunedLayer], dtype: torch.dtype | None) -> None:
    """Raise UsageError where a merge has nothing that stochastic rounding could round: no update, or no
    weight in bfloat16."""
    found = {dtype or getattr(layer, name).dtype for layer in layers for name in layer.weights}
    if not found:
        what = "there is no update to round stochastically: what trained lies in the model's own weights"
        raise UsageError(what, where="rounding", remedy="leave it out")
    if torch.bfloat16 not in found:
        kinds = ", ".join(sorted(str(one).removeprefix("torch.") for one in found))
        what = "stochastic rounding is for weights that are written in bfloat16"
        raise UsageError(what, where="rounding", found=kinds, remedy="leave it out, or give the dtype bf16")


def seed_of(rounding: str, seed: int | None, own: int) -> int | None:
    """The seed of rounding `stochastic`, `own` unless one is given; None for `nearest`. Raises UsageError for
    any other, and for a seed that nothing is drawn from."""
    if rounding not in ("nearest", "stochastic"):
        raise UsageError(
            "this rounding is unknown", where="rounding", expected="nearest, stochastic", found=str(rounding)
        )
    if rounding == "stochastic":
        return own if seed is None else seed
    if seed is not None:
        remedy = "leave it out, or ask for stochastic rounding: --rounding stochastic"
        raise UsageError("a seed is of stochastic rounding alone", where="seed", remedy=remedy)
    return None


@dataclass(frozen=True)
class RoundingCost:
    """What rounding costs, over all merged layers together; 0 without any.

    update: norm of the updates. ulps: root mean square of an update's entry over the spacing of numbers at
    the weights' own root mean square: below 1, most entries move to a neighbour or not at all. lost: norm of
    what rounding changed, over that of the updates. kept: what is written of the updates, projected on them,
    over their norm. nearest: `kept` of rounding to nearest.
    """

    update: float
    ulps: float
    lost: float
    kept: float
    nearest: float

    @property
    def noise(self) -> float:
        """Norm of what rounding changed across the direction of the updates, over theirs."""
        return math.sqrt(max(0.0, self.lost**2 - (1 - self.kept) ** 2))


Biases = Mapping[str, tuple[Tensor, Tensor]]


@torch.no_grad()
def cost_of(
    layers: Iterable[tuple[str, TunedLayer]], biases: Biases, dtype: torch.dtype | None, seed: int | None
) -> RoundingCost:
    """What `merged_tensors` costs, of layers by their names, and `rounded_bias`, of biases by theirs: as they
    have trained, and as they began."""
    update = missed = weights = spacing = along = along_nearest = 0.0
    for (own, delta, change), written, nearest in _roundings(layers, biases, dtype, seed):
        wide = torch.promote_types(own.dtype, torch.float32)
        weight = own.to(wide)
        begun = weight.to(written.dtype).to(wide) + delta.to(wide)  # as rounding nothing would leave it
        error = written.to(wide) - begun
        update += float(change.norm()) ** 2
        missed += float(error.norm()) ** 2
        along += float((error * change).sum())
        along_nearest += float(((nearest.to(wide) - begun) * change).sum())
        weights += float(weight.norm()) ** 2
        spacing = torch.finfo(written.dtype).eps
    if not update:
        return RoundingCost(0.0, 0.0, 0.0, 0.0, 0.0)
    ulps = math.sqrt(update / weights) / spacing if weights else 0.0
    kept, as_nearest = 1 + along / update, 1 + along_nearest / update
    return RoundingCost(math.sqrt(update), ulps, math.sqrt(missed / update), kept, as_nearest)


def _roundings(
    layers: Iterable[tuple[str, TunedLayer]], biases: Biases, dtype: torch.dtype | None, seed: int | None
) -> Iterator[tuple[WeightChange, Tensor, Tensor]]:
    """Of everything that the tuning changes what that is, how it is written, and how to nearest."""
    for path, layer in layers:
        written = merged_tensors(path, layer, dtype, seed)
        nearest = written if seed is None else layer.merged_tensors(dtype)
        for name, change in layer.weight_changes().items():
            yield change, written[name], nearest[name]
    for name, (trained, base) in biases.items():
        delta = trained.float() - base.float()
        kind = dtype or base.dtype
        yield (
            WeightChange(base, delta, delta),
            rounded_bias(name, trained, base, kind, seed),
            trained.to(kind),
        )
