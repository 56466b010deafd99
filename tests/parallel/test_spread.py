"""Experts cut over ranks: steps of every method and family are those of one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from petune.kernels.configs import MemoryConfig
from tests.parallel.cells import case
from tests.parallel.harness import check
from tests.parallel.plans import ep

CELLS = [
    ("lora", "qwen3moe-causal", 2, 1),
    ("full", "mixtral-causal", 3, 1),
    ("lora", "gptoss-causal", 2, 1),
    ("adapter", "qwen2moe-causal", 2, 2),
    ("side", "qwen3moe-causal", 3, 1),
]


@pytest.mark.parametrize(("method", "name", "ranks", "replicas"), CELLS)
def test_ranks_that_share_experts_train_as_one_process(
    method: str, name: str, ranks: int, replicas: int
) -> None:
    check(case(name, method, ep(name, ranks, replicas), steps=2, passes=(5, 4)))


def test_in_float64_nothing_is_left_to_rounding() -> None:
    check(case("qwen3moe-causal", "lora", ep("qwen3moe-causal", 2), steps=3, dtype=torch.float64))


FUSED = [
    ("lora", "qwen3moe-causal", 2, 2, "input"),
    ("full", "mixtral-causal", 3, 1, "attention"),
    ("adapter", "qwen2moe-causal", 2, 1, "projections"),
    ("lora", "mixtral-causal", 2, 1, "all"),
]


@pytest.mark.parametrize(("method", "name", "ranks", "replicas", "keep"), FUSED)
def test_so_do_their_fused_blocks(method: str, name: str, ranks: int, replicas: int, keep: Any) -> None:
    dropout = 0.0 if method == "lora" else 0.1  # which lora on experts has not
    one = case(name, method, ep(name, ranks, replicas), steps=1, passes=(5, 4), dropout=dropout)
    check(replace(one, blocks=MemoryConfig(keep)))
