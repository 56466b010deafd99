"""Lengths of the rows of a weight with an update that is never made: those of the dense sum, for dense and
quantised weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from petune.models.frozen_weight import FORMS, QuantisedWeight, dense_of
from petune.models.row_lengths import ROWS, lengths_of, squares_of


@pytest.mark.parametrize(
    "kind", [torch.float64, torch.float32, torch.bfloat16, "nf4", "int8", "fp8"], ids=str
)
def test_lengths_are_those_of_the_dense_sum(kind: torch.dtype | str) -> None:
    torch.manual_seed(0)
    weight: Tensor = torch.randn(ROWS + 70, 128)
    weight = QuantisedWeight(FORMS[kind].of(weight)) if isinstance(kind, str) else weight.to(kind)
    a, b = torch.randn(3, 128).double(), torch.randn(ROWS + 70, 3).double()
    own = dense_of(weight).double()
    squares = squares_of(weight)
    assert squares.dtype == (torch.float64 if kind == torch.float64 else torch.float32)
    torch.testing.assert_close(squares.double(), own.square().sum(1), rtol=2e-6, atol=0)
    found = lengths_of(weight, a, b)
    torch.testing.assert_close(found.double(), (own + b @ a).norm(dim=1), rtol=2e-6, atol=0)


def test_a_row_that_the_update_takes_away_has_a_length_of_zero_and_no_other() -> None:
    weight = torch.tensor([[3.0, 4.0], [1.0, 0.0]])
    found = lengths_of(weight, torch.tensor([[3.0, 4.0]]), torch.tensor([[-1.0], [0.0]]))
    assert torch.equal(found, torch.tensor([0.0, 1.0]))


class Largest(TorchDispatchMode):
    """The most numbers that an operation has made."""

    most = 0

    def __torch_dispatch__(
        self, func: object, types: object, args: tuple = (), kwargs: object = None
    ) -> object:  # type: ignore[type-arg]
        out = func(*args, **(kwargs or {}))  # type: ignore[operator, arg-type]
        if isinstance(out, Tensor) and not out._is_view():
            self.most = max(self.most, out.numel())
        return out


def test_nothing_as_large_as_the_weight_is_made() -> None:
    weight = torch.randn(4 * ROWS, 64).bfloat16()
    a, b = torch.randn(4, 64), torch.randn(4 * ROWS, 4)
    with Largest() as seen:
        lengths_of(weight, a, b)
    assert seen.most <= weight.numel() // 4
