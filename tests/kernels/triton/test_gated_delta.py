"""The gated delta rule by kernels beside plain torch in float64: values and gradients of all that goes in, of
rows that hold several samples and end inside a chunk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from petune.kernels import delta
from petune.models import gated_delta
from petune.models.gated_delta import CHUNK, MixedHeads
from petune.models.transition import applied
from tests.kernels.exactness import DEVICE

ONE, SHARED, ODD = MixedHeads(1, 16, 1, 16), MixedHeads(2, 16, 4, 16), MixedHeads(1, 24, 2, 40)
WHOLE = MixedHeads(1, 128, 2, 128)  # as published
# the lengths of the samples of each row: ends inside chunks, at their ends, one over several
PACKED = ((30, 3, 50, 65, 2), (1, 149))


def drawn(rows: int, tokens: int, heads: MixedHeads, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """x, g and beta, and a gradient of y."""
    draw, of_head = torch.Generator().manual_seed(tokens), (rows, tokens, heads.heads)
    width = 2 * heads.key_heads * heads.keys + heads.heads * heads.values
    x, dy = (torch.randn(rows, tokens, size, generator=draw) for size in (width, heads.heads * heads.values))
    g = -F.softplus(torch.randn(of_head, generator=draw)) / 30  # what a chunk stores lives in the next
    beta = torch.randn(of_head, generator=draw).sigmoid().to(dtype)
    inputs = [one.to(DEVICE) for one in (x.to(dtype), g, beta)]
    return inputs, dy.view(*of_head, heads.values).to(DEVICE, dtype)


def numbered(lengths: tuple[tuple[int, ...], ...]) -> Tensor:
    """The number of each token's sample."""
    rows = [torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in lengths]
    return torch.stack(rows).to(DEVICE)


def by_node(*given: Any) -> Tensor:
    return applied(delta._Rule, *given, delta.modules())


def results(rule: Callable[..., Tensor], inputs: list[Tensor], dy: Tensor, *more: Any) -> list[Tensor]:
    """y and the gradients of x, g and beta."""
    leaves = [one.detach().requires_grad_() for one in inputs]
    y = rule(*leaves, *more)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def off(found: Tensor, exact: Tensor) -> float:
    """The largest difference as a part of the largest value, and the root of the mean square alike."""
    error, exact = (found.double() - exact).abs(), exact.abs()
    return max(
        float(error.max() / exact.max()), float(error.square().mean().sqrt() / exact.square().mean().sqrt())
    )


def assert_near(inputs: list[Tensor], dy: Tensor, near: float, *more: Any) -> None:
    found = results(by_node, inputs, dy, *more)
    exact = results(gated_delta.mixed_rule, [one.double() for one in inputs], dy.double(), *more)
    for one, other, given in zip(found, exact, [dy, *inputs], strict=True):
        assert one.dtype == given.dtype and one.shape == other.shape
        assert off(one, other) < near


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("heads", "tokens"), [(SHARED, 70), (ODD, CHUNK), pytest.param(WHOLE, 150, marks=pytest.mark.long)]
)
def test_values_and_gradients_are_the_rules(heads: MixedHeads, tokens: int, dtype: torch.dtype) -> None:
    assert_near(*drawn(1, tokens, heads, dtype), 0.015, None, heads)


@pytest.mark.skipif(DEVICE == "cuda", reason="kernels round float32 there, and are not taken for it")
@pytest.mark.parametrize(
    ("heads", "lengths"), [(ONE, PACKED), pytest.param(ODD, ((30, 3, 37),), marks=pytest.mark.long)]
)
def test_in_float32_samples_of_a_row_are_kept_apart(heads: MixedHeads, lengths: Any) -> None:
    inputs, dy = drawn(2, sum(lengths[0]), heads, torch.float32)
    assert_near(inputs, dy, 1e-5, numbered(lengths), heads)


def test_tokens_that_repeat_leave_the_system_sound() -> None:
    """Of equal keys the powers of the system, not its inverse, have numbers of 17 digits."""
    (x, g, beta), dy = drawn(1, CHUNK, ONE, torch.bfloat16)
    x[..., ONE.keys : 2 * ONE.keys] = x[:, :1, ONE.keys : 2 * ONE.keys]
    assert_near([x, torch.zeros_like(g), torch.full_like(beta, 0.5)], dy, 0.03, None, ONE)


def test_a_mixer_of_bfloat16_goes_by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, _ = drawn(1, 5, ONE, torch.bfloat16)
    plain = gated_delta.mixed_rule(*inputs, None, ONE)
    monkeypatch.setitem(gated_delta.KERNELS, torch.device(DEVICE).type, delta.MIXERS)
    monkeypatch.setattr(delta, "_kernels", lambda *_: delta.modules())
    x = inputs[0].requires_grad_()
    found = gated_delta.mixed_rule(*inputs, None, ONE)
    assert type(found.grad_fn).__name__ == "_RuleBackward" and off(found, plain.double()) < 0.015
    for none in (x.double(), torch.zeros(1, 5, 2 * 144 + 16, dtype=x.dtype, device=DEVICE)):
        heads = ONE if none.dtype is torch.float64 else ONE._replace(keys=144)
        assert (
            type(gated_delta.mixed_rule(none, *inputs[1:], None, heads).grad_fn).__name__ != "_RuleBackward"
        )
