"""A recipe as it was written: plain values without any default, and the place of each.

Files, command-line overrides and Python arguments all end here, so that one check serves them and every problem can say where it stands.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from petune.errors import Problem
from petune.recipe.yaml_lines import KeyPath

SECTIONS = {"data": "path", "method": "name"}  # a bare text there means this setting

Found = tuple[KeyPath, Problem]  # a problem and the key path it is about; () when it is about the file


@dataclasses.dataclass
class Written:
    """A recipe as it was written, before any default: the tree, and where each value stands."""

    name: str = "recipe"
    tree: dict[str, Any] = dataclasses.field(default_factory=dict)
    lines: dict[KeyPath, int] = dataclasses.field(default_factory=dict)
    places: dict[KeyPath, str] = dataclasses.field(default_factory=dict)
    refused: set[KeyPath] = dataclasses.field(default_factory=set)

    def where(self, path: KeyPath) -> str:
        """The place of `path`, or of the nearest thing around it that was written."""
        while path and path not in self.places:
            path = path[:-1]
        return self.places.get(path, self.name)

    def put(self, path: KeyPath, value: Any, place: str) -> None:
        """Set one value; a section's short form (`method: lora`) becomes a mapping when a setting inside is given."""
        node = self.tree
        for depth, key in enumerate(path[:-1]):
            child = node.get(key)
            if depth == 0 and key in SECTIONS and isinstance(child, str):
                child = {SECTIONS[key]: child}
            node[key] = child if isinstance(child, dict) else {}
            self.places.setdefault(path[: depth + 1], place)
            node = node[key]
        node[path[-1]] = value
        for table in (self.lines, self.places):
            for old in [old for old in table if old[: len(path)] == path]:
                del table[old]
        self.places[path] = place
