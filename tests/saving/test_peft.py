"""peft 0.21 is the oracle: it loads what petune writes without a missing or surplus key, and petune computes
what its folders say."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.models.gpt2 import GPT2Config, GPT2LMHeadModel

from petune.errors import FileError, UsageError
from petune.methods import tuned_state, wrap
from petune.saving import export
from petune.saving.load import load
from tests.methods.zoo import tiny
from tests.tiny_models import (
    IDS,
    bart,
    bart_classifier,
    bert,
    edit,
    llama,
    llama_classifier,
    logits,
    stir,
    t5,
    tuned,
)

FILE = "adapter_model.safetensors"


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    config = GPT2Config(
        n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=32, bos_token_id=1, eos_token_id=2
    )
    return GPT2LMHeadModel(config).eval()


def tied_llama() -> nn.Module:
    return llama(tie=True)


def gemma() -> nn.Module:
    model: nn.Module = tiny("gemma3-causal")
    return model


def gemma4() -> nn.Module:
    model: nn.Module = tiny("gemma4e-causal")
    return model


def t5gemma() -> nn.Module:
    model: nn.Module = tiny("t5gemma-seq2seq")
    return model


def by_peft(make: Any, folder: Path, **settings: Any) -> nn.Module:
    """A model peft wrapped, shook and saved."""
    model = get_peft_model(make(), LoraConfig(**{"r": 4, "lora_alpha": 12, **settings}))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for value in model.parameters():
            if value.requires_grad:
                value += 0.1 * torch.randn(value.shape, generator=generator)
    model.save_pretrained(folder)
    return model.eval()


def read_by_peft(base: nn.Module, folder: Path) -> nn.Module:
    """PeftModel.from_pretrained, with its own report of keys checked."""
    model = PeftModel.from_pretrained(base, folder)
    result = model.load_adapter(str(folder), "default", is_trainable=False)
    ours = {key for key in result.missing_keys if "lora_" in key or "modules_to_save" in key}
    assert not ours, f"missing: {ours}"
    assert not result.unexpected_keys
    written = set(load_file(folder / FILE))
    assert written == set(peft.get_peft_model_state_dict(model, save_embedding_layers=False)), (
        "peft has other keys than the file"
    )
    return model.eval()


WRITTEN: dict[str, tuple[Any, dict[str, Any]]] = {
    "bert with its head": (bert, {}),
    "bert with pooler and head": (bert, {"also_train": ["classifier", "pooler"]}),
    "bert with the pooler alone": (bert, {"also_train": ["pooler"]}),
    "bert without a head": (bert, {"also_train": []}),
    "bert by role": (bert, {"targets": ["q", "v"]}),
    "bart": (bart, {}),
    "bart with its head": (bart_classifier, {}),
    "t5": (t5, {}),
    "t5 decoder alone": (t5, {"targets": r"decoder\..*\.(q|v)"}),
    "t5gemma": (t5gemma, {}),
    "t5gemma's cross-attention": (t5gemma, {"targets": r".*\.cross_attn\.(q|v)_proj"}),
    "llama": (llama, {}),
    "llama with its head": (llama_classifier, {}),
    "gemma3": (gemma, {}),
    "gemma4": (gemma4, {}),
    "one block": (llama, {"targets": r"model\.layers\.1\..*_proj"}),
    "everything linear": (llama, {"targets": "all-linear"}),
    "an embedding": (llama, {"targets": ["embed_tokens", "q_proj"]}),
    "a tied embedding": (tied_llama, {"targets": ["embed_tokens", "q"]}),
    "a tied output head": (tied_llama, {"targets": ["lm_head", "q"]}),
    "both ends of a tie, whole": (tied_llama, {"also_train": ["lm_head", "embed_tokens"]}),
    "a norm whose name ends those of others": (llama, {"also_train": ["norm"]}),
    "conv1d": (gpt2, {"targets": ["c_attn", "c_fc"]}),
    "conv1d and an embedding": (gpt2, {"targets": ["c_attn", "wte"]}),
    "an odd alpha": (llama, {"r": 3, "alpha": 0.7}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", WRITTEN)
def test_peft_loads_every_key_and_computes_the_same(case: str, tmp_path: Path) -> None:
    make, settings = WRITTEN[case]
    model = tuned(make, **settings)
    export.save(model, tmp_path / "a")
    theirs = read_by_peft(make(), tmp_path / "a")
    assert torch.allclose(logits(model), _logits(theirs), atol=1e-5)
    ours = load(make(), tmp_path / "a").eval()
    assert torch.equal(logits(ours), logits(model))
    assert not torch.allclose(logits(model), logits(make()), atol=1e-3), "the case must be able to fail"


def _logits(model: Any) -> torch.Tensor:
    return logits(model.get_base_model())


def test_the_config_has_exactly_pefts_fields(tmp_path: Path) -> None:
    by_peft(bert, tmp_path / "peft", task_type="SEQ_CLS", target_modules=["query"])
    export.save(tuned(bert, targets=["query"]), tmp_path / "ours", base_name="org/model")
    theirs, ours = (
        json.loads((tmp_path / name / "adapter_config.json").read_text()) for name in ("peft", "ours")
    )
    assert ours.keys() == theirs.keys()
    assert {key for key in ours if ours[key] != theirs[key]} == {
        "base_model_name_or_path",
        "lora_alpha",
        "modules_to_save",
    }
    assert ours["base_model_name_or_path"] == "org/model"
    assert ours["modules_to_save"] == ["classifier"]
    assert peft.__version__ == ours["peft_version"]


def test_targets_are_leaf_names_only_where_those_are_unambiguous(tmp_path: Path) -> None:
    def targets(model: nn.Module) -> Any:
        export.save(model, tmp_path / "a", overwrite=True)
        return json.loads((tmp_path / "a" / "adapter_config.json").read_text())["target_modules"]

    assert targets(tuned(llama, targets=["v", "q"])) == ["q_proj", "v_proj"]
    # a bare `dense` would also be the pooler's
    assert "bert.encoder.layer.0.output.dense" in targets(tuned(bert))
    assert targets(tuned(llama, targets=r"model\.layers\.0\.self_attn\.q_proj")) == [
        "model.layers.0.self_attn.q_proj"
    ]


def test_task_types(tmp_path: Path) -> None:
    expected = {
        bert: "SEQ_CLS",
        bart_classifier: "SEQ_CLS",
        bart: "SEQ_2_SEQ_LM",
        t5: "SEQ_2_SEQ_LM",
        llama: "CAUSAL_LM",
        gpt2: "CAUSAL_LM",
    }
    for make, task in expected.items():
        export.save(tuned(make), tmp_path / make.__name__)
        assert json.loads((tmp_path / make.__name__ / "adapter_config.json").read_text())["task_type"] == task


def test_write_peft_leaves_nothing_of_petunes(tmp_path: Path) -> None:
    model = tuned(bert)
    export.write_peft(model, tmp_path / "a")
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == [
        "adapter_config.json",
        FILE,
        "petune.manifest.json",
    ]
    assert torch.equal(logits(load(bert(), tmp_path / "a").eval()), logits(model))
    with pytest.raises(UsageError, match="peft has no file for side"):
        export.write_peft(tuned(bert, "side"), tmp_path / "b")


def test_a_head_tied_to_what_is_frozen_cannot_be_said_in_peft_files(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"name both in also_train: \[lm_head, model\.embed_tokens\]"):
        export.save(tuned(tied_llama, also_train=["lm_head"]), tmp_path / "a")


READ: dict[str, tuple[Any, dict[str, Any]]] = {
    "leaf names": (llama, {"target_modules": ["q_proj", "v_proj"]}),
    "all-linear": (llama, {"target_modules": "all-linear", "task_type": "CAUSAL_LM"}),
    "a regex": (t5, {"target_modules": r".*\.(q|v)"}),
    "t5gemma": (t5gemma, {"target_modules": "all-linear", "task_type": "SEQ_2_SEQ_LM"}),
    "t5gemma's queries of all attention": (t5gemma, {"target_modules": ["q_proj"]}),
    "bert's head": (bert, {"target_modules": ["query"], "task_type": "SEQ_CLS"}),
    "all-linear with a head": (bert, {"target_modules": "all-linear", "task_type": "SEQ_CLS"}),
    "bart's head by name": (
        bart_classifier,
        {"target_modules": ["q_proj"], "modules_to_save": ["classification_head"]},
    ),
    "llama's score": (llama_classifier, {"target_modules": ["q_proj"], "task_type": "SEQ_CLS"}),
    "exclude": (llama, {"target_modules": ["q_proj", "down_proj"], "exclude_modules": r".*\.0\.mlp\..*"}),
    "layers": (llama, {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": "layers"}),
    "layers without a pattern": (llama, {"target_modules": ["q_proj"], "layers_to_transform": 0}),
    "rank and alpha patterns": (
        llama,
        {
            "target_modules": ["q_proj", "v_proj"],
            "rank_pattern": {"v_proj": 2},
            "alpha_pattern": {r"model.layers.1.*q_proj": 3},
        },
    ),
    "rslora": (
        llama,
        {"target_modules": ["q_proj"], "use_rslora": True, "rank_pattern": {"layers.1.self_attn.q_proj": 3}},
    ),
    "conv1d": (gpt2, {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    "an embedding": (llama, {"target_modules": ["embed_tokens", "q_proj"]}),
    "a tied embedding": (tied_llama, {"target_modules": ["embed_tokens"]}),
    "conv1d, embedding, tied": (gpt2, {"target_modules": ["c_attn", "wte"], "fan_in_fan_out": True}),
    "gaussian": (llama, {"target_modules": ["q_proj"], "init_lora_weights": "gaussian"}),
    "norms by their end": (llama, {"target_modules": ["q_proj"], "modules_to_save": ["norm"]}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", READ)
def test_a_folder_of_pefts_computes_the_same_and_can_be_saved_again(case: str, tmp_path: Path) -> None:
    make, settings = READ[case]
    theirs = by_peft(make, tmp_path / "a", **settings)
    ours = load(make(), tmp_path / "a").eval()
    assert torch.allclose(logits(ours), _logits(theirs), atol=1e-5)
    assert not torch.allclose(logits(ours), logits(make()), atol=1e-3)
    export.save(ours, tmp_path / "b")
    assert torch.equal(logits(load(make(), tmp_path / "b").eval()), logits(ours))
    assert torch.allclose(_logits(read_by_peft(make(), tmp_path / "b")), logits(ours), atol=1e-5)


def test_what_was_loaded_trains_on(tmp_path: Path) -> None:
    by_peft(bert, tmp_path / "a", target_modules=["query"], task_type="SEQ_CLS")
    model = load(bert(), tmp_path / "a").train()
    model(input_ids=IDS, labels=torch.tensor([0, 1])).loss.backward()
    assert all(value.grad is not None for value in model.parameters() if value.requires_grad)
    assert {name for name, value in model.named_parameters() if value.requires_grad} == set(
        tuned_state(model)
    )


UNSUPPORTED: dict[str, dict[str, Any]] = {
    "lora_bias": {"lora_bias": True},
    "layer_replication": {"layer_replication": [[0, 2], [1, 2]]},
    "init_lora_weights": {"init_lora_weights": "olora"},
}


@pytest.mark.parametrize("field", UNSUPPORTED)
def test_what_petune_does_not_compute_is_refused_by_name(field: str, tmp_path: Path) -> None:
    by_peft(llama, tmp_path / "a", target_modules=["q_proj"], **UNSUPPORTED[field])
    with pytest.raises(FileError, match=f"adapter_config.json  {field} = "):
        load(llama(), tmp_path / "a")


def configured(folder: Path, **fields: Any) -> Path:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    return folder


def test_every_other_unsupported_field_is_refused_too(tmp_path: Path) -> None:
    by_peft(llama, tmp_path / "a", target_modules=["q_proj"])
    original = (tmp_path / "a" / "adapter_config.json").read_text()
    fields: dict[str, Any] = {
        name: {"x": 1}
        for name in ("loftq_config", "corda_config", "lora_ga_config", "megatron_config", "arrow_config")
    }
    fields |= {name: {"x": 1} for name in ("kasa_config", "velora_config", "monteclora_config", "use_bdlora")}
    fields |= {
        "alora_invocation_tokens": [1],
        "target_parameters": ["x"],
        "use_qalora": True,
        "ensure_weight_tying": True,
    }
    fields |= {
        "use_something_new": True,
        "r": 0,
        "lora_alpha": "8",
        "target_modules": None,
        "rank_pattern": {"(": 1},
    }
    fields |= {"init_lora_weights": "pissa_niter_4", "peft_type": "LOHA"}
    for name, value in fields.items():
        (tmp_path / "a" / "adapter_config.json").write_text(original)
        with pytest.raises(FileError, match=name if name != "rank_pattern" else "regular expression"):
            load(llama(), configured(tmp_path / "a", **{name: value}))


def test_a_missing_layer_is_noticed_although_nothing_lists_tensors(tmp_path: Path) -> None:
    by_peft(llama, tmp_path / "a", target_modules=["q_proj"])
    edit(
        tmp_path / "a", lambda tensors: [tensors.pop(key) for key in list(tensors) if "layers.1" in key], FILE
    )
    with pytest.raises(
        FileError, match=r"2 missing, 0 unexpected[\s\S]*layers\.1\.self_attn\.q_proj\.lora_A\.weight"
    ):
        load(llama(), tmp_path / "a")


def test_a_rank_the_config_does_not_state_is_misshaped(tmp_path: Path) -> None:
    by_peft(llama, tmp_path / "a", target_modules=["q_proj"])
    with pytest.raises(FileError, match=r"4 mis-shaped[\s\S]*expected \[3, 32\], found \[4, 32\]"):
        load(llama(), configured(tmp_path / "a", r=3))


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "module._orig_mod.", ""])
def test_wrappers_prefixes_are_known(prefix: str, tmp_path: Path) -> None:
    theirs = by_peft(llama, tmp_path / "a", target_modules=["q_proj"])
    tensors = {
        key.removeprefix("base_model.model."): value
        for key, value in load_file(tmp_path / "a" / FILE).items()
    }
    for style in (f"{prefix}base_model.model.", f"base_model.model.{prefix}", prefix):
        save_file({style + key: value for key, value in tensors.items()}, tmp_path / "a" / FILE)
        assert torch.allclose(logits(load(llama(), tmp_path / "a")), _logits(theirs), atol=1e-5)
    if prefix:
        key = next(iter(tensors))
        save_file(tensors | {prefix + key: tensors[key].clone()}, tmp_path / "a" / FILE)
        with pytest.raises(FileError, match="another tensor has this name"):
            load(llama(), tmp_path / "a")


def test_pickles_are_refused_with_the_way_out(tmp_path: Path) -> None:
    by_peft(llama, tmp_path / "a", target_modules=["q_proj"])
    (tmp_path / "a" / FILE).rename(tmp_path / "a" / "adapter_model.bin")
    with pytest.raises(FileError, match=r"\.bin file[\s\S]*save_pretrained writes safetensors"):
        load(llama(), tmp_path / "a")


def test_an_adapter_of_another_name_is_found_for_the_user(tmp_path: Path) -> None:
    model = get_peft_model(llama(), LoraConfig(r=2, target_modules=["q_proj"]), adapter_name="mine")
    model.save_pretrained(tmp_path / "a")
    with pytest.raises(FileError, match=r"give .*a/mine"):
        load(llama(), tmp_path / "a")


def test_an_embedding_of_another_base_is_noticed(tmp_path: Path) -> None:
    by_peft(llama, tmp_path / "a", target_modules=["embed_tokens"])
    assert any("base_layer" in key for key in load_file(tmp_path / "a" / FILE))
    with pytest.raises(FileError, match=r"embed_tokens\.base_layer\.weight[^\n]*unexpected"):
        load(llama(seed=1), tmp_path / "a")


def test_a_head_trained_apart_from_its_tie_is_refused(tmp_path: Path) -> None:
    by_peft(tied_llama, tmp_path / "a", target_modules=["q_proj"], modules_to_save=["lm_head"])
    with pytest.raises(FileError, match="trained apart from"):
        load(tied_llama(), tmp_path / "a")


def test_a_target_petune_cannot_tune_is_named(tmp_path: Path) -> None:
    def convolution() -> nn.Module:
        return nn.Sequential(nn.Conv1d(3, 4, 3), nn.Linear(4, 4))

    get_peft_model(convolution(), LoraConfig(r=2, target_modules=["0", "1"])).save_pretrained(tmp_path / "a")
    with pytest.raises(FileError, match="tunes a Conv1d"):
        load(convolution(), tmp_path / "a")


def test_rslora_scales_by_the_root_of_each_layers_own_rank(tmp_path: Path) -> None:
    by_peft(
        llama,
        tmp_path / "a",
        target_modules=["q_proj"],
        use_rslora=True,
        rank_pattern={"layers.1.self_attn.q_proj": 2},
    )
    model = load(llama(), tmp_path / "a")
    scales = [model.model.layers[index].self_attn.q_proj.scale for index in (0, 1)]
    assert scales == pytest.approx([12 / 2, 12 / math.sqrt(2)])


def test_the_init_adapter_of_a_recipe_keeps_its_scale(tmp_path: Path) -> None:
    model = stir(wrap(llama(), r=7, alpha=11.3))
    export.save(model, tmp_path / "a")
    again = load(llama(), tmp_path / "a")
    assert {layer.scale for _, layer in again.named_modules() if hasattr(layer, "scale")} == {11.3 / 7}
