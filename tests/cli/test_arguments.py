"""One grammar for every verb: a recipe or a run folder, then settings."""

from __future__ import annotations

from pathlib import Path

import pytest
from petune_cli.arguments import Given, is_setting

from petune.errors import FileError, RecipeError, UsageError
from petune.models.source import resolve_model
from tests.cli.conftest import FakeRun


def test_words_are_sorted_into_target_and_settings() -> None:
    assert Given.of(["x.yaml", "method.r=4", "epochs=2"]) == Given("x.yaml", ("method.r=4", "epochs=2"))
    assert Given.of(["epochs=2"]) == Given(None, ("epochs=2",))
    assert Given.of(None) == Given(None, ())


def test_a_second_target_is_refused() -> None:
    with pytest.raises(UsageError, match="one recipe"):
        Given.of(["a.yaml", "b.yaml"])


def test_a_path_with_an_equals_sign_is_a_path_when_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert is_setting("lr=1")
    (tmp_path / "lr=1").mkdir()
    assert not is_setting("lr=1")
    assert not is_setting("runs/lr=1")


def test_a_run_folder_means_the_recipe_it_was_made_with(run_folder: FakeRun) -> None:
    recipe = Given(str(run_folder.folder), ("epochs=3",)).recipe()
    assert (recipe.model, recipe.method_name, recipe.epochs) == ("demo:tiny-llama", "lora", 3)
    assert recipe.out == str(run_folder.folder)


def test_a_recipe_means_the_run_it_made(run_folder: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run_folder.folder.parent.parent)
    run = Given("llama_lora", ("out=runs/mine", "batch_size=3")).run()
    assert run is run_folder  # type: ignore[comparison-overlap]
    assert run.recipe.batch_size == 3


def test_the_newest_of_several_runs_of_a_recipe_without_out_is_meant(
    run_folder: FakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = run_folder.folder.parent
    monkeypatch.chdir(runs.parent)
    text = "model: demo:tiny-llama\ndata: demo:docstrings\ntask: causal\nmethod: lora\n"
    Path("own.yaml").write_text(text)
    for stamp in ("20260101-000000", "20260102-000000"):
        (runs / f"own-{stamp}").mkdir()
    (runs / "own-20260101-000000" / "resolved.yaml").write_text(text)
    assert Given("own.yaml", ())._made_by_recipe() == Path("runs/own-20260101-000000")
    (runs / "own-20260102-000000" / "resolved.yaml").write_text(text)
    assert Given("own.yaml", ())._made_by_recipe() == Path("runs/own-20260102-000000")


def test_a_recipe_never_trained_says_how_to_train_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="petune train llama_lora"):
        Given("llama_lora", ()).run()


def test_a_folder_that_is_no_run_is_a_file_error(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="not a run folder") as by_recipe:
        Given(str(tmp_path), ()).recipe()
    with pytest.raises(FileError) as by_run:
        Given(str(tmp_path), ()).run()
    assert str(by_recipe.value) == str(by_run.value)
    assert by_recipe.value.problems[0].remedy


@pytest.mark.parametrize("name", ["three.jsonl", "rows.csv", "ROWS.TSV"])
def test_a_data_file_for_a_recipe_is_told_where_it_belongs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_text("text,label\n")
    for look in (Given(name, ()).recipe, Given(name, ()).run):
        with pytest.raises(
            UsageError, match=f"{name}  this is a data file\\n.*\\n.*petune data RECIPE data={name}"
        ):
            look()


def test_a_data_file_that_is_not_there_is_a_recipe_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError, match="no such file or folder"):
        Given("rows.csv", ()).recipe()


def test_a_run_folder_that_is_not_there_is_called_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileError, match="not a run folder"):
        Given("runs/nothing", ()).run()
    with pytest.raises(UsageError, match="no run yet"):
        Given("recipes/llama_lora", ()).run()


def test_a_run_in_the_place_of_a_model_is_told_what_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run/tuned").mkdir(parents=True)
    Path("run/resolved.yaml").write_text("")
    with pytest.raises(UsageError, match=r"(?s)run  is the folder of a run.*without model=: run"):
        Given(None, ("model=run",)).recipe()
    assert Given(None, ("model=run", "data=rows.csv")).recipe().model == "run"
    with pytest.raises(FileError, match=r"(?s)is the folder of a run.*tuned as init_adapter"):
        resolve_model("run", tmp_path)
    for name, says in (("petune.json", "is a tuning, not"), ("adapter_config.json", "is an adapter, not")):
        Path("run/tuned", name).write_text("{}")
        with pytest.raises(FileError, match=says):
            resolve_model("run/tuned", tmp_path)
    Path("run/tuned/config.json").write_text("{}")
    with pytest.raises(FileError, match=r"give .*run/tuned, the model that it tuned"):
        resolve_model("run", tmp_path)
