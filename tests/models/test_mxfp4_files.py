"""Checkpoints of gpt-oss as it is published, experts in MXFP4: read as transformers makes them dense, and
refused in words where they are not whole."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from petune.errors import FileError
from petune.methods import tune, tuned_parameters
from petune.methods.configs import make_config
from petune.models import family_of
from petune.models.contents import TensorPart, attach, contents_of
from petune.models.frozen_weight import EXPERT_FORMS, dense_of
from petune.models.loading import Loaded, load_model
from petune.models.source import resolve_model
from petune.parallel import ALONE, alone, parallelize
from tests.methods.zoo import tiny

UP = "model.layers.1.mlp.experts.gate_up_proj"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny model whose experts are bytes, with every number and scales far apart."""
    tiny("gptoss-causal", hidden_size=64, intermediate_size=64).save_pretrained(tmp_path)
    path, generator = tmp_path / "model.safetensors", torch.Generator().manual_seed(0)
    tensors = load_file(path)
    for name in [name for name in tensors if name.endswith("_proj") and ".experts." in name]:
        experts, inputs, outputs = tensors.pop(name).shape
        sizes = (experts, outputs, inputs // 32)
        tensors[f"{name}_blocks"] = torch.randint(256, (*sizes, 16), dtype=torch.uint8, generator=generator)
        tensors[f"{name}_scales"] = torch.randint(100, 130, sizes, dtype=torch.uint8, generator=generator)
    save_file(tensors, path, {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def loaded(folder: Path, dtype: torch.dtype = torch.bfloat16) -> Loaded:
    return load_model(resolve_model(str(folder), folder), "causal", None, dtype, seed=3)


def theirs(folder: Path, name: str, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    tensors = load_file(folder / "model.safetensors")
    found: Tensor = convert_moe_packed_tensors(
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"], dtype=dtype
    )
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_every_value_is_that_of_transformers(folder: Path, dtype: torch.dtype) -> None:
    model = loaded(folder, dtype).read()
    for name, value in model.named_parameters():
        if name.endswith(("gate_up_proj", "down_proj")):
            assert value.dtype == dtype and torch.equal(value, theirs(folder, name, dtype)), name


def test_any_box_of_them_is_read_and_a_model_has_a_fingerprint(folder: Path) -> None:
    found = loaded(folder)
    assert found.contents is not None
    attach(found.model, found.contents)
    contents, out = contents_of(found.model), torch.empty(2, 21, 40, dtype=torch.bfloat16)
    assert contents is not None and contents.fill([TensorPart(UP, out, (1, 30, 17))]) == []
    assert torch.equal(out, theirs(folder, UP)[1:3, 30:51, 17:57])
    assert contents.fingerprint() == contents.fingerprint()


def test_they_go_into_the_form_that_is_asked_for(folder: Path) -> None:
    found = loaded(folder)
    tune(found.model, make_config("lora", {"r": 2, "targets": ["q"]}))
    assert found.contents is not None
    attach(found.model, found.contents)
    here = alone(torch.device("cpu"))
    model = parallelize(
        found.model, family_of(found.model), ALONE, here, tuned_parameters, base_dtype="nf4"
    ).modules[0]
    expected = EXPERT_FORMS["nf4"].of(theirs(folder, UP)).dense()
    assert torch.equal(dense_of(model.get_parameter(UP)), expected)


FAULTS: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "no scales": (lambda held: held.pop(f"{UP}_scales"), "lack their scales"),
    "no blocks": (lambda held: held.pop(f"{UP}_blocks"), "lack their blocks"),
    "other scales": (
        lambda held: held.update({f"{UP}_scales": held[f"{UP}_scales"][:, 1:].clone()}),
        r"of other shapes(.|\n)*found uint8 \[4, 128, 2, 16\] and uint8 \[4, 127, 2\]",
    ),
    "other bytes": (
        lambda held: held.update({f"{UP}_blocks": held[f"{UP}_blocks"].to(torch.int16)}),
        r"of other shapes(.|\n)*found int16",
    ),
    "other experts": (
        lambda held: held.update({key: held[key][:3].clone() for key in (f"{UP}_blocks", f"{UP}_scales")}),
        "gate_up_proj",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_experts_that_are_not_whole_are_refused_in_words(fault: str, folder: Path) -> None:
    path, (change, words) = folder / "model.safetensors", FAULTS[fault]
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(FileError, match=words):
        loaded(folder)
