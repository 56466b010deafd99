"""Linears of one input as one: values and gradients of autograd in float64, whatever is tuned, banked,
dropped out of or tiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from petune.kernels import reference
from petune.kernels.block.dense import Dense, matmul32
from petune.kernels.block.linear import Bank
from petune.kernels.block.packed_linear import Group, spans
from petune.kernels.block.rows import LinearInput, Sink
from petune.kernels.dispatch import reference_ops
from petune.methods.configs import LoraConfig
from petune.methods.lora import tune
from petune.models.tuned_linear import low_rank_of
from petune.models.tuned_parts import TENSORS, LowRank
from petune.rng.dropout import Drop

M, K = 7, 12
WIDTHS = (8, 5, 5)


@pytest.fixture(autouse=True)
def _float64(float64: None) -> None:
    torch.manual_seed(0)


def parts_of(
    ranks: tuple[int, ...], bias: bool, scales: tuple[float, ...] = (1.5, 1.5, 1.5)
) -> list[LowRank]:
    """Linears of WIDTHS outputs; a rank of 0 is no update."""
    made = []
    for width, r, scale in zip(WIDTHS, ranks, scales, strict=True):
        factors = (torch.randn(r, K), torch.randn(width, r)) if r else (None, None)
        made.append(LowRank(torch.randn(width, K), torch.randn(width) if bias else None, *factors, scale))
    return made


def draw_of(base: int) -> Drop:
    """A dropout of M rows."""
    return Drop(torch.arange(M), base, 0.3, 0)


def oracle(parts: list[LowRank], drops: list[Any], x: Tensor) -> Tensor:
    """What the group computes, by autograd."""
    outs = []
    for part, drop in zip(parts, drops, strict=True):
        y = F.linear(x, part.weight, part.bias)
        if part.a is not None and part.b is not None:
            y = y + part.scale * F.linear(
                F.linear(x if drop is None else reference.drop(x, drop), part.a), part.b
            )
        outs.append(y)
    return torch.cat(outs, 1)


def leaves(parts: list[LowRank]) -> list[Tensor | None]:
    return [tensor for part in parts for tensor in part.tensors]


CASES = {
    "all": ((2, 3, 2), True, (1.5, 1.5, 1.5)),
    "no bias": ((2, 2, 2), False, (1.5, 1.5, 1.5)),
    "some": ((2, 0, 3), True, (1.5, 1.5, 1.5)),
    "none": ((0, 0, 0), True, (1.5, 1.5, 1.5)),
    "of unequal scale": ((2, 2, 0), False, (1.5, 0.5, 3.0)),
    "too large to fold": ((30, 30, 30), True, (1.5, 1.5, 1.5)),
}


@pytest.mark.parametrize("banked", [False, True], ids=["apart", "banked"])
@pytest.mark.parametrize("dropped", [False, True], ids=["whole", "dropped"])
@pytest.mark.parametrize("case", CASES)
def test_a_groups_values_and_gradients_are_autograds(case: str, dropped: bool, banked: bool) -> None:
    parts = parts_of(*CASES[case])
    drops = [draw_of(at) if dropped and part.a is not None else None for at, part in enumerate(parts)]
    x, dy = torch.randn(M, K), torch.randn(M, sum(WIDTHS))
    tensors = [None if one is None else one.detach().requires_grad_() for one in (x, *leaves(parts))]
    made = [
        part.with_tensors(tensors[1 + TENSORS * at : 1 + TENSORS * (at + 1)]) for at, part in enumerate(parts)
    ]
    expected = oracle(made, drops, tensors[0])
    wanted = torch.autograd.grad(expected, [one for one in tensors if one is not None], dy)

    bias = None if parts[0].bias is None else torch.cat([part.bias for part in parts])
    base = Dense(torch.cat([part.weight for part in parts]), bias) if banked else None
    group = Group(parts, torch.float64, 0, reference_ops(), base, drops)
    y, s = group(x)
    torch.testing.assert_close(y, expected.detach())
    sink = Sink([True] * 3 * TENSORS)
    dx, ds = group.dproducts(dy)
    group.learn(sink, dy, LinearInput.of(x), s, ds)
    found = [one for one in (group.dupdated(dx, ds), *group.gradients(sink)) if one is not None]
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("dropped", [False, True], ids=["whole", "dropped"])
@pytest.mark.parametrize("size", [1, 3, 7])
def test_gradients_of_tiles_add_up(size: int, dropped: bool) -> None:
    parts = parts_of((2, 3, 2), True)
    drops = [draw_of(at) for at in range(3)] if dropped else []
    x, dy = torch.randn(M, K), torch.randn(M, sum(WIDTHS))
    found = []
    for rows in (M, size):
        group, sink = Group(parts, torch.float64, 0, reference_ops(), None, drops), Sink([True] * 3 * TENSORS)
        for start in range(0, M, rows):
            group.rows = slice(start, min(start + rows, M))
            tile, grad = x[start : start + rows], dy[start : start + rows]
            _, s = group(tile)
            group.learn(sink, grad, LinearInput.of(tile), s, group.dlow(grad))
        found.append(group.gradients(sink))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_what_does_not_train_gets_no_gradient() -> None:
    parts = parts_of((2, 3, 2), True)
    x, dy = torch.randn(M, K), torch.randn(M, sum(WIDTHS))
    needs = [False, True, False, True, False] * 3
    group, sink = Group(parts, torch.float64, 0, reference_ops()), Sink(needs)
    _, s = group(x)
    group.learn(sink, dy, LinearInput.of(x), s, group.dlow(dy))
    assert [one is not None for one in group.gradients(sink)] == needs


def test_gradients_leave_a_group_as_they_were_summed_in_float32() -> None:
    torch.set_default_dtype(torch.float32)
    part = LowRank(torch.randn(8, K).bfloat16(), None, torch.randn(2, K), torch.randn(8, 2), 2.0)
    x, dy = torch.randn(4096, K).bfloat16(), torch.randn(4096, 8).bfloat16()
    group, sink = Group([part], torch.bfloat16, 0, reference_ops()), Sink([True, False, True, True, False])
    _, s = group(x)
    group.learn(sink, dy, LinearInput.of(x), s, group.dlow(dy))
    grads = group.gradients(sink)
    assert [None if one is None else one.dtype for one in grads] == [
        torch.float32,
        None,
        torch.float32,
        torch.float32,
        None,
    ]


def test_a_product_in_float32_is_not_rounded_on_the_way() -> None:
    x, y = torch.randn(3, 64).bfloat16(), torch.randn(64, 5).bfloat16()
    torch.testing.assert_close(
        matmul32(x, y, 0.3), 0.3 * (x.double() @ y.double()).float(), rtol=1e-5, atol=1e-5
    )


def test_a_gradient_of_a_normed_matrix_needs_no_normed_matrix() -> None:
    total, weight, ds = torch.randn(M, K), torch.randn(K), torch.randn(M, 3)
    h, rstd, _ = reference.rms_norm(total, weight, 1e-6)
    asked: list[int] = []

    def again() -> Tensor:
        asked.append(1)
        return h

    rows = LinearInput.again(again, (total, rstd, weight))
    torch.testing.assert_close(rows.times(ds, lambda ds, x: ds.T @ x), ds.T @ h)
    assert not asked
    assert rows.matrix() is h and rows.matrix() is h and asked == [1]


def test_a_matrix_that_is_made_again_is_made_once() -> None:
    asked: list[int] = []
    x = torch.randn(M, K)

    def again() -> Tensor:
        asked.append(1)
        return x

    rows = LinearInput.again(again)
    assert not asked
    torch.testing.assert_close(rows.times(torch.ones(M, 1), lambda ds, x: ds.T @ x), x.sum(0, keepdim=True))
    assert rows.matrix() is x and asked == [1]


def test_spans_follow_one_another() -> None:
    assert spans([3, 0, 2]) == [slice(0, 3), slice(3, 3), slice(3, 5)]
    assert spans([]) == []


# ------------------------------------------------------------------ layers


def layers(bias: bool = True) -> list[nn.Module]:
    return [nn.Linear(K, width, bias).requires_grad_(False) for width in WIDTHS]


def test_a_linear_and_a_tuned_one_are_parts_and_nothing_else_is() -> None:
    linear = nn.Linear(4, 4)
    tuned = tune(nn.Linear(4, 4), LoraConfig(r=2, alpha=6))
    assert low_rank_of(linear) == LowRank(linear.weight, linear.bias)
    assert low_rank_of(tuned) == LowRank(
        tuned.weight, tuned.bias, tuned.lora_A, tuned.lora_B, 3.0, tuned.dropout
    )
    tuned.active = False
    assert low_rank_of(tuned) == LowRank(tuned.weight, tuned.bias)

    class Own(nn.Linear):
        """A linear whose forward is anyone's guess."""

    assert low_rank_of(Own(4, 4)) is None and low_rank_of(nn.Identity()) is None


