"""The gate's two passes: the reference against autograd, the kernels against it."""

from __future__ import annotations

import pytest
import torch

from petune.kernels import reference
from petune.kernels.triton import mixing
from tests.kernels.exactness import DEVICE, DTYPES, assert_as_good, matrix, wider

TEMPERATURE = 0.7


def test_mix_backward_in_the_reference_is_autograds() -> None:
    state, below, dy = (matrix(3, 5, torch.float64, at) for at in range(3))
    gate = torch.tensor(-0.4, dtype=torch.float64, device=DEVICE)
    inputs = [value.requires_grad_() for value in (state, below, gate)]
    expected = torch.autograd.grad(reference.mix(*inputs, TEMPERATURE), inputs, dy)
    found = reference.mix_backward(dy, *(value.detach() for value in inputs), TEMPERATURE)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 100), (65, 130), (0, 64)])
@pytest.mark.parametrize("strided", [False, True])
def test_both_passes_are_the_references(dtype: torch.dtype, shape: tuple[int, int], strided: bool) -> None:
    state, below, dy = (matrix(*shape, dtype, at, strided=strided) for at in range(3))
    given = state, below, torch.tensor(0.3, device=DEVICE), TEMPERATURE
    assert_as_good(mixing.mix(*given), reference.mix(*given), reference.mix(*wider(given)))  # type: ignore[misc]
    back = dy, *given
    pairs = zip(mixing.mix_backward(*back), reference.mix_backward(*back), strict=True)
    for (found, same), exact in zip(pairs, reference.mix_backward(*wider(back)), strict=True):  # type: ignore[misc]
        assert_as_good(found, same, exact)
