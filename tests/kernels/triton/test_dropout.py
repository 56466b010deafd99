"""Dropout in one kernel: to the bit what petune.rng.dropout draws, whatever the shape, forward and
backward."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from petune.errors import UsageError
from petune.kernels import reference
from petune.kernels.triton import dropout as fused
from petune.rng import dropout
from petune.rng.context import Running, bound_to
from petune.rng.dropout import Drop, draw, drop_attention, places, step_key

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HERE: dict[str, Any] = {
    "key": step_key(0, 3),
    "site": "encoder.4",
    "rows": torch.tensor([5, 2, 70_000]),
    "token": 9,
    "feature": 2**20 + 3,
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def x_of(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(7)).to(DEVICE, dtype)


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """petune.rng.dropout in plain torch, also on a CUDA device."""
    monkeypatch.delitem(dropout.FUSED, "cuda")


@pytest.fixture
def by_kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Drop]]:
    """petune.rng.dropout by the kernel, also on the CPU; the draws it was asked for."""
    asked: list[Drop] = []

    def counted(x: Tensor, how: Drop) -> Tensor:
        asked.append(how)
        return fused.drop(x, how)

    monkeypatch.setitem(dropout.FUSED, DEVICE.type, counted)
    yield asked


# ------------------------------------------------------------------ a matrix and a draw


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("p", [0.0, 1e-12, 0.1, 0.5, 1 - 1e-12, 1.0])
def test_the_kernel_is_the_reference_to_the_bit(p: float, dtype: torch.dtype) -> None:
    x = x_of(21, 100, dtype=dtype)
    numbers = torch.randint(-(2**63), 2**63 - 1, (21,), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    for base in (0, 1, -(2**63), 2**63 - 1, step_key(1, 1)):
        how = Drop(numbers, base, p, feature=17)
        assert torch.equal(fused.drop(x, how), reference.drop(x, how))
    assert (fused.drop(x, how) is x) == (p == 0)


@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (1, 7), (37, 64), (2, 5000), (0, 8), (8, 0)], ids=str)
def test_any_size_of_matrix(shape: tuple[int, int]) -> None:
    x, how = x_of(*shape), Drop(torch.arange(shape[0], device=DEVICE), 99, 0.3, 0)
    assert torch.equal(fused.drop(x, how), reference.drop(x, how))


def test_rows_may_be_strided_and_the_result_is_dense() -> None:
    x, how = x_of(6, 90)[:, 10:50], Drop(torch.arange(6, device=DEVICE), 99, 0.3, 0)
    y = fused.drop(x, how)
    assert y.is_contiguous()
    assert torch.equal(y, reference.drop(x, how))


def test_what_is_dropped_but_not_finite_leaves_its_trace() -> None:
    how = Drop(torch.arange(4, device=DEVICE), 99, 0.5, 0)
    x = torch.full((4, 64), math.inf, device=DEVICE)
    found, expected = fused.drop(x, how), reference.drop(x, how)
    assert 0 < expected.isnan().sum() < expected.numel()
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.signbit(fused.drop(-torch.ones(4, 64, device=DEVICE), how)).all()


# ---------------------------------------------------------- draws of a fused block are those of the plain one


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("p", [0.0, 0.4, 1.0])
def test_a_matrix_draws_what_the_tensor_it_stands_for_draws(p: float) -> None:
    x = x_of(3, 4, 20)
    with bound_to(Running(**HERE)) as now:
        expected = [dropout.drop(x, p) for _ in range(3)]
        counted, now.drawn = now.drawn, 0
        numbers = places(3, 4, DEVICE)
        found = [reference.drop(x.view(12, 20), draw(numbers, p)) for _ in range(3)]
        assert now.drawn == counted == (3 if p else 0)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.view(3, 4, 20), other)


@pytest.mark.usefixtures("plain")
def test_tokens_without_padding_keep_the_masks_they_have_with_it() -> None:
    x, kept = x_of(3, 4, 20), torch.tensor([0, 1, 4, 5, 6, 10], device=DEVICE)
    with bound_to(Running(**HERE)) as now:
        expected = dropout.drop(x, 0.4).view(12, 20)[kept]
        now.drawn = 0
        how = draw(places(3, 4, DEVICE)[kept], 0.4)
    assert torch.equal(reference.drop(x.view(12, 20)[kept], how), expected)
    rows, tokens = HERE["rows"].to(DEVICE)[kept // 4], kept % 4 + HERE["token"]
    assert torch.equal(how.numbers, (rows << 32) + tokens)


def test_without_a_key_torchs_seed_governs_and_nothing_is_counted() -> None:
    with bound_to(Running(site="encoder.4")) as now:
        bases = []
        for seed in (3, 3, 4):
            torch.manual_seed(seed)
            bases.append([draw(places(2, 2, DEVICE), 0.4).base for _ in range(2)])
        assert now.drawn == 0
    assert bases[0] == bases[1] != bases[2]
    assert bases[0][0] != bases[0][1]


def test_places_of_another_batch_than_the_running_one_are_refused() -> None:
    with bound_to(Running(**HERE)), pytest.raises(UsageError, match="3 rows in dim 0"):
        places(4, 2, DEVICE)


def test_a_probability_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        draw(torch.arange(3), 1.5)


# ------------------------------------------------------------------ petune.rng.dropout by the kernel

SHAPES = [(3,), (3, 7), (3, 5, 64), (3, 2, 5, 9), (3, 2, 2, 3, 9), (3, 0, 4), (3, 4, 0)]


def both(
    shape: tuple[int, ...], p: float, monkeypatch: pytest.MonkeyPatch, attention: bool = False
) -> list[tuple[Tensor, Tensor]]:
    """(result, gradient) of one draw, by the kernel and in plain torch."""
    results = []
    for kernel in (True, False):
        if not kernel:
            monkeypatch.setattr(dropout, "FUSED", {})
        x = x_of(*shape).requires_grad_()
        facts = HERE if len(shape) < 4 or attention else HERE | {"token": 0, "feature": 0}
        with bound_to(Running(**facts)):
            y = drop_attention(x, p, 3, 11) if attention else dropout.drop(x, p)
        (grad,) = torch.autograd.grad(y, x, x_of(*shape).cos())
        results.append((y, grad))
    return results


@pytest.mark.parametrize("p", [0.3, 1.0])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape_has_the_mask_and_the_gradient_of_plain_torch(
    shape: tuple[int, ...], p: float, by_kernel: list[Drop], monkeypatch: pytest.MonkeyPatch
) -> None:
    (y, grad), (expected, expected_grad) = both(shape, p, monkeypatch)
    assert len(by_kernel) == 2
    assert torch.equal(y, expected)
    assert torch.equal(grad, expected_grad)


def test_attention_probabilities_too(by_kernel: list[Drop], monkeypatch: pytest.MonkeyPatch) -> None:
    (y, grad), (expected, expected_grad) = both((3, 2, 5, 9), 0.3, monkeypatch, attention=True)
    assert len(by_kernel) == 2
    assert torch.equal(y, expected)
    assert torch.equal(grad, expected_grad)


@pytest.mark.usefixtures("by_kernel")
def test_a_layout_that_is_not_dense_is_dropped_all_the_same() -> None:
    x = x_of(3, 64, 5).transpose(1, 2).requires_grad_()
    with bound_to(Running(**HERE)) as now:
        y = dropout.drop(x, 0.3)
        now.drawn = 0
        assert torch.equal(y, dropout.drop(x.contiguous(), 0.3))
    y.sum().backward()  # a gradient without strides
    assert torch.equal(x.grad != 0, y != 0)


def test_the_gradient_of_the_gradient_is_right(by_kernel: list[Drop]) -> None:
    x = x_of(3, 4).requires_grad_()
    with bound_to(Running(**HERE)):
        (grad,) = torch.autograd.grad((dropout.drop(x, 0.4) ** 2).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(grad.sum(), x)
    kept = reference.drop(torch.ones(3, 4, device=DEVICE), by_kernel[0])
    torch.testing.assert_close(second, 2 * kept**2)


def test_float64_stays_with_plain_torch(by_kernel: list[Drop]) -> None:
    with bound_to(Running(**HERE)):
        assert dropout.drop(torch.ones(3, 4, dtype=torch.float64, device=DEVICE), 0.4).dtype == torch.float64
    assert by_kernel == []


def test_nothing_is_kept_for_the_backward_pass_but_the_places(by_kernel: list[Drop]) -> None:
    saved: list[Tensor] = []
    x = x_of(3, 4, 64).requires_grad_()
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda each: saved.append(each) or each, lambda each: each),
        bound_to(Running(**HERE)),
    ):
        dropout.drop(x, 0.3)
    assert [each.shape for each in saved] == [(12,)]
    assert len(by_kernel) == 1
