"""seq2seq: the encoder reads the source, the decoder writes the target; every token of the target is trained,
its end token included."""

from __future__ import annotations

from collections.abc import Sequence

from petune.tasks.examples import Coder, Example, cut_on
from petune.tasks.rows import Pair, Row


def encode_seq2seq(rows: Sequence[Row], coder: Coder) -> list[Example]:
    """One example per Pair. A source is cut on the side the config names, a target always at its end; a cut
    target has no end token."""
    pairs = [row for row in rows if isinstance(row, Pair)]
    eos = coder.eos()
    sources = coder.ids([coder.config.prefix + row.source for row in pairs])
    targets = coder.target_ids([row.target for row in pairs])
    examples = []
    with cut_on(coder.tokenizer, coder.config.truncation):
        for row, source, target in zip(pairs, sources, targets, strict=True):
            length = len(source)
            if length > coder.limit:
                source = coder.tokenizer(
                    coder.config.prefix + row.source, truncation=True, max_length=coder.limit, verbose=False
                )["input_ids"]
            if target[-1:] != [eos]:
                target = [*target, eos]
            lost = max(0, len(target) - coder.target_limit)
            examples.append(
                Example(source, target[: coder.target_limit], row.where, length + lost, has_target=True)
            )
    return examples
