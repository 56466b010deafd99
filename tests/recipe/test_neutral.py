"""A user's own model and data get neutral settings, never those of a demo, and are told what is far from
known."""

from __future__ import annotations

from pathlib import Path

import pytest

from petune.methods.configs import METHODS
from petune.recipe import far_from_known, load_recipe, usual_rate, with_rate
from petune.recipe.suggest import suggest
from petune.run.train import settle

MINE = ["model=org/mine", "data=mine.jsonl"]


class Wide:
    """A config in transformers that knows a width."""

    def __init__(self, width: int | None) -> None:
        self.hidden_size = width

    def get_text_config(self, *, decoder: bool) -> Wide:
        return self


def test_a_call_without_a_recipe_has_neutral_settings_and_says_them() -> None:
    recipe = load_recipe(None, MINE)
    assert (recipe.method_name, recipe.method.r, recipe.method.targets) == ("lora", 16, "auto")  # type: ignore[union-attr]
    assert (recipe.task, recipe.lr, recipe.epochs, recipe.max_steps) == (None, None, 3, None)
    assert recipe.class_weights == "none" and recipe.data.max_length is None and recipe.out is None
    assert recipe.source is None and recipe.name == "run"
    (note,) = recipe.notes
    assert all(
        said in note
        for said in (
            "no recipe",
            "lora with r 16",
            "lr by the model's width",
            "3 epochs",
            "task by data and model",
        )
    )


def test_python_arguments_are_neutral_too() -> None:
    assert (
        settle(None, (), {"model": "org/mine", "data": "mine.jsonl"}).resolved()
        == load_recipe(None, MINE).resolved()
    )
    assert (
        settle(None, (), {"model": "org/mine", "data": "d", "method": "full"}).learning_rate
        == METHODS["full"].usual_lr
    )


def test_settings_given_without_a_recipe_hold() -> None:
    recipe = load_recipe(None, [*MINE, "method=full", "lr=1e-5", "epochs=1"])
    assert (recipe.method_name, recipe.learning_rate, recipe.epochs) == ("full", 1e-5, 1)
    assert "full, lr 1e-05, 1 epochs" in recipe.notes[0]


def test_half_a_call_without_a_recipe_is_not_filled_from_the_demo() -> None:
    with pytest.raises(ValueError, match="model is missing"):
        load_recipe(None, ["data=mine.jsonl"])
    with pytest.raises(ValueError, match="data is missing"):
        load_recipe(None, ["model=org/mine"])


@pytest.mark.parametrize(
    ("overrides", "replaced", "said"),
    [
        (
            MINE,
            "model and data replaced",
            ["lr 0.005 (usual for lora: 0.0002 at a width of 4,096)", "task causal", "lr=null task=null"],
        ),
        ([*MINE, "lr=null"], "model and data replaced", ["task causal", "give task=null"]),
        (["method=full"], "method replaced", ["lr 0.005 (usual for full: 2e-05)"]),
        ([*MINE, "lr=null", "task=chat"], None, []),
        (["data.max_length=64", "method.r=4"], None, []),
        ([], None, []),
    ],
)
def test_settings_chosen_for_a_demo_are_said_when_they_stay(
    overrides: list[str], replaced: str | None, said: list[str]
) -> None:
    notes = load_recipe("llama_lora", overrides).notes
    assert len(notes) == (replaced is not None)
    assert all(phrase in notes[0] for phrase in (replaced or "", *said)) if replaced else True


def test_the_values_a_note_tells_to_give_are_taken() -> None:
    note = load_recipe("bert_lora", MINE).notes[0]
    assert "batch_size 16" in note and "epochs" not in note  # 3, the usual ones
    given = note.partition("give ")[2].partition(" for the usual")[0].split()
    recipe = load_recipe("bert_lora", [*MINE, *given])
    assert not recipe.notes and recipe.lr is None
    assert (recipe.task, recipe.class_weights) == (None, "none")


