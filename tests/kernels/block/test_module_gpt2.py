"""Fused blocks of GPT-2, whose linears' weights are transposed, compute what its own do: every method that
tunes them, on every rung, over quantised weights and packed rows; under plans; planted faults; what is not
fused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from petune.kernels.block import linear
from petune.kernels.block.dequantised import TurnedForm
from petune.kernels.block.linear import bankable
from petune.kernels.fuse import fuse, fused_blocks
from petune.kernels.memory.buffers import kept_bytes, standing_bytes
from petune.kernels.memory.offloaded_adamw import StreamedAdamW
from petune.kernels.memory.policy_hook import shape_of
from petune.methods import merge, wrap
from petune.models import family_of
from petune.models.tuned_parts import LowRank
from petune.parallel.plan import ParallelPlan
from tests.kernels.own_blocks import (
    assert_trains_alike,
    cells_of_methods,
    cells_of_plans,
    fused,
    tuned,
)
from tests.methods.zoo import assert_same_gradients, batch, gradients, of_64, tiny
from tests.parallel.cells import KEPT, case
from tests.parallel.harness import check
from tests.parallel.plans import BACKENDS, COMPOSED, LOOPED

NAME = "gpt2-causal"
DROPS: dict[str, Any] = {"attn_pdrop": 0.2, "resid_pdrop": 0.1}
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("full", {}),
    "lora": ("lora", {"r": 4, "dropout": 0.3}),
    "lora of a rank too large to fold": ("lora", {"r": 70}),
    "pissa": ("lora", {"r": 4, "init": "pissa"}),
    "adapter, pfeiffer": ("adapter", {"kind": "pfeiffer", "reduction": 4, "dropout": 0.3}),
    "side": ("side", {"reduction": 4}),
}


def model_of(method: str, dtype: Any = torch.float64, **config: Any) -> Any:
    name, settings = METHODS[method]
    return tuned(NAME, name, settings, dtype, **config)


def packed() -> dict[str, Any]:
    """Two rows of two samples each."""
    ids = batch(NAME, rows=2)["input_ids"].clamp(3)
    positions = torch.tensor([[*range(4), *range(5)], [*range(7), *range(2)]])
    labels = ids.masked_fill(positions == 0, -100)
    return {"input_ids": ids, "position_ids": positions, "labels": labels, "use_cache": False}


CELLS = cells_of_methods(METHODS)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "keep", "rows"), CELLS)
def test_every_method_trains_as_with_the_models_own_blocks(method: str, keep: str, rows: str) -> None:
    plain = model_of(method, **({} if method == "side" else DROPS))
    assert_trains_alike(fused(plain, keep), plain, batch(NAME) if rows == "padded" else packed())


def test_scores_are_scaled_as_each_block_says() -> None:
    plain = model_of("lora", scale_attn_by_inverse_layer_idx=True)
    made = fused(plain)
    scales = [block.spec.program.attends[0].scale for block in fused_blocks(made)]
    assert scales[1] == scales[0] / 2
    assert_trains_alike(made, plain, batch(NAME), 1)


@pytest.mark.parametrize("form", ["nf4", pytest.param("int8", marks=pytest.mark.long), "fp8"])
def test_over_a_quantised_base_it_trains_as_the_models_own_blocks(form: str) -> None:
    plain = tuned(NAME, "lora", {"r": 4, "base_dtype": form}, torch.float32, **of_64(NAME))
    made = fused(plain, "input")
    (block, *_) = fused_blocks(made)
    shape = shape_of(block.spec)
    assert not shape.fp8 and shape.made > 0
    assert_trains_alike(made, plain, packed(), 1)


def test_under_bfloat16_autocast_losses_and_gradients_are_near() -> None:
    plain = tuned(NAME, "lora", {"r": 4}, torch.float32)
    made = fused(plain, "input")
    with torch.autocast("cpu", torch.bfloat16):
        (loss, found), (expected, wanted) = (gradients(one, packed()) for one in (made, plain))
    assert float(loss) == pytest.approx(float(expected), rel=2e-2)
    for name, value in wanted.items():
        assert float((found[name] - value).norm()) < 0.1 * float(value.norm()) + 1e-4, name
    assert not [block.spec.said for block in fused_blocks(made) if block.spec.said]


def test_fused_blocks_are_merged_as_the_models_own() -> None:
    plain = model_of("lora").eval()
    made = fused(plain)
    inputs = batch(NAME)
    expected = plain(**inputs).logits
    torch.testing.assert_close(made.eval()(**inputs).logits, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(merge(made)(**inputs).logits, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["layer", "linear"])
def test_a_model_with_attention_to_an_encoder_is_fused_until_it_is_given_one(kind: str) -> None:
    plain = model_of("full", add_cross_attention=True)
    made, inputs = fused(plain), batch(NAME)
    if kind == "layer":
        assert_trains_alike(made, plain, inputs, 1)
        return
    encoded = torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    seen = {**inputs, "encoder_hidden_states": encoded[: len(inputs["input_ids"])]}
    (loss, found), (expected, wanted) = gradients(made, seen), gradients(plain, seen)
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)
    assert_same_gradients(found, wanted, 2e-6)
    assert {reason for block in fused_blocks(made) for reason in block.spec.said} == {
        "it attends to an encoder"
    }


# ------------------------------------------------------------------ memory


def test_there_is_no_room_for_factors_behind_transposed_weights() -> None:
    model = fused(model_of("lora", torch.float32))
    (spec, *_) = [block.spec for block in fused_blocks(model)]
    assert not any(spec.banks) and not bankable([nn.Linear(4, 4).requires_grad_(False), Conv1D(4, 4)])
    shape = shape_of(spec)
    assert shape.roomless and (shape.width, shape.columns, shape.heads) == (64, 96, 8)
    with_room = replace(shape, roomless=False)
    room = 4 * (3 * 64) + 4 * 64  # of qkv and of down; that of up is the activation's
    assert standing_bytes(with_room) - standing_bytes(shape) == 4 * room
    assert kept_bytes(with_room, "all") == kept_bytes(shape, "all")


@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_block_keeps_what_is_foretold(method: str) -> None:
    model = fused(tuned(NAME, method, {"r": 4} if method == "lora" else {}, torch.float32))
    (block, *_) = fused_blocks(model)
    own, found = {one.untyped_storage().data_ptr() for one in model.parameters()}, dict[int, int]()

    def pack(value: Tensor) -> Tensor:
        storage = value.untyped_storage()
        if storage.data_ptr() not in own and value.shape[0] == 3 * 16:
            found[storage.data_ptr()] = storage.nbytes()
        return value

    x = torch.randn(3, 16, 64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        block(x)
    heads = 8 * 4  # of log-sum-exp, which lies by rows of heads
    assert sum(found.values()) / 48 + heads == kept_bytes(shape_of(block.spec), "all")


def test_streamed_blocks_train_to_the_bit_as_those_that_rest() -> None:
    found = []
    for streams in (False, True):
        made = fused(tuned(NAME, "full", {}, torch.float32))
        given: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.0}
        parameters = list(made.parameters())
        optimizer: Any = (
            StreamedAdamW(made, fused_blocks(made), **given, states=torch.float32)
            if streams
            else torch.optim.AdamW(parameters, **given, foreach=False)
        )
        for _ in range(2):
            made(**batch(NAME), use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append({name: value.clone() for name, value in made.state_dict().items()})
    for name, value in found[0].items():
        assert torch.equal(found[1][name], value), name


# ------------------------------------------------------------------ plans

PLANS: dict[str, ParallelPlan] = {
    **{name: BACKENDS[name](NAME, 2) for name in ("sp-gather", "sp-ulysses", "sp-ring", "shard", "dp")},
    "pp-1f1b": BACKENDS["pp-1f1b"](NAME, 2),
    "pp-zero-bubble": LOOPED["pp-zero-bubble"](NAME, 2),
    "sp x pp": COMPOSED["sp x pp"](NAME),
}
SHORT = [("sp-gather", "lora", 3), ("shard", "full", 1)]


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "method", "kept"), cells_of_plans(PLANS, (1, 3), SHORT))
def test_ranks_of_a_plan_train_as_one_process(plan: str, method: str, kept: int) -> None:
    check(case(NAME, method, PLANS[plan], steps=1, blocks=KEPT[kept]))


# ------------------------------------------------------------------ planted faults

FAULTS: dict[str, tuple[Any, str, Any]] = {
    "rows are taken for columns": (LowRank, "outputs", property(lambda self: len(self.weight))),
    "a weight is read as it is stored": (LowRank, "upright", property(lambda self: self.weight)),
    "transposed weights lie in banks": (linear, "Conv1D", ()),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_turning_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = tuned(NAME, "lora", {"r": 4}, n_inner=64)  # some are square, which no error tells
    owner, name, wrong = FAULTS[fault]
    monkeypatch.setattr(owner, name, wrong)
    with pytest.raises((AssertionError, RuntimeError, IndexError)):
        assert_trains_alike(fused(plain), plain, batch(NAME), 1)


def test_a_quantised_weight_that_is_not_turned_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = tuned(NAME, "lora", {"r": 4, "base_dtype": "int8", "targets": ["o"]}, torch.float32)
    monkeypatch.setattr(TurnedForm, "_dense", lambda self, *given: super(TurnedForm, self)._dense(*given))
    with pytest.raises((AssertionError, RuntimeError)):
        assert_trains_alike(fused(plain), plain, batch(NAME), 1)


# ------------------------------------------------------------------ what is refused


def test_lora_by_parts_of_what_is_joined_is_not_fused() -> None:
    model = wrap(tiny(NAME), "lora", targets=["q", "v"])
    done = fuse(model, family_of(model), "reference")
    assert not done.blocks and done.reasons == (
        "decoder: block 0: attn.c_attn is a Conv1D with LoRA by parts",
    )


def test_attention_that_does_not_say_the_scale_of_its_scores_is_not_fused() -> None:
    """As that of an older transformers may not."""
    model = tiny(NAME)
    del model.transformer.h[1].attn.scaling
    done = fuse(model, family_of(model), "reference")
    assert done.reasons == (
        "decoder: block 1: attn is a GPT2Attention, which does not say the scale of its scores",
    )
