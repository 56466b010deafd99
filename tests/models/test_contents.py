"""What a model holds before it has memory: the same as transformers reads, for every family, head and form of
file."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from petune import demo
from petune.errors import FileError
from petune.models.checksums import RankShare, checksums
from petune.models.contents import TensorPart, attach, checksums_of, contents_of, detach
from petune.models.loading import AUTO, Head, Loaded, load_model
from petune.models.source import resolve_model
from tests.methods.zoo import MOE, tiny


def old_names(folder: Path) -> None:
    """As BERT's checkpoints once named their norms."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    save_file(
        {
            name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
                "LayerNorm.bias", "LayerNorm.beta"
            ): it
            for name, it in tensors.items()
        },
        path,
        {"format": "pt"},
    )


def twice(folder: Path) -> None:
    """Both ends of a tie, as old files hold them."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, path, {"format": "pt"})


def bias(folder: Path) -> None:
    """A bias of BART's head that is not zero, which only the file knows."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["final_logits_bias"] = torch.linspace(-1, 1, tensors["model.shared.weight"].shape[0])[None]
    save_file(tensors, path, {"format": "pt"})


def scalars(folder: Path) -> None:
    """Numbers by which blocks are scaled that are not one, which only the file knows, and keys that a block
    without any of its own once had."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name in [name for name in tensors if name.endswith("layer_scalar")]:
        tensors[name] = tensors[name] * 0.25
    own = "model.layers.{}.self_attn.k_proj.weight"
    tensors.setdefault(own.format(1), tensors[own.format(0)].clone())
    save_file(tensors, path, {"format": "pt"})


# the model of the file, the head it is read with, what its config says, what is done to the file
CASES: dict[str, tuple[str, Head, dict[str, Any], Any]] = {
    "llama": ("llama-causal", "causal", {}, None),
    "llama, tied": ("llama-causal", "causal", {"tie_word_embeddings": True}, None),
    "llama, tied, both stored": ("llama-causal", "causal", {"tie_word_embeddings": True}, twice),
    "llama, the base alone": ("llama-base", "causal", {"tie_word_embeddings": True}, None),
    "llama, another head": ("llama-causal", "classify", {}, None),
    "bert, its base for words masked": ("bert-mlm", "mlm", {}, None),
    "bert, a classifier of a masked one, old names": ("bert-mlm", "classify", {}, old_names),
    "t5": ("t5-seq2seq", "seq2seq", {}, None),
    "t5, gated": ("t5-gated", "seq2seq", {}, None),
    "bart": ("bart-seq2seq", "seq2seq", {}, bias),
    "bart, another head": ("bart-seq2seq", "classify", {}, None),
    "gemma3": ("gemma3-causal", "causal", {}, None),
    "qwen3": ("qwen3-causal", "causal", {}, None),
    "gemma4": ("gemma4-causal", "causal", {}, scalars),
    "gemma4, embeddings of blocks": ("gemma4e-causal", "causal", {}, scalars),
}


def written(folder: Path, case: str, shard: str = "1GB") -> Head:
    """The files of a case in `folder`."""
    name, head, changes, change = CASES[case]
    model = tiny("llama-causal" if name == "llama-base" else name, **changes).bfloat16()
    (model.model if name == "llama-base" else model).save_pretrained(folder, max_shard_size=shard)
    if change is not None:
        change(folder)
    return head


def loaded(folder: Path, head: Head, dtype: torch.dtype) -> Loaded:
    labels = ["a", "b", "c"] if head == "classify" else None
    return load_model(resolve_model(str(folder), folder), head, labels, dtype)


def theirs(folder: Path, head: Head, dtype: torch.dtype) -> Any:
    return AUTO[head].from_pretrained(folder, dtype=dtype, output_loading_info=True)


def assert_equal(mine: Any, other: Any, new: tuple[str, ...]) -> None:
    """Equal to the bit: parameters and buffers, but for what no file holds; ties; and all that is no
    tensor."""
    for found, wanted in (
        (dict(mine.named_parameters()), dict(other.named_parameters())),
        (dict(mine.named_buffers()), dict(other.named_buffers())),
    ):
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            assert found[name].dtype == value.dtype and found[name].shape == value.shape, name
            assert (new and name.startswith(new)) or torch.equal(found[name], value), name
    assert not mine.training
    renamed = [[one.source_patterns for one in model._weight_conversions] for model in (mine, other)]
    assert renamed[0] == renamed[1], "saving undoes other renamings"
    if other.can_generate():
        assert mine.generation_config.to_dict() == other.generation_config.to_dict()


FILES = [(case, "1GB") for case in CASES] + [(case, "20KB") for case in ("llama", "t5", "gemma3")]


@pytest.mark.parametrize(("case", "shard"), FILES)
def test_a_model_is_read_as_transformers_reads_it(case: str, shard: str, tmp_path: Path) -> None:
    head = written(tmp_path, case, shard)
    dtype = torch.float32 if len(case) % 2 else torch.bfloat16
    found, (other, info) = loaded(tmp_path, head, dtype), theirs(tmp_path, head, dtype)
    assert all(value.is_meta for value in found.model.parameters())
    assert found.contents is not None
    plan = found.contents.plan
    assert plan.info["missing_keys"] == set(info["missing_keys"])
    assert plan.info["unexpected_keys"] == set(info["unexpected_keys"])
    assert_equal(found.read(), other, tuple(f"{name}." for name in found.new))


HEADS: dict[str, Head] = {"tiny-llama": "causal", "minilm": "classify"}


@pytest.mark.parametrize("name", demo.MODELS)
def test_the_demo_checkpoints_are_read_as_transformers_reads_them(name: str) -> None:
    place, head = demo.model_path(name), HEADS.get(name, "seq2seq")
    for dtype in (torch.float32, torch.bfloat16):
        found = loaded(place, head, dtype)
        new = tuple(f"{one}." for one in found.new)
        other = AUTO[head].from_pretrained(place, dtype=dtype, **({"num_labels": 3} if new else {}))
        assert_equal(found.read(), other, new)


def test_a_head_that_was_saved_is_rounded_as_the_base_is_before_it_is_widened(tmp_path: Path) -> None:
    tiny("bert-classify").save_pretrained(tmp_path)
    found = loaded(tmp_path, "classify", torch.bfloat16)
    found.model.get_submodule("classifier").float()
    other = theirs(tmp_path, "classify", torch.bfloat16)[0].classifier.float()
    assert torch.equal(found.read().get_submodule("classifier").weight, other.weight)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", MOE)
def test_experts_that_files_have_one_by_one_are_read_as_transformers_reads_them(
    name: str, tmp_path: Path
) -> None:
    tiny(name).save_pretrained(tmp_path)
    found = loaded(tmp_path, "causal", torch.bfloat16)
    assert found.contents is not None
    assert_equal(found.read(), theirs(tmp_path, "causal", torch.bfloat16)[0], ())
    found.model.save_pretrained(tmp_path / "again")
    names = [set(load_file(place / "model.safetensors")) for place in (tmp_path, tmp_path / "again")]
    assert names[0] == names[1]


@pytest.mark.parametrize("name", ["llama-causal", "qwen3moe-causal"])
def test_checksums_of_a_model_that_is_not_read_are_those_of_the_read_one(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("petune.models.checksums._READ", 4096)
    tiny(name).save_pretrained(tmp_path)
    found = loaded(tmp_path, "causal", torch.bfloat16)
    assert found.contents is not None
    found.contents.remember(found.model)
    attach(found.model, found.contents)
    before, shared = (each(found.model) for each in (checksums_by_one, checksums_by_three))
    detach(found.model)
    read = found.read()
    assert before == shared == checksums(dict(read.named_parameters())) == checksums_by_three(read)


def checksums_by_one(model: nn.Module) -> dict[str, int]:
    return checksums_of(model, dict(model.named_parameters()))


def checksums_by_three(model: nn.Module) -> dict[str, int]:
    """What each of three ranks makes of the shares of all, if they make the same."""
    parts: list[str] = []
    for rank in range(3):
        with suppress(KeyError):  # the others have not given theirs
            share = RankShare(rank, 3, lambda text: parts.append(text) or [])
            checksums_of(model, dict(model.named_parameters()), share)
    (found,) = {
        json.dumps(checksums_of(model, dict(model.named_parameters()), RankShare(rank, 3, lambda _: parts)))
        for rank in range(3)
    }
    assert all(0 < len(json.loads(part)) < len(json.loads(found)) for part in parts)
    return json.loads(found)


def test_any_box_of_experts_is_read_of_the_files_of_each(tmp_path: Path) -> None:
    model = tiny("qwen3moe-causal")
    model.save_pretrained(tmp_path)
    found = loaded(tmp_path, "causal", torch.float32)
    name = "model.layers.1.mlp.experts.gate_up_proj"
    whole = model.get_parameter(name)
    out = torch.empty(3, 20, 7)  # over gate and up of three experts
    assert found.contents is not None
    found.contents.fill([TensorPart(name, out, (1, 5, 2))])
    assert torch.equal(out, whole[1:4, 5:25, 2:9])


def test_an_expert_that_is_missing_in_the_files_is_named(tmp_path: Path) -> None:
    tiny("qwen3moe-causal").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.3.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(FileError, match=r"layers\.1\.mlp\.experts\.gate_up_proj"):
        loaded(tmp_path, "causal", torch.float32)


def test_a_model_that_transformers_computes_of_several_tensors_is_left_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny("qwen3moe-causal").save_pretrained(tmp_path)
    monkeypatch.setattr("petune.models.read_plan.Concatenate", type(None))  # that it knows another way
    found = loaded(tmp_path, "causal", torch.float32)
    assert found.contents is None
    assert_equal(found.read(), theirs(tmp_path, "causal", torch.float32)[0], ())


def test_values_that_are_not_finite_are_found_when_they_are_read(tmp_path: Path) -> None:
    model = tiny("llama-causal")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] = float("inf")
    model.save_pretrained(tmp_path)
    found = loaded(tmp_path, "causal", torch.float32)
    with pytest.raises(FileError, match=r"layers\.1\.mlp\.up_proj\.weight  holds a value that is not finite"):
        found.read()


def test_models_of_other_values_have_other_fingerprints(tmp_path: Path) -> None:
    for seed in (0, 1):
        tiny("llama-causal", seed=seed).save_pretrained(tmp_path / str(seed))
    found = []
    for folder, seed in (("0", 0), ("0", 0), ("1", 0), ("0", 1)):
        place = resolve_model(str(tmp_path / folder), tmp_path)
        contents = load_model(place, "causal", None, torch.float32, seed=seed).contents
        assert contents is not None
        found.append(contents.fingerprint())
    assert found[0] == found[1] and len(set(found)) == 3


def test_contents_are_left_on_a_model_until_it_is_filled(tmp_path: Path) -> None:
    tiny("llama-causal").save_pretrained(tmp_path)
    found = loaded(tmp_path, "causal", torch.float32)
    assert found.contents is not None and contents_of(found.model) is None
    attach(found.model, found.contents)
    assert contents_of(found.model) is detach(found.model) is found.contents
    assert detach(found.model) is None
