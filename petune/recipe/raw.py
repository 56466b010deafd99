"""A recipe as it was written: plain values without any default, and the place of each.

Files, command-line overrides and Python arguments all end here, so that one check serves them and every
problem can say where it stands.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from petune.errors import Problem
from petune.recipe.yaml_lines import KeyPath, scalar, short, write_scalar
from petune.tasks.configs import OF_TASKS

MEMORY = "memory"
# a bare text there means this setting
SECTIONS = {"data": "path", "method": "name", MEMORY: "keep"}
SECTIONS |= {key: dataclasses.fields(config)[0].name for key, config in OF_TASKS.items()}
OPTIONAL = (MEMORY, *OF_TASKS)  # sections that may be left out or empty
PARALLEL = "parallel"  # holds an axis per backend, which holds settings
AUTO = "auto"  # in the place of its axes: they are chosen when a run starts

FoundProblem = tuple[KeyPath, Problem]  # a problem and the key path it is about; () when it is about the file


def as_mapping(path: KeyPath, value: Any) -> dict[str, Any] | None:
    """The mapping that the short form of a section stands for: `method: lora`, `memory: input`, `parallel:
    pp`, `parallel: dp:2,tp:2`.

    A mapping stands for itself; None where `value` is no form of the section `path`.
    """
    if isinstance(value, dict):
        return value
    if path == (PARALLEL,):
        if value is None or value in ("none", AUTO):
            return {}
        return _sizes(value) if isinstance(value, str) else None
    if path[0] == PARALLEL and len(path) == 2:
        if value is None:
            return {}
        return {"size": value} if isinstance(value, int) and not isinstance(value, bool) else None
    if path[0] in OPTIONAL and len(path) == 1 and value is None:
        return {}
    short = len(path) == 1 and path[0] in SECTIONS and isinstance(value, str)
    return {SECTIONS[path[0]]: value} if short else None


def _sizes(text: str) -> dict[str, Any]:
    """Backends with or without a size, as a shell takes them unquoted: `pp`, `dp:2`, `dp:2,tp:4`."""
    parts = [part.partition(":") for part in text.split(",")]
    sizes = {name.strip(): scalar(size.strip()) if colon else None for name, colon, size in parts}
    return sizes if len(sizes) == len(parts) else {text: None}  # no backend: one of two sizes would be lost


def show(value: Any) -> str:
    """A value as a message names it."""
    if value is None:
        return "nothing"
    if isinstance(value, int) and value.bit_length() > 1000:  # Python refuses to print some of these
        return "a number of more than 300 digits"
    if isinstance(value, bool | int | float):
        return short(write_scalar(value), 60)
    if isinstance(value, str):
        return f"the text {short(value, 60)!r}"
    if isinstance(value, dict | tuple):
        return "a mapping" if isinstance(value, dict) else "a list"
    return f"a Python {type(value).__name__}"


@dataclasses.dataclass
class Written:
    """A recipe as it was written, before any default: the tree, and where each value stands.

    `spelled` names the values that were given under a classic key.
    """

    name: str = "recipe"
    tree: dict[str, Any] = dataclasses.field(default_factory=dict)
    lines: dict[KeyPath, int] = dataclasses.field(default_factory=dict)
    places: dict[KeyPath, str] = dataclasses.field(default_factory=dict)
    refused: set[KeyPath] = dataclasses.field(default_factory=set)
    spelled: dict[KeyPath, str] = dataclasses.field(default_factory=dict)

    def where(self, path: KeyPath) -> str:
        """The place of `path`, or of the nearest thing around it that was written."""
        while path and path not in self.places:
            path = path[:-1]
        return self.places.get(path, self.name)

    def get(self, path: KeyPath) -> Any:
        """The value at `path`; None where there is none."""
        node: Any = self.tree
        for key in path:
            node = node.get(key) if isinstance(node, dict) else None
        return node

    def put(self, path: KeyPath, value: Any, place: str) -> None:
        """Set one value; a section's short form (`method: lora`) becomes a mapping when a setting inside is
        given."""
        node = self._holder(path, place)
        if node is None:
            return
        self.drop(path)
        node[path[-1]] = value
        self.places[path] = place

    def drop(self, path: KeyPath) -> None:
        """Forget the value at `path` and where it stood."""
        node = self.get(path[:-1])
        if isinstance(node, dict):
            node.pop(path[-1], None)
        for table in (self.lines, self.places, self.spelled):
            for old in [old for old in table if old[: len(path)] == path]:
                del table[old]

    def move(self, old: KeyPath, new: KeyPath) -> None:
        """Put the value at `old`, which was written, at `new`, where none is; it keeps its place, and its
        rank among the places."""
        holder = self._holder(new, self.where(old))
        if holder is None:
            return
        node = self.tree
        for key in old[:-1]:
            node = node[key]
        holder[new[-1]] = node.pop(old[-1])

        def renamed(path: KeyPath) -> KeyPath:
            return (*new, *path[len(old) :]) if path[: len(old)] == old else path

        self.lines = {renamed(path): line for path, line in self.lines.items()}
        self.places = {renamed(path): place for path, place in self.places.items()}
        self.spelled = {renamed(path): key for path, key in self.spelled.items()}
        self.refused = {renamed(path) for path in self.refused}

    def _holder(self, path: KeyPath, place: str) -> dict[str, Any] | None:
        """The mapping that is to hold `path`. None inside a wrong value of `parallel`, which stays there to
        be reported."""
        node = self.tree
        for depth, key in enumerate(path[:-1], 1):
            child = as_mapping(path[:depth], node.get(key))
            if child is None and path[0] == PARALLEL and depth < 3:
                return None
            node[key] = child or {}
            self.places.setdefault(path[:depth], place)
            node = node[key]
        return node
