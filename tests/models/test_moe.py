"""Mixtures of Llamas: read as Mixtral where they have its class, refused by name where they have one of their
own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import MixtralForCausalLM

from petune.errors import FileError
from petune.models import FAMILIES
from petune.models.loading import load_model, read_config
from petune.models.source import ModelSource, resolve_model
from tests.methods.zoo import batch, tiny


def write_mixture_of_llamas(folder: Path) -> None:
    """In Mixtral's class, with the positions of a Llama and without windows."""
    positions = {"rope_type": "default", "rope_theta": 500000.0}
    tiny("mixtral-causal", rope_parameters=positions, sliding_window=None).save_pretrained(folder)


def test_a_mixture_of_llamas_in_mixtral_s_class_is_read_as_mixtral(tmp_path: Path) -> None:
    write_mixture_of_llamas(tmp_path)
    found = load_model(resolve_model(str(tmp_path), tmp_path), "causal", None, torch.float32)
    assert found.family is FAMILIES["mixtral"]
    other = MixtralForCausalLM.from_pretrained(tmp_path).eval()
    inputs = batch("mixtral-causal")
    assert torch.equal(found.read()(**inputs).logits, other(**inputs).logits)


def test_one_with_tensors_of_its_own_is_refused_whatever_its_class_is_called(tmp_path: Path) -> None:
    """transformers would leave them out."""
    write_mixture_of_llamas(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.block_sparse_moe.mlp_residual.w1.weight"
    save_file(tensors | {name: torch.zeros(24, 32)}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(FileError, match=r"mlp_residual(.|\n)*is in the checkpoint but not in the model"):
        load_model(resolve_model(str(tmp_path), tmp_path), "causal", None, torch.float32)


@pytest.mark.parametrize("kind", ["folder", "config"])
def test_llama_moe_is_refused_with_what_is_read_as_mixtral(kind: str, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    named = {"model_type": "llama_moe", "architectures": ["LlamaMoEForCausalLM"]}
    config.write_text(json.dumps(named))
    source = (
        ModelSource(f"config:{config}", "config", str(config), None, "")
        if kind == "config"
        else resolve_model(str(tmp_path), tmp_path)
    )
    said = r"class of its own(.|\n)*Mixtral's class are read as Mixtral(.|\n)*LlamaMoEForCausalLM"
    with pytest.raises(FileError, match=said):
        read_config(source)
