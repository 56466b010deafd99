"""A fused block whose products of weights wait gives the gradients of one whole backward pass, to the bit."""

from __future__ import annotations

from itertools import product
from typing import cast

import pytest
import torch
from torch import Tensor, nn

from petune.kernels import fuse as fusing
from petune.kernels.block import attention as attending
from petune.kernels.block.rows import Late, learn_late
from petune.kernels.configs import Rung
from petune.kernels.dispatch import triton_ops
from petune.kernels.fuse import fuse
from petune.kernels.graphs.replay import ungraph
from petune.kernels.memory.offload import Passing
from petune.models import family_of
from petune.rng.context import bound
from tests.kernels.fused_pairs import METHODS, batch, blocks, fresh, stand_on
from tests.parallel.cells import in_part

KEPT = [(Rung("all"), None), (Rung("projections", "input"), 4), (Rung("input"), 5)]


def twice(model: nn.Module, name: str, late: list[Late] | None) -> dict[str, Tensor | None]:
    """The gradients of two passes, of the second without padding; late: where products of weights wait."""
    model.zero_grad()
    for padded in (True, False):
        with bound(passing=Passing(late=late)):
            loss = model(**batch(name, padded)).loss
        loss.backward()
    return {own: value.grad for own, value in model.named_parameters()}


def weights_in(model: nn.Module) -> set[str]:
    """The matrices within blocks."""
    inside = {id(value) for block in blocks(model) for value in block.parameters() if value.dim() > 1}
    return {name for name, value in model.named_parameters() if id(value) in inside}


SHORT = [("llama", "reference", 1, torch.bfloat16), ("bert", "reference", 2, torch.float32)]
EVERY = product(("llama", "bert"), ("reference",), range(3), (torch.bfloat16, torch.float32))
TRITON = [("llama", "triton", 2, torch.float32), ("bert", "triton", 0, torch.bfloat16)]


@pytest.mark.parametrize(("name", "kernels", "kept", "dtype"), in_part([*EVERY, *TRITON], SHORT))
def test_products_that_wait_give_the_gradients_of_one_backward_pass_to_the_bit(
    name: str, kernels: str, kept: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, late = fresh(name, METHODS["full"]).to(dtype).train(), list[Late]()
    if kernels == "triton":
        monkeypatch.setattr(fusing, "select", lambda *_: triton_ops())
        form = attending.ChosenForm("triton", "asked for")
        monkeypatch.setattr(attending, "choose", lambda *_, **__: form)
    assert fuse(model, family_of(model), cast("fusing.KernelsName", kernels))
    ungraph(model)
    stand_on(model, *KEPT[kept])
    expected = twice(model, name, None)
    found, told = twice(model, name, late), list[str]()
    waits = weights_in(model)
    assert {own for own, grad in found.items() if grad is None} == waits and len(late) == 2 * len(waits)
    for own, value in model.named_parameters():
        value.register_post_accumulate_grad_hook(lambda _, own=own: told.append(own))
    learn_late(late)
    assert not late and sorted(told) == sorted(2 * list(waits))
    for own, value in model.named_parameters():
        assert torch.equal(cast("Tensor", value.grad), cast("Tensor", expected[own])), own


def test_factors_of_an_update_wait_for_nobody() -> None:
    model, late = fresh("llama", METHODS["lora"]).train(), list[Late]()
    assert fuse(model, family_of(model), "reference")
    found = twice(model, "llama", late)
    assert not late and all(found[own] is not None for own in found if "lora" in own)
