"""(IA)^3: its equations, peft as the oracle over steps and files, the identity at the start, merging with
biases, and cuts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

import petune
from petune.errors import FileError, UsageError
from petune.kernels.configs import MemoryConfig
from petune.methods import merge, merged_weights, without_tuning, wrap
from petune.saving.export import save_merged
from tests.methods import references, zoo
from tests.methods.peft_twins import assert_close, assert_trains_as_peft
from tests.methods.zoo import assert_same_gradients, batch, frozen, gradients, stir, tiny
from tests.parallel.harness import Case, check
from tests.parallel.plans import BACKENDS, settings_of

FAMILIES = ("llama-causal", "bert-classify", "t5-seq2seq", "gemma3-causal")


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_it_starts_as_the_base_and_trains_as_in_peft_with_files_both_ways(name: str, tmp_path: Path) -> None:
    found = wrap(tiny(name), "ia3", also_train=())(**batch(name)).logits
    assert torch.equal(found, frozen(tiny(name))(**batch(name)).logits)
    assert_trains_as_peft(name, tmp_path, "ia3")
    again = petune.load(tiny(name), tmp_path / "ours")
    assert again.petune_tuning.config.inputs == ("down",) and again.petune_tuning.method == "ia3"


@pytest.mark.parametrize("of_inputs", [False, True])
def test_forward_and_gradient_follow_the_equation(of_inputs: bool) -> None:
    references.ia3_follows_the_equation(of_inputs)


def biased(name: str) -> Any:
    """A model of the zoo whose biases are no zeros, as those of a fresh one are."""
    model = tiny(name)
    torch.manual_seed(5)
    for key, value in model.named_parameters():
        if key.endswith(".bias"):
            torch.nn.init.normal_(value)
    return model


def test_a_folder_of_pefts_is_read_and_its_biases_are_merged(tmp_path: Path) -> None:
    name = "bert-classify"
    config = peft.IA3Config(
        target_modules=["key", "value", "output.dense"],
        feedforward_modules=["output.dense"],
        exclude_modules=["attention.output.dense"],
        task_type="SEQ_CLS",
    )
    theirs = peft.get_peft_model(biased(name), config)
    stir(theirs.base_model.model.bert, std=0.3)
    theirs.save_pretrained(str(tmp_path / "a"))
    ours, expected = petune.load(biased(name), tmp_path / "a").eval(), theirs.eval()(**batch(name)).logits
    assert_close(ours(**batch(name)).logits, expected)
    bias = ours.bert.encoder.layer[0].attention.self.key.bias
    with merged_weights(ours):
        assert_close(ours(**batch(name)).logits, expected)
    assert ours.bert.encoder.layer[0].attention.self.key.bias is bias
    with without_tuning(ours):
        assert not torch.allclose(ours(**batch(name)).logits, expected, atol=1e-3)
    save_merged(ours, tmp_path / "merged")
    plain = type(tiny(name)).from_pretrained(tmp_path / "merged").eval()
    assert_close(plain(**batch(name)).logits, expected)
    assert_close(merge(ours)(**batch(name)).logits, expected)
    assert all(value.requires_grad for value in ours.parameters())


def test_a_folder_of_pefts_with_the_bases_own_head_is_read(tmp_path: Path) -> None:
    config = peft.IA3Config(target_modules=["lm_head", "k_proj"], feedforward_modules=["lm_head"])
    theirs = peft.get_peft_model(tiny("llama-causal"), config)
    stir(theirs, std=0.3)
    theirs.save_pretrained(str(tmp_path / "a"))  # lm_head.base_layer.weight is in the file
    ours, inputs = petune.load(tiny("llama-causal"), tmp_path / "a").eval(), batch("llama-causal")
    assert_close(ours(**inputs).logits, theirs.eval()(**inputs).logits)
    with pytest.raises(FileError, match=r"lm_head\.base_layer\.weight  is unexpected"):
        petune.load(tiny("llama-causal", seed=1), tmp_path / "a")


def test_a_scaled_input_that_others_read_gives_way_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    for module in ("fuse", "single_modules"):
        monkeypatch.setattr(f"petune.kernels.{module}.say", said.append)
    sides = []
    for kernels in ("off", "reference"):
        model = wrap(tiny("llama-causal"), "ia3", targets=["k", "up"], inputs=["up"], kernels=kernels)
        stir(model, std=0.1)
        sides.append(gradients(model.train(), batch("llama-causal"))[1])
    assert_same_gradients(sides[1], sides[0], 1e-5)
    assert any("up_proj scales an input that other linears read" in line for line in said)


@pytest.mark.crossed(1)
@pytest.mark.parametrize("keep", [None, "all", "attention"])
@pytest.mark.parametrize(
    ("backend", "name"), [("tp", "bert-classify"), ("galaxy", "llama-causal"), ("shard", "llama-causal")]
)
def test_on_two_ranks_it_trains_as_in_one_process(
    backend: str, name: str, keep: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """keep: what fused blocks keep; None: the model's own blocks. No input that several read is scaled."""
    targets = ["k", "v", "o", "up", "down"]
    inputs = ["down"] if name.startswith("llama") else ["up", "down"]
    monkeypatch.setitem(zoo.SETTINGS, "ia3", {"targets": targets, "inputs": inputs})
    plan, memory = BACKENDS[backend](name, 2), None if keep is None else MemoryConfig(keep=keep)
    check(Case(name, "ia3", plan, settings=settings_of(name, plan), passes=(3,), blocks=memory))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"targets": ["k"]}, "ia3.inputs names what is no target"),
        ({"targets": ["embed_tokens"], "inputs": []}, "ia3 tunes torch.nn.Linear, not Embedding"),
        ({"targets": ["kk"]}, "targets: 'kk' matches no module"),
    ],
)
def test_what_cannot_be_scaled_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        wrap(tiny("llama-causal"), "ia3", **settings)


def test_what_a_folder_lacks_or_adds_is_refused(tmp_path: Path) -> None:
    petune.save(wrap(tiny("llama-causal"), "ia3"), tmp_path / "a")
    for name in ("petune.json", "petune.manifest.json"):
        (tmp_path / "a" / name).unlink()
    file = tmp_path / "a" / "adapter_config.json"
    config = json.loads(file.read_text())
    for changed, message in (
        ({"something_new": 1}, "something_new is unknown"),
        ({"target_modules": []}, "target_modules is empty"),
        ({"target_modules": ["k_proj", "down_proj"]}, r"0 missing, 2 unexpected"),
        ({"feedforward_modules": []}, "2 mis-shaped"),
        ({"feedforward_modules": 3}, "feedforward_modules"),
    ):
        file.write_text(json.dumps(config | changed))
        with pytest.raises(FileError, match=message):
            petune.load(tiny("llama-causal"), tmp_path / "a")
