"""A recipe as JSON, from one process of a run to another: what was written, and where each value stands.

So the other process names the same lines in its errors, and reads no file twice.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from petune.recipe.raw import Written
from petune.recipe.read import checked
from petune.recipe.schema import Recipe
from petune.recipe.yaml_lines import KeyPath


def hand_over(recipe: Recipe, out: str) -> dict[str, Any]:
    """The recipe as plain data for JSON, with its output in the folder `out` and the rate that it has."""
    written = copy.deepcopy(recipe._written)
    if recipe.out != out:
        written.put(("out",), out, "argument")
    if recipe.lr is not None and written.tree.get("lr") is None:  # filled in by the model's width
        written.tree["lr"] = recipe.lr
    return {
        "name": recipe.name,
        "source": None if recipe.source is None else str(recipe.source),
        "folder": str(recipe.folder),
        "notes": list(recipe.notes),
        "from": written.name,
        "tree": written.tree,
        "lines": list(written.lines.items()),
        "places": list(written.places.items()),
        "spelled": list(written.spelled.items()),
    }


def take_over(facts: Mapping[str, Any]) -> Recipe:
    """The recipe of `hand_over`. Raises RecipeError for one that is none on this machine."""
    lines, places, spelled = (_by_path(facts[name]) for name in ("lines", "places", "spelled"))
    written = Written(facts["from"], _with_tuples(facts["tree"]), lines, places, spelled=spelled)
    recipe = checked(written, facts["name"])
    recipe._source = None if facts["source"] is None else Path(facts["source"])
    recipe._folder, recipe._notes = Path(facts["folder"]), tuple(facts["notes"])
    return recipe


def _by_path(table: Iterable[tuple[list[str], Any]]) -> dict[KeyPath, Any]:
    return {tuple(path): value for path, value in table}


def _with_tuples(value: Any) -> Any:
    """A value of JSON as YAML would have given it."""
    if isinstance(value, dict):
        return {key: _with_tuples(item) for key, item in value.items()}
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value
