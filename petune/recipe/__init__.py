"""YAML -> a frozen Recipe, or every problem at once, each with its line, its key path and what was probably
meant.

`read` finds and reads (`yaml_lines`: strict YAML with places), `check` validates against `schema` and
`rules`, `suggest` guesses what was meant, `neutral` says what holds without a recipe, `resume` what a resumed
run may not change, `resolved` whether the settings of a run are what it wrote. The only room that imports
pydantic; checking a recipe needs no torch.
"""

from petune.recipe.neutral import far_from_known, usual_rate, with_rate
from petune.recipe.read import demo_recipe, find_recipe, load_recipe, recipe_folder, shipped_recipes
from petune.recipe.resolved import load_resolved, sealed_settings
from petune.recipe.resume import KEYS_THAT_CHANGE_NUMBERS, differences
from petune.recipe.schema import Recipe
from petune.recipe.written_schema import json_schema, settings_text

__all__ = [
    "KEYS_THAT_CHANGE_NUMBERS",
    "Recipe",
    "demo_recipe",
    "differences",
    "far_from_known",
    "find_recipe",
    "json_schema",
    "load_recipe",
    "load_resolved",
    "recipe_folder",
    "sealed_settings",
    "settings_text",
    "shipped_recipes",
    "usual_rate",
    "with_rate",
]
