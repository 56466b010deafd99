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


@pytest.mark.parametrize(
    ("data", "kernels", "model", "samples"),
    [
        ({}, "auto", "llama-causal", {1}),  # rows of unequal length, whose padding is left out
        ({"packing": True}, "auto", "llama-causal", {2}),
        ({"chunk": True}, "auto", "llama-causal", {0}),  # full ones
        ({"packing": True}, "off", "llama-causal", {0}),
        ({}, "auto", "t5-seq2seq", {0}),  # whose bias of positions is made for whole rows
    ],
)
def test_rows_lie_behind_one_another_where_fused_blocks_leave_padding_out(
    data: dict[str, bool], kernels: str, model: str, samples: set[int], tmp_path: Path
) -> None:
    recipe = recipe_of(model, tmp_path, kernels=kernels, device="cuda", data={"path": "nowhere", **data})
    work = workload(sketch(recipe))
    every = (part for kind in work.kinds for region in kind for part in region)
    assert {part.samples for part in every if part.place == "scores"} == samples
