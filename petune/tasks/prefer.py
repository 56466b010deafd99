"""prefer: a decoder learns which of two answers to a prompt is the better one.

Each answer is encoded as the causal or the chat task encodes it, the answer alone being trained; the rejected
one stands beside the chosen one in `Example.others`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from petune.tasks.causal import encode_causal
from petune.tasks.chat import encode_chat
from petune.tasks.examples import Coder, Example
from petune.tasks.rows import Conversation, Preference, Row


def encode_prefer(rows: Sequence[Row], coder: Coder) -> list[Example]:
    """One example per Preference, of two texts. Raises as `encode_chat` where rows are turns."""
    found = [row for row in rows if isinstance(row, Preference)]
    talks = bool(found) and isinstance(found[0].chosen, Conversation)
    work = encode_chat if talks else encode_causal
    chosen, rejected = (work([getattr(row, side) for row in found], coder) for side in ("chosen", "rejected"))
    return [replace(one, others=(other,)) for one, other in zip(chosen, rejected, strict=True)]
