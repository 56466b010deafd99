"""Frozen linears that share an input, moved into one tensor or held in a form of fewer bytes: a base weight
of fused blocks, and products with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from petune.kernels.block.dense import Dense, PackedWeight, whole_lines
from petune.kernels.block.dequantised import PackedForms, TurnedForm
from petune.kernels.block.fp8 import PackedFp8
from petune.kernels.dispatch import Ops
from petune.kernels.reference import LowFactors
from petune.models.form import Form
from petune.models.fp8 import Fp8
from petune.models.frozen_weight import QuantisedWeight, bytes_in
from petune.models.tuned_parts import LowRank


@dataclass(frozen=True)
class Apart(PackedWeight):
    """Weights of several forms, or with and without a bias, one product each."""

    weights: Sequence[PackedWeight]
    widths: Sequence[int]

    def linear(self, x: Tensor) -> Tensor:
        return torch.cat([weight.linear(x) for weight in self.weights], 1)

    def linear32(self, x: Tensor) -> Tensor:
        return torch.cat([weight.linear32(x) for weight in self.weights], 1)

    def linear_low(self, x: Tensor, low: LowFactors, ops: Ops, inlet: Tensor | None) -> Tensor:
        s, b = low
        pairs = zip(self.weights, b.split(list(self.widths)), strict=True)
        return torch.cat([weight.linear_low(x, (s, rows), ops, None) for weight, rows in pairs], 1)

    def dlinear(self, dy: Tensor) -> Tensor:
        first, *rest = (
            weight.dlinear(own)
            for weight, own in zip(self.weights, dy.split(list(self.widths), 1), strict=True)
        )
        return sum(rest, first)


def packed(part: LowRank, ops: Ops) -> PackedWeight:
    """The frozen weight of one linear, dense or quantised."""
    if not isinstance(part.weight, QuantisedWeight):
        return Dense(part.upright, part.bias)
    if part.transposed:
        return TurnedForm([part.weight.form], part.bias, ops)
    return _packed([part.weight.form], part.bias, ops)


def _packed(forms: Sequence[Form], bias: Tensor | None, ops: Ops, room: int = 0) -> PackedWeight:
    """Forms of one kind, one below the other."""
    if isinstance(forms[0], Fp8):
        return PackedFp8(cast("Sequence[Fp8]", forms), bias, ops)
    return PackedForms(forms, bias, ops, room)


def at_hand(bank: Bank | None, parts: Sequence[LowRank], ops: Ops) -> PackedWeight | None:
    """The frozen weights of `parts` as one product: those of their bank, or quantised ones that are in none
    (a rank's shard gathered for this call) or have left it; else None."""
    if bank is not None and bank.intact(parts):
        return bank.base
    parts = [part for part in parts if part.leads]
    weights = [part.weight for part in parts]
    forms = [weight.form for weight in weights if isinstance(weight, QuantisedWeight)]
    if not forms:
        return None
    biases = [part.bias for part in parts if part.bias is not None]
    if len(parts) == 1:
        return packed(parts[0], ops)
    alike = len(forms) == len(parts) and len(set(map(type, forms))) == 1
    if alike and len(biases) in (0, len(parts)) and not any(part.transposed for part in parts):
        return _packed(forms, torch.cat(biases) if len(biases) > 1 else next(iter(biases), None), ops)
    return Apart([packed(part, ops) for part in parts], [part.outputs for part in parts])


class Bank:
    """Weights that do not train, moved into one tensor so that linears of one input are one product; the
    layers keep views of it.

    A layer whose weight is replaced later (moved, copied, merged) no longer lies in the bank, and `intact`
    says so. With `room`, rows have so many columns more, for the factors b. Of quantised weights those in
    eight-bit floats are moved together as what they are held in; the others stay where they are.
    """

    base: PackedWeight

    def __init__(self, layers: Sequence[nn.Module], ops: Ops, room: int = 0) -> None:
        self.room, self.ops = room, ops
        weights = [cast("nn.Parameter", layer.weight) for layer in layers]
        biases = [value for layer in layers if (value := cast("nn.Parameter | None", layer.bias)) is not None]
        self.bias = _moved_together(biases, 0)[0] if len(biases) == len(layers) else None
        self.quantised = isinstance(weights[0], QuantisedWeight)
        if self.quantised:
            held = cast("Any", weights)
            forms: list[Form] = [weight.form for weight in held]
            if len(forms) > 1 and isinstance(forms[0], Fp8):
                forms = [Fp8.together(cast("list[Fp8]", forms))]
                _become_views(held, forms[0])
            self.base = _packed(forms, self.bias, ops, room)
            self.tensors: tuple[Tensor, ...] = sum(map(bytes_in, weights), ())
        else:
            weight, whole = _moved_together(weights, room)
            self.tensors, self.base = (weight,), Dense(weight, self.bias, whole if room else None)

    def __getstate__(self) -> dict[str, Any]:
        """Without eight-bit floats, which torch cannot unpickle: a bank is made again of the layers."""
        return self.__dict__ | ({"tensors": ()} if self.quantised else {})

    def intact(self, parts: Sequence[LowRank]) -> bool:
        """Whether these parts' weights and biases are still those of the bank."""
        parts = [part for part in parts if part.leads]
        biases = [part.bias for part in parts if part.bias is not None]
        if bool(biases) if self.bias is None else not _lie_in(self.bias, biases):
            return False
        if not self.quantised:
            return _lie_in(self.tensors[0], [part.weight for part in parts])
        held = [value for part in parts for value in bytes_in(part.weight)]
        return [value.data_ptr() for value in held] == [value.data_ptr() for value in self.tensors]

    def again(self, layers: Sequence[nn.Module]) -> Bank | None:
        """A bank of the weights as they are now; None where there can be none, but for quantised ones, which
        this finds one by one."""
        if bankable(layers):
            return Bank(layers, self.ops, self.room)
        return self if self.quantised else None


def bankable(layers: Sequence[nn.Module]) -> bool:
    """Whether the weights and biases of `layers` are plain tensors of one dtype, or quantised in one form,
    none of which trains or is transposed."""
    weights = [cast("Tensor", layer.weight) for layer in layers]
    biases = [cast("Tensor | None", layer.bias) for layer in layers]
    plain = all(
        type(weight.data) in (Tensor, QuantisedWeight) and not weight.requires_grad for weight in weights
    )
    kinds = {
        (weight.dtype, type(weight.form) if isinstance(weight, QuantisedWeight) else None)
        for weight in weights
    }
    alike = len(kinds) == 1 and len({bias is None for bias in biases}) == 1
    upright = not any(isinstance(layer, Conv1D) for layer in layers)
    return upright and plain and alike and all(bias is None or not bias.requires_grad for bias in biases)


def _lie_in(whole: Tensor, values: Sequence[Tensor]) -> bool:
    """Whether `values` are the rows of `whole`, one after the other, to the last."""
    at, stride = whole.data_ptr(), whole.stride(0)
    for value in values:
        if value.data_ptr() != at or value.stride(0) != stride or value.dtype != whole.dtype:
            return False
        at += len(value) * stride * value.itemsize
    return at == whole.data_ptr() + len(whole) * stride * whole.itemsize


def _become_views(weights: Sequence[QuantisedWeight], whole: Form) -> None:
    """Let `weights` be the rows of `whole`, one after the other."""
    at = 0
    for weight in weights:
        weight.form, at = whole.narrow(0, at, len(weight)), at + len(weight)


@torch.no_grad()
def _moved_together(values: Sequence[nn.Parameter], room: int) -> tuple[Tensor, Tensor]:
    """`values` [n, ...] as views of one tensor, one below the other, which is the first result; the second
    has `room` more columns."""
    if len(values) == 1 and not room:
        return values[0].detach(), values[0].detach()
    rest = list(values[0].shape[1:])
    whole = values[0].new_zeros(sum(map(len, values)), *(rest if not room else [whole_lines(rest[0] + room)]))
    together = whole[:, : rest[0]] if room else whole
    for value, piece in zip(values, together.split([len(value) for value in values]), strict=True):
        value.data = piece.copy_(value.detach())
    return together, whole
