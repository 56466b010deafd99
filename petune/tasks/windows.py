"""Windows: documents joined, each with its end token, and cut into pieces of one length. No token is lost and
none is in two pieces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Document:
    """A text as token ids, its end token included, and where it came from."""

    ids: list[int]
    where: str


def cut_documents(documents: Sequence[Document], size: int) -> Iterator[tuple[list[int], str]]:
    """The ids of each window, `size` of them but for the last, and the place of the document it begins in."""
    ids = [token for document in documents for token in document.ids]
    starts, start = [], 0
    for document in documents:
        starts.append(start)
        start += len(document.ids)
    current = 0
    for begin in range(0, len(ids), size):
        while current + 1 < len(starts) and starts[current + 1] <= begin:
            current += 1
        yield ids[begin : begin + size], documents[current].where
