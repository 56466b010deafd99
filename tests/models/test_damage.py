"""The base under a tuning: every verb notices a flipped bit in it, and a base that is damaged before training
is refused by name."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

import petune
from petune.errors import FileError
from petune.models.loading import load_model, load_tokenizer
from petune.models.source import model_files, resolve_model
from petune.recipe import load_resolved, sealed_settings
from petune.run.finished import Run, load_run
from petune.saving import tuning_record
from tests.small_runs import run, settings, write_model


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A place with a base `llama` in several shards, a lora run `run` and a full run `full`."""
    place = tmp_path_factory.mktemp("tuned")
    recipe = settings(place, max_steps=1, warmup=0)
    model = transformers.LlamaForCausalLM.from_pretrained(place / "llama")
    (place / "llama" / "model.safetensors").unlink()
    model.save_pretrained(place / "llama", max_shard_size="30KB")
    run(recipe)
    run(settings(place, method="full", out="full", max_steps=1, warmup=0))
    return place


def flipped(path: Path, count: int, seed: int) -> Iterator[None]:
    """Let the file be wrong in one bit, `count` times, then whole again."""
    whole, drawn = path.read_bytes(), random.Random(seed)
    for _ in range(count):
        changed = bytearray(whole)
        changed[drawn.randrange(len(whole))] ^= 1 << drawn.randrange(8)
        path.write_bytes(changed)
        yield
    path.write_bytes(whole)


VERBS: dict[str, Callable[[Run], object]] = {
    "eval": Run.eval,
    "generate": lambda found: found.generate("red sun", max_new_tokens=1),
    "chat": Run.chat,
    "merge": lambda found: found.merge(overwrite=True),
    "export": lambda found: found.export("peft", overwrite=True),
}


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_notices_a_flipped_bit_in_the_weights_of_the_base(verb: str, tuned: Path) -> None:
    for number, path in enumerate(sorted((tuned / "llama").glob("model*.safetensors"))[:2]):
        for _ in flipped(path, 1, number):
            with pytest.raises(FileError, match=rf"{path.name}"):
                VERBS[verb](load_run(tuned / "run"))


@pytest.mark.parametrize("count", [4, pytest.param(100, marks=pytest.mark.long)])
def test_a_flipped_bit_anywhere_in_the_base_is_noticed(count: int, tuned: Path) -> None:
    for path in model_files(str(tuned / "llama")).values():
        for _ in flipped(path, count, count):
            with pytest.raises(FileError):
                _ = load_run(tuned / "run").speaker
    assert load_run(tuned / "run").speaker


def test_petune_load_compares_the_folder_that_the_model_came_from(tuned: Path) -> None:
    path = sorted((tuned / "llama").glob("model*.safetensors"))[-1]
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    base = transformers.LlamaForCausalLM.from_pretrained(tuned / "llama")
    with pytest.raises(FileError, match=rf"the files of the base differ[\s\S]*{path.name}"):
        petune.load(base, tuned / "run" / "tuned")
    path.write_bytes(whole)
    petune.load(base, tuned / "run" / "tuned")


def test_a_full_tuning_needs_its_bases_configs_and_the_weights_only_to_show_the_base(tuned: Path) -> None:
    finished = load_run(tuned / "full")
    weights = sorted((tuned / "llama").glob("model*.safetensors"))[0]
    for _ in flipped(weights, 1, 5):
        assert finished.speaker
        with pytest.raises(FileError, match=weights.name):
            _ = finished.base
    for _ in flipped(tuned / "llama" / "config.json", 3, 6):
        with pytest.raises(FileError):
            _ = load_run(tuned / "full").speaker


def test_a_base_saved_anew_in_other_files_is_the_same_base_and_that_is_said(
    tuned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(tuning_record, "say", said.append)
    model = transformers.LlamaForCausalLM.from_pretrained(tuned / "llama")
    model.save_pretrained(tmp_path / "whole")
    petune.load(transformers.LlamaForCausalLM.from_pretrained(tmp_path / "whole"), tuned / "run" / "tuned")
    assert len(said) == 1 and "saved anew" in said[0]
    with pytest.raises(FileError, match="the files of the base differ"):
        base = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "whole")
        petune.load(base, tuned / "run" / "tuned", verify_base=True)


@pytest.fixture
def moved(tuned: Path, tmp_path: Path) -> Path:
    """A copy of the run `run` beside a base that was saved anew in one file."""
    transformers.LlamaForCausalLM.from_pretrained(tuned / "llama").save_pretrained(tmp_path / "llama")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tuned / "llama" / name, tmp_path / "llama")
    shutil.copytree(tuned / "run", tmp_path / "run")
    resolved = tmp_path / "run" / "resolved.yaml"
    moved = load_resolved(resolved, {"model": str(tmp_path / "llama")})
    resolved.write_bytes(sealed_settings(moved, "0" * 32))
    return tmp_path / "run"


