"""A model, a tokenizer and rows given from Python: the run is the one that files would have given, and it
says what it was given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import petune
from petune.errors import DataError, FileError, RecipeError, Stopped, UsageError
from petune.files.safetensors import read_json
from tests.small_runs import (
    Listener,
    assert_same_run,
    newest,
    numbers,
    row_of,
    run,
    sentences,
    settings,
    state_of,
    terminate_at,
    write_rows,
)

pytestmark = pytest.mark.usefixtures("no_picture")
AUTO: dict[str, Any] = {
    "bert": transformers.AutoModelForSequenceClassification,
    "bart": transformers.AutoModelForSeq2SeqLM,
    "t5": transformers.AutoModelForSeq2SeqLM,
    "llama": transformers.AutoModelForCausalLM,
}


def rows_in(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def objects(place: Path, family: str = "llama", **options: Any) -> dict[str, Any]:
    """The model, tokenizer and rows of `settings(place, family)` as arguments of petune.train."""
    task = {"bert": "classify", "llama": "causal"}.get(family, "seq2seq")
    torch.manual_seed(0)  # from which a new head is drawn, as petune draws it
    if family == "bert":
        options |= {"num_labels": 3}
    data = {"path": rows_in(place / f"{task}.jsonl"), "eval": rows_in(place / f"{task}-held.jsonl")}
    model = AUTO[family].from_pretrained(place / family, **options)
    return {
        "model": model,
        "tokenizer": transformers.AutoTokenizer.from_pretrained(place / family),
        "data": data,
    }


def test_a_base_in_memory_that_is_quantised_is_known_by_its_fingerprint(tmp_path: Path) -> None:
    recipe = settings(tmp_path, kernels="reference", base_dtype="fp8", max_steps=3, save_every=50)
    found = run(recipe, **objects(tmp_path))
    stored = read_json(found.folder / "tuned" / "petune.json")["base"]
    assert stored["sha256"] is None and stored["fingerprint"]["tensors"]
    other = objects(tmp_path)["model"]
    petune.load(other, found.folder / "tuned")
    wrong = objects(tmp_path)["model"]
    with torch.no_grad():
        wrong.model.layers[1].mlp.up_proj.weight.mul_(1.01)
    with pytest.raises(FileError, match="another base model"):
        petune.load(wrong, found.folder / "tuned")


@pytest.mark.parametrize(
    ("family", "method"),
    [
        ("llama", "lora"),
        ("llama", "full"),
        *(pytest.param(*pair, marks=pytest.mark.long) for pair in (("t5", "adapter"), ("bart", "side"))),
    ],
)
def test_a_run_in_memory_is_bit_by_bit_that_from_files(family: str, method: str, tmp_path: Path):
    three = {"max_steps": 3, "save_every": 2}
    from_files = run(settings(tmp_path, family, method, **three, out="files"))
    found = run(settings(tmp_path, family, method, **three), **objects(tmp_path, family))
    assert numbers(found.folder) == numbers(from_files.folder)
    expected, state = (state_of(newest(folder))[0] for folder in (from_files.folder, found.folder))
    assert expected.keys() == state.keys() and all(
        torch.equal(expected[name], state[name]) for name in state if "rng" not in name
    )


@pytest.fixture
def trained(tmp_path: Path) -> tuple[petune.Run, dict[str, Any], Path]:
    """A finished run of a Llama in memory, what it was given, and the folder of the files that hold the
    same."""
    recipe = settings(tmp_path)
    given = objects(tmp_path)
    return run(recipe, **given), given, tmp_path


def test_the_run_holds_the_model_that_was_tuned_and_what_it_learned(
    trained: tuple[petune.Run, dict[str, Any], Path],
):
    found, given, place = trained
    assert found.model is given["model"] and not found.model.training
    base = AUTO["llama"].from_pretrained(place / "llama")
    again = petune.load_run(found.folder, base=base)
    ids = torch.tensor([[9, 10, 11, 12]])
    with torch.no_grad():
        assert again.model is base and torch.allclose(
            found.model(ids).logits, again.model(ids).logits, atol=1e-6
        )
    assert found.generate("red sun", max_new_tokens=4) == again.generate("red sun", max_new_tokens=4)
    scores = found.eval()
    assert scores["tuned"]["loss"] == pytest.approx(found.summary["after"]["loss"], rel=1e-6)
    with pytest.raises(DataError, match=r"object:(dict|list)"):
        again.eval()
    with pytest.raises(FileError, match="give it again"):
        petune.load_run(found.folder).model  # noqa: B018
    assert "a LlamaForCausalLM given from Python" in (found.folder / "run.log").read_text()
    assert "run.eval()" in (found.folder / "run.log").read_text()
    resolved = (found.folder / "resolved.yaml").read_text()
    assert (
        "model: object:LlamaForCausalLM@" in resolved
        and "path: object:list@" in resolved
        and "eval: object:list@" in resolved
    )
    for folder in (found.folder / "tuned", found.export("peft")):
        assert read_json(folder / "adapter_config.json")["base_model_name_or_path"] == str(place / "llama")
    assert "petune.load(base, " in (found.folder / "README.md").read_text()


def test_a_stopped_run_goes_on_when_the_same_objects_are_given_again(tmp_path: Path):
    straight = run(
        settings(tmp_path, out="straight"), **objects(tmp_path) if (tmp_path / "llama").exists() else {}
    )
    recipe = settings(tmp_path)
    with pytest.raises(Stopped, match=r"model=model, tokenizer=tokenizer, data=data, resume=True"):
        run(recipe, terminate_at(3), **objects(tmp_path))
    given = objects(tmp_path)
    with torch.no_grad():
        next(given["model"].parameters()).add_(0.5)
    with pytest.raises(RecipeError, match="model has changed since the run began"):
        run(recipe, resume=True, **given)
    given = objects(tmp_path)
    given["data"]["path"].pop()
    with pytest.raises(RecipeError, match=r"data\.path has changed since the run began"):
        run(recipe, resume=True, **given)
    with pytest.raises(FileError, match="give it again"):
        petune.train(tmp_path / "run", resume=True, reporter=Listener())
    listener = Listener()
    found = petune.train(tmp_path / "run", resume=True, reporter=listener, **objects(tmp_path))
    assert [record["step"] for record in listener.steps] == [4, 5, 6]
    assert numbers(found.folder) == numbers(straight.folder)
    finished = petune.train(tmp_path / "run", resume=True, reporter=listener, **objects(tmp_path))
    assert "is finished" in listener.notes[-1] and finished.generate("red sun") == found.generate("red sun")


def test_rows_alone_may_be_in_memory(tmp_path: Path):
    recipe = settings(tmp_path, max_steps=3, save_every=50)
    expected = run(recipe | {"out": str(tmp_path / "files")})
    found = run(
        recipe,
        data={"path": rows_in(tmp_path / "causal.jsonl"), "eval": str(tmp_path / "causal-held.jsonl")},
    )
    assert_same_run(found.folder, expected.folder)
    assert found.model is not None and found.eval()["rows"] == 9


@pytest.fixture
def classifier(tmp_path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    recipe = settings(tmp_path, "bert")
    return recipe, objects(tmp_path, "bert")


def test_a_classifier_takes_its_names_from_the_rows(
    classifier: tuple[dict[str, Any], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
):
    recipe, given = classifier
    said: list[str] = []
    monkeypatch.setattr("petune.run.build.say", said.append)
    found = run(recipe, **given)
    assert given["model"].config.id2label == {0: "blue", 1: "green", 2: "red"}
    assert found.generate("red sun") in ("blue", "green", "red")
    assert said == ["bert.pooler stays frozen: if it is new and not pretrained, name it in method.also_train"]


def test_a_classifier_with_names_keeps_the_order_of_its_classes(
    classifier: tuple[dict[str, Any], dict[str, Any]],
):
    recipe, given = classifier
    given["model"].config.id2label = {0: "red", 1: "blue", 2: "green"}
    run(recipe, **given)
    assert given["model"].config.id2label == {0: "red", 1: "blue", 2: "green"}


def test_a_classifier_of_other_classes_is_refused(
    classifier: tuple[dict[str, Any], dict[str, Any]], tmp_path: Path
):
    recipe, given = classifier
    given["model"].config.id2label = {0: "red", 1: "blue", 2: "yellow"}
    with pytest.raises(DataError, match="'green' is not one the model knows"):
        run(recipe, **given)
    two = objects(tmp_path, "bert")["model"].__class__.from_pretrained(tmp_path / "bert", num_labels=2)
    with pytest.raises(UsageError, match="another number of classes than the rows") as caught:
        run(recipe, **given | {"model": two})
    assert "num_labels=3: blue, green, red" in str(caught.value)


WORDS = "a model in memory needs its tokenizer"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda given: given | {"tokenizer": None}, WORDS),
        (lambda given: given | {"tokenizer": "llama"}, WORDS),
        (lambda given: given | {"model": nn.Linear(2, 2)}, "takes a model of transformers"),
        (
            lambda given: given | {"model": petune.wrap(given["model"], "lora", r=2)},
            "wrapped already, with lora",
        ),
        (lambda given: given | {"model": given["model"].half()}, "computes in float32 or bfloat16"),
        (lambda given: given | {"model": given["model"].to("meta")}, "must lie on one device"),
        (lambda given: given | {"model": given["model"].model}, "has not the head for causal"),
        (
            lambda given: given | {"parallel": {"dp": 2}},
            "model in memory cannot reach the processes of a parallel plan",
        ),
        (lambda given: {"data": given["data"], "parallel": {"dp": 2}}, "data in memory cannot reach"),
        (lambda given: {"tokenizer": given["tokenizer"]}, "a tokenizer goes with a model in memory"),
        (
            lambda given: given | {"data": {"path": given["data"]["path"], "colums": {"text": "x"}}},
            "data.colums is not a setting",
        ),
    ],
)
def test_objects_that_cannot_be_trained_are_refused_by_name_and_nothing_is_written(
    change: Any, words: str, tmp_path: Path
):
    recipe = settings(tmp_path)
    with pytest.raises(UsageError, match=words):
        run(recipe, **change(objects(tmp_path)))
    assert not (tmp_path / "run").exists()


def test_a_model_with_a_value_that_is_not_finite_is_refused(tmp_path: Path):
    recipe, given = settings(tmp_path), objects(tmp_path)
    with torch.no_grad():
        given["model"].lm_head.weight[0, 0] = float("nan")
    with pytest.raises(FileError, match=r"lm_head\.weight  holds a value that is not finite"):
        run(recipe, **given)


@pytest.mark.parametrize(
    ("dtype", "asked", "trained_in"), [("bfloat16", "auto", "bfloat16"), ("float16", "fp32", "float32")]
)
def test_the_dtype_is_the_models_own_unless_another_is_asked_for(
    dtype: str, asked: str, trained_in: str, tmp_path: Path
):
    recipe = settings(tmp_path, max_steps=1, warmup=0, dtype=asked)
    given = objects(tmp_path, dtype=getattr(torch, dtype))
    found = run(recipe, **given)
    assert found.model.get_submodule("model.layers.0.mlp.gate_proj").weight.dtype == getattr(
        torch, trained_in
    )
    assert found.recipe.dtype == {"bfloat16": "bf16", "float32": "fp32"}[trained_in]


def test_the_fingerprint_is_of_the_weights_and_the_tokenizer(tmp_path: Path):
    settings(tmp_path)

    def spec(given: dict[str, Any]) -> str:
        return str(petune.run.objects.take_objects({"model": given["model"]}, given["tokenizer"])[0]["model"])

    first, second, other = (objects(tmp_path) for _ in range(3))
    # leaves settings in the tokenizer
    second["tokenizer"]("red sun", padding="max_length", max_length=9, truncation=True)
    assert spec(first) == spec(second)
    other["tokenizer"].add_tokens(["moonlight"])
    assert spec(other) != spec(first)


def test_a_list_of_rows_needs_no_settings_around_it(tmp_path: Path):
    recipe = settings(tmp_path) | {"data": str(write_rows(tmp_path / "all.jsonl", "causal"))}
    expected = run(recipe | {"out": str(tmp_path / "files")})
    found = run(recipe, data=[row_of(text, "causal") for text in sentences(24)])
    assert_same_run(found.folder, expected.folder)
