"""What a tuned text model leaves of a checkpoint of several modalities: files that peft and servers read on
the whole, and the whole again, merged."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

import petune
from petune.errors import FileError, UsageError
from petune.files.manifest import MANIFEST, RECORD
from petune.files.safetensors import read_tensors
from petune.models.loading import load_model
from petune.models.multimodal import text_model
from petune.models.source import resolve_model
from petune.saving.combining import combine
from petune.saving.export import probe, save_merged, write_adapters
from petune.saving.peft import TENSORS
from petune.saving.serve import write_for
from tests.tiny_models import stir
from tests.wholes import EACH, logits, some, text, whole, write_whole

pytestmark = pytest.mark.usefixtures("no_network")

WIDE = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16}  # for weights in four bits
INSIDE = "base_model.model.model.language_model."


def tuned(folder: Path, method: str = "lora", **settings: Any) -> Any:
    return stir(petune.wrap(text(folder), method, **{"kernels": "off", **settings}))


def near(one: Any, other: Any) -> bool:
    return torch.allclose(one if isinstance(one, torch.Tensor) else logits(one), logits(other), atol=2e-6)


# ---------------------------------------------------------------- peft's files


@pytest.mark.parametrize("kind", EACH)
def test_peft_reads_on_the_whole_what_its_text_model_was_tuned_with(kind: str, tmp_path: Path) -> None:
    """Merged, the whole is written again: it computes what was trained, and the rest is bit by bit as it
    was."""
    base = write_whole(tmp_path / "base", kind)
    model = tuned(base, r=4)
    expected = logits(model)
    assert not torch.allclose(expected, logits(text(base)), atol=1e-2)
    folder = petune.save(model, tmp_path / "tuned")
    assert all(key.startswith(INSIDE) for key in read_tensors(folder / TENSORS))
    by_peft: Any = PeftModel.from_pretrained(whole(base, kind), folder)
    assert near(expected, by_peft)
    assert not any("vis" in name and "lora" in name for name, _ in by_peft.named_modules())
    assert torch.equal(logits(petune.load(text(base), folder)), expected)

    report = save_merged(model, tmp_path / "merged", batch=probe(model))
    assert report.logits is not None and report.logits < 1e-5
    assert near(expected, whole(tmp_path / "merged", kind))
    before, after = (load_file(place / "model.safetensors") for place in (base, tmp_path / "merged"))
    assert before.keys() == after.keys()
    others = [key for key in before if "language_model" not in key and key != "lm_head.weight"]
    assert others and all(torch.equal(before[key], after[key]) for key in others)
    for file in ("config.json", "preprocessor_config.json", "generation_config.json"):
        assert json.loads((tmp_path / "merged" / file).read_text()) == json.loads((base / file).read_text())


WAYS: dict[str, dict[str, Any]] = {
    "dora": {"method": "dora", "r": 2},
    "ia3": {"method": "ia3"},
    "miss": {"method": "miss", "r": 4},
    "pissa": {"r": 2, "init": "pissa"},
    "one block": {"r": 2, "layers": [1], "rank_pattern": {"q": 4}, "targets": ["q", "down"]},
    "head": {"r": 2, "targets": ["q_proj", "lm_head"]},
    "whole modules": {"r": 2, "targets": ["v"], "also_train": ["model.norm"]},
    "rows of tokens": {"r": 2, "targets": ["v"], "token_rows": [5, 7]},
}


@pytest.mark.parametrize("way", some(WAYS, "ia3", "one block", "head"))
def test_whatever_peft_can_say_it_says_of_the_whole(way: str, tmp_path: Path) -> None:
    base = write_whole(tmp_path / "base", "llava")
    model = tuned(base, **WAYS[way])
    folder = petune.save(model, tmp_path / "tuned")
    assert near(model, PeftModel.from_pretrained(whole(base, "llava"), folder))
    assert near(model, petune.load(text(base), folder))


TRAINED: dict[str, dict[str, Any]] = {
    "pattern": {
        "target_modules": r".*language_model.*\.(q|down)_proj",
        "alpha_pattern": {r"language_model.*q_proj": 32},
    },
    "names": {"target_modules": ["model.language_model.layers.1.self_attn.o_proj", "lm_head"]},
    "layers": {
        "target_modules": ["language_model.layers.1.mlp.up_proj", "k_proj"],
        "layers_to_transform": [1],
    },
    "all but": {"target_modules": ["q_proj", "k_proj"], "exclude_modules": r".*vision.*|model\.layers.*"},
    "modules": {"target_modules": ["up_proj"], "modules_to_save": ["model.language_model.norm"]},
}


@pytest.mark.parametrize("how", some(TRAINED, "pattern", "layers", "all but"))
def test_what_peft_trained_on_the_whole_tunes_its_text_model(how: str, tmp_path: Path) -> None:
    base = write_whole(tmp_path / "base", "llava")
    made: Any = get_peft_model(whole(base, "llava"), LoraConfig(r=2, **TRAINED[how]))
    with torch.no_grad():
        for name, value in made.named_parameters():
            if value.requires_grad:
                value += 0.1 * torch.randn(value.shape, generator=torch.Generator().manual_seed(len(name)))
    made.save_pretrained(tmp_path / "theirs")
    assert near(made, petune.load(text(base), tmp_path / "theirs"))


def test_what_a_compiled_whole_saved_tunes_its_text_model(tmp_path: Path) -> None:
    base = write_whole(tmp_path / "base", "llava")
    model = tuned(base, r=2)
    folder, expected = petune.save(model, tmp_path / "tuned"), logits(model)
    for file in (RECORD, MANIFEST):
        (folder / file).unlink()
    outer, wrapper = "base_model.model.", "module._orig_mod."
    tensors = {key.removeprefix(outer): value for key, value in load_file(folder / TENSORS).items()}
    for style in (wrapper + outer, outer + wrapper, wrapper):
        save_file({style + key: value for key, value in tensors.items()}, folder / TENSORS)
        assert torch.equal(logits(petune.load(text(base), folder)), expected)
    again = shutil.copytree(folder, tmp_path / "again")
    assert near(expected, combine(text(base), {folder: 0.5, again: 0.5}))


def test_adapters_of_a_whole_are_combined_on_its_text_model(tmp_path: Path) -> None:
    base = write_whole(tmp_path / "base", "llava")
    model = tuned(base, r=2)
    folder = petune.save(model, tmp_path / "tuned")
    other = petune.save(tuned(base, r=2, targets=["q"]), tmp_path / "other")
    found = combine(text(base), {folder: 1.0, other: 0.0})
    assert near(model, found)


def test_what_tunes_the_vision_tower_is_refused(tmp_path: Path) -> None:
    base = write_whole(tmp_path / "base", "llava")
    get_peft_model(whole(base, "llava"), LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(
        tmp_path / "theirs"
    )
    with pytest.raises(FileError, match=r"vision_tower.*(.|\n)*belongs to nothing in this model"):
        petune.load(text(base), tmp_path / "theirs")


def test_a_server_is_written_the_names_of_the_whole_wherever_it_lies(tmp_path: Path) -> None:
    """A GGUF file has numbers of blocks, which are the text model's in both."""
    model = tuned(write_whole(tmp_path / "base", "gemma3"), r=4)
    write_for("vllm", model, tmp_path / "served", base_name="google/gemma-3-4b-it")
    assert all(key.startswith(INSIDE) for key in read_tensors(tmp_path / "served" / TENSORS))
    pytest.importorskip("gguf")
    written = write_for("llamacpp", model, tmp_path / "gguf", base_name=str(tmp_path / "base"))
    assert written.logits < 1e-4
    with pytest.raises(UsageError, match=r"Ollama is not known to load LoRA for the text model of a gemma3"):
        write_for("ollama", model, tmp_path / "ollama")


