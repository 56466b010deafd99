"""Words of a docstring with tags that say which of them named code: a token task made from the demo corpus, with nothing annotated by hand.

Docstrings mark code by its spelling: `read_file()`, `os.path`, `'utf-8'`, `None`. Such a mention is found by its marks, split into words
(read, file) and tagged; then the marks and capitals are taken away, so that a model must tell from the words around them.
"""

from __future__ import annotations

import re

MENTION = re.compile(
    r"(?P<STRING>(?<!\w)'[^'\n]{1,30}'(?!\w)|(?<!\w)\"[^\"\n]{1,30}\"(?!\w))"
    r"|(?P<CALL>\b[A-Za-z_][\w.]*\([^()\n]{0,60}\))"
    r"|(?P<CONSTANT>\b(?:None|True|False|NULL|[A-Z][A-Z\d]*_[A-Z\d_]+)\b)"
    r"|(?P<NAME>\b(?!e\.g|i\.e)(?:[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+|\w*[A-Za-z]_\w*|_+[A-Za-z]\w*|[A-Z][a-z\d]+(?:[A-Z][a-z\d]+)+)\b)"
)
WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+")
PLAIN = re.compile(r"[A-Za-z]+|\d+|[.,:;?!]")


def code_words(text: str) -> tuple[list[str], list[str]]:
    """Words in lower case and as many tags: B-KIND and I-KIND for a mention of STRING, CALL, CONSTANT or NAME, O for any other word."""
    tokens: list[str] = []
    tags: list[str] = []
    start = 0
    for found in MENTION.finditer(text):
        outside = PLAIN.findall(text[start : found.start()])
        inside = WORD.findall(found.group())
        tokens += [word.lower() for word in (*outside, *inside)]
        tags += ["O"] * len(outside) + [f"{'I' if index else 'B'}-{found.lastgroup}" for index in range(len(inside))]
        start = found.end()
    rest = PLAIN.findall(text[start:])
    return [*tokens, *(word.lower() for word in rest)], [*tags, *["O"] * len(rest)]
