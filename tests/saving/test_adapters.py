"""Folders as AdapterHub's `adapters` lays them out, held against what that library wrote and computed.

adapters_layout.json has its facts: names and shapes of tensors, fields, and logits of tiny models whose every
tensor is `filled` by its name, so that no weights have to lie here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    RobertaConfig,
    RobertaForSequenceClassification,
    T5Config,
    T5ForConditionalGeneration,
)

import petune
from petune.errors import FileError, UsageError
from petune.files.safetensors import read_json, read_tensors, write_json, write_tensors
from petune.methods import tuned_state, tuning
from petune.saving.adapters import PLACES
from petune.saving.export import write_adapters
from tests.methods.zoo import batch, stir, tiny

FACTS: dict[str, Any] = json.loads((Path(__file__).parent / "adapters_layout.json").read_text("utf-8"))
CLASSES: dict[str, Any] = {
    "bert": (BertForSequenceClassification, BertConfig),
    "roberta": (RobertaForSequenceClassification, RobertaConfig),
    "bart": (BartForConditionalGeneration, BartConfig),
    "t5": (T5ForConditionalGeneration, T5Config),
    "llama": (LlamaForCausalLM, LlamaConfig),
}
KINDS = {"double_seq_bn": "houlsby", "seq_bn": "pfeiffer", "par_bn": "parallel"}
NAMED = "poet."
CASES = list(FACTS["cases"])


def filled(name: str, like: Tensor) -> Tensor:
    """The values of a tensor, by its name and shape alone."""
    wave = torch.sin(0.7 * torch.arange(like.numel(), dtype=torch.float64) + len(name)).reshape(like.shape)
    return (wave * 0.5 + ("norm" in name.lower() and name.endswith("weight"))).to(like.dtype)


def base(case: str) -> Any:
    """The base model of a case."""
    name = case.partition("-")[0]
    kind, config = CLASSES[name]
    model = kind(config(**FACTS["models"][name])).eval()
    with torch.no_grad():
        for own, value in model.named_parameters():
            value.copy_(filled(own, value))
    return model


def config_of(case: str) -> dict[str, Any]:
    """The `config` of a case."""
    kind = case.split("-")[1]
    return FACTS["kinds"][kind] | {"cross_adapter": case.endswith("-cross")}


def folder_of(case: str, place: Path, **changes: Any) -> Path:
    """A folder as the library wrote it; `changes` go over its config."""
    own = FACTS["cases"][case]
    place.mkdir()
    write_json(place / "adapter_config.json", own["about"] | {"config": config_of(case) | changes})
    made = {name: filled(name, torch.empty(shape)) for name, shape in own["tensors"].items()}
    write_tensors(place / "adapter.safetensors", made)
    return place


def logits(model: nn.Module) -> list[float]:
    """What the facts have of a model's answer."""
    ids = torch.tensor([[3, 5, 7, 11, 13, 2]])
    inputs = {"input_ids": ids}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids[:, :4]
    with torch.no_grad():
        return list(model.eval()(**inputs).logits.flatten()[-6:].tolist())


@pytest.mark.parametrize("case", CASES)
def test_a_folder_of_the_library_computes_what_it_computed_there(case: str, tmp_path: Path) -> None:
    model = base(case)
    untouched = logits(model)
    petune.load(model, folder_of(case, tmp_path / "there"))
    assert logits(model) == pytest.approx(FACTS["cases"][case]["logits"], rel=1e-5, abs=2e-6)
    assert logits(model) != pytest.approx(untouched, abs=1e-3)
    config = tuning(model).config
    assert (config.kind, config.reduction) == (KINDS[case.split("-")[1]], 2)


@pytest.mark.parametrize(
    "case", [case for case in CASES if case not in ("bart-double_seq_bn", "t5-double_seq_bn")]
)
def test_what_is_written_is_what_the_library_writes(case: str, tmp_path: Path) -> None:
    """Names, shapes and values of tensors, and every field."""
    model = petune.load(base(case), folder_of(case, tmp_path / "there"))
    place = write_adapters(model, tmp_path / "here", name="poet")
    found, own = read_json(place / "adapter_config.json"), FACTS["cases"][case]
    assert found == own["about"] | {"config": config_of(case)}
    tensors = read_tensors(place / "adapter.safetensors")
    assert {name: list(value.shape) for name, value in tensors.items()} == own["tensors"]
    for name, value in tensors.items():
        assert torch.equal(value, filled(name, value)), name
    assert not (place / "model_head.safetensors").exists()


def test_a_trained_head_goes_both_ways_in_its_own_file(tmp_path: Path) -> None:
    model = petune.wrap(base("bert-par_bn"), "adapter", kind="parallel", reduction=2, activation="relu")
    stir(model)
    place = write_adapters(model, tmp_path / "here", name="poet")
    head = read_tensors(place / "model_head.safetensors")
    assert {name: list(value.shape) for name, value in head.items()} == FACTS["heads"]["bert"]
    assert read_json(place / "head_config.json") == FACTS["head_config"]["bert"]
    again = petune.load(base("bert-par_bn"), place)
    assert logits(again) == logits(model)
    assert tuning(again).also_train == ("classifier",)
    assert tuned_state(again).keys() == tuned_state(model).keys()


