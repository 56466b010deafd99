"""MiSS: its equation, peft as the oracle over steps and files, the identity at the start, merging, cuts, and
what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn

import petune
from petune.errors import FileError, UsageError
from petune.kernels.configs import MemoryConfig
from petune.methods import merge, merged_weights, without_tuning, wrap
from petune.methods.configs import MissConfig
from petune.methods.miss import MissLinear
from petune.recipe import load_recipe
from tests.methods import zoo
from tests.methods.peft_twins import assert_close, assert_trains_as_peft
from tests.methods.zoo import batch, frozen, stir, tiny
from tests.parallel.harness import Case, check
from tests.parallel.plans import BACKENDS, settings_of

FAMILIES = ("llama-causal", "bert-classify", "t5-seq2seq", "gemma3-causal")
NAME = "llama-causal"


@pytest.mark.crossed(1)
@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("r", [8, 24])
def test_it_starts_as_the_base_and_trains_as_in_peft_with_files_both_ways(
    name: str, r: int, tmp_path: Path
) -> None:
    """24 divides none of these widths."""
    found = wrap(tiny(name), "miss", r=r, also_train=())(**batch(name)).logits
    assert torch.equal(found, frozen(tiny(name))(**batch(name)).logits)
    assert_trains_as_peft(name, tmp_path, "miss", r=r)
    again = petune.load(tiny(name), tmp_path / "ours")
    assert again.petune_tuning.config.r == r and again.petune_tuning.method == "miss"


def test_dropout_is_drawn_as_in_peft(tmp_path: Path) -> None:
    assert_trains_as_peft(NAME, tmp_path, "miss", r=24, dropout=0.3)


def test_forward_gradients_and_merging_follow_the_equation() -> None:
    torch.manual_seed(0)
    form, x = MissLinear.around(nn.Linear(5, 4).double(), MissConfig(r=2)), torch.randn(3, 5).double()
    with torch.no_grad():
        form.miss_block += torch.randn_like(form.miss_block)
    d, x = form.miss_block, x.requires_grad_()
    sums = torch.stack([x[:, 0] + x[:, 2] + x[:, 4], x[:, 1] + x[:, 3]], 1)
    own = x @ form.weight.T + form.bias + sums @ d
    torch.testing.assert_close(form(x), own)
    found, expected = (torch.autograd.grad(y.square().sum(), [x, d]) for y in (form(x), own))
    torch.testing.assert_close(found, expected)
    merged = nn.functional.linear(x, form.merged_weight(), form.bias)
    torch.testing.assert_close(merged, own)


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        found: Tensor = model.eval()(**batch(NAME)).logits
        return found


def test_merged_and_passed_by_it_is_what_it_was() -> None:
    model = wrap(tiny(NAME), "miss", r=12, targets=["q", "down"])
    stir(model, std=0.1)
    tuned, base = logits(model), logits(tiny(NAME))
    assert float((tuned - base).abs().max()) > 0.05
    with without_tuning(model):
        assert torch.equal(logits(model), base)
    with merged_weights(model):
        torch.testing.assert_close(logits(model), tuned, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(logits(merge(model)), tuned, rtol=1e-4, atol=1e-5)


def test_a_bf16_base_keeps_its_shards_in_float32() -> None:
    model = wrap(tiny(NAME).bfloat16(), "miss", r=8)
    stir(model, std=0.1)
    layer = next(module for module in model.modules() if isinstance(module, MissLinear))
    x = torch.randn(2, 64).bfloat16()
    assert layer.miss_block.dtype == torch.float32 and layer(x).dtype == torch.bfloat16


@pytest.mark.crossed(1)
@pytest.mark.parametrize("keep", [None, "attention"])
@pytest.mark.parametrize(("backend", "name"), [("tp", NAME), ("pp-1f1b", "t5-seq2seq")])
def test_on_two_ranks_it_trains_as_in_one_process(
    backend: str, name: str, keep: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """keep: what fused blocks keep; None: the model's own blocks."""
    monkeypatch.setitem(zoo.SETTINGS, "miss", {"r": 8, "targets": ["q", "k", "v"]})
    plan = BACKENDS[backend](name, 2)
    memory = None if keep is None else MemoryConfig(keep=keep)
    check(Case(name, "miss", plan, settings=settings_of(name, plan), passes=(3,), blocks=memory))


def test_a_plan_that_cuts_rows_is_refused_before_a_model_is_loaded() -> None:
    settings = {"model": "m", "data": "d", "method": "miss"}
    with pytest.raises(UsageError, match="cannot cut a linear by its inputs"):
        load_recipe(settings | {"parallel": "tp"})
    load_recipe(settings | {"parallel": "pp"})
    load_recipe(settings | {"method": {"name": "miss", "targets": ["q", "up"]}, "parallel": "tp"})
    with pytest.raises(UsageError, match="miss cannot cut a linear by its inputs"):
        MissLinear.around(nn.Linear(4, 3), MissConfig(r=2)).splits("row")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"r": 65}, "r 65 is more than the 64 inputs of this linear"),
        ({"targets": ["embed_tokens"]}, "miss tunes torch.nn.Linear, not Embedding"),
        ({"targets": ["q"], "exclude": ["q"]}, "nothing to tune"),
        ({"r": 0}, "must be at least 1"),
    ],
)
def test_what_cannot_be_tuned_is_refused_and_leaves_the_model(settings: Any, message: str) -> None:
    model = tiny(NAME)
    with pytest.raises(UsageError, match=message):
        wrap(model, "miss", **{"r": 8, **settings})
    assert not any(isinstance(module, MissLinear) for module in model.modules())


def test_a_folder_of_another_variant_is_refused_by_name(tmp_path: Path) -> None:
    config = peft.MissConfig(r=8, target_modules=["q_proj"], init_weights="bat")
    peft.get_peft_model(tiny(NAME), config).save_pretrained(str(tmp_path / "bat"))
    with pytest.raises(FileError, match="init_weights = 'bat' is not supported"):
        petune.load(tiny(NAME), tmp_path / "bat")
    theirs = peft.get_peft_model(
        tiny(NAME), peft.MissConfig(r=8, target_modules=["q_proj", "v_proj"], layers_to_transform=[1])
    )
    stir(theirs, std=0.1)
    theirs.save_pretrained(str(tmp_path / "plain"))
    assert_close(logits(petune.load(tiny(NAME), tmp_path / "plain")), logits(theirs))
    file = tmp_path / "plain" / "adapter_config.json"
    written = json.loads(file.read_text())
    for changed, message in (
        ({"bias": "all"}, "bias = 'all' is not supported"),
        ({"r": 4}, "mis-shaped"),
        ({"layers_to_transform": None}, "2 missing"),
        ({"something_new": 1}, "something_new is unknown"),
    ):
        file.write_text(json.dumps(written | changed))
        with pytest.raises(FileError, match=message):
            petune.load(tiny(NAME), tmp_path / "plain")
