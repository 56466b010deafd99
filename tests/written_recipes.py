"""Recipes written for a test, and what the reader says of a wrong one."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from petune.errors import RecipeError
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
