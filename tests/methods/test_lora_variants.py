"""What can be set of LoRA beyond rank and alpha, each beside peft: logits, gradients, three steps and files
both ways."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft.optimizers import create_loraplus_optimizer

import petune
from petune.errors import UsageError
from petune.methods import count_parameters, learning_rates, tune, tuned_parameters, without_tuning, wrap
from petune.methods.configs import LoraConfig, make_config
from petune.models.tuned_linear import tuned_layers
from petune.recipe import load_recipe
from petune.run.state import make_optimizer
from petune.saving.export import save_merged
from tests.methods import zoo
from tests.methods.peft_twins import (
    assert_close,
    assert_steps_agree,
    assert_trains_as_peft,
    parameters_of,
    read_by_peft,
)
from tests.methods.zoo import assert_same_gradients, batch, gradients, stir, tiny
from tests.parallel.harness import Case, check
from tests.parallel.plans import BACKENDS, settings_of

FAMILIES = ("llama-causal", "bert-classify", "t5-seq2seq", "gemma3-causal")
PATTERNS = {"rank_pattern": {"v": 2, "o": 6}, "alpha_pattern": {"v": 5}}
VARIANTS: dict[str, dict[str, Any]] = {
    "rslora": {"r": 4, "alpha": 6, "rslora": True},
    "patterns": {"r": 4, "alpha": 6, **PATTERNS},
    "rslora patterns": {"r": 4, "rslora": True, **PATTERNS},
    "one block": {"r": 4, "layers": [1]},
    "biases of tuned layers": {"r": 4, "bias": "lora", "targets": ["q", "v", "down"]},
    "every bias": {"r": 4, "bias": "all", "targets": ["q", "v"]},
}
CASES = [
    (variant, name)
    for variant, settings in VARIANTS.items()
    for name in FAMILIES
    if name == "bert-classify" or ("bias" not in settings and (variant != "patterns" or name == "t5-seq2seq"))
]
SHORT = ("bert-classify", "t5-seq2seq")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "name"),
    [pytest.param(*case, marks=() if case[1] in SHORT else pytest.mark.long) for case in CASES],
)
def test_it_trains_as_peft_and_files_go_both_ways(variant: str, name: str, tmp_path: Path) -> None:
    assert_trains_as_peft(name, tmp_path, **VARIANTS[variant])


def config_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "adapter_config.json").read_text())
    return found


def test_rslora_divides_by_the_root_of_each_layers_own_rank_and_says_so(tmp_path: Path) -> None:
    model = wrap(tiny("llama-causal"), r=16, alpha=8, rslora=True, rank_pattern={"v": 4}, targets=["q", "v"])
    scales = {name.rpartition(".")[2]: layer.scale for name, layer in tuned_layers(model)}
    assert scales == {"q_proj": 8 / math.sqrt(16), "v_proj": 8 / math.sqrt(4)}
    petune.save(model, tmp_path / "a")
    config = config_of(tmp_path / "a")
    assert (config["use_rslora"], config["r"], config["lora_alpha"]) == (True, 16, 8)
    assert set(config["rank_pattern"].values()) == {4} and not config["alpha_pattern"]
    again = petune.load(tiny("llama-causal"), tmp_path / "a")
    assert again.petune_tuning.config == model.petune_tuning.config


def test_an_alpha_by_default_is_twice_the_layers_own_rank() -> None:
    model = wrap(tiny("llama-causal"), r=8, rank_pattern={"v": 2, "layers.1.mlp.up_proj": 32})
    assert {layer.scale for _, layer in tuned_layers(model)} == {2.0}
    ranks = {name: len(layer.lora_A) for name, layer in tuned_layers(model)}
    assert ranks["model.layers.0.self_attn.v_proj"] == 2 and ranks["model.layers.0.mlp.up_proj"] == 8
    assert ranks["model.layers.1.mlp.up_proj"] == 32


def test_an_alpha_of_its_own_changes_the_scale_of_its_layers_alone() -> None:
    model = wrap(tiny("llama-causal"), r=4, alpha=6, alpha_pattern={"v": 5}, targets=["q", "v"])
    scales = {name.rpartition(".")[2]: layer.scale for name, layer in tuned_layers(model)}
    assert scales == {"q_proj": 6 / 4, "v_proj": 5 / 4}


@pytest.mark.parametrize(
    "settings", [*VARIANTS.values(), {"r": 4, "init": "pissa"}, {"r": 4, "token_rows": [5, 9]}]
)
def test_a_model_on_the_meta_device_counts_what_a_real_one_does(settings: dict[str, Any]) -> None:
    found = []
    for device in ("meta", "cpu"):
        with torch.device(device):
            model = tiny("bert-classify")
        tune(model, make_config("lora", settings))
        found.append(count_parameters(model))
    assert found[0] == found[1]


def test_the_first_entry_that_fits_counts_as_in_peft() -> None:
    model = wrap(tiny("llama-causal"), targets=["v"], rank_pattern={"layers.1.self_attn.v_proj": 3, "v": 2})
    assert [len(layer.lora_A) for _, layer in tuned_layers(model)] == [2, 3]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank_pattern": {"qq": 2}}, "rank_pattern: 'qq' matches no module"),
        ({"rank_pattern": {"o": 2}}, "rank_pattern: 'o' decides nothing"),
        ({"alpha_pattern": {"q": 2.0, "layers.1.self_attn.q_proj": 3.0}}, "decides nothing"),
        ({"layers": [2]}, r"layers: no target is in block 2\n.*expected of the blocks 0, 1"),
        ({"bias": "lora"}, "bias: lora trains nothing, as no tuned layer has one"),
        ({"bias": "all"}, "bias: all trains nothing, as this model has none"),
        ({"bias": "some"}, "lora.bias = 'some' is not one of"),
        ({"rank_pattern": {"q": 0}}, "must be at least 1"),
        ({"rank_pattern": {"q": 1.5}}, "is not a whole number"),
        ({"rank_pattern": [2]}, "is not a mapping of names to numbers"),
        ({"layers": 1}, "is not a list of whole numbers"),
        ({"layers": ["1"]}, "is not a whole number"),
        ({"rslora": 1}, "is not true or false"),
    ],
)
def test_a_setting_that_would_decide_nothing_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        wrap(tiny("llama-causal"), targets=["q", "v"], **settings)


def test_layers_number_the_blocks_of_both_stacks() -> None:
    model = wrap(tiny("t5-seq2seq"), r=2, layers=[1])
    names = [name for name, _ in tuned_layers(model)]
    assert names and all(name.startswith(("encoder.block.1.", "decoder.block.1.")) for name in names)
    assert any("EncDecAttention" in name for name in names)


# ---------------------------------------------------------------- LoRA+


@pytest.mark.parametrize("name", FAMILIES)
def test_the_factors_b_learn_faster_as_in_pefts_lora_plus(name: str, tmp_path: Path) -> None:
    method = {"name": "lora", "r": 4, "lr_ratio": 8, "also_train": []}
    recipe = load_recipe({"model": "m", "data": "d", "lr": 1e-3, "method": method})
    ours = tiny(name)
    tune(ours, recipe.method)
    stir(ours, std=0.1)
    petune.save(ours, tmp_path / "a")
    theirs = read_by_peft(name, tmp_path / "a")
    own, twins = tuned_parameters(ours), parameters_of(theirs)
    optimizers = [
        make_optimizer(recipe, own, learning_rates(ours)),
        create_loraplus_optimizer(theirs, torch.optim.AdamW, lr=1e-3, loraplus_lr_ratio=8),
    ]
    assert sorted(group["lr"] for group in optimizers[0].param_groups) == [1e-3, 8e-3]
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group["eps"] = 1e-4
    matched = {
        key.removeprefix("base_model.model.").removesuffix(".weight"): value for key, value in twins.items()
    }
    assert matched.keys() == own.keys()
    assert_steps_agree(ours, theirs, own, matched, name, optimizers)


def test_only_factors_b_of_linears_have_a_rate_of_their_own() -> None:
    model = tiny("bert-classify")
    tune(model, LoraConfig(r=2, lr_ratio=4.0, targets=("query", "word_embeddings")))
    assert learning_rates(model) == {
        f"bert.encoder.layer.{block}.attention.self.query.lora_B": 4.0 for block in (0, 1)
    }


def test_a_ratio_of_rates_is_refused_where_the_optimizer_is_the_users() -> None:
    with pytest.raises(UsageError, match="lr_ratio is a setting of recipes"):
        wrap(tiny("llama-causal"), lr_ratio=16)


# ---------------------------------------------------------------- biases


@pytest.mark.parametrize("name", ["bert-classify", "bert-mlm"])  # the second has a bias of two names
def test_biases_train_and_without_the_tuning_are_the_bases_again(name: str, tmp_path: Path) -> None:
    base, inputs = tiny(name), batch(name)
    model = wrap(tiny(name), r=2, targets=["q"], bias="all", also_train=())
    stir(model, std=0.1)
    trained = {name for name in tuned_parameters(model) if "lora_" not in name}
    assert trained == {name for name, _ in base.named_parameters() if name.endswith(".bias")}
    tuned = model(**inputs).logits
    with without_tuning(model):
        assert torch.equal(model(**inputs).logits, base(**inputs).logits)
    assert torch.equal(model(**inputs).logits, tuned)
    petune.save(model, tmp_path / "a")
    again = petune.load(tiny(name), tmp_path / "a").eval()
    assert torch.equal(again(**inputs).logits, tuned)
    with without_tuning(again):
        assert torch.equal(again(**inputs).logits, base(**inputs).logits)
    save_merged(model, tmp_path / "merged")
    plain = type(base).from_pretrained(tmp_path / "merged").eval()
    assert_close(plain(**inputs).logits, tuned)


def test_only_biases_of_tuned_layers_train_where_that_is_asked() -> None:
    model = wrap(tiny("bert-classify"), r=2, targets=["q"], bias="lora", also_train=())
    trained = {name for name in tuned_parameters(model) if "lora_" not in name}
    assert trained == {f"bert.encoder.layer.{block}.attention.self.query.bias" for block in (0, 1)}


@pytest.mark.parametrize("variant", ["rslora patterns", "every bias"])
def test_fused_blocks_give_the_same_gradients(variant: str) -> None:
    sides = []
    for kernels in ("off", "reference"):
        torch.manual_seed(0)
        model = wrap(tiny("bert-classify"), kernels=kernels, **VARIANTS[variant])
        stir(model, std=0.1)
        sides.append(gradients(model.train(), batch("bert-classify"))[1])
    assert_same_gradients(sides[1], sides[0], 1e-5)


def test_a_folder_of_pefts_with_every_bias_is_read(tmp_path: Path) -> None:
    config = peft.LoraConfig(r=4, target_modules=["query"], bias="all", task_type="SEQ_CLS")
    theirs = peft.get_peft_model(tiny("bert-classify"), config)
    stir(theirs.base_model.model.bert, std=0.1)
    theirs.save_pretrained(str(tmp_path / "a"))
    ours = petune.load(tiny("bert-classify"), tmp_path / "a").eval()
    assert ours.petune_tuning.config.bias == "all"
    assert_close(ours(**batch("bert-classify")).logits, theirs.eval()(**batch("bert-classify")).logits)


def test_cut_across_two_ranks_it_trains_as_in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"r": 4, "rslora": True, "alpha": 2, "bias": "all", "rank_pattern": {"v": 2, "o": 6}}
    monkeypatch.setitem(zoo.SETTINGS, "lora", settings)
    plan = BACKENDS["tp"]("bert-classify", 2)
    check(Case("bert-classify", "lora", plan, settings=settings_of("bert-classify", plan), passes=(3,)))
