from __future__ import annotations

from pathlib import Path

import pytest

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


@pytest.mark.parametrize(
    ("kernels", "device", "method", "own"),
    [
        ("auto", "cuda", "lora", True),
        ("auto", "cpu", "lora", False),  # where no kernel fuses the head
        ("reference", "cpu", "lora", True),
        ("off", "cuda", "lora", False),
        ("auto", "cuda", "full", False),
    ],
)
def test_a_fused_head_behind_which_nothing_trains_is_that_of_own_tokens(
    kernels: str, device: str, method: str, own: bool, tmp_path: Path
) -> None:
    recipe = recipe_of("llama-causal", tmp_path, method={"name": method}, kernels=kernels, device=device)
    (head,) = workload(sketch(recipe)).head
    assert head.own_tokens == own