def test_a_recipe_of_ones_own_may_be_given_other_inputs_in_silence(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("model: org/one\ndata: one.jsonl\nmethod: lora\nlr: 5e-3\n")
    assert load_recipe(tmp_path / "own.yaml", MINE).notes == ()


@pytest.mark.parametrize(
    ("settings", "trainable", "tokens", "said"),
    [
        ({}, 10**6, 10**5, []),
        ({"lr": 6e-3}, 10**6, 10**5, ["lr 0.006 is 17.1 times the usual 0.00035 of lora"]),
        ({"lr": 3e-3}, 10**6, 10**5, []),
        ({"lr": 1e-5}, 10**6, 10**5, ["lr 1e-05 is 1/35 of"]),
        ({"method": "full", "lr": 2e-4}, 10**9, 10**5, ["lr 0.0002 is 10 times the usual 2e-05 of full"]),
        ({}, 10**6, 10**7, ["r 16 trains 1,000,000 parameters", "r 128"]),
        ({"method": "full"}, 10**6, 10**7, []),
        ({}, 10**6, None, []),
        ({"model": "demo:tiny-llama", "lr": 5e-3}, 10**4, 10**7, []),
    ],
)
def test_what_is_far_from_known_is_said(
    settings: dict[str, object], trainable: int, tokens: int | None, said: list[str]
) -> None:
    recipe = load_recipe(None, MINE, settings)
    lines = list(far_from_known(recipe, Wide(1024), trainable, tokens, 100))
    assert len(lines) == bool(said) and all(phrase in lines[0] for phrase in said)


def test_few_steps_are_said_unless_they_were_asked_for() -> None:
    few = "3 steps are few to learn from: raise epochs, or lower batch_size"
    assert list(far_from_known(load_recipe(None, MINE), Wide(1024), 10**6, None, 3)) == [few]
    asked = load_recipe(None, MINE, {"max_steps": 3})
    assert list(far_from_known(asked, Wide(1024), 10**6, None, 3)) == []


@pytest.mark.parametrize(
    ("method", "width", "rate"),
    [
        # Hu et al. 2021: 5e-4 and 4e-4; Schulman et al. 2025: 5e-4 at 2,000; usual: 1e-4 to 2e-4
        *(("lora", 768, 3.9e-4), ("lora", 1024, 3.5e-4), ("lora", 2048, 2.6e-4), ("lora", 4096, 2e-4)),
        *(("lora", 8192, 1.5e-4), ("lora", 384, 5.2e-4), ("lora", None, 2e-4)),
        ("side", 768, 2e-3),  # Sung et al. 2022: 3e-3, T5-base
        *(("full", 768, 2e-5), ("full", 8192, 2e-5)),
    ],
)
def test_the_usual_rate_is_by_method_and_by_the_width_of_the_model(
    method: str, width: int | None, rate: float
) -> None:
    recipe = load_recipe(None, MINE, {"method": method})
    assert with_rate(recipe, Wide(width)).lr == usual_rate(recipe, Wide(width)) == rate
    given = load_recipe(recipe, ["lr=3e-3"])
    assert with_rate(given, Wide(width)) is given


def test_of_two_widths_the_usual_rate_is_that_of_the_decoders() -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model("musicgen", decoder={"hidden_size": 384}, text_encoder={"model_type": "t5"})
    assert usual_rate(load_recipe(None, MINE), config) == 5.2e-4


def test_the_name_of_a_run_is_the_files_and_survives_being_resolved(tmp_path: Path) -> None:
    recipe = load_recipe("llama_lora")
    (tmp_path / "resolved.yaml").write_text(recipe.to_yaml())
    assert load_recipe(tmp_path / "resolved.yaml").name == recipe.name == "llama_lora"
    assert load_recipe("llama_lora", ["name=mine"]).name == "mine"


@pytest.mark.parametrize("key", ["banana", "notes", "cases", "tempo", "workers"])
def test_a_word_that_is_like_no_key_suggests_none(key: str) -> None:
    assert "did you mean" not in suggest((key,), "lora")


@pytest.mark.parametrize(
    ("key", "meant"),
    [("leraning_rate", "lr"), ("batchsze", "batch_size"), ("memroy", "memory"), ("epocs", "epochs")],
)
def test_a_typing_error_suggests_what_was_meant(key: str, meant: str) -> None:
    assert f"did you mean: {meant}   " in suggest((key,), "lora")
