"""Rows that entered a linear, at hand or made again, and the gradients that a backward pass finds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor


class Sink:
    """Gradients of a block as its backward pass finds them, summed over tiles in float32."""

    def __init__(self, needs: Sequence[bool]) -> None:
        self.needs = needs
        self.found: dict[object, Tensor] = {}

    def add(self, key: object, value: Tensor | None) -> None:
        """Add to what was found under `key`."""
        if value is not None:
            self.found[key] = self.found[key].add_(value) if key in self.found else value


@dataclass(frozen=True)
class LinearInput:
    """A matrix x that entered a linear: at hand, or made again from what a norm read. normed: total, rstd and
    weight of an RMS norm."""

    matrix: Callable[[], Tensor]
    normed: tuple[Tensor, Tensor, Tensor] | None = None

    @staticmethod
    def of(x: Tensor) -> LinearInput:
        """The matrix itself."""
        return LinearInput(lambda: x)

    @staticmethod
    def again(make: Callable[[], Tensor], normed: tuple[Tensor, Tensor, Tensor] | None = None) -> LinearInput:
        """A matrix that is made when it is asked for, once."""
        return LinearInput(cache(make), normed)

    def times(self, ds: Tensor, product: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """product(ds [m, r], x [m, k]): ds^T x [r, k] in float32, or that of an x some of whose elements are
        zero.

        x = total * rstd * weight need not be made for it: scaling the few columns of ds does the same, but in
        float16, whose range ds * rstd may leave.
        """
        if self.normed is None or ds.dtype is torch.float16:
            return product(ds, self.matrix())
        total, rstd, weight = self.normed
        return product(torch.mul(ds, rstd[:, None], out=torch.empty_like(ds)), total).mul_(weight)
