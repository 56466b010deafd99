"""Names of classes: the library `datasets` writes class numbers into its files, and what they mean beside
them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

ClassNames = Mapping[str, list[str]]  # column -> the names of its numbers


def class_names(features: Mapping[str, Any]) -> ClassNames:
    """The names of the classes of each column that holds their numbers, or lists of them; `features` as
    datasets writes them."""
    found = {}
    for column, kind in features.items():
        while isinstance(kind, list) or (isinstance(kind, dict) and "feature" in kind):
            kind = kind[0] if isinstance(kind, list) else kind["feature"]
        if isinstance(kind, dict) and kind.get("_type") == "ClassLabel" and kind.get("names"):
            found[column] = kind["names"]
    return found


def class_names_of(metadata: bytes | None) -> ClassNames:
    """The same from the metadata of a Parquet file; none of one that another program wrote."""
    try:
        return class_names(json.loads(metadata or b"{}")["info"]["features"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}


def named(columns: dict[str, Any], names: ClassNames) -> dict[str, Any]:
    """A record with names for class numbers; what is no number of a class stays."""

    def name(value: Any, known: list[str]) -> Any:
        if isinstance(value, list):
            return [name(one, known) for one in value]
        return known[value] if isinstance(value, int) and 0 <= value < len(known) else value

    return columns | {
        column: name(columns[column], known) for column, known in names.items() if column in columns
    }
