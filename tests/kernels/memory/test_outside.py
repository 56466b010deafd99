"""What a policy is told of a model beside its fused blocks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import petune
from petune.kernels.memory.block_cost import H100
from petune.kernels.memory.outside import once
from tests.methods.zoo import tiny


@pytest.mark.parametrize(("dtype", "bytes_"), [(torch.float32, 28 + 4), (torch.bfloat16, 14 + 2)])
def test_what_is_once_is_the_beginning_and_the_update_of_what_no_block_has(
    dtype: torch.dtype, bytes_: int
) -> None:
    """Of a table and a head that is its own, so once; and of the last norm. The gradient of a table is filled
    with zeros."""
    model = petune.wrap(tiny("llama-causal", tie_word_embeddings=True).to(dtype), "full", kernels="reference")
    table, norm = model.get_input_embeddings().weight.numel(), model.model.norm.weight.numel()
    rates = replace(H100, memory=1e6, launch=0.0)
    moved = bytes_ * table + (bytes_ - dtype.itemsize) * norm
    assert once(model, rates) == pytest.approx(rates.begins + moved / 1e6)
    frozen = petune.wrap(tiny("llama-causal").to(dtype), "lora", kernels="reference")
    assert once(frozen, rates) == rates.begins > 0
