"""A bucket holds the batches it was made for, and no slot of it is empty or longer than the others."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch

from petune.kernels.block.varlen import Segments
from petune.kernels.graphs.bucket import QUANTUM, SHORTEST, SLOTS, Bucket, Size

Lengths = Sequence[int]
LENGTHS = [
    (1,),
    (500,),
    (64,) * 40,
    (7, 255, 3),
    (1,) * 300,
    tuple(range(1, 60)),
    (1, 4000),
    (5000, 243),
    (100_001,),
]


# the last ones leave one slot of eight
@pytest.mark.parametrize("lengths", [*LENGTHS, (65,) * 127, (40,) * 207, (8,) * 7])
def test_a_bucket_holds_what_it_was_made_for_and_no_slot_is_empty_or_too_long(
    lengths: tuple[int, ...],
) -> None:
    segments = Segments(torch.empty(0), lengths, None, (1, sum(lengths)))
    bucket = Bucket.of((1, sum(lengths), 8), segments)
    assert bucket.holds(segments)
    assert bucket.tokens % QUANTUM == 0
    assert bucket.tokens - sum(lengths) <= max(QUANTUM, sum(lengths) / 8) + SLOTS
    assert bucket.own.longest < 2 * max(SHORTEST, *lengths), "a spare slot is longer than the segments"
    starts = bucket.own.starts(segments, bucket.rows - len(lengths))
    slots = [end - start for start, end in pairwise(starts)]
    assert tuple(slots[: len(lengths)]) == lengths
    assert len(slots) == bucket.rows and starts[-1] == bucket.tokens
    assert min(slots) >= 1 and max(slots) <= bucket.own.longest


def test_a_bucket_holds_neither_more_tokens_nor_segments_nor_longer_ones() -> None:
    bucket = Bucket(Size(512, 128), 8, True, ())

    def holds(*lengths: int) -> bool:
        return bucket.holds(Segments(torch.empty(0), lengths, None, (1, sum(lengths))))

    assert holds(*[100] * 5) and holds(*[71] * 7)
    assert not holds(129, 100, 100, 100)
    assert not holds(*[1] * 8)  # no slot left for what is lacking
    assert not holds(*[128] * 4)  # nor anything lacking for the slots that are
    assert not holds(*[1] * 7)  # too much is lacking for the slot that is left


COUNTS = [
    ((1,), (1,)),
    ((500, 3), (1, 2)),
    ((1,) * 40, (512,) * 40),
    ((64,) * 9, (1,) * 9),
    (tuple(range(1, 60)), tuple(range(60, 1, -1))),
]


@pytest.mark.parametrize(("own", "memory"), COUNTS)
def test_a_bucket_has_as_many_slots_for_the_memory_and_none_is_empty_or_too_long(
    own: Lengths, memory: Lengths
) -> None:
    sides = [Segments(torch.empty(0), tuple(lengths), None, (1, sum(lengths))) for lengths in (own, memory)]
    bucket = Bucket.of((1, sum(own), 8), sides[0], (), sides[1])
    assert bucket.holds(*sides) and bucket.memory is not None
    for size, side in zip((bucket.own, bucket.memory), sides, strict=True):
        starts = size.starts(side, bucket.rows - len(side.lengths))
        slots = [end - start for start, end in pairwise(starts)]
        assert tuple(slots[: len(side.lengths)]) == side.lengths
        assert len(slots) == bucket.rows and starts[-1] == size.tokens
        assert min(slots) >= 1 and max(slots) <= size.longest
    longer = Segments(torch.empty(0), (*memory[:-1], bucket.memory.longest + 1), None, (1, 1))
    assert not bucket.holds(sides[0], longer)