@pytest.mark.parametrize("room", [0, 3])
def test_a_bank_leaves_parameters_values_and_state_as_they_were(room: int) -> None:
    own = layers()
    parameters = [layer.weight for layer in own]
    before = [value.clone() for value in parameters]
    bank = Bank(own, reference_ops(), room)
    x = torch.randn(M, K)
    assert all(layer.weight is value for layer, value in zip(own, parameters, strict=True))
    assert all(torch.equal(value, old) for value, old in zip(parameters, before, strict=True))
    torch.testing.assert_close(bank.base.linear(x), torch.cat([layer(x) for layer in own], 1))
    torch.testing.assert_close(
        bank.base.dlinear(torch.ones(M, sum(WIDTHS))), sum(value.sum(0) for value in before).expand(M, K)
    )
    assert bank.intact([low_rank_of(layer) for layer in own])


@pytest.mark.parametrize("room", [0, 3, 5])
def test_room_behind_the_weights_changes_no_product_and_no_weight(room: int) -> None:
    own = layers()
    bank, dy, b = Bank(own, reference_ops(), room), torch.randn(M, sum(WIDTHS)), torch.randn(sum(WIDTHS), 3)
    before = bank.tensors[0].clone()
    for factor in (b, 2 * b):
        dx, ds = bank.base.dlinear_with(dy, factor)
        torch.testing.assert_close(dx, dy @ before)
        torch.testing.assert_close(ds, dy @ factor)
    assert torch.equal(bank.tensors[0], before)


