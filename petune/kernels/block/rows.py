"""Rows that entered a linear, at hand or made again, and the gradients that a backward pass finds."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor


class Sink:
    """Gradients of a block as its backward pass finds them, summed over tiles in float32.

    later: the weights whose products wait, by place, for a pass of their own (`learn_late`).
    """

    def __init__(self, needs: Sequence[bool], later: Container[int] = ()) -> None:
        self.needs, self.later = needs, later
        self.found: dict[object, Tensor] = {}
        self.waiting: dict[int, list[Callable[[], Tensor]]] = {}

    def add(self, key: object, value: Tensor | None) -> None:
        """Add to what was found under `key`."""
        if value is not None:
            self.found[key] = self.found[key].add_(value) if key in self.found else value

    def learn(self, place: int, product: Callable[..., Tensor], *matrices: Any) -> None:
        """Add the gradient of a weight, product(*matrices), or keep the matrices until it is its turn."""
        if place not in self.later:
            self.add(place, product(*matrices))
            return
        # without what autograd knows of them: a block's input holds all that was before it
        held = (one.detach() if isinstance(one, Tensor) else one for one in matrices)
        self.waiting.setdefault(place, []).append(partial(product, *held))


# a weight, and the products whose sum is its gradient, of one call of a block
Late = tuple[Tensor, list[Callable[[], Tensor]]]


@torch.no_grad()
def learn_late(late: list[Late]) -> None:
    """Make the products that wait, one weight after the other, so that what each has kept is freed behind it,
    and let autograd add them to `.grad` as it does with what a backward pass finds. `late` is used up."""
    late.reverse()
    while late:
        weight, products = late.pop()
        with torch.autocast(weight.device.type, enabled=False):
            sink = Sink(())
            while products:
                sink.add(None, products.pop(0)())
        torch.autograd.backward([weight], [sink.found.pop(None).to(weight.dtype)])


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
