"""Fused blocks of ModernBERT: windows to both sides with rotary angles of their own, a first block without a
norm before attention, norms without biases, packed linears, plans."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    ModernBertConfig,
    ModernBertForMaskedLM,
    ModernBertForSequenceClassification,
    ModernBertForTokenClassification,
)

import petune
from petune.kernels.block import attention as attending
from petune.kernels.block.attention import How
from petune.kernels.configs import MemoryConfig, Rung
from petune.kernels.dispatch import triton_ops
from petune.kernels.fuse import fuse
from petune.kernels.graphs.replay import ungraph
from petune.kernels.memory import block_cost
from petune.kernels.memory.policy_hook import shape_of
from petune.models import attention, family_of
from petune.models.copied import copied
from petune.models.stack import own_stacks
from petune.rng.context import Running
from petune.rng.dropout import drawing, step_key
from tests.kernels.fused_pairs import BATCHES, blocks, stand_on
from tests.kernels.own_blocks import assert_streams_alike
from tests.kernels.replays import replayed
from tests.methods.more_models import MODERNBERT
from tests.methods.zoo import SETTINGS, assert_same_gradients, batch, gradients, stir
from tests.parallel.cells import can_be_cut, case, in_part
from tests.parallel.harness import check
from tests.parallel.plans import BACKENDS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAME, LENGTH = "modernbert-classify", 12  # tokens of a row, of which a window reaches 2 to each side
METHODS: dict[str, dict[str, Any]] = {
    "lora": {"r": 4},
    "full": {},
    "adapter": {"reduction": 4},
    "side": {"reduction": 2},
    "dora": {"r": 4},
    "ia3": {"targets": ["qkv", "down"]},
    "miss": {"r": 12},
}
KEEPS = ("all", "projections", "attention", "input")


def pair(
    method: str = "lora", kind: Any = ModernBertForSequenceClassification, p: float = 0.0, **changes: Any
) -> tuple[Any, Any]:
    """A tuned model of three blocks twice, fused and not, in training, nothing in it at identity. p: of the
    updates' dropout."""
    torch.manual_seed(0)
    plain = kind(ModernBertConfig(**{**MODERNBERT, "num_hidden_layers": 3, **changes}))
    petune.wrap(plain, method, **METHODS[method], **({"dropout": p} if p else {}), kernels="off")
    stir(plain, std=0.1)
    fused = copied(plain)
    done = fuse(fused, family_of(fused), "reference")
    assert done.blocks and not done.reasons
    assert len(blocks(fused)) == plain.config.num_hidden_layers * (1 + (method == "side"))
    return fused.train(), plain.train()


def rows_of(kind: str) -> dict[str, Tensor]:
    """A batch of rows of unequal length, as these are; without padding where there is no mask."""
    inputs: dict[str, Tensor] = batch(NAME, length=LENGTH)
    return {**BATCHES, "no mask": _without_mask}[kind](inputs)


def _without_mask(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: inputs[key] for key in ("input_ids", "labels")}


def assert_alike(fused: nn.Module, plain: nn.Module, inputs: dict[str, Tensor], near: float = 3e-6) -> None:
    """Equal losses and gradients, and no block that ran its own forward."""
    (loss, found), (expected, wanted) = gradients(fused, inputs), gradients(plain, inputs)
    torch.testing.assert_close(loss, expected, rtol=near, atol=0)
    assert_same_gradients(found, wanted, near)
    assert not [block.spec.said for block in blocks(fused) if block.spec.said]


# ------------------------------------------------------------------ whole models


@pytest.mark.crossed(1)
@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("rows", ["padded", "padded on the left", "whole rows", "no mask"])
@pytest.mark.parametrize("method", METHODS)
def test_a_whole_model_is_transformers_own_on_every_rung(method: str, rows: str, keep: Any) -> None:
    fused, plain = pair(method)
    stand_on(fused, Rung(keep), tile=None if keep == "all" else 4)
    near = 5e-6 if method == "side" else 3e-6  # whose gates are divided by a temperature of 0.1
    assert_alike(fused, plain, rows_of(rows), near)


@pytest.mark.parametrize("rows", ["padded", "whole rows"])
def test_a_window_reaches_as_far_to_both_sides_as_transformers_own(rows: str, hows: list[How]) -> None:
    """`local_attention` 6 is the token itself and 3 on either side, whose masks no block is handed."""
    fused, plain = pair(local_attention=6)
    assert_alike(fused, plain, rows_of(rows))
    assert [how.window for how in hows] == [None, 4, 4] and all(how.mask is None for how in hows)
    assert all((how.segments is not None) is (rows == "padded") for how in hows)


def test_a_block_reads_a_token_at_the_edge_of_its_window_and_none_beyond() -> None:
    fused, _ = pair(local_attention=6)
    places = torch.arange(LENGTH)
    states = torch.randn(1, LENGTH, 64, generator=torch.Generator().manual_seed(2)).requires_grad_()
    angles = fused.model.rotary_emb(states, places[None], "sliding_attention")
    out = blocks(fused)[1](states, position_embeddings=angles)
    (grad,) = torch.autograd.grad(out[0, 5].sum(), states)
    assert grad[0].any(-1).tolist() == ((places - 5).abs() <= 3).tolist()


