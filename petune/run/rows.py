"""The rows of a run: tokenized, from where they are kept or made now; or as texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from petune.files.given import own_cache
from petune.models.loading import kind_of
from petune.recipe import Recipe
from petune.run.objects import Objects
from petune.tasks import Asked, Encoded, RowFacts, Rows, Shelf, load_rows, rows_and_examples, stream_rows
from petune.tasks.media import Reader, rate_of


def rows_of(
    recipe: Recipe,
    task: str,
    config: Any,
    max_positions: int | None,
    tokenizer: PreTrainedTokenizerBase | None,
    labels: tuple[str, ...] | None,
    objects: Objects,
    reader: Reader | None = None,
) -> tuple[RowFacts, Encoded]:
    """The rows of a recipe for a model of `config`, tokenized, and what is known of them. Raises as
    `load_rows` and `encode`."""
    vocab_size = getattr(config, "vocab_size", None)
    if recipe.data.stream and tokenizer is not None:
        return stream_rows(
            recipe.data,
            task,
            recipe.folder,
            tokenizer,
            model_kind=kind_of(config),
            max_positions=max_positions,
            vocab_size=vocab_size,
            seed=recipe.seed,
            objects=objects.data,
        )
    asked = Asked(
        recipe.data,
        task,
        recipe.folder,
        tokenizer,
        kind_of(config),
        max_positions,
        vocab_size,
        recipe.seed,
        labels,
        objects.data,
        reader,
    )
    return rows_and_examples(asked, shelf_of(recipe))


def shelf_of(recipe: Recipe) -> Shelf | None:
    """Where tokenized rows are kept for other processes and runs; None where they are not."""
    said, most = recipe.rows_cache, round(recipe.rows_cache_gib * 2**30)
    if said == "off":
        return None
    if said != "auto":
        return Shelf(Path(said), most, all=True)
    return Shelf(own_cache() / "rows", most)


def texts_of(
    recipe: Recipe,
    task: str,
    labels: tuple[str, ...] | None,
    objects: Objects,
    reader: Reader | None = None,
) -> Rows:
    """The rows as they were read, with their texts, which tokenized ones are without."""
    given, rate = objects.data, rate_of(reader)
    return load_rows(
        recipe.data, task, recipe.folder, seed=recipe.seed, labels=labels, objects=given, rate=rate
    )
