"""Packing: several examples in one sequence, best fit first, none seeing another.

The longest example not yet placed goes to the fullest bin it fits. Positions restart at 0 for each sample and
no attention mask is passed; transformers derives the block-diagonal mask from that, provided that no cache is
in use (pass use_cache=False).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence

from petune.tasks.examples import Example


def packed(examples: Sequence[Example], sizes: Sequence[int], limit: int) -> Iterator[Example]:
    """Bins of at most `limit` tokens, in the order of their first example, of examples of so many tokens
    each. Each must fit by itself."""
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, bin), sorted
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        size = sizes[index]
        place = bisect_left(room, (size, -1))
        left, number = room.pop(place) if place < len(room) else (limit, len(bins))
        if number == len(bins):
            bins.append([])
        bins[number].append(index)
        insort(room, (left - size, number))
    return (join([examples[index] for index in sorted(chosen)]) for chosen in sorted(bins, key=min))


def join(samples: Sequence[Example]) -> Example:
    """One packed example; the first label of each sample is masked already, so none predicts the next one's
    first token."""
    labels = [label for sample in samples if isinstance(sample.labels, list) for label in sample.labels]
    ids = [token for sample in samples for token in sample.input_ids]
    positions = [position for sample in samples for position in range(len(sample.input_ids))]
    return Example(ids, labels, samples[0].where, len(ids), positions=positions)