@pytest.mark.crossed(1)
@pytest.mark.parametrize("rows", ["padded", "padded on the left", "whole rows"])
@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("kind", [ModernBertForMaskedLM, ModernBertForTokenClassification])
def test_other_heads_learn_what_they_learn_over_transformers_own(kind: Any, method: str, rows: str) -> None:
    """Logits where tokens are, and three steps of AdamW."""
    fused, plain = pair(method, kind, num_labels=90)
    inputs = rows_of("padded")
    labels = inputs["input_ids"] % 90
    inputs |= {"labels": labels.masked_fill(inputs["attention_mask"] == 0, -100)}
    inputs = BATCHES[rows](inputs)
    there = inputs["attention_mask"].bool()
    fed = {key: value for key, value in inputs.items() if key != "labels"}
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4) for model in (fused, plain)]
    for _ in range(3):
        assert_alike(fused, plain, inputs, 2e-6)
        for optimizer in optimizers:
            optimizer.step()
    with torch.no_grad():
        logits = [model(**fed).logits[there] for model in (fused, plain)]
    torch.testing.assert_close(*logits, rtol=1e-5, atol=1e-5)


def test_norms_and_linears_with_biases_and_a_pooled_mean_are_transformers_own() -> None:
    biases = dict.fromkeys(("norm_bias", "attention_bias", "mlp_bias"), True)
    assert_alike(*pair("full", classifier_pooling="mean", **biases), rows_of("padded"))


@pytest.mark.parametrize("keep", ["all", "input"])
def test_dropout_of_every_kind_draws_the_masks_of_the_unfused_model(keep: Any) -> None:
    fused, plain = pair("lora", p=0.2, attention_dropout=0.3, mlp_dropout=0.2, embedding_dropout=0.1)
    own_stacks(plain, family_of(plain))  # type: ignore[arg-type]  # it has one
    attention.use(plain)
    stand_on(fused, Rung(keep))
    found = []
    for model in (fused, plain):
        with drawing(Running(rows=torch.tensor([5, -1, 7]), key=step_key(7, 3))):
            found.append(gradients(model, rows_of("padded")))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=2e-6, atol=0)
    assert_same_gradients(found[0][1], found[1][1], 2e-6)
    assert not [block.spec.said for block in blocks(fused) if block.spec.said]


def test_kernels_of_triton_train_as_plain_torch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention in windows among them, which a CPU would leave to plain torch."""
    monkeypatch.setattr(
        "petune.kernels.fuse.select", lambda name, *_: None if name == "off" else triton_ops()
    )
    monkeypatch.setattr(
        attending, "choose", lambda *args, **more: attending.ChosenForm("triton", "asked for")
    )
    fused, plain = pair("full", num_hidden_layers=2)
    if DEVICE == "cpu":  # which records nothing
        ungraph(fused)
    inputs = {name: value.to(DEVICE) for name, value in batch(NAME, rows=2, length=6).items()}
    assert_alike(fused.to(DEVICE), plain.to(DEVICE), inputs, 1e-5)


def test_blocks_are_replayed_though_the_first_has_no_norm() -> None:
    fused, plain = pair()
    recorder = replayed(fused)
    for rows in ("padded", "whole rows", "padded"):
        assert_alike(fused, plain, rows_of(rows))
    assert recorder.backwards


def test_blocks_stream_though_the_first_has_fewer_weights() -> None:
    fused, plain = pair("full")
    assert_streams_alike(fused, plain, rows_of("padded"), 3)


def test_what_a_block_costs_knows_its_window_and_that_the_first_lacks_a_norm() -> None:
    fused, _ = pair(local_attention=32)
    work = [block_cost.forward(shape_of(block.spec), 64, 64) for block in blocks(fused)]
    flops = [sum(one.cost.flop for one in own if one.kind == "attention") for own in work]
    assert flops[0] == 4 * 8 * 8 * 64 * 64
    assert flops[1] == flops[2] == 4 * 8 * 8 * 64 * 17 * (2 - 17 / 64)
    assert [sum(one.stage == "attention.h" for one in own) for own in work] == [0, 1, 1]


# ------------------------------------------------------------------ plans

PLANS = [backend for backend in BACKENDS if can_be_cut(NAME, backend)]
SHORT = (("sp-gather", "full"), ("sp-ring", "lora"), ("pp-1f1b", "adapter"))


@pytest.mark.crossed(1)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize(("backend", "method"), in_part(list(product(PLANS, SETTINGS)), list(SHORT)))
def test_fused_blocks_train_under_every_plan_as_in_one_process(
    backend: str, method: str, dropout: float
) -> None:
    plan = BACKENDS[backend](NAME, 2)
    check(case(NAME, method, plan, dropout=dropout, steps=1, blocks=MemoryConfig("attention")))