# ---------------------------------------------------------------- the whole again


def test_a_whole_in_several_files_is_written_in_the_same_files(tmp_path: Path) -> None:
    base = write_whole(tmp_path / "base", "qwen3_5_moe", shard="40KB")
    files = sorted(path.name for path in base.glob("*.safetensors"))
    assert len(files) > 1
    model = tuned(base, r=4)
    save_merged(model, tmp_path / "merged", dtype=torch.bfloat16)
    assert sorted(path.name for path in (tmp_path / "merged").glob("*.safetensors")) == files
    for name in files:
        before, after = (load_file(place / name) for place in (base, tmp_path / "merged"))
        assert before.keys() == after.keys()
        assert {after[key].dtype for key in after if "language_model" in key} <= {torch.bfloat16}
        assert all(torch.equal(before[key], after[key]) for key in before if "visual" in key)
    fields = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert fields["dtype"] == "bfloat16"
    assert torch.allclose(logits(whole(tmp_path / "merged", "qwen3_5_moe")).float(), logits(model), atol=0.1)


@pytest.mark.parametrize("kind", some(("mistral3", "qwen3_5_moe"), "qwen3_5_moe"))
def test_a_full_tuning_is_a_text_model_and_merged_the_whole(kind: str, tmp_path: Path) -> None:
    base = write_whole(tmp_path / "base", kind)
    model = tuned(base, "full")
    folder = petune.save(model, tmp_path / "tuned")
    expected = logits(model)
    alone = type(model).from_pretrained(folder)
    assert torch.equal(logits(alone), expected)
    save_merged(petune.load(text(base), folder), tmp_path / "merged")
    assert torch.equal(logits(whole(tmp_path / "merged", kind)), expected)


