"""What frozen weights of fused blocks are multiplied by: their products, and those of a dense one.

A weight with room behind it is [W | b], b [n, r] the factor of its low-rank update. Then one product is x W^T
+ s b^T of [x | s], summed in float32 and rounded once, and one product gives dy W and dy b.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from petune.kernels.dispatch import Ops
from petune.kernels.reference import LowFactors


def matmul32(x: Tensor, y: Tensor, scale: float = 1.0) -> Tensor:
    """scale * x y, summed and given in float32 (float64 for float64)."""
    if x.device.type == "cuda" and x.dtype in (torch.bfloat16, torch.float16):
        if scale == 1.0:
            return torch.mm(x, y, out_dtype=torch.float32)
        nothing = torch.empty(1, 1, dtype=torch.float32, device=x.device)  # beta = 0: not read
        return torch.addmm(nothing, x, y, torch.float32, beta=0, alpha=scale)
    wide = torch.promote_types(x.dtype, torch.float32)
    if x.device.type == "cpu":  # whose product would be rounded on its way
        x, y = x.to(wide), y.to(wide)
    product = (x @ y).to(wide)
    return product if scale == 1.0 else product.mul_(scale)


WIDE = 2  # times as many outputs as inputs, from which on one product gives dy W and dy b sooner than two


def whole_lines(columns: int) -> int:
    """Columns so that rows of 16-bit numbers begin where lines of the cache do; in a narrow matrix, where
    loads of 16 bytes do."""
    unit = 64 if columns > 1024 else 8
    return -(-columns // unit) * unit


def wide_rows(new: Callable[..., Tensor], rows: int, columns: int) -> Tensor:
    """A matrix of `new`, not initialised, in the memory of one whose rows begin where cache lines do."""
    whole = new((rows, whole_lines(columns)))
    if whole.device.type == "cpu":
        # oneDNN reads behind rows of bf16 and multiplies by zero, which leaves NaN what is NaN
        whole[:, columns:] = 0
    return whole[:, :columns]


class PackedWeight(ABC):
    """The frozen weights of linears that share an input, [sum of outputs, k] with their biases, and the
    products a fused block makes."""

    rate: Literal["matmul", "matmul_fp8"] = "matmul"  # which rate of a device its products run at

    @property
    def made(self) -> float:
        """Bytes a number of what is made dense for each product, 0 where nothing is."""
        return 0

    @abstractmethod
    def linear(self, x: Tensor) -> Tensor:
        """x W^T + bias, [m, k] -> [m, sum of outputs]."""

    @abstractmethod
    def linear32(self, x: Tensor) -> Tensor:
        """The same as it is summed, before it is rounded: float32, float64 for float64."""

    def inlet(self, m: int, rank: int) -> Tensor | None:
        """A matrix [m, k + rank] for x and s side by side, not initialised; None where `linear_low` has no
        use for it."""
        return None

    @abstractmethod
    def linear_low(self, x: Tensor, low: LowFactors, ops: Ops, inlet: Tensor | None) -> Tensor:
        """x W^T + bias + low, rounded once. inlet: what `inlet` gave, if x is its left part."""

    @abstractmethod
    def dlinear(self, dy: Tensor) -> Tensor:
        """dy W, [m, sum of outputs] -> [m, k]."""

    def dlinear_with(self, dy: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """(dy W, dy b) with b [sum of outputs, r]."""
        return self.dlinear(dy), dy @ b


@dataclass(frozen=True)
class Dense(PackedWeight):
    """Weight [n, k] and bias [n] as they are."""

    weight: Tensor
    bias: Tensor | None
    room: Tensor | None = None  # [n, k + r]: the weight and behind it room for b

    def linear(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def linear32(self, x: Tensor) -> Tensor:
        y = matmul32(x, self.weight.T)
        return y if self.bias is None else y.add_(self.bias)

    def inlet(self, m: int, rank: int) -> Tensor | None:
        if not self._has_room(rank):
            return None
        return wide_rows(self.weight.new_empty, m, self.weight.shape[1] + rank)

    def linear_low(self, x: Tensor, low: LowFactors, ops: Ops, inlet: Tensor | None) -> Tensor:
        s, b = low
        if not self._has_room(s.shape[1]):
            product: Tensor = ops.linear_low(x, self.weight, self.bias, low)
            return product
        if inlet is None:
            inlet = torch.cat((x, s), 1)
        else:
            inlet[:, x.shape[1] :].copy_(s)
        return F.linear(inlet, self._with(b), self.bias)

    def _has_room(self, rank: int) -> bool:
        return self.room is not None and self.room.shape[1] >= self.weight.shape[1] + rank

    def _with(self, b: Tensor) -> Tensor:
        """[W | b]."""
        assert self.room is not None
        k = self.weight.shape[1]
        self.room[:, k : k + b.shape[1]].copy_(b)
        return self.room[:, : k + b.shape[1]]

    def dlinear(self, dy: Tensor) -> Tensor:
        return dy @ self.weight

    def dlinear_with(self, dy: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        outputs, k = self.weight.shape
        if not self._has_room(b.shape[1]) or outputs <= WIDE * k:
            return super().dlinear_with(dy, b)
        both = dy @ self._with(b)
        return both[:, :k], both[:, k:]
