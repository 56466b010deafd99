"""prefer: a decoder learns which of two answers to a prompt is the better one.

Each answer is encoded as the causal or the chat task encodes it, the answer alone being trained; the rejected
one stands beside the chosen one in `Example.others`. Of an answer that is good or bad, the answer to another
prompt stands there, behind its own prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from petune.tasks.causal import encode_causal
from petune.tasks.chat import encode_chat
from petune.tasks.examples import Coder, Example
from petune.tasks.rows import Conversation, Pair, Preference, Rated, Row


def encode_prefer(rows: Sequence[Row], coder: Coder) -> list[Example]:
    """One example per Preference or Rated, of two texts. Raises as `encode_chat` where rows are turns."""
    if rated := [row for row in rows if isinstance(row, Rated)]:
        own = encode_causal([row.answer for row in rated], coder)
        beside = encode_causal([Pair(row.where, row.answer.source, row.other) for row in rated], coder)
        texts = zip(own, beside, rated, strict=True)
        return [
            replace(one, good=row.good, others=(replace(other, good=row.good),)) for one, other, row in texts
        ]
    found = [row for row in rows if isinstance(row, Preference)]
    talks = bool(found) and isinstance(found[0].chosen, Conversation)
    work = encode_chat if talks else encode_causal
    chosen, rejected = (work([getattr(row, side) for row in found], coder) for side in ("chosen", "rejected"))
    return [replace(one, others=(other,)) for one, other in zip(chosen, rejected, strict=True)]
