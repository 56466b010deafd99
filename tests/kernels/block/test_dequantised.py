"""Blocks over frozen weights in four bits and in eight-bit integers: their products are those of the dense
weights they stand for, to the bit, and they hold nothing else."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import petune
from petune.errors import UsageError
from petune.kernels.block.dense import Dense, whole_lines
from petune.kernels.block.dequantised import PackedForms
from petune.kernels.dispatch import reference_ops
from petune.kernels.fuse import unfuse
from petune.models import family_of
from petune.models.copied import copied
from petune.models.frozen_weight import FORMS, dense_of, quantised_in, restore_dense
from petune.models.quantise import quantise_blocks
from tests.kernels.fused_pairs import blocks
from tests.methods.zoo import assert_same_gradients, batch, gradients, stir, tiny

NAMES = ("nf4", "int8")
TUNINGS: list[tuple[str, dict[str, Any]]] = [
    ("llama-causal", {"method": "lora", "r": 4}),
    ("qwen3-causal", {"method": "lora", "r": 72}),
    ("gemma3-causal", {"method": "lora", "r": 4, "targets": ["q", "v", "down"]}),
    ("bert-classify", {"method": "adapter", "reduction": 4}),
    ("bart-seq2seq", {"method": "adapter", "kind": "pfeiffer", "reduction": 4}),
    ("llama-causal", {"method": "adapter", "kind": "pfeiffer", "reduction": 4}),
    ("bart-seq2seq", {"method": "lora", "r": 4}),
    ("t5-gated", {"method": "side", "reduction": 4}),
    ("llama-causal", {"method": "dora", "r": 4}),
    ("bert-classify", {"method": "dora", "r": 4}),
    ("t5-gated", {"method": "ia3"}),
    ("gemma3-causal", {"method": "miss", "r": 8}),
]


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    torch.manual_seed(0)
    yield


def sized(name: str, columns: int = 128) -> nn.Module:
    """A model of the zoo whose MLPs have as many columns as blocks of 64 fill."""
    keys = ("intermediate_size", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim")
    made: nn.Module = tiny(name, **dict.fromkeys(keys, columns))
    return made


def pair_of(name: str, base_dtype: str, **settings: Any) -> tuple[nn.Module, nn.Module]:
    """The same tuned model with fused blocks over quantised weights, and the model's own blocks over dense
    ones with their values."""
    held = petune.wrap(sized(name), kernels="reference", base_dtype=base_dtype, **settings)
    stir(held, std=0.1)
    plain = copied(held)
    unfuse(plain)
    restore_dense(plain)
    return held.train(), plain.train()


@pytest.mark.parametrize("base_dtype", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("room", [0, 4])
def test_products_are_those_of_a_dense_weight_with_its_values(
    base_dtype: str, dtype: torch.dtype, room: int
) -> None:
    forms = [FORMS[base_dtype].of(torch.randn(rows, 64).to(dtype)) for rows in (96, 64)]
    values, bias = torch.cat([form.dense() for form in forms]), torch.randn(160).to(dtype)
    whole = torch.zeros(160, whole_lines(64 + room), dtype=dtype)
    whole[:, :64] = values
    found = PackedForms(forms, bias, reference_ops(), room)
    dense = Dense(whole[:, :64], bias, whole[:, : 64 + room] if room else None)
    x, dy, low = torch.randn(9, 64), torch.randn(9, 160), (torch.randn(9, 4), torch.randn(160, 4))
    x, dy, low = x.to(dtype), dy.to(dtype), (low[0].to(dtype), low[1].to(dtype))
    inlets = [one.inlet(9, 4) for one in (found, dense)]
    for inlet in inlets:
        assert (inlet is None) == (room == 0)
        if inlet is not None:
            inlet[:, :64] = x
    y = [
        one.linear_low(x if inlet is None else inlet[:, :64], low, reference_ops(), inlet)
        for one, inlet in zip((found, dense), inlets, strict=True)
    ]
    assert torch.equal(*y)
    assert torch.equal(found.linear(x), dense.linear(x)) and torch.equal(found.linear32(x), dense.linear32(x))
    assert torch.equal(found.dlinear(dy), dense.dlinear(dy))
    assert all(map(torch.equal, found.dlinear_with(dy, low[1]), dense.dlinear_with(dy, low[1])))


@pytest.mark.crossed(1)
@pytest.mark.parametrize(("name", "settings"), TUNINGS, ids=lambda one: one if isinstance(one, str) else "")
@pytest.mark.parametrize("base_dtype", NAMES)
def test_loss_and_gradients_are_those_of_the_dense_values(
    base_dtype: str, name: str, settings: dict[str, Any]
) -> None:
    held, plain = pair_of(name, base_dtype, **settings)
    every = [layer for block in blocks(held) for layers in block.spec.layers for layer in layers]
    linears = [layer for layer in every if not layer.weight.requires_grad]  # a ladder's train
    assert len(linears) == len({id(weight) for _, _, weight in quantised_in(held)}) > 0
    (loss, found), (expected, wanted) = gradients(held, batch(name)), gradients(plain, batch(name))
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)
    assert_same_gradients(found, wanted, 2e-6)


@pytest.mark.parametrize("base_dtype", NAMES)
def test_blocks_that_are_unfused_or_decline_a_call_compute_the_same(base_dtype: str) -> None:
    held, plain = pair_of("llama-causal", base_dtype, method="lora", r=4)
    other = copied(held)
    unfuse(other)
    inputs = batch("llama-causal")
    (loss, found), (expected, wanted) = gradients(other, inputs), gradients(plain, inputs)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)  # unfused LoRA sums in another order
    assert_same_gradients(found, wanted, 1e-6)
    with torch.no_grad():
        one, two = (model.eval()(**inputs, use_cache=True).logits for model in (held, plain))
    torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("base_dtype", NAMES)
@pytest.mark.parametrize(
    "change", [lambda model: model.double().float(), copy.deepcopy], ids=["moved", "copied"]
)
def test_a_model_that_was_moved_or_copied_computes_the_same(base_dtype: str, change: Any) -> None:
    held, _ = pair_of("llama-causal", base_dtype, method="lora", r=4)
    loss, wanted = gradients(held, batch("llama-causal"))
    again, found = gradients(change(held), batch("llama-causal"))
    assert float(again) == pytest.approx(float(loss), rel=1e-6)
    assert_same_gradients(found, wanted, 1e-6)


def test_weights_that_are_loaded_later_count() -> None:
    held, plain = pair_of("llama-causal", "nf4", method="lora", r=4)
    gradients(held, batch("llama-causal"))
    state = {
        name: value * 2 if "proj.weight" in name else value for name, value in plain.state_dict().items()
    }
    held.load_state_dict(state)
    plain.load_state_dict(state)
    loss, expected = gradients(held, batch("llama-causal"))[0], gradients(plain, batch("llama-causal"))[0]
    assert float(loss) == pytest.approx(float(expected), rel=1e-3)


def test_inputs_that_are_no_multiple_of_a_block_are_refused() -> None:
    with pytest.raises(UsageError, match="multiple of 64 inputs") as caught:
        petune.wrap(sized("llama-causal", 96), kernels="reference", base_dtype="nf4")
    assert "64 x 96" in str(caught.value)


@pytest.mark.parametrize("base_dtype", NAMES)
def test_weights_that_train_are_refused(base_dtype: str) -> None:
    model = petune.wrap(sized("llama-causal"), "full", kernels="off")
    with pytest.raises(UsageError, match=f"{base_dtype} needs weights that do not train"):
        quantise_blocks(model, family_of(model), base_dtype)


def test_dense_values_are_nobodys_after_a_step() -> None:
    held, _ = pair_of("llama-causal", "nf4", method="lora", r=4)
    gradients(held, batch("llama-causal"))
    weights = [weight for _, _, weight in quantised_in(held)]
    assert sum(weight.nbytes for weight in weights) < 0.6 * sum(map(torch.numel, weights))
    assert all(type(dense_of(weight)) is torch.Tensor for weight in weights)
