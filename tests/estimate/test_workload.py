from __future__ import annotations

from pathlib import Path

from petune.estimate.forecast import sketch
from petune.estimate.workload import workload
from tests.written_recipes import recipe_of


def test_scores_are_counted_by_the_heads_of_each_block(tmp_path: Path) -> None:
    """Gemma 4's with sliding attention, and with full attention."""
    work = workload(sketch(recipe_of("gemma4-causal", tmp_path)))
    heads = [
        part.heads
        for _, kind in work.blocks
        for region in work.kinds[kind]
        for part in region
        if part.place == "scores"
    ]
    assert [one and one[2] for one in heads] == [8, 16]
