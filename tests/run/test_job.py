"""A job is the same in the launcher and in a rank: the recipe, its places, its folder and how to begin."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from petune.errors import UsageError
from petune.recipe import Recipe, load_recipe
from petune.recipe.handing import hand_over, take_over
from petune.run.build import Base, build, prepare
from petune.run.distributed import wanted
from petune.run.folder import RunFolder
from petune.run.job import Job
from petune.run.train import rated
from tests.small_runs import as_yaml, settings, write_model


def from_a_file(place: Path) -> Recipe:
    recipe = settings(place, parallel={"tp": {"columns": [32, 16]}}, out="given")
    return load_recipe(
        as_yaml(place / "recipe.yaml", recipe), ["method.r=4", "trackers=[tensorboard]"], {"seed": 3}
    )


def from_a_mapping(place: Path) -> Recipe:
    return load_recipe(settings(place, parallel="dp:2"))


def with_the_usual_rate(place: Path) -> Recipe:
    recipe = load_recipe(as_yaml(place / "recipe.yaml", settings(place, parallel="dp:2", lr=None)))
    return rated(Base(recipe))


def with_classic_keys(place: Path) -> Recipe:
    recipe = settings(place, parallel="tp") | {"tp_intermediate_size_list": [32, 16]}
    return load_recipe(as_yaml(place / "recipe.yaml", recipe))


@pytest.mark.parametrize(
    "made",
    [
        from_a_file,
        from_a_mapping,
        with_the_usual_rate,
        with_classic_keys,
        lambda place: load_recipe("bert_lora"),
    ],
)
def test_a_recipe_comes_out_of_a_job_as_it_went_in(made: Callable[[Path], Recipe], tmp_path: Path) -> None:
    recipe = made(tmp_path)
    job = Job(recipe, RunFolder.of(recipe), "a/step-3", True, ("lr", "data.path"), 12.5)
    (scratch := tmp_path / "scratch").mkdir()
    found = Job.read(job.write(scratch))
    assert found.folder.path == job.folder.path
    assert (found.resume, found.overwrite, found.since) == ("a/step-3", True, 12.5)
    assert tuple(found.allow_change) == job.allow_change
    assert found.recipe.resolved() == recipe.resolved() | {"out": str(job.folder.path)}
    assert found.recipe.given == recipe.given | {("out",)}
    for key in ("lr", "method.r", "seed", "data.path", "model", "batch_size"):
        assert found.recipe.where(key) == recipe.where(key)
    if recipe.source is None:
        assert found.recipe.source is not None
        assert found.recipe.source.read_text() == recipe.to_yaml()
    else:
        assert (found.recipe.source, found.recipe.folder) == (recipe.source, recipe.folder)
        assert found.recipe.notes == recipe.notes


@pytest.mark.parametrize("resume", [True, False])
def test_how_to_begin_is_kept(resume: bool, tmp_path: Path) -> None:
    recipe = load_recipe()
    assert Job.read(Job(recipe, RunFolder.of(recipe), resume).write(tmp_path)).resume in (
        (True,) if resume else ("", False)
    )


def test_a_recipe_is_read_once_in_the_launcher_and_once_in_a_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import petune.recipe.read
    import petune.run.train

    file = as_yaml(tmp_path / "recipe.yaml", settings(tmp_path, parallel="dp:2"))
    read, files, jobs = petune.recipe.read.validate, list[Any](), list[dict[str, Any]]()

    def noted(written: Any) -> Any:
        files.append(written)
        return read(written)

    def launched(plan: Any, job: Job, *rest: Any) -> None:
        jobs.append(hand_over(job.recipe, str(job.folder.path)))
        raise KeyboardInterrupt

    monkeypatch.setattr("petune.recipe.read.validate", noted)
    monkeypatch.setattr(petune.run.distributed, "launch_ranks", launched)
    recipe = load_recipe(file)  # as the command line does
    with pytest.raises(KeyboardInterrupt):
        petune.run.train.train(recipe)
    assert len(files) == 1
    assert take_over(jobs[0]).resolved() == recipe.resolved()
    assert len(files) == 2


def test_a_models_config_is_read_once_for_plan_rows_and_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import petune.models.loading

    read, seen = petune.models.loading.read_config, list[Any]()

    def noted(source: Any) -> Any:
        seen.append(source)
        return read(source)

    monkeypatch.setattr("petune.models.loading.read_config", noted)
    monkeypatch.setattr("petune.run.build.read_config", noted)
    recipe = load_recipe(settings(tmp_path, "bert", parallel={"tp": {"columns": [32, 16]}}))
    base = Base(recipe)
    assert wanted(recipe, base).tp == 2
    prepared = prepare(recipe, base=base)
    models = [build(prepared) for _ in range(2)]  # as at the end of a run whose model is cut
    assert len(seen) == 1
    assert models[0].config.num_labels == models[1].config.num_labels == 3
    assert base.config.num_labels == 2, "the config was changed by a model that was made of it"


def test_a_plan_that_cuts_a_block_of_four_bits_is_refused_before_ranks_are_started(tmp_path: Path) -> None:
    write_model(tmp_path / "llama", "llama", hidden_size=64, intermediate_size=128)
    plan = {"parallel": {"tp": {"columns": [96, 32]}}, "base_dtype": "nf4"}
    with pytest.raises(UsageError, match="holds inputs in blocks"):
        wanted(load_recipe(settings(tmp_path, **plan)))
