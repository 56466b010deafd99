"""Routed experts under plans: equal to one process, or refused in words."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from petune.errors import UsageError
from petune.kernels.configs import MemoryConfig
from petune.models import FAMILIES
from petune.parallel.configs import CutConfig, ParallelConfig
from petune.parallel.plan import make_plan
from tests.methods.zoo import tiny
from tests.parallel.cells import case
from tests.parallel.harness import check
from tests.parallel.plans import BACKENDS

# every family of experts and every plan once, with the methods in turn
CELLS = [
    ("lora", "dp", "gptoss-causal"),
    ("lora", "shard", "qwen3moe-causal"),
    ("full", "shard", "mixtral-causal"),
    ("lora", "pp-1f1b", "qwen2moe-causal"),
    ("side", "pp-1f1b", "qwen3moe-causal"),
    ("lora", "sp-gather", "mixtral-causal"),
    ("lora", "galaxy2", "qwen3moe-causal"),
    ("adapter", "galaxy2", "qwen2moe-causal"),
]


@pytest.mark.parametrize(("method", "backend", "name"), CELLS)
def test_a_plan_trains_experts_as_one_process_does(method: str, backend: str, name: str) -> None:
    check(case(name, method, BACKENDS[backend](name, 2), steps=1))


FUSED = [
    ("full", "dp", "mixtral-causal", "input"),
    ("lora", "shard", "qwen3moe-causal", "attention"),
    ("full", "shard", "qwen2moe-causal", "projections"),
    ("lora", "pp-1f1b", "qwen2moe-causal", "input"),
    ("adapter", "sp-gather", "mixtral-causal", "all"),
    ("lora", "sp-ulysses", "qwen3moe-causal", "projections"),
    ("lora", "sp-ring", "qwen2moe-causal", "attention"),
    ("lora", "galaxy2", "qwen3moe-causal", "input"),
]


@pytest.mark.parametrize(("method", "backend", "name", "keep"), FUSED)
def test_so_do_their_fused_blocks(method: str, backend: str, name: str, keep: Any) -> None:
    own = case(name, method, BACKENDS[backend](name, 2), steps=1)
    check(replace(own, blocks=MemoryConfig(keep)))


@pytest.mark.parametrize("backend", ["pp-1f1b", "galaxy2"])
def test_so_do_quantised_experts(backend: str) -> None:
    own = case("qwen3moe-causal", "lora", BACKENDS[backend]("qwen3moe-causal", 2), steps=1)
    check(replace(own, blocks=MemoryConfig("input"), base_dtype="int8"))


@pytest.mark.parametrize("row", ["tp", "galaxy"])
def test_columns_of_experts_are_not_cut_and_that_is_said(row: str) -> None:
    config = tiny("qwen3moe-causal").config
    asked: Any = {row: CutConfig(size=2)}
    with pytest.raises(UsageError, match=f"{row}.size  experts are not cut by columns"):
        make_plan(ParallelConfig(**asked), FAMILIES[config.model_type], config, None, 8)
