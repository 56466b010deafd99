"""A fused ladder: losses and gradients of the unfused one, one node a block and one a gate, whatever its
rows, dropout, dtype and memory are."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import petune
from petune.kernels.block.module import FusedBlock
from petune.kernels.configs import MemoryConfig
from petune.kernels.fuse import fuse, unfuse
from petune.models import attention, family_of
from petune.models.stack import Stack, own_stacks
from petune.rng.context import Running
from petune.rng.dropout import drawing, step_key
from tests.kernels.fused_pairs import blocks
from tests.methods.zoo import assert_same_gradients, batch, gradients, stir, tiny

NAMES = ("llama-causal", "gemma3-causal", "bert-mlm", "bart-seq2seq", "t5-seq2seq")
# what scores of attention are made of stays as small as in a model that has been trained
GENTLE = {"t5-seq2seq": {"initializer_factor": 0.3}}
DROPOUTS: dict[str, dict[str, Any]] = {
    "bert-mlm": {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.3},
    "bart-seq2seq": {"dropout": 0.2, "attention_dropout": 0.3, "activation_dropout": 0.1},
    "t5-seq2seq": {"dropout_rate": 0.2},
    "llama-causal": {"attention_dropout": 0.3},
}


def pair(name: str, changes: dict[str, Any] | None = None, **settings: Any) -> tuple[Any, Any]:
    """A ladder away from its start twice, fused and not, in training."""
    plain: Any = tiny(name, **GENTLE.get(name, {}), **(changes or {}))
    petune.wrap(plain, "side", **{"reduction": 4, "kernels": "off", **settings})
    stir(plain, std=0.1)
    fused = copy.deepcopy(plain)
    done = fuse(fused, family_of(fused), "reference")
    assert done.blocks and not done.reasons
    return fused.train(), plain.train()


def stacks(model: nn.Module) -> list[Stack]:
    return [module for module in model.modules() if isinstance(module, Stack)]


def said(model: nn.Module) -> set[str]:
    return {reason for block in blocks(model) for reason in block.spec.said}


def rows_of(name: str, kind: str) -> dict[str, Any]:
    """A batch whose padding stands on the right, or on the left, or is none."""
    inputs: dict[str, Any] = batch(name)
    if kind == "left":
        inputs |= {key: inputs[key].flip(1) for key in ("input_ids", "attention_mask")}
        if inputs["labels"].shape == inputs["input_ids"].shape:
            inputs["labels"] = inputs["labels"].flip(1)
    if kind == "whole":
        del inputs["attention_mask"]
    return inputs if name == "bert-mlm" else inputs | {"use_cache": False}


@pytest.mark.crossed(1)
@pytest.mark.parametrize("kind", ["right", "left", "whole"])
@pytest.mark.parametrize("name", NAMES)
def test_loss_and_every_gradient_are_the_unfused_ladders(name: str, kind: str) -> None:
    fused, plain = pair(name)
    inputs = rows_of(name, kind)
    (loss, found), (expected, wanted) = gradients(fused, inputs), gradients(plain, inputs)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    assert_same_gradients(found, wanted, 1e-6)
    assert not said(fused)


def test_packed_rows_attend_within_their_samples() -> None:
    fused, plain = pair("llama-causal")
    inputs = {
        "input_ids": batch("llama-causal")["input_ids"],
        "labels": batch("llama-causal")["input_ids"],
        "position_ids": torch.tensor([[*range(6), *range(3)]] * 3),
        "use_cache": False,
    }
    (loss, found), (expected, wanted) = gradients(fused, inputs), gradients(plain, inputs)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    assert_same_gradients(found, wanted, 1e-6)


def test_padding_is_left_out_of_the_backbone_and_of_the_ladder() -> None:
    fused, _ = pair("llama-causal")
    seen: list[tuple[int, ...]] = []
    for block in blocks(fused):
        block.inputs = (
            lambda hidden, *rest, own=block.inputs: (  # type: ignore[method-assign]
                seen.append(tuple(hidden.shape[:2])) or own(hidden, *rest)
            )
        )
    inputs = rows_of("llama-causal", "right")
    fused(**inputs)
    assert seen == [(1, int(inputs["attention_mask"].sum()))] * 4


@pytest.mark.crossed(1)
@pytest.mark.parametrize("end", ["residual", "paper"])
@pytest.mark.parametrize("name", DROPOUTS)
def test_what_drops_out_is_the_unfused_ladders(name: str, end: str) -> None:
    fused, plain = pair(name, DROPOUTS[name], end=end, dropout=0.2)
    own_stacks(plain, family_of(plain))  # type: ignore[arg-type]
    attention.use(plain)
    found = []
    for model in (fused, plain):
        with drawing(Running(rows=torch.tensor([5, -1, 7]), key=step_key(7, 3))):
            found.append(gradients(model, rows_of(name, "right")))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=2e-6, atol=0)
    assert_same_gradients(found[0][1], found[1][1], 2e-6)
    assert not said(fused)


@pytest.mark.parametrize("name", ["llama-causal", "t5-seq2seq"])
def test_a_level_is_one_node_of_its_gate_and_one_of_its_block(name: str) -> None:
    fused, _ = pair(name)
    waiting, seen = [fused(**rows_of(name, "whole")).loss.grad_fn], dict[Any, str]()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen[node] = type(node).__name__
            waiting += [before for before, _ in node.next_functions]
    levels = sum(len(stack) for stack in stacks(fused))
    assert sum(kind == "NodeBackward" for kind in seen.values()) == levels
    assert sum(kind == "_MixBackward" for kind in seen.values()) == levels


@pytest.mark.parametrize("name", ["llama-causal", "bert-mlm", "t5-seq2seq"])
def test_under_autocast_a_float32_ladder_is_as_near_in_bfloat16_as_an_unfused_one(name: str) -> None:
    plain: Any = tiny(name, **GENTLE.get(name, {})).to(torch.bfloat16)
    petune.wrap(plain, "side", reduction=4, kernels="off", also_train=())
    stir(plain, std=0.1)
    fused = copy.deepcopy(plain)
    assert fuse(fused, family_of(fused), "reference")
    inputs, exact = rows_of(name, "right"), copy.deepcopy(plain).double()
    wanted = gradients(exact.train(), inputs)[1]
    off: list[float] = []
    for model in (fused, plain):
        with torch.autocast("cpu", torch.bfloat16):
            found = gradients(model.train(), inputs)[1]
        errors = [float((found[key] - value).norm()) for key, value in wanted.items()]
        off.append(sum(error**2 for error in errors) ** 0.5)
    assert not said(fused)
    assert off[0] <= 1.2 * off[1]


@pytest.mark.parametrize("keep", ["input", "attention", "projections", "all"])
def test_memory_says_what_the_ladders_blocks_keep(keep: Any) -> None:
    fused, plain = pair("t5-seq2seq")
    fuse(fused, family_of(fused), "reference", MemoryConfig(keep))
    inputs = rows_of("t5-seq2seq", "right")
    (loss, found), (expected, wanted) = gradients(fused, inputs), gradients(plain, inputs)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    assert_same_gradients(found, wanted, 1e-6)
    ladders = [stack.ladder for stack in stacks(fused)]
    kept = {block.spec.rung.keep for ladder in ladders if ladder for _, block in ladder.numbered}  # type: ignore[union-attr]
    assert kept == {keep}


def test_levels_that_are_computed_again_keep_all_until_then() -> None:
    fused, plain = pair("llama-causal")
    fuse(fused, family_of(fused), "reference", MemoryConfig("input"))
    (stack,) = stacks(fused)
    stack.recompute = True
    inputs = rows_of("llama-causal", "right")
    (_, found), (_, wanted) = gradients(fused, inputs), gradients(plain, inputs)
    assert_same_gradients(found, wanted, 1e-6)
    assert stack.ladder is not None
    assert {block.spec.rung.keep for _, block in stack.ladder.numbered} == {"all"}  # type: ignore[union-attr]


def test_a_copy_stands_alone_and_unfusing_gives_the_familys_blocks_back() -> None:
    fused, plain = pair("bart-seq2seq")
    inputs = rows_of("bart-seq2seq", "right")
    expected = gradients(fused, inputs)[1]
    other = copy.deepcopy(fused)
    for stack in stacks(fused):
        nn.init.zeros_(stack.ladder.blocks[0].fc1.weight)  # type: ignore[union-attr]
    assert_same_gradients(gradients(other, inputs)[1], expected, 0.0)
    unfuse(other)
    assert not blocks(other) and all(
        stack.ladder is None or stack.ladder.ops is None for stack in stacks(other)
    )
    assert_same_gradients(gradients(other, inputs)[1], gradients(plain, inputs)[1], 0.0)


def test_a_ladder_that_cannot_be_fused_is_told_and_runs_beside_fused_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain: Any = tiny("llama-causal")
    petune.wrap(plain, "side", reduction=4, kernels="off")
    plain.model.layers.side.blocks[1].mlp.act_fn = nn.Tanh()
    done = fuse(plain, family_of(plain), "reference")
    assert done.blocks and done.reasons == (
        "decoder.side: block 1: mlp.act_fn is a Tanh, and the config's activation is 'silu'",
    )
    (stack,) = stacks(plain)
    assert isinstance(stack.blocks[0], FusedBlock)
    assert stack.ladder is not None and stack.ladder.ops is None
    assert not any(isinstance(block, FusedBlock) for _, block in stack.ladder.numbered)
    assert gradients(plain.train(), rows_of("llama-causal", "right"))[1]


@pytest.mark.parametrize("name", ["llama-causal", "bart-seq2seq"])
def test_a_step_of_generation_with_a_cache_is_the_unfused_one(name: str) -> None:
    fused, plain = (model.eval() for model in pair(name))
    inputs = {key: value for key, value in batch(name).items() if key == "input_ids"}
    found, expected = (
        model.generate(**inputs, max_new_tokens=4, do_sample=False, pad_token_id=0)
        for model in (fused, plain)
    )
    assert torch.equal(found, expected)
