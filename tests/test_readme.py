"""The lines of README.md do as typed, one after another."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import pytest
from petune_cli.arguments import Given

from petune.preflight.draft import draft
from petune.preflight.inputs import check_inputs
from petune.recipe import Recipe, load_recipe
from petune.run.build import plan_of, prepare

README = (Path(__file__).parents[1] / "README.md").read_text("utf-8")
STARS = "review,stars\n" + "".join(f"seen {at} times,{1 + at % 5}\n" for at in range(20))


def lines_with(verb: str) -> list[list[str]]:
    """The words after `petune VERB` in each such line, without comments."""
    return [
        shlex.split(line, comments=True)[2:]
        for line in README.splitlines()
        if line.startswith(f"petune {verb} ")
    ]


@pytest.fixture
def typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of somebody who has typed README's first block and both `petune init` lines."""
    monkeypatch.chdir(tmp_path)
    (table,) = re.findall(r"cat > reviews.csv <<'END'\n(.*?)END\n", README, re.DOTALL)
    (tmp_path / "reviews.csv").write_text(table)
    (tmp_path / "stars.csv").write_text(STARS)
    for words in lines_with("init"):
        given = Given.of(words)
        file = Path(given.target or "recipe.yaml")
        file.write_text(draft(prepare(load_recipe(None, given.overrides)), file))
    return tmp_path


def recipe_of(words: list[str]) -> Recipe:
    return Given.of(words).recipe()


def test_every_train_line_has_a_folder_of_its_own_and_a_plan_that_can_be(typed: Path):
    recipes = [recipe_of(words) for words in lines_with("train")]
    places = [recipe.out for recipe in recipes]
    assert places == ["runs/recipe", "runs/dp"]
    assert [plan_of(recipe).world for recipe in recipes] == [1, 2]
    for recipe in recipes:
        check_inputs(recipe)


def test_a_table_with_other_column_names_becomes_a_classifier(typed: Path):
    recipe = load_recipe("stars.yaml")
    assert recipe.task == "classify" and recipe.data.on_bad_line == "skip"
    assert dict(recipe.data.columns) == {"text": "review", "label": "stars"}


def test_python_and_the_command_line_train_alike():
    (settings,) = re.findall(r'petune\.train\(model="demo:minilm", data="reviews\.csv", (.*?)\)', README)
    assert set(settings.split(", ")) <= set(lines_with("init")[0])


def test_the_python_blocks_define_what_they_use():
    tree = ast.parse("\n".join(re.findall(r"```python\n(.*?)```", README, re.DOTALL)))
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.alias)}
    defined |= {node.id for node in names if isinstance(node.ctx, ast.Store)}
    assert {node.id for node in names} <= defined | {"print"}
