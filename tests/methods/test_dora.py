"""DoRA: its equation with the norm held constant, peft's own as the oracle over steps and files, and which
cuts it can bear."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn

import petune
from petune.errors import UsageError
from petune.kernels.configs import MemoryConfig
from petune.methods import merge, merged_weights, tuned_parameters, tuned_state, without_tuning, wrap
from petune.methods.configs import DoraConfig
from petune.methods.dora import DoraLinear
from petune.parallel.plan import ParallelPlan
from petune.recipe import load_recipe
from petune.saving.export import save_merged
from tests.methods import references, zoo
from tests.methods.zoo import batch, frozen, stir, tiny
from tests.parallel.harness import Case, check
from tests.parallel.plans import BACKENDS, settings_of


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_starts_as_the_base_bit_for_bit(dtype: torch.dtype) -> None:
    inputs = {key: value for key, value in batch("bert-classify").items() if key != "labels"}
    base = frozen(tiny("bert-classify").to(dtype))
    model = wrap(tiny("bert-classify").to(dtype), "dora", r=4)
    assert torch.equal(frozen(model)(**inputs).logits, base(**inputs).logits)
    assert {value.dtype for name, value in tuned_parameters(model).items() if "lora_" in name} == {
        torch.float32
    }


@pytest.mark.parametrize("bias", [True, False])
def test_forward_and_gradients_follow_the_equation_with_a_constant_norm(bias: bool) -> None:
    references.dora_follows_the_equation(bias)


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: layer.weight.data.mul_(3),
        lambda layer: setattr(layer.weight, "data", 3 * layer.weight.data),
        lambda layer: setattr(layer, "weight", nn.Parameter(3 * layer.weight.detach())),
        lambda layer: layer.weight.detach().copy_(3 * layer.weight.detach()),
    ],
    ids=["written past autograd", "moved", "replaced", "written"],
)
def test_lengths_are_those_of_the_weight_as_it_is(change: Any) -> None:
    form = references.with_dora(nn.Linear(10, 6))
    form.row_norms()
    change(form)
    expected = (form.weight + 5 / 3 * form.lora_B @ form.lora_A).norm(dim=1)
    torch.testing.assert_close(form.row_norms(), expected.detach())


def test_a_row_of_zeros_stays_one_and_trains_nothing_to_nan() -> None:
    layer = nn.Linear(5, 4)
    with torch.no_grad():
        layer.weight[2] = 0
    form, x = DoraLinear.around(layer, DoraConfig(r=2)), torch.randn(3, 5)
    form(x).sum().backward()
    assert torch.equal(form(x), layer(x))
    assert all(value.grad is not None and value.grad.isfinite().all() for value in form.tuned().values())


def peft_twin(name: str, targets: list[str], dtype: torch.dtype, dropout: float = 0.0) -> Any:
    """The same model tuned by peft."""
    config = peft.LoraConfig(r=4, lora_alpha=6, lora_dropout=dropout, target_modules=targets, use_dora=True)
    return peft.get_peft_model(tiny(name).to(dtype), config).to(dtype)


@pytest.mark.parametrize(
    ("name", "targets", "dtype", "dropout"),
    [
        ("llama-causal", ["q_proj", "v_proj", "down_proj"], torch.float64, 0.0),
        ("llama-causal", ["q_proj", "v_proj", "down_proj"], torch.float32, 0.3),
        ("bert-classify", ["query", "dense"], torch.float32, 0.0),
        ("t5-seq2seq", ["q", "v", "wo"], torch.float32, 0.0),
        ("gemma3-causal", ["q_proj", "v_proj", "down_proj"], torch.float32, 0.0),
    ],
)
def test_three_steps_of_adamw_equal_those_of_peft(
    name: str, targets: list[str], dtype: torch.dtype, dropout: float
) -> None:
    inputs, close = batch(name), 1e-10 if dtype == torch.float64 else 2e-5
    ours = wrap(tiny(name).to(dtype), "dora", r=4, alpha=6, dropout=dropout, targets=targets, also_train=())
    theirs = peft_twin(name, targets, dtype, dropout)
    twins = {
        key.removeprefix("base_model.model."): value
        for key, value in theirs.named_parameters()
        if value.requires_grad
    }
    twins = {key.replace(".default", "").replace(".weight", ""): value for key, value in twins.items()}
    own = tuned_parameters(ours)
    assert twins.keys() == own.keys()
    with torch.no_grad():
        for key, value in own.items():  # the lengths of rows are what both made of the same base
            if key.endswith("lora_magnitude_vector"):
                torch.testing.assert_close(value, twins[key])
            else:
                twins[key].copy_(value)
    ours.train(), theirs.train()
    optimizers = [torch.optim.AdamW(values, lr=1e-2, eps=1e-4) for values in (own.values(), twins.values())]
    start = {key: value.detach().clone() for key, value in own.items()}
    for step in range(3):
        losses = []
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            torch.manual_seed(step)
            loss = model(**inputs).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        assert abs(losses[0] - losses[1]) <= close * max(1.0, losses[1])
    for key, value in own.items():
        assert float((value - twins[key]).abs().max()) <= close, key
    assert all(
        float((value - start[key]).abs().max()) > 1e-3 for key, value in own.items() if "magnitude" in key
    )


def logits(model: nn.Module) -> Tensor:
    """Of the batch of Llama, in eval mode."""
    with torch.no_grad():
        found: Tensor = model.eval()(**batch("llama-causal")).logits
        return found


def test_files_go_to_peft_and_come_from_it_and_merging_keeps_the_logits(tmp_path: Path) -> None:
    model = wrap(tiny("llama-causal"), "dora", r=4, targets=["q", "down"])
    stir(model, std=0.1)
    tuned_logits, base = logits(model), logits(tiny("llama-causal"))
    assert float((tuned_logits - base).abs().max()) > 0.05
    petune.save(model, tmp_path / "ours")
    again = petune.load(tiny("llama-causal"), tmp_path / "ours")
    assert again.petune_tuning.method == "dora" and torch.equal(logits(again), tuned_logits)
    by_peft = peft.PeftModel.from_pretrained(tiny("llama-causal"), str(tmp_path / "ours"))
    assert by_peft.peft_config["default"].use_dora
    torch.testing.assert_close(logits(by_peft), tuned_logits, rtol=1e-4, atol=1e-5)
    by_peft.save_pretrained(str(tmp_path / "theirs"))
    theirs = petune.load(tiny("llama-causal"), tmp_path / "theirs")
    assert all(torch.equal(value, tuned_state(model)[name]) for name, value in tuned_state(theirs).items())
    with without_tuning(model):
        assert torch.equal(logits(model), base)
    with merged_weights(model):
        torch.testing.assert_close(logits(model), tuned_logits, rtol=1e-4, atol=1e-5)
    report = save_merged(model, tmp_path / "merged")
    assert report.layers == 4 and report.update > 0
    plain = merge(model)
    assert not any(isinstance(module, DoraLinear) for module in plain.modules())
    torch.testing.assert_close(logits(plain), tuned_logits, rtol=1e-4, atol=1e-5)


def test_a_row_of_zeros_that_peft_makes_nan_of_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def padded() -> Any:
        model = tiny("llama-causal")
        model.lm_head.weight.data[0] = 0
        return model

    model, inputs = wrap(padded(), "dora", r=2, targets=["lm_head"]), batch("llama-causal")
    said: list[str] = []
    monkeypatch.setattr("petune.saving.peft.warn", said.append)
    petune.save(model, tmp_path / "a")
    assert len(said) == 1 and "lm_head: 1 of its rows are zeros" in said[0]
    assert torch.isfinite(petune.load(padded(), tmp_path / "a")(**inputs).logits).all()
    theirs = peft.PeftModel.from_pretrained(padded(), str(tmp_path / "a"))
    assert theirs(**inputs).logits[..., 0].isnan().all()


def test_with_dropout_it_is_never_fused_as_lora_and_a_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    for module in ("fuse", "single_modules"):
        monkeypatch.setattr(f"petune.kernels.{module}.say", said.append)
    plain, model = (
        wrap(tiny("llama-causal"), "dora", r=4, dropout=0.1, kernels=kernels)
        for kernels in ("off", "reference")
    )
    for one in (plain, model):
        stir(one, std=0.1)
    assert any("q_proj is a DoraLinear with dropout" in line for line in said) and any(
        "no fused form" in line for line in said
    )
    torch.testing.assert_close(logits(model), logits(plain), rtol=1e-5, atol=1e-6)


def test_a_plan_that_cuts_rows_is_refused_by_name_before_a_model_is_loaded() -> None:
    settings = {"model": "m", "data": "d", "method": "dora"}
    for parallel in ("tp", "galaxy", "galaxy2"):
        with pytest.raises(UsageError, match="cannot cut a linear by its inputs"):
            load_recipe(settings | {"parallel": parallel})
    load_recipe(settings | {"parallel": "sp"}), load_recipe(settings | {"parallel": "pp"})
    load_recipe(settings | {"method": {"name": "dora", "targets": ["q", "up"]}, "parallel": "tp"})
    with pytest.raises(UsageError, match="dora cannot cut a linear by its inputs"):
        DoraLinear.around(nn.Linear(4, 3), DoraConfig(r=2)).splits("row")


COLUMNS = {"r": 4, "targets": ["q", "k", "v", "up"]}


@pytest.mark.crossed(1)
@pytest.mark.parametrize(
    ("backend", "name", "settings"),
    [
        ("dp", "bert-classify", {"r": 4}),
        ("shard", "bert-classify", {"r": 4}),
        ("pp-1f1b", "t5-seq2seq", {"r": 4}),
        ("sp-gather", "bert-classify", {"r": 4}),
        ("tp", "llama-causal", COLUMNS),
        ("galaxy", "llama-causal", COLUMNS),
    ],
)
@pytest.mark.parametrize("keep", [None, "all", "attention"])
def test_on_two_ranks_it_trains_as_in_one_process(
    backend: str, name: str, settings: dict[str, Any], keep: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """keep: what fused blocks keep; None: the model's own blocks."""
    monkeypatch.setitem(zoo.SETTINGS, "dora", settings)
    plan: ParallelPlan = BACKENDS[backend](name, 2)
    memory = None if keep is None else MemoryConfig(keep=keep)
    own: dict[str, Any] = {"blocks": memory, "recompute": backend == "shard" and keep is None}
    check(Case(name, "dora", plan, settings=settings_of(name, plan), passes=(3,), steps=1, **own))
