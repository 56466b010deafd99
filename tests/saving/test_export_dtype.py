"""Merging into another dtype than the base's: each tensor is rounded once, and the report says what that
cost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from petune.methods import wrap
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


@pytest.mark.parametrize("name", ["bert-classify", "bart-classify", "t5-seq2seq", "t5-classify"])
def test_the_probe_fits_every_head(name: str) -> None:
    model = tiny(name)
    with torch.no_grad():
        assert model(**probe(model)).logits.isfinite().all()
    assert probe(model)["input_ids"].shape == (1, 16) and batch(name)["input_ids"].shape != (1, 16)
