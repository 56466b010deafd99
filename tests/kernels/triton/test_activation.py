"""Activations between two linears: the reference against autograd, the kernels against the reference in
float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from petune.kernels import reference
from petune.kernels.dispatch import triton_ops
from petune.kernels.reference import Act, LowFactors, Scale
from petune.kernels.triton import activation, activation_backward, residual
from petune.rng.dropout import Drop
from tests.kernels.exactness import DEVICE, DTYPES, assert_as_good, matrix, wider

kernels = triton_ops()
ACTS: list[Act] = ["silu", "gelu", "gelu_tanh", "relu"]
# rows, columns of h, rank of low or 0, rank of a and below or 0
SHAPES = [
    (1, 16, 1, 8),
    (3, 100, 8, 1),
    (65, 130, 48, 16),
    (65, 130, 0, 16),
    (3, 100, 16, 0),
    (65, 16, 0, 0),
    (33, 34, 64, 64),
]
each_shape = pytest.mark.parametrize(("rows", "width", "rank", "depth"), SHAPES)
each_form = pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])


def operands(
    rows: int,
    width: int,
    rank: int,
    depth: int,
    gated: bool,
    dtype: torch.dtype,
    strided: bool = False,
    p: float | None = None,
    scaled: str = "",
) -> dict[str, Any]:
    """u, dh, low, a and below of one activation; the factors are scaled as trained ones are. scaled: "all" of
    u with its update, or "but own"."""
    columns = width * (1 + gated)
    low: LowFactors | None = (
        (matrix(rows, rank, dtype, 1, strided), matrix(columns, rank, dtype, 2, strided) / 4)
        if rank
        else None
    )
    a = matrix(depth, width, dtype, 3, strided) / 4 if depth else None
    scale, own = (matrix(1, columns, torch.float32, seed)[0].to(promoted(dtype)) for seed in (7, 8))
    return {
        "u": 2 * matrix(rows, columns, dtype, 4, strided),
        "dh": matrix(rows, width, dtype, 5, strided),
        "low": low,
        "a": a,
        "below": None if a is None else (matrix(rows, depth, dtype, 6, strided), a),
        "how": None if p is None else Drop(torch.arange(rows, device=DEVICE), 99, p, 3),
        "scale": Scale(1 + scale / 4, own if scaled == "but own" else None) if scaled else None,
    }


def promoted(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def forward(module: Any, given: dict[str, Any], act: Act, gated: bool) -> tuple[Tensor | None, ...]:
    rest = {name: given[name] for name in ("how", "scale")}
    return module.activate(given["u"], act, gated, given["low"], given["a"], **rest)


def backward(module: Any, given: dict[str, Any], act: Act, gated: bool) -> tuple[Tensor | None, ...]:
    """Without the sums of a scale where there is none."""
    rest = {name: given[name] for name in ("how", "scale")}
    found = module.activate_backward(
        given["dh"], given["u"], act, gated, given["low"], given["below"], **rest
    )
    return found[: 3 + (given["scale"] is not None)]


def assert_all_as_good(call: Any, given: dict[str, Any], act: Act, gated: bool) -> None:
    scale = None if given["scale"] is None else Scale(*wider(tuple(given["scale"])))  # type: ignore[misc]
    wide = {name: wider(value) for name, value in given.items()} | {"how": given["how"], "scale": scale}
    exact = call(reference, wide, act, gated)
    for found, same, true in zip(
        call(kernels, given, act, gated), call(reference, given, act, gated), exact, strict=True
    ):
        if same is None:
            assert found is None
        else:
            assert_as_good(found, same, true)


# ------------------------------------------------------------------ the reference


@each_form
@pytest.mark.parametrize("act", ACTS)
def test_the_references_backward_is_autograds(act: Act, gated: bool) -> None:
    given = operands(5, 7, 3, 2, gated, torch.float64)
    (s, b), (ds, a), u = given["low"], given["below"], given["u"]
    for leaf in (u, b, a):
        leaf.requires_grad_()
    h, hidden = reference.activate(u, act, gated, (s, b), a)
    assert hidden is not None
    expected = torch.autograd.grad((h * given["dh"]).sum() + (hidden * ds).sum(), (u, b, a))
    with torch.no_grad():
        found = backward(reference, given, act, gated)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.to(torch.float64) if one is not None else one, other)


@each_form
def test_the_references_gradients_of_a_scale_are_autograds(gated: bool) -> None:
    """Of a row of a weight that is scaled by c and its bias o that is not: c x + (1 - c) o of x + o."""
    given = operands(5, 7, 3, 2, gated, torch.float64, scaled="but own")
    columns, own = (one.requires_grad_() for one in given["scale"])
    u, below = given["u"].requires_grad_(), given["below"]
    h, hidden = reference.activate(
        u + own - own.detach(), "silu", gated, given["low"], given["a"], scale=Scale(columns, own)
    )
    assert hidden is not None
    expected = torch.autograd.grad((h * given["dh"]).sum() + (hidden * below[0]).sum(), (u, columns, own))
    with torch.no_grad():
        du, *_, sums = backward(reference, given, "silu", gated)
        assert sums is not None
        found = du, sums[0] / columns, sums[1]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@each_form
@pytest.mark.parametrize("act", ACTS)
def test_the_references_forward_passes_gradcheck(act: Act, gated: bool) -> None:
    given = operands(3, 4, 2, 2, gated, torch.float64)
    leaves = [leaf.requires_grad_() for leaf in (given["u"], *given["low"], given["a"])]
    assert torch.autograd.gradcheck(lambda u, s, b, a: reference.activate(u, act, gated, (s, b), a), leaves)


# ------------------------------------------------------------------ the kernels


@pytest.mark.crossed
@pytest.mark.parametrize("dtype", DTYPES)
@each_form
@each_shape
def test_both_ways_are_the_references(
    rows: int, width: int, rank: int, depth: int, gated: bool, dtype: torch.dtype
) -> None:
    given = operands(rows, width, rank, depth, gated, dtype)
    assert_all_as_good(forward, given, "silu", gated)
    assert_all_as_good(backward, given, "silu", gated)


@pytest.mark.crossed
@pytest.mark.parametrize("dtype", DTYPES)
@each_form
@pytest.mark.parametrize("act", ACTS)
def test_every_activation_is_the_references_where_rows_are_strided(
    act: Act, gated: bool, dtype: torch.dtype
) -> None:
    given = operands(35, 66, 8, 16, gated, dtype, strided=True)
    kept = given["u"].clone()
    assert_all_as_good(forward, given, act, gated)
    assert_all_as_good(backward, given, act, gated)
    assert torch.equal(given["u"], kept)


@pytest.mark.crossed
@pytest.mark.parametrize("dtype", DTYPES)
@each_form
@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
@pytest.mark.parametrize(
    ("rows", "width", "rank", "depth"), [(65, 130, 48, 16), (33, 34, 64, 64), (65, 130, 0, 16)]
)
def test_what_drops_out_of_the_input_below_is_the_references(
    rows: int, width: int, rank: int, depth: int, p: float, gated: bool, dtype: torch.dtype
) -> None:
    given = operands(rows, width, rank, depth, gated, dtype, strided=True, p=p)
    assert_all_as_good(forward, given, "silu", gated)
    assert_all_as_good(backward, given, "silu", gated)


@pytest.mark.crossed
@pytest.mark.parametrize("dtype", DTYPES)
@each_form
@pytest.mark.parametrize("scaled", ["all", "but own"])
@pytest.mark.parametrize(
    ("rows", "width", "rank", "depth"),
    [(65, 130, 16, 16), (33, 34, 64, 64), (3, 100, 0, 0), (65, 130, 0, 16)],
)
def test_what_a_scale_does_and_its_sums_are_the_references(
    rows: int, width: int, rank: int, depth: int, scaled: str, gated: bool, dtype: torch.dtype
) -> None:
    given = operands(rows, width, rank, depth, gated, dtype, strided=True, scaled=scaled)
    assert_all_as_good(forward, given, "gelu", gated)
    assert_all_as_good(backward, given, "gelu", gated)


@each_form
@pytest.mark.parametrize("depth", [16, 64])
def test_a_base_on_the_device_is_read_there(gated: bool, depth: int) -> None:
    given = operands(33, 34, 16, depth, gated, torch.bfloat16, p=0.3)
    there = given | {"how": given["how"]._replace(base=torch.tensor([99], device=DEVICE))}
    for call in (forward, backward):
        for one, other in zip(
            call(kernels, given, "silu", gated), call(kernels, there, "silu", gated), strict=True
        ):
            assert one is not None and other is not None and torch.equal(one, other)


@pytest.mark.parametrize("module", [kernels, reference], ids=["triton", "reference"])
@each_form
def test_a_result_is_written_where_it_is_wanted_and_nowhere_else(gated: bool, module: Any) -> None:
    given = operands(35, 66, 8, 16, gated, torch.bfloat16)
    whole = torch.full((35, 80), 7.0, dtype=torch.bfloat16, device=given["u"].device)
    found, s = module.activate(given["u"], "silu", gated, given["low"], given["a"], out=whole[:, :66])
    wanted, same = forward(module, given, "silu", gated)
    assert found.data_ptr() == whole.data_ptr() and s is not None and same is not None
    assert torch.equal(whole[:, :66], wanted) and torch.equal(s, same)  # type: ignore[arg-type]
    assert bool((whole[:, 66:] == 7).all())


@each_form
def test_an_update_that_the_matrix_has_already_is_not_added_again(gated: bool) -> None:
    given = operands(35, 66, 8, 16, gated, torch.float32)
    s, b = given["low"]
    added = given | {
        "u": reference.add_low(given["u"], torch.zeros_like(given["u"]), (s, b)),
        "low": (s, None),
    }
    for found, wanted in zip(
        backward(kernels, added, "silu", gated), backward(reference, given, "silu", gated), strict=True
    ):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@each_form
def test_tiles_shared_between_programs_add_up(gated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    given = operands(130, 130, 16, 16, gated, torch.bfloat16, scaled="but own")
    for parts in (1, 2, 5):
        for module in (activation, activation_backward):
            monkeypatch.setattr(module, "shares", lambda walks, steps, places, parts=parts: parts)
        assert_all_as_good(forward, given, "silu", gated)
        assert_all_as_good(backward, given, "silu", gated)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter
@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_tanh"])
def test_large_numbers_saturate_and_what_is_not_a_number_stays_so(act: Act) -> None:
    u = torch.tensor([[-1e4, -90.0, -20.0, 0.0, 20.0, 90.0, 1e4, float("nan")] * 2], device=DEVICE)
    dh = torch.ones_like(u)
    for found, same in zip(
        kernels.activate(u, act, False)[:1], reference.activate(u, act, False)[:1], strict=True
    ):
        torch.testing.assert_close(found, same, equal_nan=True, rtol=1e-5, atol=1e-6)
    found, same = (module.activate_backward(dh, u, act, False)[0] for module in (kernels, reference))
    torch.testing.assert_close(found[:, :7], same[:, :7], rtol=1e-5, atol=1e-6)
    assert found.isnan().equal(same.isnan())


@each_form
def test_no_rows_give_empty_results_and_zero_gradients(gated: bool) -> None:
    given = operands(0, 32, 8, 4, gated, torch.bfloat16, scaled="but own")
    for call in (forward, backward):
        for found, same in zip(
            call(kernels, given, "silu", gated), call(reference, given, "silu", gated), strict=True
        ):
            assert found is not None
            assert same is not None
            assert found.dtype == same.dtype
            assert found.equal(same)


@each_form
def test_the_same_call_gives_the_same_bits(gated: bool) -> None:
    given = operands(65, 130, 16, 16, gated, torch.bfloat16)
    for call in (forward, backward):
        once, again = call(kernels, given, "silu", gated), call(kernels, given, "silu", gated)
        assert all(
            one is not None and other is not None and one.equal(other)
            for one, other in zip(once, again, strict=True)
        )


@pytest.mark.parametrize("name", ["low", "below"])
def test_a_rank_above_the_largest_is_refused(name: str) -> None:
    given = operands(2, 16, 8, 8, True, torch.float32) | {
        name: operands(2, 16, 65, 65, True, torch.float32)[name]
    }
    with pytest.raises(ValueError, match=f"rank 65.*up to {residual.MAX_RANK}"):
        backward(kernels, given, "silu", True)


def test_paired_ranks_are_those_of_a_block_diagonal_factor() -> None:
    torch.manual_seed(0)
    u, dh, s, a, ds = (
        torch.randn(*shape, device=DEVICE) for shape in ((9, 60), (9, 30), (9, 6), (2, 30), (9, 2))
    )
    b = torch.block_diag(*torch.randn(2, 30, 3, device=DEVICE))
    for module in (reference, kernels):
        h, hidden = module.activate(u, "silu", True, (s, b), a, paired=True)
        wanted, expected = reference.activate(u, "silu", True, (s, b), a)
        torch.testing.assert_close(h, wanted, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(hidden, expected, rtol=1e-5, atol=1e-5)
        du, db, da, _ = module.activate_backward(dh, u, "silu", True, (s, b), (ds, a), paired=True)
        whole, dense, below, _ = reference.activate_backward(dh, u, "silu", True, (s, b), (ds, a))
        torch.testing.assert_close(du, whole, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(da, below, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(db, torch.cat([dense[:30, :3], dense[30:, 3:]]), rtol=1e-4, atol=1e-5)
