"""A base in NF4 that is written as transformers with bitsandbytes writes one: the same bytes, read by both
and by petune bit for bit, and refused where those files have no place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from bitsandbytes import functional
from safetensors.torch import load_file
from torch import nn

import petune
from petune.errors import UsageError
from petune.methods import tuned_names
from petune.models import family_of
from petune.models.frozen_weight import QuantisedWeight, dense_of, quantised_in
from petune.models.loading import load_model
from petune.models.quantise import quantise_blocks
from petune.models.source import resolve_model
from petune.saving.export import write_peft
from petune.saving.four_bit import save_base
from tests.methods.zoo import batch, stir, tiny

SIZES = {"intermediate_size": 128}


def four(name: str = "llama-causal", dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A model with LoRA, its base in NF4."""
    model = petune.wrap(tiny(name, **SIZES).to(dtype), r=4, base_dtype="nf4", **changes)
    stir(model, std=0.02)
    return model.eval()


def theirs(folder: Path, dtype: torch.dtype) -> Any:
    """The same base as transformers and bitsandbytes hold it."""
    tiny("llama-causal", **SIZES).to(dtype).save_pretrained(folder)
    settings: Any = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    config = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=dtype, **settings)
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=config, device_map="cpu", dtype=dtype
    )


def read(folder: Path, head: Any) -> nn.Module:
    """The folder as a run with base_dtype: nf4 reads it."""
    found = load_model(resolve_model(str(folder), folder), head, None, torch.float32, seed=3)
    found.model.requires_grad_(False)
    quantise_blocks(found.model, family_of(found.model), "nf4")
    return found.read()


