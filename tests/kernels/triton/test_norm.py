"""RMSNorm and LayerNorm: the reference against autograd, the kernels against the reference in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from petune.kernels import reference
from petune.kernels.triton import norm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EPS = 1e-5
BACKWARD = {
    "rms": (reference.rms_norm_backward, norm.rms_norm_backward),
    "layer": (reference.layer_norm_backward, norm.layer_norm_backward),
}


def forward(
    module: Any, kind: str, x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None = None
) -> tuple[Tensor, ...]:
    """(result, mean for layer, 1 / std, total) of one of the two modules."""
    if kind == "rms":
        return module.rms_norm(x, weight, EPS, residual)
    return module.layer_norm(x, weight, bias, EPS, residual)


def operands(rows: int, columns: int, dtype: torch.dtype, strided: bool = False) -> dict[str, Tensor]:
    """x, residual, dy, dresidual [rows, columns], off-centre; weight and bias [columns]. Strided: every row
    is a part of a longer one."""
    generator = torch.Generator().manual_seed(rows * 100_003 + columns)
    width = columns + 24 if strided else columns
    names = ("x", "residual", "dy", "dresidual")
    made = {
        name: torch.randn(rows, width, generator=generator).add(0.3).to(DEVICE, dtype)[:, :columns]
        for name in names
    }
    return made | {
        name: torch.randn(columns, generator=generator).add(1).to(DEVICE, dtype)
        for name in ("weight", "bias")
    }


def assert_as_good(found: Tensor, same: Tensor, exact: Tensor, floor: float = 0.0) -> None:
    """No further from float64 than torch in the same dtype, but for `floor` and 2^-18 of the largest: another
    order of sums in float32."""
    assert found.dtype == same.dtype
    assert found.shape == same.shape
    if exact.numel():
        error, allowed = (float((result.double() - exact).abs().max()) for result in (found, same))
        assert error <= allowed + 2**-18 * float(exact.abs().max()) + floor


# ------------------------------------------------------------------ the reference


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("kind", BACKWARD)
def test_the_references_backward_is_autograds(kind: str, residual: bool) -> None:
    given = {name: value.requires_grad_() for name, value in operands(5, 7, torch.float64).items()}
    y, *statistics, total = forward(
        reference, kind, given["x"], given["weight"], given["bias"], given["residual"] if residual else None
    )
    wanted = [
        given["x"],
        given["weight"],
        *([given["bias"]] if kind == "layer" else []),
        *([given["residual"]] if residual else []),
    ]
    expected = torch.autograd.grad((y * given["dy"] + total * given["dresidual"]).sum(), wanted)
    with torch.no_grad():
        found = BACKWARD[kind][0](
            given["dy"], total, given["weight"], *statistics, given["dresidual"], weight_grad=True
        )
    for one, other in zip([*found, *found[:1]], expected, strict=False):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", BACKWARD)
def test_the_reference_is_torchs_own(kind: str) -> None:
    x, weight, bias = (operands(5, 64, torch.float64)[name] for name in ("x", "weight", "bias"))
    functional = torch.nn.functional
    expected = (
        functional.rms_norm(x, (64,), weight, EPS)
        if kind == "rms"
        else functional.layer_norm(x, (64,), weight, bias, EPS)
    )
    torch.testing.assert_close(forward(reference, kind, x, weight, bias)[0], expected)


# ------------------------------------------------------------------ the kernels

SHAPES = [(1, 4096), (3, 1), (3, 7), (11, 64), (37, 100), (3, 20_000), (0, 64)]


@pytest.mark.crossed
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", BACKWARD)
def test_a_norm_is_as_good_as_torchs_in_the_same_dtype(
    kind: str, dtype: torch.dtype, shape: tuple[int, int], residual: bool
) -> None:
    names = ("x", "weight", "bias", *(["residual"] if residual else []))
    given = [operands(*shape, dtype)[name] for name in names]
    exact = forward(reference, kind, *(value.double() for value in given))
    for found, same, truth in zip(
        forward(norm, kind, *given), forward(reference, kind, *given), exact, strict=True
    ):
        assert_as_good(found, same, truth)


@pytest.mark.crossed
@pytest.mark.parametrize("extra", ["", "weights", "dresidual", "both"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", BACKWARD)
def test_its_backward_is_as_good_as_the_references(
    kind: str, dtype: torch.dtype, shape: tuple[int, int], extra: str
) -> None:
    given = operands(*shape, dtype)
    _, *statistics, total = forward(reference, kind, given["x"], given["weight"], given["bias"])
    arguments = [
        given["dy"],
        total,
        given["weight"],
        *statistics,
        given["dresidual"] if extra in ("dresidual", "both") else None,
    ]
    slow, fast = BACKWARD[kind]
    exact = slow(
        *(None if value is None else value.double() for value in arguments), extra in ("weights", "both")
    )
    results = [backward(*arguments, extra in ("weights", "both")) for backward in (fast, slow)]
    terms = (
        float((given["dy"] * given["weight"]).abs().amax() * statistics[-1].abs().amax()) if shape[0] else 0.0
    )  # which cancel in a narrow row
    assert [value is None for value in results[0]] == [value is None for value in exact]
    for found, same, truth in zip(*results, exact, strict=True):
        if truth is not None:
            assert_as_good(found, same, truth, 2**-22 * terms)


@pytest.mark.parametrize("kind", BACKWARD)
def test_rows_may_be_strided_and_results_are_dense(kind: str) -> None:
    given = operands(6, 40, torch.bfloat16, strided=True)
    dense = {name: value.contiguous() for name, value in given.items()}
    results = []
    for each in (given, dense):
        y, *statistics, total = forward(norm, kind, each["x"], each["weight"], each["bias"], each["residual"])
        grads = BACKWARD[kind][1](
            each["dy"], each["x"], each["weight"], *statistics, each["dresidual"], weight_grad=True
        )
        results.append([y, *statistics, total, *grads])
    assert not given["x"].is_contiguous()
    for found, expected in zip(*results, strict=True):
        assert found.is_contiguous()
        torch.testing.assert_close(found, expected)  # a compiler may build another kernel for other strides


@pytest.mark.parametrize("module", [norm, reference], ids=["triton", "reference"])
@pytest.mark.parametrize("kind", BACKWARD)
def test_a_result_is_written_where_it_is_wanted_and_nowhere_else(kind: str, module: Any) -> None:
    given = operands(6, 40, torch.bfloat16)
    extra = (given["weight"], given["bias"]) if kind == "layer" else (given["weight"],)
    call = getattr(module, f"{kind}_norm")
    whole = torch.full((6, 48), 7.0, dtype=torch.bfloat16, device=DEVICE)
    found = call(given["x"], *extra, EPS, residual=given["residual"], out=whole[:, :40])[0]
    assert found.data_ptr() == whole.data_ptr()
    assert torch.equal(whole[:, :40], call(given["x"], *extra, EPS, residual=given["residual"])[0])
    assert bool((whole[:, 40:] == 7).all())


def test_a_layer_norm_may_have_no_bias() -> None:
    x, weight = (operands(11, 64, torch.float32)[name] for name in ("x", "weight"))
    expected = torch.nn.functional.layer_norm(x, (64,), weight, None, EPS)
    for module in (norm, reference):
        torch.testing.assert_close(module.layer_norm(x, weight, None, EPS)[0], expected)


def test_without_a_residual_the_total_is_the_input_itself() -> None:
    given = operands(2, 64, torch.float32)
    assert norm.rms_norm(given["x"], given["weight"], EPS)[-1] is given["x"]


def test_a_weight_may_have_a_dtype_of_its_own() -> None:
    given = operands(4, 64, torch.bfloat16)
    weight = torch.randn(64, device=DEVICE)
    expected = reference.rms_norm(given["x"], weight, EPS)[0]
    assert torch.equal(norm.rms_norm(given["x"], weight, EPS)[0], expected)


def test_rows_too_wide_for_a_program_go_to_the_reference() -> None:
    given = operands(2, norm.WIDEST + 1, torch.float32)
    assert torch.equal(
        norm.rms_norm(given["x"], given["weight"], EPS)[0],
        reference.rms_norm(given["x"], given["weight"], EPS)[0],
    )


def test_gradients_of_weights_are_summed_by_several_programs() -> None:
    """Forty rows of a thousand and more columns are walked by fewer programs than rows: each makes a partial
    sum of many."""
    given = operands(40, 1100, torch.float32)
    rstd, total = reference.rms_norm(given["x"], given["weight"], EPS)[1:]
    found = norm.rms_norm_backward(given["dy"], total, given["weight"], rstd, weight_grad=True)[1]
    expected = reference.rms_norm_backward(given["dy"], total, given["weight"], rstd, weight_grad=True)[1]
    torch.testing.assert_close(found, expected)
    again = norm.rms_norm_backward(given["dy"], total, given["weight"], rstd, weight_grad=True)[1]
    assert torch.equal(found, again)
