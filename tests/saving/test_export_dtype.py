"""Merging into another dtype than the base's: each tensor is rounded once, and the report says what that
cost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from petune.files.safetensors import read_tensors
from petune.methods import merge, tuned_parameters, wrap
from petune.methods.trainable import widen
from petune.methods.wrapped import tuning
from petune.models.tuned_linear import tuned_layers
from petune.saving.export import probe, save_merged
from tests.methods.zoo import batch, stir, tiny


def tuned(dtype: torch.dtype, **changes: Any) -> Any:
    model = wrap(tiny("llama-causal", **changes).to(dtype), r=4)
    stir(model, std=0.02)
    return model.eval()


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize(
    ("base", "written"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)]
)
def test_every_tensor_is_rounded_once_to_the_dtype_that_is_asked_for(
    base: torch.dtype, written: torch.dtype, tie: bool, tmp_path: Path
) -> None:
    model = tuned(base, tie_word_embeddings=tie)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    report = save_merged(model, tmp_path / "m", dtype=written, batch=probe(model))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    name = str(written).removeprefix("torch.")
    assert report.dtype == name == json.loads((tmp_path / "m" / "config.json").read_text())["dtype"]
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype="auto")
    assert {value.dtype for value in plain.parameters()} == {written}
    assert (plain.lm_head.weight is plain.model.embed_tokens.weight) is tie
    own = dict(plain.named_parameters())
    for key, layer in tuned_layers(model):
        exact = layer.weight.float() + layer.delta().detach()
        assert torch.equal(own[f"{key}.weight"], exact.to(written)), key
    assert torch.equal(own["model.norm.weight"], model.model.norm.weight.to(written))
    assert report.logits is not None and 0 < report.logits < 0.5
    assert (report.lost < 1e-5) is (written is torch.float32) and report.lost < 0.5


@pytest.mark.parametrize("seed", [None, pytest.param(3, marks=pytest.mark.long)])
def test_what_trained_in_float32_beside_a_bf16_base_is_rounded_once(seed: int | None, tmp_path: Path) -> None:
    model = wrap(tiny("bert-classify").bfloat16(), r=4, bias="all")
    widen(model, tuned_parameters(model).values())
    began = {name: value.clone() for name, value in tuning(model).biases.items()}
    stir(model, std=0.002)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    report = save_merged(model, tmp_path / "m", batch=probe(model), seed=seed)
    assert all(value.dtype == before[name].dtype for name, value in model.state_dict().items())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert json.loads((tmp_path / "m" / "config.json").read_text())["dtype"] == report.dtype == "bfloat16"
    own = read_tensors(tmp_path / "m" / "model.safetensors")
    assert {value.dtype for value in own.values()} == {torch.bfloat16}
    layers = [(layer, own[f"{name}.weight"]) for name, layer in tuned_layers(model)]
    pairs = [
        (got.float() - layer.weight.float(), layer.delta().detach().float()) for layer, got in layers
    ] + [(own[name].float() - value.float(), before[name] - value.float()) for name, value in began.items()]
    update = sum(float(delta.norm()) ** 2 for _, delta in pairs)
    missed = sum(float((got - delta).norm()) ** 2 for got, delta in pairs)
    assert report.lost == pytest.approx((missed / update) ** 0.5, rel=1e-3)
    nearest = all(torch.equal(own[name], before[name].bfloat16()) for name in began)
    assert nearest is (seed is None) and torch.equal(
        own["classifier.weight"], before["classifier.weight"].bfloat16()
    )
    wide = save_merged(model, tmp_path / "w", dtype=torch.float32)
    exact = read_tensors(tmp_path / "w" / "model.safetensors")
    assert wide.dtype == "float32" and all(torch.equal(exact[name], before[name]) for name in began)
    assert {value.dtype for value in merge(model).parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("name", ["bert-classify", "bart-classify", "t5-seq2seq", "t5-classify"])
def test_the_probe_fits_every_head(name: str) -> None:
    model = tiny(name)
    with torch.no_grad():
        assert model(**probe(model)).logits.isfinite().all()
    assert probe(model)["input_ids"].shape == (1, 16) and batch(name)["input_ids"].shape != (1, 16)