def inputs(name: str) -> dict[str, Any]:
    return {key: value for key, value in batch(name).items() if key != "labels"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_files_are_those_of_transformers_byte_for_byte(dtype: torch.dtype, tmp_path: Path) -> None:
    one = theirs(tmp_path / "dense", dtype)
    one.save_pretrained(tmp_path / "theirs")
    place = petune.save_base(four(dtype=dtype), tmp_path / "ours")
    own, other = (load_file(folder / "model.safetensors") for folder in (place, tmp_path / "theirs"))
    assert own.keys() == other.keys() and sum("quant_state" in name for name in own) == 14
    for name, value in own.items():
        assert value.dtype == other[name].dtype and torch.equal(value, other[name]), name
    mine, their = (
        json.loads((folder / "config.json").read_text()) for folder in (place, tmp_path / "theirs")
    )
    assert mine["quantization_config"].pop("llm_int8_skip_modules") == ["lm_head"]
    assert their["quantization_config"].pop("llm_int8_skip_modules") is None  # the head is found by itself
    assert mine["quantization_config"] == their["quantization_config"]
    assert mine["dtype"] == their["dtype"]


@pytest.mark.parametrize(
    "name",
    [
        "bert-classify",
        "llama-causal",
        *(
            pytest.param(f"{one}-classify", marks=pytest.mark.long)
            for one in ("modernbert", "qwen2", "deberta")
        ),
    ],
)
def test_transformers_reads_every_weight_and_peft_puts_the_tuning_on_it(name: str, tmp_path: Path) -> None:
    model = four(name)
    save_base(model, tmp_path / "four")
    write_peft(model, tmp_path / "peft")
    auto: Any = transformers.AutoModelForSequenceClassification
    auto = transformers.AutoModelForCausalLM if "causal" in name else auto
    loaded, info = auto.from_pretrained(tmp_path / "four", device_map="cpu", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    held = 0
    for path, layer in loaded.named_modules():
        if type(layer).__name__ == "Linear4bit":
            own, held = dense_of(model.get_submodule(path).weight), held + 1
            assert torch.equal(functional.dequantize_4bit(layer.weight, layer.weight.quant_state), own), path
    assert held == len(list(quantised_in(model)))
    tuned = peft.PeftModel.from_pretrained(loaded, tmp_path / "peft").eval()
    with torch.no_grad():
        found, expected = (one(**inputs(name)).logits for one in (tuned, model))
    assert float((found - expected).norm()) < 0.02 * float(expected.norm())  # their products may be in bf16


def test_petune_reads_the_bits_that_it_wrote(tmp_path: Path) -> None:
    model = four()
    save_base(model, tmp_path / "a")
    again = read(tmp_path / "a", "causal")
    before, after = dict(model.named_parameters()), dict(again.named_parameters())
    for name, value in after.items():
        own = before[name]
        if isinstance(value, QuantisedWeight):
            assert isinstance(own, QuantisedWeight)
            pairs = zip(value.form.tensors, own.form.tensors, strict=True)
            assert all(torch.equal(one, two) for one, two in pairs), name
        else:
            assert torch.equal(value, own), name
    save_base(again, tmp_path / "b")
    one, two = ((tmp_path / at / "model.safetensors").read_bytes() for at in "ab")
    assert one == two
    assert before.keys() - after.keys() == set(tuned_names(model))
    with pytest.raises(UsageError, match="occupied"):
        save_base(model, tmp_path / "b")


def test_modules_that_train_whole_are_written_as_they_are(tmp_path: Path) -> None:
    model = four("bert-classify", also_train=("classifier",), bias="lora")
    save_base(model, tmp_path / "four")
    found, base = load_file(tmp_path / "four" / "model.safetensors"), tiny("bert-classify", **SIZES)
    assert torch.equal(found["classifier.weight"], model.classifier.weight.float())
    own = base.state_dict()
    dense = [name for name in own if "classifier" not in name and f"{name}.absmax" not in found]
    assert len(dense) > 20 and all(torch.equal(found[name], own[name]) for name in dense if name in found)
    assert {name for name in dense if name not in found} <= {"bert.embeddings.position_ids"}


@pytest.mark.parametrize("method", ["adapter", "side", "dora", "ia3", "unfused"])
def test_the_base_is_the_same_whatever_is_tuned_beside_it(method: str, tmp_path: Path) -> None:
    expected = (save_base(four(), tmp_path / "lora") / "model.safetensors").read_bytes()
    settings: Any = {"unfused": {"kernels": "off"}, "side": {"reduction": 2}}.get(method, {})
    name = "lora" if method == "unfused" else method
    model = petune.wrap(tiny("llama-causal", **SIZES), name, base_dtype="nf4", **settings)
    stir(model, std=0.02)
    assert (save_base(model, tmp_path / "other") / "model.safetensors").read_bytes() == expected


def int8() -> Any:
    return petune.wrap(tiny("llama-causal"), r=4, base_dtype="int8")


REFUSED: dict[str, tuple[Any, str]] = {
    "int8": (int8, "no weights in nf4"),
    "dense": (lambda: petune.wrap(tiny("llama-causal"), r=4), "no weights in nf4"),
    "pissa": (lambda: four(init="pissa"), "init: pissa has changed"),
    "Conv1D": (
        lambda: petune.wrap(tiny("gpt2-causal", n_inner=128), r=4, base_dtype="nf4"),
        "no place(.|\n)*Conv1D",
    ),
    "kept wide": (
        lambda: petune.wrap(tiny("t5-seq2seq", d_ff=128), r=4, base_dtype="nf4"),
        "keeps it in float32",
    ),
    "experts": (
        lambda: petune.wrap(
            tiny("qwen3moe-causal", hidden_size=64, moe_intermediate_size=64, intermediate_size=64),
            r=4,
            base_dtype="nf4",
        ),
        "experts in one tensor",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_those_files_have_no_place_for_is_refused(what: str, tmp_path: Path) -> None:
    made, match = REFUSED[what]
    with pytest.raises(UsageError, match=match):
        save_base(made(), tmp_path / "four")
    assert not list(tmp_path.iterdir())