def test_writing_b_behind_the_weights_does_not_make_saved_weights_look_changed() -> None:
    own = layers()
    bank = Bank(own, reference_ops(), 3)
    x = torch.randn(M, K, requires_grad=True)
    y = own[0](x)
    bank.base.dlinear_with(torch.randn(M, sum(WIDTHS)), torch.randn(sum(WIDTHS), 3))
    y.sum().backward()
    torch.testing.assert_close(x.grad, own[0].weight.sum(0).expand(M, K))


@pytest.mark.parametrize("room", [1, 3, 4, 12])
def test_rows_of_a_bank_begin_at_multiples_of_sixteen_bytes(room: int) -> None:
    own = [nn.Linear(16, 48, dtype=torch.bfloat16).requires_grad_(False) for _ in range(2)]
    bank = Bank(own, reference_ops(), room)
    assert bank.tensors[0].stride(0) * bank.tensors[0].itemsize % 16 == 0


CHANGES: dict[str, Callable[[nn.Module], None]] = {
    "replaced": lambda layer: setattr(layer, "weight", nn.Parameter(layer.weight.detach().clone())),
    "of another dtype": lambda layer: layer.float() and None,
    "moved": lambda layer: setattr(layer.weight, "data", layer.weight.data.clone()),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("room", [0, 3])
def test_a_bank_sees_that_a_weight_has_left(which: int, change: str, room: int) -> None:
    own = layers()
    bank = Bank(own, reference_ops(), room)
    CHANGES[change](own[which])
    assert not bank.intact([low_rank_of(layer) for layer in own])


def test_a_bank_sees_that_a_bias_has_left() -> None:
    own = layers()
    bank = Bank(own, reference_ops())
    own[1].bias = nn.Parameter(own[1].bias.detach() + 1)
    assert not bank.intact([low_rank_of(layer) for layer in own])


def test_weights_in_another_order_are_not_the_banks() -> None:
    own = [nn.Linear(K, 4).requires_grad_(False) for _ in range(2)]
    bank = Bank(own, reference_ops())
    assert not bank.intact([low_rank_of(layer) for layer in reversed(own)])


def test_what_is_written_into_a_layer_is_in_the_bank() -> None:
    own = layers()
    bank = Bank(own, reference_ops(), 3)
    with torch.no_grad():
        own[2].weight.fill_(7.0)
        own[2].bias.fill_(8.0)
    assert torch.equal(
        bank.base.linear(torch.ones(1, K))[0, -WIDTHS[2] :], torch.full((WIDTHS[2],), 7.0 * K + 8)
    )


@pytest.mark.parametrize(
    ("with_bias", "expected"), [((True, True, True), True), ((False, False, False), False)]
)
def test_a_bank_has_a_bias_where_all_layers_have_one(with_bias: tuple[bool, ...], expected: bool) -> None:
    own = [
        nn.Linear(K, width, bias).requires_grad_(False) for width, bias in zip(WIDTHS, with_bias, strict=True)
    ]
    assert (Bank(own, reference_ops()).bias is not None) is expected


def test_memory_behind_the_rows_of_an_inlet_counts_nothing() -> None:
    """oneDNN reads behind rows of bf16 whose columns are no multiple of eight."""
    layer = nn.Linear(64, 128, bias=False, dtype=torch.bfloat16).requires_grad_(False)
    base = Bank([layer], reference_ops(), 12).base
    x, low = (
        torch.randn(128, 64).bfloat16(),
        (torch.randn(128, 12).bfloat16(), torch.randn(128, 12).bfloat16()),
    )
    torch.use_deterministic_algorithms(True)  # what is not written is NaN then
    try:
        inlet = base.inlet(len(x), 12)
    finally:
        torch.use_deterministic_algorithms(False)
    assert inlet is not None and inlet.shape == (128, 76)
    inlet[:, :64] = x
    expected = torch.cat((x, low[0]), 1).double() @ torch.cat((layer.weight, low[1]), 1).double().T
    torch.testing.assert_close(
        base.linear_low(inlet[:, :64], low, reference_ops(), inlet).double(), expected, rtol=1e-2, atol=1e-1
    )
