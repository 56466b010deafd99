"""Checkpoints that transformers and bitsandbytes have saved in four bits: read as the very bits that they
are, whole and in slices, made dense where nobody asks for them, and refused in any other form."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from bitsandbytes import functional
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from petune.errors import FileError
from petune.methods import tune, tuned_parameters
from petune.methods.configs import make_config
from petune.models import family_of
from petune.models.contents import TensorPart, attach, contents_of
from petune.models.frozen_weight import QuantisedWeight, dense_of, quantised_in
from petune.models.loading import load_model
from petune.models.source import resolve_model
from petune.parallel import ALONE, alone, parallelize
from tests.methods.zoo import batch, tiny


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, nn.Module]:
    """A folder, and transformers' own model of it."""
    folder = tmp_path_factory.mktemp("saved")
    tiny("llama-causal", intermediate_size=128).save_pretrained(folder / "dense")
    settings: Any = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    config = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32, **settings
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "dense", quantization_config=config, device_map="cpu", dtype=torch.float32
    )
    model.save_pretrained(folder / "four")
    return folder / "four", model


def read(folder: Path, base_dtype: str | None) -> nn.Module:
    found = load_model(resolve_model(str(folder), folder), "causal", None, torch.float32, seed=3)
    tune(found.model, make_config("lora", {"r": 4}))
    assert found.contents is not None
    attach(found.model, found.contents)
    return parallelize(
        found.model,
        family_of(found.model),
        ALONE,
        alone(torch.device("cpu")),
        tuned_parameters,
        base_dtype=base_dtype,
    ).modules[0]


