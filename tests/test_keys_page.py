"""Every key of a recipe: docs/keys.md, made from the schema that checks recipes, held by comparing.

`python -m tests.test_keys_page` writes it anew.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from petune.parallel.configs import BACKENDS, CUTS
from petune.recipe.resume import KEYS_THAT_CHANGE_NUMBERS
from petune.recipe.schema import Recipe
from petune.recipe.written_schema import json_schema
from petune.recipe.yaml_lines import write_scalar
from petune.tasks.configs import OF_TASKS

DOCS = Path(__file__).parent.parent / "docs"
HEAD = """# Every key of a recipe

Written by `python -m tests.test_keys_page` from the schema that checks recipes; a test compares. What the
larger settings do, and how paths and overrides are read, is in [recipes.md](recipes.md). `petune check --full
RECIPE` prints the same for a recipe of yours; `petune.recipe.json_schema()` is the schema, for an editor.
"""
SECTIONS = ("data", "method", *OF_TASKS, "memory", "parallel")
KINDS = {"string": "text", "boolean": "true, false", "null": "null", "object": "mapping", "array": "list"}
LOW = {"minimum": "from", "exclusiveMinimum": "above"}
HIGH = {"maximum": "to", "exclusiveMaximum": "below"}
ENDLESS = 1e9  # bounds from here on only keep nonsense out

Schema = Mapping[str, Any]


def takes(schema: Schema) -> str:
    """What a setting takes, in words."""
    if "anyOf" in schema:
        return " or ".join(takes(one) for one in schema["anyOf"] if one.get("type") != "null")
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{one}`" for one in schema.get("enum", [schema.get("const")]) if one is not None)
    kind = schema["type"]
    if kind in ("integer", "number"):
        return ("whole number" if kind == "integer" else "number") + bounds(schema)
    if kind == "array":
        return f"list of {takes(schema['items'])}"
    if kind == "object":
        keys = takes({"enum": schema["propertyNames"]["enum"]}) if "propertyNames" in schema else "text"
        return f"mapping of {keys} to {takes(schema['additionalProperties'])}"
    return KINDS[kind]


def bounds(schema: Schema) -> str:
    """The range of a number, without limits that only keep nonsense out."""
    low = [f" {word} {schema[key]:g}" for key, word in LOW.items() if key in schema]
    high = [f" {word} {schema[key]:,g}" for key, word in HIGH.items() if schema.get(key, ENDLESS) < ENDLESS]
    return ",".join(low + high)


def shown(schema: Schema) -> str:
    """The default as a recipe has it."""
    value = schema.get("default", {} if schema.get("type") == "object" else None)
    return json.dumps(value) if isinstance(value, list | dict) else write_scalar(value)


def rows(prefix: str, properties: Schema, required: Collection[str] = ()) -> Iterator[str]:
    """A table of keys."""
    yield "| key | takes | default | meaning |"
    yield "|---|---|---|---|"
    for name, schema in properties.items():
        default = "required" if name in required else f"`{shown(schema)}`"
        yield f"| `{prefix}{name}` | {takes(schema)} | {default} | {schema['description']} |"


def axis(schema: Schema) -> Schema:
    """The settings of an axis of parallel, which may be a bare size too."""
    settings: Schema = schema["anyOf"][1]["properties"]
    return settings


def page() -> str:
    """The document."""
    keys = json_schema()["properties"]
    lines = [HEAD, *rows("", {key: one for key, one in keys.items() if key not in SECTIONS}, ["model"])]
    data, methods = keys["data"]["anyOf"][1], keys["method"]["anyOf"][1:]
    lines += ["", "## data", "", meaning(keys["data"]), ""]
    lines += rows("data.", data["properties"], data["required"])
    lines += ["", "## method", "", meaning(keys["method"])]
    told: dict[str, Schema] = {}
    for one in methods:
        settings = dict(one["properties"])
        name = settings.pop("name")["const"]
        alike = next((other for other, its in told.items() if its == settings), None)
        told[name] = settings
        lines += ["", f"### {name}", ""]
        lines += (
            [f"Those of {alike}."] if alike else rows("method.", settings) if settings else ["No settings."]
        )
    for name in (*OF_TASKS, "memory"):
        lines += ["", f"## {name}", "", meaning(keys[name]), ""]
        lines += rows(f"{name}.", keys[name]["anyOf"][1]["properties"])
    lines += ["", "## parallel", "", meaning(keys["parallel"]), ""]
    axes = keys["parallel"]["anyOf"][1]["properties"]
    lines += ["| key | |", "|---|---|"]
    lines += [f"| `parallel.{name}` | {one['description']} |" for name, one in axes.items()]
    lines += ["", f"What cuts blocks ({', '.join(CUTS)}) has one set of settings:", ""]
    lines += rows("parallel.cut.", axis(axes["cut"]))
    for name in sorted(set(BACKENDS) - set(CUTS)):
        lines += ["", *rows(f"parallel.{name}.", axis(axes[name]))]
    free = [key for key in keys if key not in {*KEYS_THAT_CHANGE_NUMBERS, "version"}]
    lines += ["", "## What may change when a run is resumed", "", ", ".join(f"`{key}`" for key in free) + "."]
    return "\n".join([*lines, ""])


def meaning(schema: Schema) -> str:
    """What a whole section takes."""
    needed = "default" not in schema
    return f"{'Required' if needed else 'Default `' + shown(schema) + '`'}: {schema['description']}."


def test_the_page_is_what_the_schema_says() -> None:
    assert (DOCS / "keys.md").read_text(encoding="utf-8") == page(), "python -m tests.test_keys_page"


def test_every_top_level_key_stands_on_it() -> None:
    found = set(re.findall(r"^\| `(\w+)` \|", page(), re.MULTILINE))
    assert found | set(SECTIONS) == set(Recipe.model_fields)


if __name__ == "__main__":
    (DOCS / "keys.md").write_text(page(), encoding="utf-8")
    sys.exit()
