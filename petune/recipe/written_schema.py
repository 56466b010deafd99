"""The keys of a recipe as others read them: a JSON schema for editors, a text for help()."""

from __future__ import annotations

import dataclasses
from inspect import formatannotation
from typing import Any, get_type_hints

from petune.kernels.configs import KEEPS, MemoryConfig
from petune.methods.configs import METHODS
from petune.parallel.configs import BACKENDS, ParallelConfig
from petune.recipe.raw import MEMORY, PARALLEL, SECTIONS
from petune.recipe.schema import Recipe, field_docs, section_model
from petune.tasks.configs import OF_TASKS, DataConfig, choices_of


def json_schema() -> dict[str, Any]:
    """The JSON schema of a recipe file, for editors; data, method, memory and parallel may be a text or a
    mapping. No classic keys."""
    schema = Recipe.model_json_schema()
    schema.pop("$defs", None)
    sections = {
        "data": [{"type": "string"}, _section_schema(DataConfig)],
        "method": [
            {"enum": list(METHODS)},
            *(_section_schema(method.config, name) for name, method in METHODS.items()),
        ],
        MEMORY: [{"enum": [*KEEPS, None]}, _section_schema(MemoryConfig)],
        **{key: _short_or_section(config) for key, config in OF_TASKS.items()},
        PARALLEL: [{"enum": ["none", "auto", *BACKENDS, None]}, _parallel_schema()],
    }
    for key, forms in sections.items():
        schema["properties"][key] = {"anyOf": forms, "description": Recipe.model_fields[key].description}
    for key, config in OF_TASKS.items():
        schema["properties"][key]["default"] = getattr(config(), SECTIONS[key])
    schema["properties"][MEMORY]["default"], schema["properties"][PARALLEL]["default"] = "auto", "none"
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "petune recipe"}


def _short_or_section(config: type) -> list[dict[str, Any]]:
    """The forms of a section: a bare text, which is one of its settings, or a mapping."""
    return [{"enum": [*choices_of(config), None]}, _section_schema(config)]


def _parallel_schema() -> dict[str, Any]:
    size = {"type": ["integer", "null"], "minimum": 1}
    docs = field_docs(ParallelConfig)
    axes = {
        name: {"anyOf": [size, _section_schema(config)], "description": docs[name]}
        for name, config in BACKENDS.items()
    }
    return {"type": "object", "properties": axes, "additionalProperties": False}


def _section_schema(config: type, name: str = "") -> dict[str, Any]:
    return section_model(config, name).model_json_schema()


def settings_text() -> str:
    """The keys of a recipe that are no arguments of `petune.train` themselves, each with type, default and
    meaning, for help()."""
    kinds, written = get_type_hints(Recipe), json_schema()["properties"]
    lines = []
    for name, info in Recipe.model_fields.items():
        if info.is_required() or name == "version":
            continue
        section = dataclasses.is_dataclass(info.default)
        kind = "str | Mapping[str, Any]" if section else formatannotation(kinds[name]).replace("typing.", "")
        lines += [
            f"        {name}: {kind} = {written[name].get('default')!r}",
            f"            {info.description}",
        ]
    return "\n".join(["", "    Settings:", *lines, "    "])
