"""The convolution of a mixer and its gated norm by kernels, beside torch in float64, and a whole mixer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNormGated

from petune.kernels import delta
from petune.methods import wrap
from petune.models import gated_delta
from petune.models.gated_delta import causal_convolution
from petune.models.transition import applied
from tests.kernels.exactness import DEVICE, DTYPES, matrix
from tests.methods.zoo import stir, tiny

LENGTHS = (3, 1, 2, 14)


def results(function: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    """y and the gradients of all inputs."""
    leaves = [one.detach().requires_grad_() for one in inputs]
    y = function(*leaves)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(3)).to(DEVICE, y.dtype)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def compare(found: Any, plain: Any, inputs: list[Tensor]) -> None:
    exact = results(plain, *(one.double() for one in inputs))
    for one, same, true in zip(results(found, *inputs), results(plain, *inputs), exact, strict=True):
        error, allowed = (float((value.double() - true).norm()) for value in (one, same))
        assert one.dtype == same.dtype and error <= 1.1 * allowed + 2**-18 * float(true.norm())


@pytest.mark.parametrize(("packed", "dtype"), [(False, torch.float32), (True, torch.bfloat16)])
def test_convolution_is_the_references_both_ways(packed: bool, dtype: torch.dtype) -> None:
    one = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS)).to(DEVICE)
    samples = torch.stack([one, one.flip(0).neg()]) if packed else torch.zeros_like(one)[None]
    x, weight = matrix(40, 136, dtype, 1).view(2, 20, 136), matrix(136, 4, dtype, 2)
    kernels = delta.modules()[2]
    compare(
        lambda *given: applied(delta._Convolution, *given, samples if packed else None, kernels),
        lambda *given: F.silu(causal_convolution(*given, samples)),
        [x, weight],
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(40, 24), (33, 128)])
def test_a_gated_norm_is_transformers_both_ways(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, gate, weight = matrix(*shape, dtype, 1), matrix(*shape, dtype, 2), 1 + matrix(1, shape[1], dtype, 3)[0]
    own = SimpleNamespace(weight=weight, variance_epsilon=1e-6, activation="silu")

    def plain(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
        own.weight = weight
        if x.dtype is not torch.float64:
            return Qwen3_5RMSNormGated.forward(own, x, gate)  # type: ignore[no-any-return, arg-type]
        return F.rms_norm(x, x.shape[1:], weight, 1e-6) * F.silu(gate)

    compare(
        lambda *given: applied(delta._GatedNorm, *given, 1e-6, delta.modules()[2]), plain, [x, gate, weight]
    )


def test_a_model_in_bfloat16_trains_by_kernels_as_without(monkeypatch: pytest.MonkeyPatch) -> None:
    model = wrap(tiny("qwen3_5-causal", linear_value_head_dim=16), "full", kernels="off")
    stir(model, std=0.1)
    model, on = model.to(DEVICE), torch.device(DEVICE).type
    monkeypatch.delitem(gated_delta.KERNELS, on, raising=False)
    ids = torch.randint(3, 90, (1, 9), generator=torch.Generator().manual_seed(5)).to(DEVICE)
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3]]).to(DEVICE)

    def gradients(model: Any) -> dict[str, Tensor]:
        model(input_ids=ids, position_ids=positions, labels=ids, use_cache=False).loss.backward()
        return {name: one.grad.float() for name, one in model.named_parameters() if one.grad is not None}

    exact, half = gradients(copy.deepcopy(model).bfloat16().float()), copy.deepcopy(model).bfloat16()
    plain = gradients(copy.deepcopy(half))
    calls: list[Any] = []
    monkeypatch.setattr(delta, "_kernels", lambda *given: calls.append(given) or delta.modules())
    monkeypatch.setitem(gated_delta.KERNELS, on, delta.MIXERS)
    found = gradients(half)
    assert len(calls) == 3 * model.config.layer_types.count("linear_attention")
    for name, value in exact.items():
        error, allowed = (float((one[name] - value).norm() / value.norm()) for one in (found, plain))
        assert error < 1.2 * allowed + 0.02, name
