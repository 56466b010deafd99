"""PiSSA: the components against a float64 decomposition and against peft's start, and everything that must
know that the base's weight has lost them: the untouched base, files, merging, fused blocks, ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor

import petune
from petune.errors import UsageError
from petune.methods import merge, merged_weights, tuned_parameters, without_tuning, wrap
from petune.methods.pissa import principal, started
from petune.saving.export import full_hash, save_merged
from petune.saving.fingerprint import fingerprint
from tests.methods import zoo
from tests.methods.peft_twins import assert_close, assert_steps_agree, parameters_of, read_by_peft
from tests.methods.zoo import assert_same_gradients, batch, gradients, stir, tiny
from tests.parallel.harness import Case, check
from tests.parallel.plans import BACKENDS, settings_of


def spectrum(out: int, inputs: int) -> Tensor:
    """A weight whose singular values fall from 1 by a third each."""
    torch.manual_seed(0)
    u, _, vh = torch.linalg.svd(torch.randn(out, inputs), full_matrices=False)
    return u * (2 / 3) ** torch.arange(min(out, inputs)) @ vh


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (32, 32)])
@pytest.mark.parametrize(("iterations", "close"), [(None, 1e-5), (8, 1e-2)])
def test_the_components_are_those_of_the_largest_singular_values(
    shape: tuple[int, int], iterations: int | None, close: float
) -> None:
    weight = spectrum(*shape)
    a, b = principal(weight, 4, iterations)
    u, s, vh = torch.linalg.svd(weight.double(), full_matrices=False)
    best = u[:, :4] * s[:4] @ vh[:4]
    assert float((b @ a - best).norm() / best.norm()) < close
    torch.testing.assert_close(a @ a.T, torch.diag(s[:4]).float(), atol=close, rtol=close)
    torch.testing.assert_close(b.T @ b, torch.diag(s[:4]).float(), atol=close, rtol=close)


def test_the_draw_of_approximate_components_follows_the_seed() -> None:
    weight, found = spectrum(24, 40), []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        found.append(principal(weight, 4, 1)[0])
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])


def pissa(name: str, **settings: Any) -> Any:
    return wrap(tiny(name), init="pissa", **{"r": 4, "alpha": 6, **settings})


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("llama-causal", ["q_proj", "down_proj"]),
        ("bert-classify", ["query"]),
        ("t5-seq2seq", ["q"]),
        ("gemma3-causal", ["q_proj", "down_proj"]),
    ],
)
def test_start_and_three_steps_are_pefts(name: str, targets: list[str]) -> None:
    ours = pissa(name, targets=targets, also_train=())
    config = peft.LoraConfig(r=4, lora_alpha=6, target_modules=targets, init_lora_weights="pissa")
    theirs = peft.get_peft_model(tiny(name), config)
    assert_close(ours(**batch(name)).logits, tiny(name)(**batch(name)).logits)
    twins = {
        key.removeprefix("base_model.model.").removesuffix(".weight"): value
        for key, value in parameters_of(theirs).items()
    }
    own = tuned_parameters(ours)
    assert twins.keys() == own.keys()
    for key, layer in started(ours).items():
        residual = theirs.get_submodule(f"base_model.model.{key}").base_layer.weight
        assert_close(layer.weight.detach(), residual.detach(), key)
    with torch.no_grad():  # components have no sign of their own
        for key, value in own.items():
            twins[key].copy_(value)
    assert_steps_agree(ours, theirs, own, twins, name)


@pytest.mark.parametrize("rslora", [False, True])
def test_files_say_plain_lora_on_the_untouched_base(rslora: bool, tmp_path: Path) -> None:
    name = "llama-causal"
    model = pissa(name, rslora=rslora, rank_pattern={"v": 2}, targets=["q", "v"])
    stir(model, std=0.05)
    tuned = model(**batch(name)).logits
    petune.save(model, tmp_path / "a")
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert (config["r"], config["init_lora_weights"]) == (8, True) and set(
        config["rank_pattern"].values()
    ) == {4}
    assert config["lora_alpha"] == pytest.approx(6 * 2 ** (0.5 if rslora else 1))
    assert_close(read_by_peft(name, tmp_path / "a").eval()(**batch(name)).logits, tuned)
    again = petune.load(tiny(name), tmp_path / "a").eval()
    assert_close(again(**batch(name)).logits, tuned)
    assert (again.petune_tuning.config.init, again.petune_tuning.config.r) == ("auto", 8)
    assert fingerprint(model) == fingerprint(tiny(name)) == fingerprint(again)
    with pytest.raises(UsageError, match="the weights of this base are gone"):
        full_hash(model)


def test_peft_converts_to_the_same_difference(tmp_path: Path) -> None:
    """peft's own conversion of a trained PiSSA, by its `path_initial_model_for_weight_conversion`."""
    name, config = "llama-causal", peft.LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj"])
    config.init_lora_weights = "pissa"
    theirs = peft.get_peft_model(tiny(name), config)
    theirs.save_pretrained(str(tmp_path / "start"))
    stir(theirs, std=0.05)
    found = theirs.eval()(**batch(name)).logits
    start = str(tmp_path / "start")
    theirs.save_pretrained(str(tmp_path / "a"), path_initial_model_for_weight_conversion=start)
    assert_close(petune.load(tiny(name), tmp_path / "a").eval()(**batch(name)).logits, found)


