"""A LoRA linear as one node: what its operations would give, what it keeps, and where it is not taken."""

from __future__ import annotations

import peft
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from petune.methods import lora_node
from petune.methods.configs import LoraConfig
from petune.methods.lora import LoraLayer, tune


def layers() -> dict[str, nn.Module]:
    """Frozen linears, as `wrap` leaves them."""
    torch.manual_seed(0)
    made = {"linear": nn.Linear(10, 6), "without bias": nn.Linear(10, 6, bias=False)}
    return {name: layer.requires_grad_(False) for name, layer in made.items()}


def entry(dtype: torch.dtype = torch.float32) -> Tensor:
    torch.manual_seed(3)
    return torch.randn(4, 7, 10).to(dtype)


def tuned(layer: nn.Module, r: int = 3, alpha: float = 5) -> LoraLayer:
    torch.manual_seed(1)
    form = tune(layer, LoraConfig(r=r, alpha=alpha))
    with torch.no_grad():
        for factor in form.tuned().values():
            factor.normal_()
    return form


def written_out(layer: LoraLayer, x: Tensor) -> Tensor:
    """What the node of a linear stands for."""
    y = F.linear(x, layer.weight, layer.bias)
    return (y + layer.update(x)).to(y.dtype)


@pytest.mark.parametrize("kind", ["linear", "without bias"])
@pytest.mark.parametrize("shape", [(4, 7, 10), (5, 10), (1, 10), (10,), (0, 10), (2, 0, 10)], ids=str)
def test_a_linear_computes_what_its_operations_would(kind: str, shape: tuple[int, ...]) -> None:
    form = tuned(layers()[kind].double(), r=3, alpha=5)
    x = torch.randn(shape, dtype=torch.float64).requires_grad_()
    y, expected = form(x), written_out(form, x)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        torch.testing.assert_close(form(x), expected, rtol=1e-12, atol=1e-12)
    inputs, upstream = [x, form.lora_A, form.lora_B], torch.randn_like(y)
    for ours, theirs in zip(
        torch.autograd.grad(y, inputs, upstream), torch.autograd.grad(expected, inputs, upstream), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("asked", ["x", "lora_A", "lora_B"])
def test_a_linear_gives_the_gradient_of_what_alone_trains(asked: str) -> None:
    form = tuned(layers()["linear"].double()).requires_grad_(False)
    x = entry(torch.float64)
    wanted = x if asked == "x" else form.get_parameter(asked)
    wanted.requires_grad_()
    (ours,), (theirs,) = (
        torch.autograd.grad(y.square().sum(), wanted) for y in (form(x), written_out(form, x))
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("upstream", ["dense", "one number", "every other column", "transposed"])
def test_many_rows_of_float32_have_the_gradients_of_float64(
    upstream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another library multiplies them by a large weight on a CPU, however the gradient lies in memory."""
    monkeypatch.setattr(lora_node, "_LARGE", 0)
    torch.manual_seed(3)
    form, wide = (tuned(layers()["linear"].to(dtype)) for dtype in (torch.float32, torch.float64))
    for own, value in zip(wide.parameters(), form.parameters(), strict=True):
        own.data.copy_(value)
    x = torch.randn(5, 40, 10)
    dy = {
        "dense": torch.randn(5, 40, 6),
        "one number": torch.randn(()).expand(5, 40, 6),
        "every other column": torch.randn(5, 40, 12)[..., ::2],
        "transposed": torch.randn(6, 40, 5).transpose(0, 2),
    }[upstream]

    def gradients(layer: LoraLayer, dtype: torch.dtype) -> tuple[Tensor, ...]:
        own = x.to(dtype).requires_grad_()
        return torch.autograd.grad(layer(own), [own, layer.lora_A, layer.lora_B], dy.to(dtype))

    for ours, exact in zip(gradients(form, torch.float32), gradients(wide, torch.float64), strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [60, pytest.param(4096, marks=pytest.mark.long)])
def test_beside_a_bf16_base_it_errs_no_more_than_peft_under_autocast(rows: int) -> None:
    torch.manual_seed(3)
    base = nn.Linear(64, 48).bfloat16().requires_grad_(False)
    form = tuned(base, r=8, alpha=20.8)
    x, upstream = (torch.randn(rows, width).bfloat16() for width in (64, 48))
    theirs = peft.tuners.lora.Linear(
        base, "default", peft.LoraConfig(), r=8, lora_alpha=20.8, init_lora_weights=False
    )
    twins = [theirs.lora_A["default"].weight, theirs.lora_B["default"].weight]
    exact = tuned(nn.Linear(64, 48).double(), r=8, alpha=20.8)
    with torch.no_grad():
        for one, twin, wide in zip(form.tuned().values(), twins, exact.tuned().values(), strict=True):
            one.mul_(0.1)
            twin.copy_(one)
            wide.copy_(one)
        for own, value in zip((exact.weight, exact.bias), (base.weight, base.bias), strict=True):
            own.copy_(value)

    def passes(layer: nn.Module, factors: list[Tensor], dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
        own = x.to(dtype).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=layer is theirs):
            y = layer(own)
        return [y.detach(), *torch.autograd.grad(y, [own, *factors], upstream.to(dtype))]

    ours, others = passes(form, [*form.tuned().values()]), passes(theirs, twins)
    oracle = passes(exact, [*exact.tuned().values()], torch.float64)
    assert [one.dtype for one in ours] == [torch.bfloat16] * 2 + [torch.float32] * 2
    for name, one, other, true in zip(("y", "dx", "dA", "dB"), ours, others, oracle, strict=True):
        error, theirs_errs = (float((value - true).norm() / true.norm()) for value in (one, other))
        assert error < min(1.02 * theirs_errs, 2**-8), name


def test_a_linear_keeps_its_input_and_r_numbers_a_row() -> None:
    form = tuned(nn.Linear(64, 48).requires_grad_(False), r=3)
    x = torch.randn(20, 64, requires_grad=True)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one, lambda one: one):
        form(x)
    own = {one.data_ptr() for one in (x, *form.parameters())}
    assert x.data_ptr() in {one.data_ptr() for one in kept}
    assert sum(one.numel() for one in kept if one.data_ptr() not in own) == 3 * 20


def test_a_linear_goes_its_long_way_where_somebody_looks_on() -> None:
    form = tuned(layers()["linear"])
    x = entry()
    rows = torch.func.vmap(form)(x)
    torch.testing.assert_close(rows, written_out(form, x))
    with torch.autocast("cpu", torch.bfloat16):
        assert form(x).dtype == written_out(form, x).dtype == torch.bfloat16
    form.weight.requires_grad_()
    form(x).sum().backward()
    assert form.weight.grad is not None
