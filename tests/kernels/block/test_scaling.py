"""Groups whose results or inputs are scaled by what trains: values and gradients of autograd in float64, with
a norm that is a constant, banked, tiled and in narrow dtypes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from petune.kernels.block.dense import Dense
from petune.kernels.block.packed_linear import Group
from petune.kernels.block.rows import LinearInput, Sink
from petune.kernels.block.scaling import over_vector
from petune.kernels.dispatch import reference_ops
from petune.models.tuned_parts import TENSORS, LowRank, Scaling

M, K = 7, 12
WIDTHS = (8, 5, 5)


@pytest.fixture(autouse=True)
def _float64(float64: None) -> None:
    torch.manual_seed(0)


def part_of(width: int, scaling: Scaling | None, r: int, bias: bool = True, turned: bool = False) -> LowRank:
    b = (torch.randn(r, width) if turned else torch.randn(width, r)) if r else None
    size = {"lengths": (width,), "outputs": (width, 1), "inputs": (1, K), None: None}[scaling]
    return LowRank(
        torch.randn(width, K),
        torch.randn(width) if bias else None,
        torch.randn(r, K) if r else None,
        b,
        1.5,
        by=None if size is None else 1 + 0.3 * torch.randn(size),
        scaling=scaling,
        turned=turned,
    )


def oracle(part: LowRank, x: Tensor) -> Tensor:
    """What a part computes, by autograd."""
    if part.scaling == "inputs" and part.by is not None:
        x = x * part.by
    weight = part.weight
    if part.a is not None and part.b is not None:
        weight = weight + part.scale * (part.b.T if part.turned else part.b) @ part.a
    y = F.linear(x, weight)
    if part.by is not None and part.scaling == "lengths":
        y = y * part.by / weight.detach().norm(dim=1)
    y = y if part.bias is None else y + part.bias
    return y * part.by.flatten() if part.by is not None and part.scaling == "outputs" else y


CASES: dict[str, list[tuple[Scaling | None, int, bool, bool]]] = {
    "lengths": [("lengths", 2, True, False), ("lengths", 3, True, False), ("lengths", 2, True, False)],
    "lengths without biases": [("lengths", 2, False, False)] * 3,
    "some lengths": [("lengths", 2, True, False), (None, 0, True, False), (None, 3, True, False)],
    "outputs": [(None, 0, True, False), ("outputs", 0, True, False), ("outputs", 0, True, False)],
    "outputs of one": [("outputs", 0, True, False)],
    "lengths of one": [("lengths", 4, True, False)],
    "inputs of one": [("inputs", 0, True, False)],
    "turned": [(None, 2, True, True), (None, 2, True, True), (None, 0, True, False)],
    "turned, one": [(None, 3, False, True)],
}


@pytest.mark.parametrize("banked", [False, True], ids=["apart", "banked"])
@pytest.mark.parametrize("size", [M, 3])
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_autograds(case: str, size: int, banked: bool) -> None:
    parts = [part_of(width, *own) for width, own in zip(WIDTHS, CASES[case], strict=False)]
    widths = [len(part.weight) for part in parts]
    x, dy = torch.randn(M, K), torch.randn(M, sum(widths))
    leaves = [x, *(tensor for part in parts for tensor in part.tensors)]
    tensors = [None if one is None else one.detach().requires_grad_() for one in leaves]
    made = [part.with_tensors(tensors[1 + TENSORS * at :][:TENSORS]) for at, part in enumerate(parts)]
    expected = torch.cat([oracle(part, tensors[0]) for part in made], 1)
    wanted = torch.autograd.grad(expected, [one for one in tensors if one is not None], dy)

    bias = None if parts[0].bias is None else torch.cat([part.bias for part in parts])
    base = Dense(torch.cat([part.weight for part in parts]), bias) if banked else None
    group, sink = Group(parts, torch.float64, 0, reference_ops(), base), Sink([True] * TENSORS * len(parts))
    ys, dxs = [], []
    for start in range(0, M, size):
        tile, grad = x[start : start + size], dy[start : start + size]
        y, s = group(tile)
        dz = group.unscaled(sink, grad, y)
        entered, (dx, ds) = LinearInput.of(tile), group.dproducts(dz)
        group.learn(sink, dz, group.entered(entered), s, ds)
        dxs.append(group.dupdated(group.unentered(sink, dx, entered), ds))
        ys.append(y)
    torch.testing.assert_close(torch.cat(ys), expected.detach())
    found = [one for one in (torch.cat(dxs), *group.gradients(sink)) if one is not None]
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)


GATES: dict[str, list[tuple[Scaling | None, int, bool, bool]]] = {
    "lengths": [("lengths", 2, True, False), ("lengths", 2, True, False)],
    "lengths of unequal ranks": [("lengths", 2, True, False), ("lengths", 3, True, False)],
    "lengths without biases": [("lengths", 2, False, False)] * 2,
    "a length": [(None, 2, True, False), ("lengths", 2, True, False)],
    "an output": [(None, 0, True, False), ("outputs", 0, True, False)],
}


@pytest.mark.parametrize("case", GATES)
def test_values_and_gradients_of_what_an_activation_scales_are_autograds(case: str) -> None:
    parts, ops = [part_of(6, *own) for own in GATES[case]], reference_ops()
    x, dm = torch.randn(M, K), torch.randn(M, 6)
    leaves = [x, *(tensor for part in parts for tensor in part.tensors)]
    tensors = [None if one is None else one.detach().requires_grad_() for one in leaves]
    made = [part.with_tensors(tensors[1 + TENSORS * at :][:TENSORS]) for at, part in enumerate(parts)]
    gate, up = (oracle(part, tensors[0]) for part in made)
    expected = F.silu(gate) * up
    wanted = torch.autograd.grad(expected, [one for one in tensors if one is not None], dm)

    group, sink = Group(parts, torch.float64, 0, ops, gates=True), Sink([True] * TENSORS * len(parts))
    u, s = group(x)
    scale, low = group.deferred_scale, group.deferred(s)
    m = ops.activate(u, "silu", True, low, None, group.paired, scale=scale)[0]
    torch.testing.assert_close(m, expected.detach())
    du, db, _, sums = ops.activate_backward(
        dm, u, "silu", True, group.read(s), None, group.paired, scale=scale
    )
    group.learn_scale(sink, sums)
    dx, ds = group.dproducts(group.unscaled(sink, du, None))
    group.learn(sink, du, LinearInput.of(x), s, ds, db=db)
    found = [one for one in (group.dupdated(dx, ds), *group.gradients(sink)) if one is not None]
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)


def test_a_group_that_is_made_of_what_it_has_made_before_computes_the_same() -> None:
    parts = [part_of(width, "lengths", 2) for width in WIDTHS]
    x, first = torch.randn(M, K), Group(parts, torch.float64, 0, reference_ops())
    others = [part._replace(by=2 * part.by) for part in parts]  # which are not read again
    again = Group(others, torch.float64, 0, reference_ops(), factors=first.factors)
    assert torch.equal(first(x)[0], again(x)[0])


def test_what_is_passed_by_is_the_plain_product() -> None:
    for scaling in ("lengths", "outputs", "inputs"):
        part = part_of(5, scaling, 0)._replace(by=None)
        x, group = torch.randn(M, K), Group([part], torch.float64, 0, reference_ops())
        torch.testing.assert_close(group(x)[0], F.linear(x, part.weight, part.bias))
        dy, sink = torch.randn(M, 5), Sink([True] * TENSORS)
        assert group.unscaled(sink, dy, None) is dy
        group.learn(sink, dy, LinearInput.of(x), None, None)
        weight, bias, *others = group.gradients(sink)
        assert others == [None] * 3
        torch.testing.assert_close(weight, dy.T @ x)
        torch.testing.assert_close(bias, dy.sum(0))


def test_a_small_change_of_a_length_survives_rounding() -> None:
    """m that grows by 2^-12, a sixteenth of the last place of bf16, moves the mean of y as much."""
    torch.set_default_dtype(torch.float32)
    weight, x = torch.randn(64, 256).bfloat16(), torch.randn(512, 256).bfloat16()
    lengths = weight.float().norm(dim=1)
    a, b = torch.zeros(2, 256), torch.zeros(64, 2)
    ys = []
    for by in (lengths, lengths * (1 + 2**-12)):
        part = LowRank(weight, None, a, b, by=by, scaling="lengths")
        ys.append(Group([part], torch.bfloat16, 0, reference_ops())(x)[0].double())
    change = x.double() @ weight.double().T * 2**-12
    survived = float(((ys[1] - ys[0]) * change).sum() / change.square().sum())
    assert survived == pytest.approx(1, abs=0.15)


def test_an_entry_of_zero_has_no_gradient_and_no_nan() -> None:
    assert torch.equal(
        over_vector(torch.tensor([4.0, 3.0]), torch.tensor([2.0, 0.0])), torch.tensor([2.0, 0.0])
    )
