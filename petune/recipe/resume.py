"""What a resumed run may not change unasked: the keys that alter the numbers, and the comparison of two
recipes by them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from petune.recipe.schema import INPUTS, Recipe
from petune.recipe.yaml_lines import KeyPath, dotted

_DO_NOT_CHANGE_NUMBERS = (
    *(
        "version",
        "name",
        "out",
        "trackers",
        "report",
        "save_every",
        "snapshot_every",
        "keep",
        "eval_batch_size",
        "head_only",
        "timeout",
        "cache_folder",
        "cache_room",
        "rows_cache",
        "rows_cache_gib",
    ),
    *("device", "gradient_checkpointing", "kernels", "memory", "parallel"),
)
KEYS_THAT_CHANGE_NUMBERS: tuple[str, ...] = tuple(
    key for key in Recipe.model_fields if key not in _DO_NOT_CHANGE_NUMBERS
)
# Settings that do, of keys that do not, and what they were before there was a setting.
_CHANGE_NUMBERS_WITHIN: Mapping[KeyPath, Any] = {
    ("memory", "stream"): "none",
    ("data", "stream"): False,
    ("data", "window"): 10_000,
    ("data", "held_out"): None,
}


def differences(
    old: Mapping[str, Any], new: Mapping[str, Any], allow: Sequence[str] = ()
) -> list[tuple[str, Any, Any]]:
    """(key path, old, new) of what a resumed run would compute differently; both as `Recipe.resolved()` gives
    them.

    A key path in `allow` excuses itself and everything under it. Inputs are compared by their last path
    component: their content is what counts, and whoever loads them compares that; a moved folder is no
    change.
    """
    before, after = ({**_CHANGE_NUMBERS_WITHIN, **dict(_flat(values))} for values in (old, new))
    return [
        (dotted(path), before.get(path), after.get(path))
        for path in dict.fromkeys((*before, *after))
        if (path[0] in KEYS_THAT_CHANGE_NUMBERS or path in _CHANGE_NUMBERS_WITHIN)
        and _content(path, before.get(path)) != _content(path, after.get(path))
        and not any(dotted(path[:end]) in allow for end in range(1, len(path) + 1))
    ]


def _flat(values: Mapping[str, Any], path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, (*path, str(key)))
        else:
            yield (*path, str(key)), list(value) if isinstance(value, tuple) else value


def _content(path: KeyPath, value: Any) -> Any:
    return PurePath(value).name if path in INPUTS and isinstance(value, str) else value