def test_a_run_says_once_that_its_base_was_saved_anew(moved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(tuning_record, "say", said.append)
    load_run(moved).eval()
    assert len(said) == 1 and "saved anew" in said[0]


def test_a_tuned_folder_that_changes_while_the_base_is_loaded_is_refused(
    moved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = moved / "tuned" / "adapter_model.safetensors"

    def loaded(*given: Any) -> Any:
        whole = bytearray(tensors.read_bytes())
        whole[-1] ^= 1
        tensors.write_bytes(whole)
        return load_model(*given)

    monkeypatch.setattr("petune.run.build.load_model", loaded)
    with pytest.raises(FileError, match=tensors.name):
        _ = load_run(moved).speaker


# ---------------------------------------------------------------- damaged before training


def lose(tensors: dict[str, Tensor]) -> None:
    for name in [name for name in tensors if "layers" in name]:
        del tensors[name]


def add(tensors: dict[str, Tensor]) -> None:
    tensors |= {f"model.layers.9.mlp.up_proj.{at}": torch.ones(2) for at in range(20)}


def reshape(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.ones(3, 5)


def poison(tensors: dict[str, Tensor]) -> None:
    for name in tensors:
        tensors[name].view(-1)[0] = float("nan")


def retype(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"].to(
        torch.int32
    )


def quantise(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"].to(
        torch.float8_e4m3fn
    )


def untie(tensors: dict[str, Tensor]) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1


DAMAGE: dict[str, tuple[Callable[[dict[str, Tensor]], None], str, int]] = {
    "missing": (lose, "is in the model but not in the checkpoint", 11),
    "extra": (add, "is in the checkpoint but not in the model", 11),
    "another shape": (reshape, r"up_proj\.weight  has another shape", 2),
    "not a number": (poison, "not finite", 10),
    "integers": (retype, r"up_proj\.weight  holds int32, not weights", 1),
    "8 bits": (quantise, r"up_proj\.weight  holds float8_e4m3fn, not weights", 1),
    "broken ties": (untie, r"breaks ties[\s\S]*lm_head\.weight  is tied to model\.embed_tokens\.weight", 2),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_base_is_refused_with_the_first_ten_names(name: str, tmp_path: Path) -> None:
    damage, says, problems = DAMAGE[name]
    folder = write_model(tmp_path / "llama", "llama", tie_word_embeddings=True)
    tensors = load_file(folder / "model.safetensors")
    damage(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(FileError, match=says) as caught:
        load_model(resolve_model(str(folder), tmp_path), "causal", None, torch.float32).read()
    assert len(caught.value.problems) == problems


@pytest.mark.parametrize(
    "change",
    [
        {"num_hidden_layers": 10**12},
        {"hidden_size": 10**40},
        {"quantization_config": {"quant_method": "fp8"}},
    ],
)
def test_a_config_of_no_possible_model_is_refused_before_it_is_built(
    change: dict[str, object], tmp_path: Path
) -> None:
    folder = write_model(tmp_path / "llama", "llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(FileError, match=rf"config\.json  {next(iter(change))}"):
        load_model(resolve_model(str(folder), tmp_path), "causal", None, torch.float32)


@pytest.mark.parametrize("limit", ["\x1b[31m", [[]], {"a": 1}, -1])
def test_a_tokenizer_whose_limit_is_no_number_is_refused(limit: object, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "llama", "llama")
    fields = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(fields | {"model_max_length": limit}))
    with pytest.raises(FileError, match="model_max_length"):
        load_tokenizer(resolve_model(str(folder), tmp_path))


# ---------------------------------------------------------------- paths


@pytest.mark.parametrize(
    "name",
    [
        *(
            "../outside.safetensors",
            "sub/../../outside.safetensors",
            "/etc/passwd",
            "/tmp/x.safetensors",
            ".",
            "",
            "model.bin",
        ),
        *("a\0b.safetensors", "a\nb.safetensors", "x" * 300 + ".safetensors", "․․/outside.safetensors"),  # noqa: RUF001 - dots of Unicode
    ],
)
def test_an_index_that_leads_out_of_the_folder_is_refused(name: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "llama", "llama")
    (folder / "model.safetensors").rename(tmp_path / "outside.safetensors")
    tensors = dict.fromkeys(load_file(tmp_path / "outside.safetensors"), name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": tensors}))
    with pytest.raises(FileError, match=r"weight_map|is not there"):
        load_model(resolve_model(str(folder), tmp_path), "causal", None, torch.float32)


@pytest.mark.parametrize(
    "name", ["model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja"]
)
def test_a_link_out_of_a_models_folder_is_refused_and_one_of_a_hub_cache_is_followed(
    name: str, tmp_path: Path
) -> None:
    folder = write_model(tmp_path / "llama", "llama")
    (folder / name).rename(tmp_path / "elsewhere")
    (folder / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileError, match="leads out of the model's folder"):
        load_model(resolve_model(str(folder), tmp_path), "causal", None, torch.float32)
    cached = tmp_path / "models--a--b" / "snapshots" / "1"
    shutil.move(folder, cached)
    (tmp_path / "models--a--b" / "blobs").mkdir()
    (tmp_path / "elsewhere").rename(tmp_path / "models--a--b" / "blobs" / "1")
    (cached / name).unlink()
    (cached / name).symlink_to("../../blobs/1")
    load_model(resolve_model(str(cached), tmp_path), "causal", None, torch.float32).read()