def test_what_cannot_be_written_with_the_whole_is_refused_by_name(tmp_path: Path) -> None:
    gemma, llava = write_whole(tmp_path / "gemma3", "gemma3"), write_whole(tmp_path / "llava", "llava")
    with pytest.raises(UsageError, match=r"parts a head that the config of this gemma3 ties"):
        save_merged(tuned(gemma, r=2, targets=["lm_head"]), tmp_path / "merged")
    wide = text(write_whole(tmp_path / "wide", "llava", **WIDE))
    held = petune.wrap(wide, "lora", base_dtype="nf4", kernels="off")
    with pytest.raises(UsageError, match=r"text model of a llava: files of bitsandbytes"):
        petune.save_base(held, tmp_path / "held")
    with pytest.raises(UsageError, match=r"text model of a llava: AdapterHub"):
        write_adapters(tuned(llava, "adapter", reduction=4), tmp_path / "adapters")
    live = stir(petune.wrap(text_model(whole(llava, "llava")), "lora", r=2, kernels="off"))
    with pytest.raises(UsageError, match=r"part of a llava in memory(.|\n)*save_pretrained of the model"):
        save_merged(live, tmp_path / "merged")


def test_a_whole_in_four_bits_is_tuned_and_not_merged(tmp_path: Path) -> None:
    """Its text model is that of the same files by themselves."""
    base, alone = write_whole(tmp_path / "base", "llava", **WIDE), tmp_path / "alone"
    petune.merge(petune.wrap(text(base), "lora", kernels="off")).save_pretrained(tmp_path / "plain")
    plain: Any = type(text(base)).from_pretrained(tmp_path / "plain")
    petune.save_base(petune.wrap(plain, "lora", base_dtype="nf4", kernels="off"), alone)
    four, rest = load_file(alone / "model.safetensors"), load_file(base / "model.safetensors")
    rest = {key: value for key, value in rest.items() if not key.startswith("language_model.")}
    rest |= {f"language_model.{key}": value for key, value in four.items()}
    save_file(rest, base / "model.safetensors", {"format": "pt"})
    fields = json.loads((base / "config.json").read_text())
    quantised = json.loads((alone / "config.json").read_text())["quantization_config"]
    (base / "config.json").write_text(json.dumps(fields | {"quantization_config": quantised}))
    expected = load_model(resolve_model(str(alone), tmp_path), "causal", None, torch.float32).read()
    assert torch.equal(logits(text(base)), logits(expected))
    with pytest.raises(UsageError, match="the files of this llava hold weights in four bits"):
        save_merged(tuned(base, r=2), tmp_path / "merged")
