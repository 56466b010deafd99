"""One setting of a config: its default, and what recipes, `wrap` and the JSON schema read of it."""

from __future__ import annotations

from dataclasses import field
from typing import Any


def setting(default: Any, doc: str, **rules: Any) -> Any:
    """A field of a frozen dataclass. rules: its range, by `ge`, `gt`, `le`, `lt`, or its `choices`."""
    return field(default=default, metadata={"doc": doc, **rules})