def test_the_base_is_computed_where_the_tuning_is_passed_by_and_merging_is_right(
    tmp_path: Path,
) -> None:
    name = "bert-classify"
    base, model = tiny(name), pissa(name, dropout=0.5, also_train=())
    stir(model, std=0.1)
    tuned, expected = model(**batch(name)).logits, base(**batch(name)).logits
    assert float((tuned - expected).detach().abs().max()) > 1e-2
    for kernels in ("off", "reference"):
        fused = wrap(tiny(name), init="pissa", r=4, alpha=6, also_train=(), kernels=kernels)
        stir(fused, std=0.1)
        with without_tuning(fused):
            assert_close(fused(**batch(name)).logits, expected)
    with merged_weights(model):
        assert_close(model(**batch(name)).logits, tuned)
    report = save_merged(model, tmp_path / "merged", batch=batch(name))
    moved = sum(float(layer.change().detach().norm()) ** 2 for layer in started(model).values()) ** 0.5
    assert report.update == pytest.approx(moved) and report.logits < 1e-4 and report.lost < 1e-3
    assert_close(type(base).from_pretrained(tmp_path / "merged").eval()(**batch(name)).logits, tuned)
    plain = merge(model)
    assert plain.state_dict().keys() == base.state_dict().keys()
    assert_close(plain(**batch(name)).logits, tuned)


def test_fused_blocks_give_the_same_gradients() -> None:
    sides = []
    for kernels in ("off", "reference"):
        model = pissa("llama-causal", kernels=kernels)
        stir(model, std=0.05)
        sides.append(gradients(model.train(), batch("llama-causal"))[1])
    assert_same_gradients(sides[1], sides[0], 1e-5)


@pytest.mark.parametrize("cut", ["column", "row"])
def test_the_start_is_cut_as_the_factors_are(cut: Any) -> None:
    for layer in started(pissa("llama-causal", targets=["q"])).values():
        splits = layer.splits(cut)
        assert (splits["start_A"], splits["start_B"]) == (splits["lora_A"], splits["lora_B"]) != (None, None)


@pytest.mark.parametrize("backend", ["tp", "shard"])
def test_cut_across_two_ranks_it_trains_as_in_one_process(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(zoo.SETTINGS, "lora", {"r": 4, "init": "pissa"})
    plan = BACKENDS[backend]("llama-causal", 2)
    check(Case("llama-causal", "lora", plan, settings=settings_of("llama-causal", plan), passes=(3,)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"targets": ["embed_tokens"]}, "an embedding has no components"),
        ({"r": 65}, "r 65 is more than the 64 components"),
        ({"init": "auto", "init_iterations": 4}, "init_iterations is of init: pissa"),
        ({"method": "dora"}, "dora has no start from principal components"),
        ({"init": "olora"}, "lora.init = 'olora' is not one of"),
    ],
)
def test_what_has_no_components_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        wrap(tiny("llama-causal"), **{"init": "pissa", "r": 4, **settings})


def test_a_tied_weight_is_refused_and_so_is_a_checkpoint_without_weights(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="its weight is tied to another module's"):
        wrap(tiny("llama-causal", tie_word_embeddings=True), init="pissa", r=4, targets=["lm_head"])
    with pytest.raises(UsageError, match="save_pretrained keeps no weights"):
        pissa("llama-causal").save_pretrained(tmp_path)