@pytest.mark.parametrize("word", ["tanh", "leakyrelu", "gelu_new", "swish"])
def test_activations_go_both_ways_by_the_librarys_words(word: str, tmp_path: Path) -> None:
    model = petune.load(base("bert-par_bn"), folder_of("bert-par_bn", tmp_path / "a", non_linearity=word))
    assert tuning(model).config.activation == {"leakyrelu": "leaky_relu", "swish": "silu"}.get(word, word)
    fields = read_json(write_adapters(model, tmp_path / "b") / "adapter_config.json")
    assert fields["config"]["non_linearity"] == word
    assert logits(petune.load(base("bert-par_bn"), tmp_path / "b")) == logits(model)
    petune.save(model, tmp_path / "c")
    assert logits(petune.load(base("bert-par_bn"), tmp_path / "c")) == logits(model)
    assert logits(model) != pytest.approx(FACTS["cases"]["bert-par_bn"]["logits"], abs=1e-3)  # of relu


def test_a_head_that_was_not_trained_is_the_bases_own(tmp_path: Path) -> None:
    """The library writes every head, trained or not, and a language model's with its tied table."""
    place, model = folder_of("bart-par_bn", tmp_path / "there"), base("bart-par_bn")
    write_json(place / "head_config.json", {"model_class": "BartForConditionalGeneration"})
    own = {name: value.clone() for name, value in model.state_dict().items()}
    write_tensors(place / "model_head.safetensors", {name: own[name] for name in FACTS["heads"]["bart"]})
    assert tuning(petune.load(model, place)).also_train == ()


def test_adapters_across_to_an_encoder_that_a_folder_has_not_add_nothing(tmp_path: Path) -> None:
    model = petune.load(base("t5-double_seq_bn"), folder_of("t5-double_seq_bn", tmp_path / "there"))
    across = {name: value for name, value in tuned_state(model).items() if "EncDecAttention" in name}
    assert len(across) == 4
    assert not any(value.any() for name, value in across.items() if "adapter_up" in name)


def test_names_of_the_base_model_alone_are_found(tmp_path: Path) -> None:
    """A folder saved from a model without a head."""
    case = "bert-double_seq_bn"
    place = folder_of(case, tmp_path / "there")
    made = read_tensors(place / "adapter.safetensors")
    write_tensors(place / "adapter.safetensors", {name.removeprefix("bert."): made[name] for name in made})
    assert logits(petune.load(base(case), place)) == pytest.approx(FACTS["cases"][case]["logits"], abs=2e-6)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"architecture": "lora", "r": 8}, "architecture is 'lora'"),
        ({"ln_before": True}, "ln_before = True is not supported"),
        ({"phm_layer": True}, "phm_layer = True is not supported"),
        ({"inv_adapter": "nice"}, "inv_adapter = 'nice' is not supported"),
        ({"leave_out": [0]}, r"leave_out = \[0\] is not supported"),
        ({"scaling": "learned"}, "scaling"),
        ({"non_linearity": "prelu"}, "non_linearity"),
        ({"reduction_factor": {"default": 2}}, "reduction_factor"),
        ({"reduction_factor": 1.5}, "which no whole number does"),
        ({"mh_adapter": True}, "is no kind of adapter petune has"),
        ({"something_new": 3}, "something_new = 3 is unknown"),
    ],
)
def test_what_petune_does_not_compute_is_refused_by_name(
    changes: dict[str, Any], match: str, tmp_path: Path
) -> None:
    place = folder_of("bert-seq_bn", tmp_path / "there", **changes)
    with pytest.raises(FileError, match=match):
        petune.load(base("bert-seq_bn"), place)


def test_pickles_and_missing_tensors_are_refused(tmp_path: Path) -> None:
    place = folder_of("bert-seq_bn", tmp_path / "there")
    made = read_tensors(place / "adapter.safetensors")
    first = next(iter(made))
    write_tensors(place / "adapter.safetensors", {name: made[name] for name in made if name != first})
    with pytest.raises(FileError, match="1 missing, 0 unexpected"):
        petune.load(base("bert-seq_bn"), place)
    (place / "adapter.safetensors").rename(place / "pytorch_adapter.bin")
    with pytest.raises(FileError, match="a pickle, which can run code") as refused:
        petune.load(base("bert-seq_bn"), place)
    assert "use_safetensors=True" in str(refused.value)


def test_what_the_layout_has_no_place_for_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no layout for qwen3"):
        write_adapters(petune.wrap(tiny("qwen3-causal"), "adapter"), tmp_path / "a")
    with pytest.raises(UsageError, match="for bottleneck adapters, not lora"):
        write_adapters(petune.wrap(tiny("bert-classify"), "lora"), tmp_path / "a")
    model = petune.wrap(tiny("bert-classify"), "adapter", also_train=["pooler", "classifier"])
    with pytest.raises(UsageError, match="no place for what trains inside the base"):
        write_adapters(model, tmp_path / "a")


@pytest.mark.parametrize("kind", ["houlsby", "pfeiffer"])
@pytest.mark.parametrize("name", ["mbart-seq2seq", "mistral-causal"])
def test_kin_of_these_models_go_round(name: str, kind: str, tmp_path: Path) -> None:
    model = petune.wrap(tiny(name), "adapter", kind=kind, reduction=4)
    stir(model)
    expected = model(**batch(name)).logits
    again = petune.load(tiny(name), write_adapters(model, tmp_path / "here"))
    assert torch.equal(again(**batch(name)).logits, expected)


def test_every_model_of_the_layout_has_a_table() -> None:
    assert PLACES.keys() <= petune.models.FAMILIES.keys()
