"""Rules of `data.stream`, each one row: what a stream must have, and what does not go with it."""

from __future__ import annotations

from typing import Any

from petune.recipe.schema import Recipe
from petune.recipe.task_rules import Rule
from petune.tasks.configs import DataConfig

_OFF = "or data.stream: false"


def _data(recipe: Recipe, name: str) -> Any:
    """A setting of `data`, or its default where what was written is wrong."""
    return getattr(recipe.data, name, getattr(DataConfig, name, None))


def _never(name: str, why: str, remedy: str) -> Rule:
    """`data.name` must have its default in a stream."""
    default = getattr(DataConfig, name)
    key = f"data.{name}"
    return Rule(
        (key, "data.stream"),
        lambda recipe: not _data(recipe, "stream") or _data(recipe, name) == default,
        why,
        f"{remedy}, {_OFF}",
    )


def _only(name: str) -> Rule:
    """`data.name` must have its default where nothing is streamed."""
    default = getattr(DataConfig, name)
    return Rule(
        (f"data.{name}", "data.stream"),
        lambda recipe: _data(recipe, "stream") or _data(recipe, name) == default,
        "it is about a stream, and data.stream is off",
        f"remove data.{name}, or set data.stream: true",
    )


STREAM_RULES: tuple[Rule, ...] = (
    Rule(
        ("data.stream", "task"),
        lambda recipe: not _data(recipe, "stream") or recipe.task not in ("prefer", "embed", "rerank"),
        "rows of several texts are not streamed yet",
        "set data.stream: false",
    ),
    Rule(
        ("data.stream", "max_steps"),
        lambda recipe: not _data(recipe, "stream") or recipe.max_steps is not None,
        "a stream has no known end",
        f"set max_steps, {_OFF}",
    ),
    Rule(
        ("epochs", "data.stream"),
        lambda recipe: not _data(recipe, "stream") or recipe.epochs == Recipe.model_fields["epochs"].default,
        "how many rows an epoch of a stream has is not known",
        f"remove epochs and set max_steps, {_OFF}",
    ),
    Rule(
        ("data.held_out", "data.eval"),
        lambda recipe: _data(recipe, "held_out") is None or _data(recipe, "eval") is None,
        "data.eval gives the held-out rows already",
        "remove one of the two",
    ),
    Rule(
        ("task", "data.stream"),
        lambda recipe: not _data(recipe, "stream") or recipe.task not in ("classify", "tokens"),
        "its classes must be known before the first step, and a stream is read later",
        "set data.stream: false",
    ),
    Rule(
        ("cache", "data.stream"),
        lambda recipe: not _data(recipe, "stream") or not recipe.cache,
        "it keeps what blocks give for rows that come again, and those of a stream may not",
        f"remove cache, {_OFF}",
    ),
    _never("packing", "it packs rows by their lengths, which must all be known", "remove data.packing"),
    _never("chunk", "it joins all documents before they are cut", "remove data.chunk"),
    _never("split", "a share of rows is chosen among all", "give data.held_out or data.eval"),
    _never("split_by", "it chooses among all rows", "remove data.split_by"),
    _only("window"),
    _only("held_out"),
)
