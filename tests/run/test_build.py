"""From a recipe to a model ready to train: what is refused before a weight is loaded, and what the model then
is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from petune.errors import DataError, FileError, MachineError, UsageError
from petune.kernels.fuse import fused_blocks
from petune.methods import tuned_state
from petune.models.contents import detach
from petune.models.frozen_weight import quantised_in
from petune.models.loading import read_whole
from petune.recipe import load_recipe
from petune.run.build import build, choose_place, prepare
from petune.run.finished import rebuild
from petune.saving.tuning_record import read_record
from tests.methods.zoo import stir
from tests.small_runs import (
    METHODS,
    TASK,
    Listener,
    run,
    settings,
    tokenizer,
    training,
    write_model,
    write_rows,
)

pytestmark = pytest.mark.usefixtures("no_picture")


def made(recipe: dict[str, Any]) -> Any:
    """What a run makes of a recipe, all of it in memory."""
    model = build(prepare(load_recipe(recipe)))
    if (contents := detach(model)) is not None:
        read_whole(model, contents)
    return model


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"model": "nowhere/at/all"}, FileError, "nowhere/at/all"),
        ({"data": "nowhere.jsonl"}, DataError, "nowhere.jsonl"),
        ({"task": "seq2seq"}, UsageError, "seq2seq"),
    ],
)
def test_what_cannot_be_prepared_is_refused_without_loading_a_weight(
    changes: dict[str, Any],
    error: type[Exception],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    def never(*args: Any) -> None:
        raise AssertionError("a weight was loaded")

    monkeypatch.setattr("petune.run.build.load_model", never)
    settings(tmp_path)
    recipe = {**settings(tmp_path), **changes}
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(error, match=said):
        run(recipe)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.forks
@pytest.mark.parametrize(
    ("family", "task"), [("bert", "classify"), ("bart", "seq2seq"), ("llama", "causal"), ("llama", "chat")]
)
def test_the_task_is_inferred_from_rows_and_model(family: str, task: str, tmp_path: Path):
    recipe = settings(tmp_path, family, task=task)
    del recipe["task"]
    assert prepare(load_recipe(recipe)).task.name == task


@pytest.mark.parametrize("family", ["bart", "t5"])
def test_texts_of_no_end_or_of_several_are_refused_where_a_head_reads_the_end(family: str, tmp_path: Path):
    """transformers raises a ValueError at the batch that has them, which under a plan is another one."""
    recipe = load_recipe(settings(tmp_path, family, task="classify", max_steps=1, warmup=0))
    with pytest.raises(FileError, match="does not end a text with the end token"):
        prepare(recipe)
    ending = tokenizer()
    ending.backend_tokenizer.post_processor = TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 2)]
    )
    ending.save_pretrained(tmp_path / family)
    prepare(recipe)
    rows = tmp_path / "classify.jsonl"
    rows.write_text(rows.read_text() + json.dumps({"text": "red sun </s> moon", "label": "red"}) + "\n")
    with pytest.raises(DataError, match=r"takes texts of as many in each\n.*expected 1.*found 2"):
        prepare(recipe)


def test_packing_with_an_encoder_is_refused(tmp_path: Path):
    recipe = settings(tmp_path, "bert")
    del recipe["task"]
    with pytest.raises(UsageError, match="packing"):
        prepare(load_recipe(recipe, {"data.packing": True}))


def test_auto_means_fp32_on_a_cpu_and_cuda_is_refused_where_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    recipe = load_recipe(settings(tmp_path, device="auto"))
    assert str(choose_place(recipe)) == "fp32 on cpu"
    assert str(choose_place(load_recipe(recipe, {"dtype": "bf16"}))) == "bf16 on cpu"
    with pytest.raises(MachineError, match="no CUDA device") as caught:
        choose_place(load_recipe(recipe, {"device": "cuda"}))
    assert caught.value.code == 5


@pytest.mark.slow
@pytest.mark.crossed(1)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", TASK)
def test_new_tensors_come_from_the_seed_whatever_was_drawn_before(family: str, method: str, tmp_path: Path):
    first = tuned_state(made(settings(tmp_path, family, method)))
    torch.manual_seed(12345)
    second = tuned_state(made(settings(tmp_path, family, method)))
    assert first.keys() == second.keys()
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    other = tuned_state(made(settings(tmp_path, family, method, seed=1)))
    assert (method == "full" and family != "bert") or any(
        not torch.equal(value, other[name]) for name, value in first.items()
    )


def test_a_head_the_checkpoint_lacks_trains_beside_the_method(tmp_path: Path):
    names = set(tuned_state(made(settings(tmp_path, "bert", "lora"))))
    assert {"classifier.weight", "classifier.bias"} <= names
    assert {"score.weight"} <= set(tuned_state(made(settings(tmp_path, "llama", "lora", task="classify"))))


def test_what_no_file_of_the_method_can_say_is_refused_before_anything_trains(tmp_path: Path):
    write_model(tmp_path / "llama", "llama", tie_word_embeddings=True)
    lora = {"name": "lora", "r": 2}
    with pytest.raises(UsageError, match=r"name both in also_train: \[lm_head, model\.embed_tokens\]"):
        made(settings(tmp_path, method=lora | {"also_train": ["lm_head"]}))
    both = lora | {"also_train": ["lm_head", "model.embed_tokens"]}
    assert "lm_head.weight" in dict(
        made(settings(tmp_path, method=both)).named_parameters(remove_duplicate=False)
    )


def test_the_labels_of_the_rows_become_the_names_of_the_classes(tmp_path: Path):
    model = made(settings(tmp_path, "bert"))
    assert model.config.id2label == {0: "blue", 1: "green", 2: "red"}
    assert model.config.label2id == {"blue": 0, "green": 1, "red": 2}


def test_random_weights_are_said_loudly(tmp_path: Path):
    write_model(tmp_path / "llama", "llama")
    recipe = settings(tmp_path)
    (tmp_path / "llama" / "model.safetensors").unlink()
    listener = Listener()
    run(
        {**recipe, "model": f"config:{tmp_path / 'llama' / 'config.json'}", "max_steps": 1, "warmup": 0},
        listener,
    )
    assert any("RANDOM WEIGHTS" in line for line in listener.lines)


def test_what_is_reached_of_experts_is_said_when_a_run_builds_its_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    said: list[str] = []
    monkeypatch.setattr("petune.run.build.say", said.append)
    write_model(tmp_path / "llama", "llama")
    vocabulary = json.loads((tmp_path / "llama" / "config.json").read_text())["vocab_size"]
    config = Qwen3MoeConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=4,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path / "llama")
    made(settings(tmp_path, method={"name": "lora", "r": 2}))
    assert "experts 4/4, router frozen, attention 4/4" in said
    made(settings(tmp_path, method={"name": "lora", "r": 2}, base_dtype="int8", kernels="reference"))
    assert said[-1] == "experts 4/4 in int8, router frozen, attention 4/4"
    made(settings(tmp_path, method="adapter", base_dtype="int8", kernels="reference"))
    assert said[-1] == "experts in int8"


def test_an_adapter_of_another_method_is_no_start(tmp_path: Path):
    finished = run(settings(tmp_path, method="adapter", out="first", max_steps=2, warmup=0))
    with pytest.raises(UsageError, match="was tuned with adapter") as caught:
        made(settings(tmp_path, method="lora", init_adapter=str(finished.folder / "tuned")))
    assert "expected lora" in str(caught.value)


@pytest.mark.parametrize(
    "base_dtype", ["nf4", *(pytest.param(one, marks=pytest.mark.long) for one in ("int8", "fp8"))]
)
def test_a_run_goes_on_from_an_adapter_of_pefts_over_a_quantised_base(base_dtype: str, tmp_path: Path):
    """Its factors are peft's, bit by bit, the base is held so, and it computes what peft does as nearly as
    that lets it."""
    place = write_model(tmp_path / "llama", "llama", hidden_size=64, intermediate_size=128)
    config = peft.LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj", "v_proj", "down_proj"])
    theirs = peft.get_peft_model(LlamaForCausalLM.from_pretrained(place), config)
    stir(theirs, std=0.1)
    theirs.save_pretrained(str(tmp_path / "peft"))
    recipe = settings(
        tmp_path, init_adapter=str(tmp_path / "peft"), base_dtype=base_dtype, kernels="reference"
    )
    step = training(recipe)
    expected = {
        key.removeprefix("base_model.model.").replace(".default.weight", ""): value
        for key, value in theirs.named_parameters()
        if value.requires_grad
    }
    assert step.tuned.keys() == expected.keys()
    assert all(torch.equal(value, expected[key]) for key, value in step.tuned.items())
    (model,) = step.runner.modules
    assert len({id(weight) for _, _, weight in quantised_in(model)}) == 14 and fused_blocks(model)
    inputs = {"input_ids": torch.arange(3, 19).view(2, 8)}
    with torch.no_grad():
        found, wanted = (one.eval()(**inputs).logits for one in (model, theirs))
        base = LlamaForCausalLM.from_pretrained(place).eval()(**inputs).logits
    assert float((found - wanted).norm()) < 0.5 * float((base - wanted).norm())
    finished = run({**recipe, "max_steps": 2, "warmup": 0})
    state = tuned_state(rebuild(finished.recipe, read_record(finished.folder / "tuned"), "causal")[0])
    assert any(not torch.equal(state[key], value) for key, value in expected.items())


# Every family and every method once, the rest in the long suite.
REBUILT = [
    pytest.param(family, method, marks=() if at % 4 == turn % 4 else pytest.mark.long)
    for turn, family in enumerate(TASK)
    for at, method in enumerate(METHODS)
]


@pytest.mark.parametrize(("family", "method"), REBUILT)
def test_a_rebuilt_model_computes_what_was_trained(family: str, method: str, tmp_path: Path):
    finished = run(settings(tmp_path, family, method, max_steps=3, lr=0.01))
    model, tokenizer, _ = rebuild(
        finished.recipe, read_record(finished.folder / "tuned"), finished.summary["task"]
    )
    assert not model.training and tokenizer.eos_token == "</s>"
    assert finished.eval()["tuned"] == pytest.approx(finished.summary["after"], abs=1e-5)
    assert finished.eval()["base"] == finished.summary["before"]


def test_a_row_longer_than_the_model_is_cut_and_counted(tmp_path: Path):
    rows = write_rows(tmp_path / "long.jsonl", "causal")
    with rows.open("a") as file:
        file.write(json.dumps({"text": "sun " * 200}) + "\n")
    prepared = prepare(load_recipe(settings(tmp_path, data=str(rows))))
    examples = [*prepared.encoded.train, *prepared.encoded.eval]
    assert max(len(example.input_ids) for example in examples) == 64  # the positions of this model
