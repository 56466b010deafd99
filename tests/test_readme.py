"""README.md says what docs/ten-minutes.md does, which tests/test_docs.py types."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from petune_cli.arguments import Given

from petune.preflight.draft import draft
from petune.preflight.inputs import check_inputs
from petune.recipe import load_recipe
from petune.run.build import plan_of, prepare

ROOT = Path(__file__).parents[1]
README, TEN, DATA = (
    (ROOT / name).read_text("utf-8") for name in ("README.md", "docs/ten-minutes.md", "docs/data.md")
)


def lines(text: str) -> list[list[str]]:
    """The words of each line that calls petune, in blocks and without comments."""
    typed = "".join(re.findall(r"^```\w*\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)).splitlines()
    return [shlex.split(line, comments=True) for line in typed if line.startswith("petune ")]


def python(text: str) -> list[str]:
    """The lines of the blocks of Python."""
    return "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL)).splitlines()


def test_the_lines_are_those_of_ten_minutes() -> None:
    assert [words for words in lines(README) if words not in lines(TEN)] == [
        ["petune", "train", "recipe.yaml", "parallel=dp:2", "out=runs/dp"]
    ]
    assert set(python(README)) - set(python(TEN)) == {'print(run.generate("Warm, clever, splendid"))'}


def test_the_same_recipe_can_be_trained_in_two_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (table,) = re.findall(r"cat > reviews.csv <<'END'\n(.*?)END\n", TEN, re.DOTALL)
    (tmp_path / "reviews.csv").write_text(table)
    (init,) = (words[2:] for words in lines(README) if words[1] == "init")
    file = Path("recipe.yaml")
    file.write_text(draft(prepare(load_recipe(None, Given.of(init).overrides)), file))
    recipes = [Given.of(words[2:]).recipe() for words in lines(README) if words[1] == "train"]
    assert [recipe.out for recipe in recipes] == ["runs/recipe", "runs/dp"]
    assert [plan_of(recipe).world for recipe in recipes] == [1, 2]
    for recipe in recipes:
        check_inputs(recipe)


@pytest.mark.usefixtures("no_network")
def test_a_table_with_other_column_names_becomes_a_classifier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As docs/data.md has it."""
    monkeypatch.chdir(tmp_path)
    rows = "review,stars\n" + "".join(f"seen {at} times,{1 + at % 5}\n" for at in range(20))
    (tmp_path / "reviews.csv").write_text(rows)
    columns = re.findall(r"data=reviews\.csv (data\.columns\.\S+) (data\.columns\.\S+?)`", DATA)
    given = ["model=demo:minilm", "data=reviews.csv", *columns[0]]
    file = Path("stars.yaml")
    file.write_text(draft(prepare(load_recipe(None, given)), file))
    recipe = load_recipe(file)
    assert recipe.task == "classify" and dict(recipe.data.columns) == {"text": "review", "label": "stars"}
