"""rerank: an encoder learns how well a passage answers a query, both read as one text.

A query with the passage that answers it and others that do not is an example of several texts, the right one
first; a query with one passage and a label is an example of its own. The label of a text is 1 or 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from petune.errors import DataError, UsageError
from petune.tasks.classify import pair_example
from petune.tasks.configs import RerankConfig
from petune.tasks.embed import refuse_uneven
from petune.tasks.examples import Coder, Example, cut_on
from petune.tasks.rows import Anchored, Labelled, Row

ONE_OUTPUT = ("LABEL_0",)  # what transformers calls the only output of a head


def encode_rerank(rows: Sequence[Row], coder: Coder) -> list[Example]:
    """One example per row, of as many texts as it has passages. DataError for the first row with another
    number of them, or with one alone and no label."""
    listed = [row for row in rows if isinstance(row, Anchored)]
    refuse_uneven(listed)
    if listed and not listed[0].negatives:
        remedy = "add a column negative, or write rows of query, passage and label"
        what = "these rows have no passage that does not answer the query"
        raise DataError(what, where=listed[0].where, remedy=remedy)
    with cut_on(coder.tokenizer, coder.config.truncation):
        return [_example(row, coder) for row in rows if isinstance(row, Anchored | Labelled)]


def _example(row: Anchored | Labelled, coder: Coder) -> Example:
    if isinstance(row, Labelled):
        return pair_example(row.text, row.pair, int(row.label), row.where, coder)
    passages = enumerate((row.positive, *row.negatives))
    first, *others = (
        pair_example(row.anchor, passage, int(not at), row.where, coder) for at, passage in passages
    )
    return replace(first, others=tuple(others))


def refuse_single(config: RerankConfig, examples: Sequence[Example], where: str) -> None:
    """Raise UsageError where passages of one query are to be compared and every example has one alone."""
    if config.loss == "softmax" and not examples[0].others:
        what = "softmax compares the passages of one query, and these rows have one each"
        remedy = "set rerank: bce, or write rows of query, positive and negative"
        raise UsageError(what, where=where, remedy=remedy)
