"""A tuning of a base in eight bits: saved and loaded, merged for good and for a block, known again, and
copied."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import petune
from petune.errors import FileError, UsageError
from petune.kernels.fuse import unfuse
from petune.methods import frozen_tensors, merge, merged_weights, tuned_state
from petune.methods.trainable import without_tuning
from petune.models import family_of
from petune.models.checksums import checksums
from petune.models.frozen_weight import QuantisedWeight, dense_of, quantised_in
from petune.parallel.mesh import Coordinate
from petune.parallel.plan import Cut, ParallelPlan
from petune.parallel.tensor.shard_params import cut
from petune.saving import export
from petune.saving.fingerprint import compare, fingerprint, full_hash
from petune.saving.load import load

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
IDS = torch.tensor([[5, 6, 7, 8, 2], [9, 10, 11, 12, 2]])
Q = "model.layers.0.self_attn.q_proj"


def base(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(vocab_size=50, num_key_value_heads=2, **SIZES)).eval()


@pytest.fixture
def model() -> Iterator[nn.Module]:
    """A model with LoRA on some of its linears, its base in eight bits, and updates that are not zero."""
    made = petune.wrap(base(), r=4, targets=["q", "v", "down"], kernels="reference", base_dtype="fp8")
    with torch.no_grad():
        for name, value in made.named_parameters():
            if "lora_B" in name:
                value.normal_(std=0.1)
    yield made.eval()


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    found: Tensor = model(input_ids=IDS, use_cache=False).logits
    return found


def test_a_tuning_is_saved_and_read_into_the_base_as_it_was(model: nn.Module, tmp_path: Path) -> None:
    export.save(model, tmp_path / "tuned")
    again = load(base(), tmp_path / "tuned").eval()
    one, two = tuned_state(model), tuned_state(again)
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    assert not list(quantised_in(again))
    assert float((logits(again) - logits(model)).norm()) < 0.1 * float(logits(again).norm())
    with pytest.raises(FileError, match="another base model"):
        load(base(1), tmp_path / "tuned")


def test_its_fingerprint_is_that_of_the_weights_it_was_made_of(model: nn.Module) -> None:
    found, expected = fingerprint(model), fingerprint(base())
    assert found == expected
    compare(expected, copy.deepcopy(model), "petune.json")
    with torch.no_grad():
        model.get_submodule(Q).weight.copy_(base(1).get_submodule(Q).weight)
    with pytest.raises(FileError, match="q_proj"):
        compare(expected, model, "petune.json")


def test_the_hash_of_weights_that_are_gone_is_refused(model: nn.Module) -> None:
    with pytest.raises(UsageError, match=r"weights of this base are gone(.|\n)*hash the base before"):
        full_hash(model)


def test_a_merged_model_is_dense_and_computes_what_the_adapter_did(
    model: nn.Module, caplog: pytest.LogCaptureFixture
) -> None:
    weight = {name: dense_of(value).clone() for name, value in model.named_parameters()}
    delta = model.get_submodule(Q).delta().detach()
    expected = logits(model)
    plain = merge(model)
    assert "held in fp8" in caplog.text
    assert not list(quantised_in(plain)) and all(value.requires_grad for value in plain.parameters())
    assert list(plain.state_dict()) == list(base().state_dict())
    state = plain.state_dict()
    assert torch.equal(state[f"{Q}.weight"], weight[f"{Q}.weight"] + delta)
    k = Q.replace("q_proj", "k_proj")
    assert torch.equal(state[f"{k}.weight"], weight[f"{k}.weight"])
    assert float((logits(plain) - expected).norm()) < 0.1 * float(expected.norm())


def test_weights_merged_for_a_block_come_back_to_the_bit(model: nn.Module) -> None:
    before, weight = logits(model), model.get_submodule(Q).weight
    with merged_weights(model):
        assert not isinstance(model.get_submodule(Q).weight, QuantisedWeight)
        assert float((logits(model) - before).norm()) < 0.1 * float(before.norm())
    assert model.get_submodule(Q).weight is weight and torch.equal(logits(model), before)


def test_a_merged_folder_is_read_by_transformers(model: nn.Module, tmp_path: Path) -> None:
    before = logits(model)
    report = export.save_merged(model, tmp_path / "merged", batch={"input_ids": IDS})
    assert report.layers == 6 and report.lost < 1e-3
    with merged_weights(model):
        state = {name: dense_of(value) for name, value in model.state_dict().items() if "lora" not in name}
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    assert all(torch.equal(value, state[name]) for name, value in read.state_dict().items())
    assert torch.equal(logits(model), before) and len(list(quantised_in(model))) == 14


def test_without_its_tuning_it_computes_what_its_base_does_in_eight_bits(model: nn.Module) -> None:
    plain = petune.wrap(base(), r=4, targets=["q", "v", "down"], kernels="reference", base_dtype="fp8").eval()
    with without_tuning(model):
        torch.testing.assert_close(logits(model), logits(plain), rtol=1e-5, atol=1e-5)
    assert float((logits(plain) - logits(base())).norm()) < 0.1 * float(logits(base()).norm())


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "unfused"])
def test_it_generates_what_it_scores(model: nn.Module, fused: bool) -> None:
    if not fused:
        unfuse(model)
    made = model.generate(input_ids=IDS[:, :4], max_new_tokens=4, do_sample=False, pad_token_id=0)
    with torch.no_grad():
        scores = model(input_ids=made).logits
    assert torch.equal(made[:, 4:], scores[:, 3:-1].argmax(-1))


@pytest.mark.parametrize("at", [0, 1], ids=["numbers", "scales"])
def test_the_audit_sees_a_byte_that_moved(model: nn.Module, at: int) -> None:
    before = checksums(frozen_tensors(model))
    model.get_submodule(Q).weight.form.tensors[at].view(torch.uint8)[3, 0] ^= 1
    after = checksums(frozen_tensors(model))
    assert [name for name in before if before[name] != after[name]] == [f"{Q}.weight"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_cut_holds_its_slices_of_the_bytes_and_nothing_is_quantised_again(
    model: nn.Module, rank: int
) -> None:
    unfuse(model)
    whole = {name: dense_of(value) for name, value in model.named_parameters()}
    before = sum(weight.nbytes for _, _, weight in quantised_in(model))
    one = Cut("heads", "heads", "whole", "gather", (2, 2), (1, 1), (64, 32), (), False, False)
    placed = cut(model, family_of(model), ParallelPlan(tp=2, cut=one), Coordinate(tp=rank))
    held = [weight for _, _, weight in quantised_in(model)]
    assert len(held) == 14 and sum(weight.nbytes for weight in held) < 0.75 * before
    for module, name, weight in quantised_in(model):
        path = f"{next(path for path, other in model.named_modules() if other is module)}.{name}"
        dim, sizes = placed.slices[path].dim, placed.slices[path].sizes
        assert torch.equal(dense_of(weight), whole[path].narrow(dim, sum(sizes[:rank]), sizes[rank]))
        assert all(value.untyped_storage().nbytes() == value.nbytes for value in weight.form.tensors)
