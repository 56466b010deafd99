"""Words of a docstring tagged with the punctuation that followed them: a token task for which nobody
annotated anything.

Restoring punctuation (Tilk and Alumae 2016, "Bidirectional Recurrent Neural Network with Attention Mechanism
for Punctuation Restoration"): marks and capitals are taken away, and a model must tell from the words where
sentences and clauses end.
"""

from __future__ import annotations

import re

WORD = re.compile(r"(?P<word>[A-Za-z\d](?:[\w.'/-]*\w)?)[)\]\"'`]*(?P<mark>[.,:;?!]?)(?=\s|$|[)\]\"'])")
TAGS = {",": "S-COMMA", ":": "S-COLON", ";": "S-COLON", ".": "S-STOP", "?": "S-STOP", "!": "S-STOP"}


def punctuated(text: str) -> tuple[list[str], list[str]]:
    """Words in lower case and as many tags: S-STOP, S-COMMA or S-COLON for the mark that followed the word, O
    where none did."""
    found = list(WORD.finditer(text))
    return [word["word"].lower() for word in found], [TAGS.get(word["mark"], "O") for word in found]
