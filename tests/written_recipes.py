"""Recipes written for a test, and what the reader says of a wrong one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from petune.errors import RecipeError
from petune.estimate.forecast import Forecast, Sketch, priced, sketch
from petune.parallel import ParallelConfig
from petune.recipe import Recipe, load_recipe
from tests.methods.zoo import tiny

GOOD = "model: demo:minilm\ndata: demo:docstrings\nmethod: lora\n"


def write(folder: Path, text: str | bytes, name: str = "r.yaml") -> Path:
    file = folder / name
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return file


def problems_of(source: Any, overrides: Any = ()) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        load_recipe(source, overrides)
    assert caught.value.code == 2
    return [str(problem) for problem in caught.value.problems]


@cache
def _config_of(name: str) -> str:
    return json.dumps(tiny(name).config.to_dict())


def recipe_of(name: str, folder: Path, **settings: Any) -> Recipe:
    """A recipe for a model of the zoo by its config; data that nobody reads, as the task is named."""
    place = folder / f"{name}.json"
    place.write_text(_config_of(name))
    task = {"causal": "causal", "classify": "classify", "seq2seq": "seq2seq", "gated": "seq2seq"}[
        name.partition("-")[2]
    ]
    base = {
        "model": f"config:{place}",
        "data": {"path": "nowhere.jsonl", "max_length": 32},
        "task": task,
        "method": "lora",
        "device": "cpu",
    }
    return load_recipe({**base, **settings})


_drawn: dict[tuple[bytes, str], Sketch] = {}


def sketched(recipe: Recipe) -> Sketch:
    """`sketch` of a recipe of `recipe_of` and its like, whose model all share that ask for the same: it stays
    as it is. The last few are kept."""
    config = recipe.folder.joinpath(recipe.model.removeprefix("config:")).read_bytes()
    key = config, repr(recipe.model_copy(update={"model": ""}))
    if key not in _drawn:
        while len(_drawn) >= 8:
            del _drawn[next(iter(_drawn))]
        _drawn[key] = sketch(recipe)
    return replace(_drawn[key], recipe=recipe)


def foretold(
    recipe: Recipe,
    world: int | None = None,
    memory: Sequence[int] | None = None,
    parallel: ParallelConfig | None = None,
) -> Forecast:
    """`forecast` of a recipe that is sketched once."""
    return priced(sketched(recipe), parallel or recipe.parallel, world, memory)
