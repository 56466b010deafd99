"""causal: a decoder continues text. Of a pair only the completion is trained, of plain text everything; the
end token always.

The prompt is tokenized by itself, as it will be at generation, and masked by its position: a prompt that
contains the completion's tokens, or a pad token equal to the end token, changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from petune.tasks.examples import MASKED, Coder, Example, causal_example
from petune.tasks.rows import Pair, Row, Text
from petune.tasks.windows import Document, cut_documents


def prompt_text(source: str, coder: Coder) -> str:
    """A source as the decoder sees it, up to where the completion begins."""
    return coder.config.prefix + source + coder.config.separator


def opened(ids: list[int], eos: int) -> list[int]:
    """The ids without an end token that the tokenizer added by itself."""
    return ids[:-1] if ids[-1:] == [eos] else ids


def encode_causal(rows: Sequence[Row], coder: Coder) -> list[Example]:
    """One example per Pair or Text, or per window of joined texts, where a document's first token follows
    from nothing."""
    eos = coder.eos()
    pairs = [row for row in rows if isinstance(row, Pair)]
    texts = [row for row in rows if isinstance(row, Text)]
    prompts = coder.ids([prompt_text(row.source, coder) for row in pairs])
    completions = coder.ids([row.target for row in pairs], special=False)
    examples = []
    for row, prompt, completion in zip(pairs, prompts, completions, strict=True):
        prompt = opened(prompt, eos)
        examples.append(
            causal_example(
                [*prompt, *completion, eos], [MASKED] * len(prompt) + [*completion, eos], row.where, coder
            )
        )
    whole = [
        Document([*opened(ids, eos), eos], text.where)
        for text, ids in zip(texts, coder.ids([row.text for row in texts]), strict=True)
    ]
    if not coder.config.chunk:
        return [*examples, *(causal_example(one.ids, one.ids, one.where, coder) for one in whole)]
    first = coder.tokenizer.bos_token_id
    labels = [
        Document([MASKED if one.ids[0] == first else one.ids[0], *one.ids[1:]], one.where) for one in whole
    ]
    windows = zip(*(cut_documents(some, coder.limit) for some in (whole, labels)), strict=True)
    return [causal_example(ids, trained, where, coder) for (ids, where), (trained, _) in windows]
