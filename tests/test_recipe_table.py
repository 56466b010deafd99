"""The 16 shipped recipes are one table: a family says what is trained on, a method says how, and nothing else differs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from petune.recipe import load_recipe, recipe_folder, shipped_recipes

METHODS = ("full", "lora", "adapter", "side")
SHARED: dict[str, Any] = {"batch_size": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "bert": {
        "model": "demo:minilm",
        "data": {"path": "demo:docstrings", "max_length": 64},
        "task": "classify",
        "epochs": 3,
        "class_weights": "balanced",
    },
    "bart": {"model": "demo:tiny-bart", "data": {"path": "demo:docstrings-domain", "max_length": 128}, "task": "seq2seq", "epochs": 4},
    "t5": {"model": "demo:tiny-t5", "data": {"path": "demo:docstrings-domain", "max_length": 128}, "task": "seq2seq", "epochs": 4},
    "llama": {"model": "demo:tiny-llama", "data": {"path": "demo:docstrings-domain", "max_length": 128}, "task": "causal", "epochs": 2},
}
LR: dict[str, tuple[float, ...]] = {  # in the order of METHODS
    "bert": (1e-4, 5e-4, 2e-3, 4e-3),
    "bart": (5e-4, 2e-3, 1e-2, 1e-2),
    "t5": (2e-3, 5e-3, 1e-2, 2e-2),
    "llama": (1e-3, 5e-3, 1e-2, 2e-2),
}
NAMES = [f"{family}_{method}" for family in FAMILIES for method in METHODS]


def test_the_sixteen_recipes_are_there_and_no_others() -> None:
    assert [file.stem for file in shipped_recipes()] == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_is_its_row_of_the_table(name: str) -> None:
    family, method = name.split("_")
    row = {**SHARED, **FAMILIES[family], "method": method, "lr": LR[family][METHODS.index(method)], "out": f"runs/{name}"}
    assert load_recipe(recipe_folder() / f"{name}.yaml").resolved() == load_recipe(row).resolved()


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_is_short_and_says_what_it_is(name: str) -> None:
    lines = (recipe_folder() / f"{name}.yaml").read_text().splitlines()
    settings = [line for line in lines if line and not line.startswith("#")]
    assert lines[0].startswith("# ") and 6 <= len(settings) <= 14


def test_the_readme_links_every_recipe() -> None:
    text = Path(recipe_folder() / "README.md").read_text()
    assert all(f"({name}.yaml)" in text for name in NAMES)
