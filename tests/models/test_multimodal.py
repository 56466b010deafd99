"""Checkpoints of several modalities: their text model is found, read by itself and computes what it does
inside; what petune cannot take apart is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import InternVLConfig, Mistral3Config, Qwen2_5_VLConfig

import petune
from petune.errors import FileError, UsageError
from petune.estimate.forecast import sketch
from petune.methods import count_parameters
from petune.models import family_of
from petune.models.loading import load_model, outline, read_config
from petune.models.multimodal import WHOLES, text_model, whole_of
from petune.models.source import ModelSource, resolve_model
from petune.recipe import load_recipe
from tests.methods.zoo import tiny
from tests.small_runs import tokenizer
from tests.wholes import EACH, KINDS, class_of, config_of, logits, text, whole, write_whole

pytestmark = pytest.mark.usefixtures("no_network")


def edit(folder: Path, change: Any, file: str = "config.json") -> None:
    fields = json.loads((folder / file).read_text())
    change(fields)
    (folder / file).write_text(json.dumps(fields))


def rename(folder: Path, *names: tuple[str, str]) -> None:
    tensors = load_file(folder / "model.safetensors")
    for old, new in names:
        tensors = {key.replace(old, new, 1) if key.startswith(old) else key: tensors[key] for key in tensors}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def test_every_whole_is_tried() -> None:
    assert set(KINDS) == set(WHOLES)


@pytest.mark.parametrize("kind", EACH)
def test_a_text_model_computes_by_itself_what_it_does_inside(kind: str, tmp_path: Path) -> None:
    write_whole(tmp_path, kind)
    loaded = load_model(resolve_model(str(tmp_path), tmp_path), "causal", None, torch.float32)
    assert "vis" in loaded.note and f"the text model of a {kind}" in loaded.note
    model = loaded.read()
    assert family_of(model) is not None
    assert torch.equal(logits(model), logits(whole(tmp_path, kind)))


def test_files_may_have_the_names_of_the_class(tmp_path: Path) -> None:
    write_whole(tmp_path, "llava")
    expected = logits(text(tmp_path))
    rename(tmp_path, ("language_model.lm_head", "lm_head"), ("language_model.model", "model.language_model"))
    assert torch.equal(logits(text(tmp_path)), expected)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["language_model.model.norm.weight"] = tensors["model.language_model.norm.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(FileError, match="under two names"):
        text(tmp_path)


@pytest.mark.parametrize("own", [False, True], ids=["tied", "apart"])
def test_a_head_of_which_the_whole_says_nothing_is_tied_as_its_files_are(own: bool, tmp_path: Path) -> None:
    """The classes of Mistral 3 and of its text model have other defaults."""
    write_whole(tmp_path, "mistral3")
    edit(tmp_path, lambda fields: fields.pop("tie_word_embeddings"))
    if own:
        tensors = load_file(tmp_path / "model.safetensors")
        tensors["language_model.lm_head.weight"] = tensors["language_model.model.embed_tokens.weight"] + 1
        save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    model: Any = text(tmp_path)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is not own
    assert torch.equal(logits(model), logits(whole(tmp_path, "mistral3")))
    recipe = load_recipe(None, {"model": str(tmp_path), "data": "demo:docstrings", "method": "lora"})
    assert count_parameters(sketch(recipe).model)[1] == count_parameters(petune.wrap(model, "lora"))[1]


def test_the_config_of_random_weights_may_be_one_of_several_modalities(tmp_path: Path) -> None:
    config_of("gemma3").save_pretrained(tmp_path)
    source = resolve_model(f"config:{tmp_path / 'config.json'}", tmp_path)
    model = load_model(source, "causal", None, torch.float32, read_config(source)).model
    assert type(model).__name__ == "Gemma3ForCausalLM" and whole_of(model) is None


# ---------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("config", "what", "remedy"),
    [
        (
            lambda: InternVLConfig(text_config=tiny("llama-causal").config),
            "type internvl holds more than the text model",
            "save its text model by itself, as type llama",
        ),
        (lambda: Qwen2_5_VLConfig(), "type qwen2_5_vl holds a text model for which", "petune.wrap takes"),
        (
            lambda: Mistral3Config(text_config={"model_type": "gemma"}),
            "mistral3 holds a text model",
            "choose",
        ),
    ],
    ids=["unknown whole", "unknown text model", "unknown text model of a known whole"],
)
def test_what_is_not_taken_apart_is_refused_with_what_to_do(config: Any, what: str, remedy: str) -> None:
    with pytest.raises(UsageError, match=rf"{what}(.|\n)*{remedy}"):
        outline(ModelSource("config:g.json", "config", "g.json", None, ""), config(), "causal", torch.float32)


def test_a_head_that_the_whole_has_no_place_for_is_refused(tmp_path: Path) -> None:
    source = resolve_model(str(write_whole(tmp_path, "gemma3")), tmp_path)
    with pytest.raises(UsageError, match=r"no head for classify(.|\n)*as type gemma3_text"):
        load_model(source, "classify", ["a", "b"], torch.float32)


# ---------------------------------------------------------------- models in memory


@pytest.mark.parametrize("kind", ["gemma3", pytest.param("qwen3_5", marks=pytest.mark.long)])
def test_a_text_model_shares_the_modules_of_the_model_in_memory(kind: str, tmp_path: Path) -> None:
    gemma = class_of(kind)(config_of(kind)).eval()
    before = logits(gemma)
    model = petune.wrap(text_model(gemma), "lora", r=2, kernels="off")
    assert torch.equal(logits(model), before)
    for name, value in model.named_parameters():
        if name.endswith("lora_B"):
            torch.nn.init.normal_(value, generator=torch.Generator().manual_seed(0))
    assert torch.equal(logits(gemma), logits(model)) and not torch.equal(logits(model), before)
    assert not any("vis" in name and "lora" in name for name, _ in gemma.named_parameters())
    petune.save(model, tmp_path / "tuned")
    other = class_of(kind)(gemma.config).eval()
    with pytest.raises(FileError, match=r"(?s)of another kind of model.*petune\.load\(petune\.text_model"):
        petune.load(other, tmp_path / "tuned")
    expected = logits(model)
    petune.merge(model)
    assert torch.allclose(logits(gemma), expected, atol=1e-5)


def test_a_model_of_several_modalities_in_memory_is_refused_with_what_to_do(tmp_path: Path) -> None:
    gemma = class_of("gemma3")(config_of("gemma3"))
    for method in ("lora", "side"):
        with pytest.raises(UsageError, match=r"petune\.wrap\(petune\.text_model\(model\)"):
            petune.wrap(gemma, method)
    with pytest.raises(UsageError, match=r"model=petune\.text_model\(model\)"):
        petune.train(model=gemma, data=[{"text": "red sun"}] * 4, tokenizer=tokenizer())
    with pytest.raises(UsageError, match="no text model to take"):
        text_model(tiny("llama-causal"))
    named = petune.wrap(gemma, "lora", targets=["q_proj"], kernels="off")
    assert any("vision_tower" in name and "lora" in name for name, _ in named.named_parameters())
