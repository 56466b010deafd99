"""Every family over a frozen base in four and in eight bits, in fused blocks or in its own: LoRA trains there
as over a dense base of the same values, in transformers' own blocks."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import petune
from petune.kernels.fuse import fused_blocks, unfuse
from petune.models import family_of
from petune.models.experts import is_experts
from petune.models.frozen_weight import quantised_in, restore_dense
from petune.models.parts import FINE
from petune.models.sites import find_sites
from tests.methods.family_cells import QUANTISED
from tests.methods.zoo import assert_same_gradients, batch, gradients, of_64, stir, tiny

BARE = ("deberta-classify", "dinov2-classify")  # nothing is fused, no norm either


def held_by(name: str, base_dtype: str) -> nn.Module:
    """The model with LoRA that computes something, over a base in that form."""
    model = tiny(name, **of_64(name))
    held = petune.wrap(model, r=2, base_dtype=base_dtype, kernels="off" if name in BARE else "reference")
    stir(held, std=0.1)
    return held.train()


@pytest.mark.parametrize(("base_dtype", "name"), QUANTISED)
def test_every_family_trains_over_a_quantised_base(base_dtype: str, name: str) -> None:
    held = held_by(name, base_dtype)
    sites = [one.module for one in find_sites(held, family_of(held)) if one.role not in FINE]
    weights = sum(len(one.weights) if is_experts(one) else 1 for one in sites)
    assert len(list(quantised_in(held))) == weights > 0
    plain = copy.deepcopy(held)
    unfuse(plain)
    restore_dense(plain)
    (loss, found), (expected, wanted) = gradients(held, batch(name)), gradients(plain, batch(name))
    if base_dtype != "fp8":
        assert float(loss) == pytest.approx(float(expected), rel=1e-6)
        assert_same_gradients(found, wanted, 5e-6 if name == "mt5-seq2seq" else 2e-6)
    else:  # whose products round their factors, too
        assert float(loss) == pytest.approx(float(expected), rel=0.03) and found.keys() == wanted.keys()
        whole = [torch.cat([grads[key].flatten() for key in wanted]) for grads in (found, wanted)]
        assert float(torch.cosine_similarity(*whole, dim=0)) > 0.97
    assert not [block.spec.said for block in fused_blocks(held) if block.spec.said]


def test_a_base_of_other_values_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    held = held_by("llama-causal", "nf4")
    _, _, weight = next(quantised_in(held))
    plain = copy.deepcopy(held)
    unfuse(plain)
    restore_dense(plain)
    weight.form.tensors[0].view(torch.uint8)[0] ^= 0x77
    loss, expected = gradients(held, batch("llama-causal"))[0], gradients(plain, batch("llama-causal"))[0]
    assert float(loss) != pytest.approx(float(expected), rel=1e-6)
