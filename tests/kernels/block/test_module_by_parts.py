"""Fused blocks with LoRA by parts of a linear that is several: the numbers of the same model unfused, on
every rung and over every base; what the plan of memory knows of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import petune
from petune.kernels.block import attention as attending
from petune.kernels.configs import MemoryConfig, Rung
from petune.kernels.dispatch import triton_ops
from petune.kernels.fuse import fuse, fused_blocks, unfuse
from petune.kernels.graphs.replay import ungraph
from petune.kernels.memory import block_cost
from petune.kernels.memory.buffers import kept_bytes
from petune.kernels.memory.policy_hook import shape_of
from petune.kernels.memory.shaped_program import remade
from petune.methods import tuned_parameters, without_tuning
from petune.models import attention, family_of
from petune.models.copied import copied
from petune.models.frozen_weight import restore_dense
from petune.models.quantise import quantise_blocks
from petune.models.stack import own_stacks
from petune.rng.context import Running
from petune.rng.dropout import drawing, step_key
from petune.saving.export import write_peft
from tests.kernels.fused_pairs import BATCHES, blocks, stand_on
from tests.kernels.replays import replayed
from tests.kernels.shapes import KEEPS
from tests.methods.zoo import assert_same_gradients, batch, gradients, of_64, stir, tiny
from tests.parallel.cells import case
from tests.parallel.harness import check
from tests.parallel.plans import BACKENDS

long = pytest.mark.long
PHI, BERT, GLM = "phi3-causal", "modernbert-classify", "glm4-causal"
# equal ranks of gate and up, which the activation adds; one of both; unequal ones; other scales; ranks above
# what is folded
TUNINGS: dict[str, dict[str, Any]] = {
    "all": {"targets": ["q", "k", "v", "o", "gate", "up", "down"]},
    "some": {"targets": ["q", "v", "up", "down"], "rank_pattern": {"v": 5}, "alpha_pattern": {"q": 1.5}},
    "unequal": {"targets": ["k", "gate", "up"], "rank_pattern": {"gate": 2}, "alpha_pattern": {"up": 11.0}},
    "scales": {"targets": ["v", "gate", "up"], "alpha_pattern": {"up": 11.0}},
    "large": {"targets": ["q", "v", "gate", "up"], "r": 40},
}


PLANS = ("sp-ulysses", "sp-gather", "sp-ring", "shard", "pp-1f1b")


def tuned(name: str, tuning: str, changes: dict[str, Any] | None = None, **settings: Any) -> Any:
    """The model with updates that are not zero, unfused."""
    torch.manual_seed(0)
    own = {"r": 3, "alpha": 6, **TUNINGS[tuning], **settings}
    if name == BERT:  # whose linears have other roles
        own["targets"] = [role for role in own["targets"] if role in ("q", "k", "v", "gate", "up")]
    if name == GLM:  # of whose linears one is several
        own["targets"] = [f"{role}_proj" if role in "qkvo" else role for role in own["targets"]]
    made = petune.wrap(tiny(name, **(changes or {})), "lora", **own, kernels="off", also_train=())
    stir(made, std=0.1)
    return made.train()


def fused_twin(plain: nn.Module, kernels: str = "reference") -> Any:
    """A copy of it with fused blocks."""
    fused = copied(plain)
    done = fuse(fused, family_of(fused), kernels)
    assert done.blocks and not done.reasons
    return fused


def assert_alike(fused: nn.Module, plain: nn.Module, inputs: dict[str, Any], near: float = 1e-6) -> None:
    """Equal losses and gradients of every factor, and no block that ran its own forward."""
    (loss, found), (expected, wanted) = gradients(fused, inputs), gradients(plain, inputs)
    torch.testing.assert_close(loss, expected, rtol=near, atol=0)
    assert found.keys() == wanted.keys() == tuned_parameters(plain).keys()
    assert_same_gradients(found, wanted, near)
    assert not [block.spec.said for block in blocks(fused) if block.spec.said]


@pytest.mark.crossed(1)
@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("tuning", TUNINGS)
@pytest.mark.parametrize("name", [PHI, pytest.param(BERT, marks=long), pytest.param(GLM, marks=long)])
def test_loss_and_every_gradient_are_those_unfused_on_every_rung(name: str, tuning: str, keep: Any) -> None:
    plain = tuned(name, tuning)
    fused = fused_twin(plain)
    stand_on(fused, Rung(keep), tile=None if keep == "all" else 4)
    rows = "padded" if keep in ("all", "attention") else "whole rows"
    assert_alike(fused, plain, BATCHES[rows](batch(name)))


@pytest.mark.parametrize(
    "tuning", ["all", pytest.param("some", marks=long), pytest.param("unequal", marks=long)]
)
@pytest.mark.parametrize("name", [PHI, pytest.param(BERT, marks=long)])
def test_each_part_draws_its_own_dropout(name: str, tuning: str) -> None:
    plain = tuned(name, tuning, dropout=0.3)
    fused = fused_twin(plain)
    own_stacks(plain, family_of(plain))  # type: ignore[arg-type]  # it has one
    attention.use(plain)
    for keep in ("all", "input"):
        stand_on(fused, Rung(keep))
        found = []
        for model in (fused, plain):
            with drawing(Running(rows=torch.tensor([5, -1, 7]), key=step_key(7, 3))):
                found.append(gradients(model, batch(name)))
        torch.testing.assert_close(found[0][0], found[1][0], rtol=2e-6, atol=0)
        assert_same_gradients(found[0][1], found[1][1], 2e-6)


@pytest.mark.parametrize("base_dtype", ["nf4", pytest.param("int8", marks=long)])
def test_a_base_in_fewer_bytes_gives_what_its_values_give(base_dtype: Any) -> None:
    held = tuned(PHI, "some", of_64(PHI), base_dtype=base_dtype)
    plain = copied(held)
    restore_dense(plain)
    assert_alike(fused_twin(held), plain, batch(PHI), 2e-6)


def test_a_base_in_eight_bit_floats_gives_what_plain_lora_of_the_same_file_gives(tmp_path: Any) -> None:
    held = tuned(PHI, "some", of_64(PHI), base_dtype="fp8")
    write_peft(held, tmp_path / "peft")
    whole = petune.load(tiny(PHI, **of_64(PHI)), tmp_path / "peft")
    quantise_blocks(whole, family_of(whole), "fp8")
    expected = fused_twin(whole.train())(**batch(PHI)).loss
    torch.testing.assert_close(fused_twin(held)(**batch(PHI)).loss, expected, rtol=1e-6, atol=0)


def test_biases_that_train_beside_the_parts_have_their_gradients() -> None:
    plain = tuned(BERT, "some", {"attention_bias": True}, bias="lora")
    assert any(name.endswith("Wqkv.bias") for name, own in plain.named_parameters() if own.requires_grad)
    fused = fused_twin(plain)
    (loss, found), (expected, wanted) = gradients(fused, batch(BERT)), gradients(plain, batch(BERT))
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    assert_same_gradients(found, wanted, 1e-6)


def test_float32_weights_under_autocast_compute_as_a_base_in_bfloat16() -> None:
    plain, inputs = tuned(PHI, "some"), batch(PHI)
    fused = fused_twin(plain.bfloat16())
    for model in (plain, fused):
        for own in tuned_parameters(model).values():
            own.data = own.data.float()
    wide = copied(plain).float()
    held = fused_twin(wide)
    for block in blocks(held):
        block.spec.banks = [None] * len(block.spec.banks)  # weights in float32 that no bank freezes
    expected, wanted = gradients(fused, inputs)
    with torch.autocast("cpu", torch.bfloat16):
        loss, found = gradients(held, inputs)
    torch.testing.assert_close(loss.float(), expected.float(), rtol=1e-2, atol=0)
    assert_same_gradients(found, wanted, 0.1)


@long
def test_kernels_of_triton_compute_as_plain_torch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "petune.kernels.fuse.select", lambda name, *_: None if name == "off" else triton_ops()
    )
    monkeypatch.setattr(
        attending, "choose", lambda *args, **more: attending.ChosenForm("triton", "asked for")
    )
    plain = tuned(PHI, "all", {"num_hidden_layers": 1})
    fused = fused_twin(plain)
    ungraph(fused)
    assert_alike(fused, plain, batch(PHI, rows=2, length=6), 1e-5)


def test_a_recording_reads_the_factors_of_parts_as_they_are_in_each_step() -> None:
    plain = tuned(PHI, "some")
    fused = fused_twin(plain)
    recorder = replayed(fused)
    optimizers = [torch.optim.SGD(tuned_parameters(model).values(), lr=0.1) for model in (fused, plain)]
    for _ in range(3):
        assert_alike(fused, plain, BATCHES["whole rows"](batch(PHI)), 2e-6)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert recorder.backwards


def test_parts_that_are_passed_by_or_merged_are_as_in_the_unfused_model() -> None:
    plain = tuned(PHI, "some").eval()
    fused, inputs = fused_twin(plain), batch(PHI)
    base = tiny(PHI).eval()(**inputs).logits
    with without_tuning(fused):
        torch.testing.assert_close(fused(**inputs).logits, base, rtol=1e-5, atol=1e-5)
    expected = plain(**inputs).logits
    assert float((expected - base).detach().abs().max()) > 1e-3
    torch.testing.assert_close(fused(**inputs).logits, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(petune.merge(fused)(**inputs).logits, expected, rtol=1e-5, atol=1e-5)


def test_a_model_that_is_unfused_again_holds_its_own_weights() -> None:
    plain = tuned(PHI, "some")
    fused = fused_twin(plain)
    unfuse(fused)
    assert not fused_blocks(fused)
    storage = fused.model.layers[0].self_attn.qkv_proj.weight.untyped_storage()
    assert storage.nbytes() == fused.model.layers[0].self_attn.qkv_proj.weight.nbytes
    (loss, found), (expected, wanted) = gradients(fused, batch(PHI)), gradients(plain, batch(PHI))
    assert torch.equal(loss, expected) and all(torch.equal(found[name], wanted[name]) for name in wanted)


@long
@pytest.mark.parametrize("backend", PLANS)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_under_plans_that_cut_no_linear_they_train_as_in_one_process(backend: str, dropout: float) -> None:
    """Those that cut some are in tests/parallel/tensor/test_shard_params.py."""
    tuning = (("targets", ("q", "v", "gate", "down")),)
    one = case(PHI, "lora", BACKENDS[backend](PHI, 2), dropout=dropout, steps=1, tuning=tuning)
    check(replace(one, blocks=MemoryConfig("attention")))


# ---------------------------------------------------------------- what is foretold


@pytest.mark.parametrize("tuning", ["some", "all"])
def test_a_block_costs_what_one_with_separate_linears_does(tuning: str) -> None:
    changes = {"sliding_window": None}  # as Llama's attention has none
    spec, other = (blocks(fused_twin(tuned(name, tuning, changes)))[0].spec for name in (PHI, "llama-causal"))
    shape, like = shape_of(spec), shape_of(other)
    assert replace(shape, sublayers=()) == replace(like, sublayers=())
    rooms = [[None if bank is None else bank.room for bank in own.banks] for own in (spec, other)]
    assert rooms[0] == rooms[1] and any(rooms[0])
    layer = fused_twin(tuned(PHI, tuning)).model.layers[0]
    assert shape.adapters == sum(value.numel() for value in layer.parameters() if value.requires_grad)
    assert (shape.defers, spec.defers) == (like.defers, True) == (tuning == "all", True)
    for keep in KEEPS:
        assert kept_bytes(shape, keep) == kept_bytes(like, keep)
    for cost in (block_cost.forward, block_cost.backward):
        found, expected = ([one.cost for one in cost(own, 512, 128)] for own in (shape, like))
        assert found == expected
    assert {"qkv", "gate_up"} <= remade(spec.program, "input")[0]  # as the linears are called
