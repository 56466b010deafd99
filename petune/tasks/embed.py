"""embed: an encoder learns to lay texts that belong together near one another.

Each text is encoded as the tokenizer does it, special tokens included; the positive and the negatives stand
beside the anchor in `Example.others`. Every row must have as many texts, which one table of a batch holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from petune.errors import DataError, UsageError
from petune.tasks.classify import pair_example
from petune.tasks.configs import EmbedConfig
from petune.tasks.examples import Coder, Example, cut_on
from petune.tasks.rows import Anchored, Row


def encode_embed(rows: Sequence[Row], coder: Coder) -> list[Example]:
    """One example per Anchored row. DataError for the first row with another number of negatives."""
    found = [row for row in rows if isinstance(row, Anchored)]
    refuse_uneven(found)
    with cut_on(coder.tokenizer, coder.config.truncation):
        examples = [
            [
                pair_example(text, None, 0, row.where, coder)
                for text in (row.anchor, row.positive, *row.negatives)
            ]
            for row in found
        ]
    return [replace(first, others=tuple(others)) for first, *others in examples]


def refuse_uneven(rows: Sequence[Anchored]) -> None:
    """Raise DataError for the first row with another number of negatives than the first has."""
    for row in rows:
        if len(row.negatives) != len(rows[0].negatives):
            expected = f"{len(rows[0].negatives)}, as at {rows[0].where}"
            remedy = "give every row as many, or remove the column"
            what = "the rows have different numbers of negatives"
            raise DataError(
                what, where=row.where, expected=expected, found=str(len(row.negatives)), remedy=remedy
            )


def refuse_alone(examples: Sequence[Example], size: int, where: str) -> None:
    """Raise UsageError where passes of `size` rows have no text that a positive is to be told from."""
    if min(size, len(examples)) == 1 and len(examples[0].others) == 1:
        what = "a positive is told from the texts of the other rows of its pass, and there is one row"
        remedy = "take two rows or more, or write rows with a column negative"
        raise UsageError(what, where=where, remedy=remedy)


def sentence_files(config: EmbedConfig, width: int, limit: int) -> dict[str, Any]:
    """The JSON files by which sentence-transformers knows a model that embeds, by path: its modules, the
    tokens it reads and how it pools."""
    kinds = {"0": ("", "Transformer"), "1": ("1_Pooling", "Pooling")}
    modules = [
        {"idx": int(name), "name": name, "path": path, "type": f"sentence_transformers.models.{kind}"}
        for name, (path, kind) in kinds.items()
    ]
    pooling = {
        "word_embedding_dimension": width,
        "pooling_mode_cls_token": config.pooling == "cls",
        "pooling_mode_mean_tokens": config.pooling == "mean",
    }
    return {
        "modules.json": modules,
        "sentence_bert_config.json": {"max_seq_length": limit, "do_lower_case": False},
        "1_Pooling/config.json": pooling,
    }
