"""The fingerprint of a base stays the same whatever wraps it, and tells another base apart."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from petune.errors import FileError, UsageError
from petune.methods import merged_weights, tuned_parameters, tuning, wrap
from petune.methods.trainable import widen
from petune.saving.fingerprint import base_tensors, compare, fingerprint, full_hash
from tests.tiny_models import METHODS, MODELS, bert, llama, stir, tuned


@pytest.mark.crossed(1)
@pytest.mark.parametrize("method", [name for name in METHODS if name != "full"])
@pytest.mark.parametrize("name", MODELS)
def test_wrapping_and_training_leave_it_as_it_was(name: str, method: str) -> None:
    model = tuned(MODELS[name], method)
    plain, heads = MODELS[name](), tuning(model).also_train
    saved = json.loads(json.dumps(fingerprint(model)))
    assert set(saved["tensors"]) == set(base_tensors(plain, heads)) <= set(plain.state_dict())
    assert {
        key: row for key, row in fingerprint(plain)["tensors"].items() if key in saved["tensors"]
    } == saved["tensors"]
    compare(saved, plain, "petune.json", heads)
    assert full_hash(model) == full_hash(plain, heads)
    with pytest.raises(FileError, match="another base model"):
        compare(saved, MODELS[name](1), "petune.json", heads)


def test_norms_widened_for_their_biases_are_those_of_the_base() -> None:
    plain, model = (bert().bfloat16() for _ in range(2))
    wrap(model, "lora", r=2, bias="all")
    widen(model, tuned_parameters(model).values())
    stir(model)
    saved, heads = json.loads(json.dumps(fingerprint(model))), tuning(model).also_train
    assert {name: fingerprint(plain)["tensors"][name] for name in saved["tensors"]} == saved["tensors"]
    assert full_hash(model) == full_hash(plain, heads)
    for name, row in saved["tensors"].items():  # as older versions wrote it
        row[0] = "float32" if "LayerNorm.weight" in name else row[0]
    compare(saved, bert(), "petune.json", heads)  # in another dtype
    wrong = bert()
    with torch.no_grad():
        wrong.bert.embeddings.LayerNorm.weight *= 1.02
    with pytest.raises(FileError, match=r"LayerNorm\.weight  holds other values"):
        compare(saved, wrong, "petune.json", heads)


def test_a_fully_tuned_model_keeps_the_build_alone() -> None:
    saved = fingerprint(tuned(bert, "full"))
    assert all(row[2] is None for row in saved["tensors"].values())
    compare(saved, bert(seed=1), "petune.json")
    with pytest.raises(FileError, match=r"classifier\.weight  has another shape"):
        compare(saved, bert(labels=7), "petune.json")
    with pytest.raises(UsageError, match="no untouched base"):
        full_hash(tuned(bert, "full"))


def test_rounding_is_no_difference_but_a_changed_value_is() -> None:
    saved = fingerprint(llama())
    for dtype in (torch.bfloat16, torch.float16):
        compare(saved, llama().to(dtype), "petune.json")
        compare(fingerprint(llama().to(dtype)), llama(), "petune.json")
    model = llama()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight *= 1.0001
    with pytest.raises(
        FileError, match=r"1 of \d+ tensors differ[\s\S]*layers\.1\.mlp\.up_proj\.weight  holds other values"
    ):
        compare(saved, model, "petune.json")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight *= 1.02
    with pytest.raises(FileError, match="holds other values"):
        compare(saved, model.bfloat16(), "petune.json")


def test_a_resized_vocabulary_says_what_to_do() -> None:
    model = llama()
    model.resize_token_embeddings(70, mean_resizing=False)
    with pytest.raises(FileError, match=r"resize_token_embeddings\(64\)"):
        compare(fingerprint(llama()), model, "petune.json")


def test_merged_weights_are_not_the_base() -> None:
    model = tuned(llama)
    for look in (fingerprint, full_hash):
        with merged_weights(model), pytest.raises(UsageError, match="merged_weights"):
            look(model)


def test_values_json_has_no_number_for_are_kept() -> None:
    model = stir(tuned(llama))
    with torch.no_grad():
        model.model.norm.weight.fill_(float("inf"))
    saved: Any = json.loads(json.dumps(fingerprint(model), allow_nan=False))
    assert saved["tensors"]["model.norm.weight"][2] == ["inf"] * 4
    plain = llama()
    with torch.no_grad():
        plain.model.norm.weight.fill_(float("inf"))
    compare(saved, plain, "petune.json")


def test_the_hash_sees_every_bit() -> None:
    model = llama()
    before = full_hash(model)
    model.model.layers[0].mlp.up_proj.weight.data.view(torch.uint8)[5, 77] ^= 1
    assert full_hash(model) != before


def test_a_fingerprint_of_another_version_is_refused() -> None:
    with pytest.raises(FileError, match="another version"):
        compare({"version": 2, "tensors": {}}, llama(), "petune.json")


def test_a_tensor_without_values_is_named() -> None:
    model = llama()
    model.model.layers[1].mlp.down_proj.to("meta")
    with pytest.raises(UsageError, match=r"layers\.1\.mlp\.down_proj\.weight  this tensor has no values"):
        fingerprint(model)