@pytest.mark.parametrize("base_dtype", ["nf4", None])
def test_every_value_is_that_of_bitsandbytes(
    base_dtype: str | None, saved: tuple[Path, nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    folder, theirs = saved
    with caplog.at_level("INFO", logger="petune"):
        model = read(folder, base_dtype)
    assert "14 weights are held in four bits there" in caplog.text
    tensors, own = load_file(folder / "model.safetensors"), dict(model.named_parameters())
    for name in (key.partition(".quant_state")[0] for key in tensors if "quant_state" in key):
        parts = {key: value for key, value in tensors.items() if key.startswith(f"{name}.")}
        state = functional.QuantState.from_dict(parts, torch.device("cpu"))
        assert torch.equal(dense_of(own[name]), functional.dequantize_4bit(tensors[name], state))
    inputs = {name: value for name, value in batch("llama-causal").items() if name != "labels"}
    with torch.no_grad():
        found, expected = (one(**inputs, use_cache=False).logits for one in (model.eval(), theirs.eval()))
    assert float((found - expected).norm()) < 0.02 * float(expected.norm())  # their products may be in bf16
    assert not hasattr(model.config, "quantization_config")


def test_weights_in_four_bits_are_the_bits_of_the_files(saved: tuple[Path, nn.Module]) -> None:
    folder, _ = saved
    tensors, model = load_file(folder / "model.safetensors"), read(folder, "nf4")
    assert len(list(quantised_in(model))) == 14
    for name, value in model.named_parameters():
        if isinstance(value, QuantisedWeight):
            q, scales, nested, _ = value.form.tensors
            held = tensors[name], tensors[f"{name}.absmax"], tensors[f"{name}.nested_absmax"]
            assert torch.equal(q.view(-1, 1), held[0])
            assert torch.equal(scales.view(-1), held[1]) and torch.equal(nested, held[2])


def test_it_has_the_fingerprint_of_its_values_and_any_slice_of_them(saved: tuple[Path, nn.Module]) -> None:
    folder, _ = saved
    found = load_model(resolve_model(str(folder), folder), "causal", None, torch.float32)
    assert found.contents is not None
    attach(found.model, found.contents)
    contents = contents_of(found.model)
    assert contents is not None and contents.fingerprint() == contents.fingerprint()
    name = "model.layers.0.mlp.down_proj.weight"
    part = torch.empty(20, 50)
    assert contents.fill([TensorPart(name, part, (8, 33))]) == []
    own = dict(read(folder, "nf4").named_parameters())[name]
    assert torch.equal(part, dense_of(own)[8:28, 33:83])


def test_experts_that_files_have_one_by_one_in_four_bits_are_read_each(
    saved: tuple[Path, nn.Module], tmp_path: Path
) -> None:
    """As files of older transformers had them, whose experts were linears."""
    model = tiny("qwen3moe-causal", hidden_size=64, moe_intermediate_size=64, intermediate_size=64)
    model.save_pretrained(tmp_path)
    path, values = tmp_path / "model.safetensors", dict[str, Tensor]()
    tensors = load_file(path)
    for name in [name for name in tensors if ".experts." in name]:
        bits, state = functional.quantize_4bit(
            tensors.pop(name), blocksize=64, compress_statistics=True, quant_type="nf4"
        )
        values[name] = functional.dequantize_4bit(bits, state)
        tensors |= {f"{name}.{key}": value for key, value in state.as_dict(packed=True).items()} | {
            name: bits
        }
    save_file(tensors, path, {"format": "pt"})
    for base_dtype in (None, "int8"):
        own = dict(read(tmp_path, base_dtype).named_parameters())["model.layers.1.mlp.experts.gate_up_proj"]
        for number, expert in enumerate(dense_of(own)):
            rows = [
                values[f"model.layers.1.mlp.experts.{number}.{role}_proj.weight"] for role in ("gate", "up")
            ]
            off = float((expert - torch.cat(rows)).abs().max())
            assert off == 0 if base_dtype is None else off < 0.01 * float(expert.abs().max())


def other_state(tensors: dict[str, Tensor], **changes: Any) -> None:
    """Change what a file says of one of its weights."""
    (name, *_) = sorted(key for key in tensors if "quant_state" in key)
    fields = json.loads(bytes(tensors[name].tolist())) | changes
    tensors[name] = torch.tensor(list(json.dumps(fields).encode()), dtype=torch.uint8)


DAMAGE: dict[str, Callable[[dict[str, Tensor]], Any]] = {
    "fp4": lambda tensors: other_state(tensors, quant_type="fp4"),
    "blocks of 128": lambda tensors: other_state(tensors, blocksize=128),
    "another shape": lambda tensors: other_state(tensors, shape=[64, 64]),
    "no shape": lambda tensors: other_state(tensors, shape=None),
    "a mean that is none": lambda tensors: other_state(tensors, nested_offset="x"),
    "no JSON": lambda tensors: tensors.update(
        {key: tensors[key][1:] for key in tensors if "quant_state" in key}
    ),
    "other levels": lambda tensors: [tensors[key].mul_(2) for key in tensors if key.endswith(".quant_map")],
    "scales of float32": lambda tensors: tensors.update(
        {key: tensors[key].float() for key in tensors if key.endswith(".absmax")}
    ),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_any_other_form_is_refused(how: str, saved: tuple[Path, nn.Module], tmp_path: Path) -> None:
    folder, _ = saved
    tensors = load_file(folder / "model.safetensors")
    DAMAGE[how](tensors)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    with pytest.raises(FileError, match=r"form that petune does not read(.|\n)*base_dtype: nf4"):
        load_model(resolve_model(str(tmp_path), tmp_path), "causal", None, torch.float32)


@pytest.mark.parametrize(
    "change",
    [
        {"bnb_4bit_quant_type": "fp4"},
        {"bnb_4bit_use_double_quant": False},
        {"bnb_4bit_quant_storage": "bfloat16"},
    ],
    ids=str,
)
def test_a_config_of_any_other_form_is_refused(
    change: dict[str, Any], saved: tuple[Path, nn.Module], tmp_path: Path
) -> None:
    config = json.loads((saved[0] / "config.json").read_text())
    config["quantization_config"] |= change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(FileError, match="quantised, which petune cannot tune"):
        load_model(resolve_model(str(tmp_path), tmp_path), "causal", None, torch.float32)
