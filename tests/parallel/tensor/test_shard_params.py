"""Linears that are several, cut by heads and columns: each rank has some of the outputs of every part, and
trains as one process."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from petune.errors import UsageError
from petune.kernels.configs import MemoryConfig
from petune.models.copied import copied
from petune.models.quantise import quantise_blocks
from petune.parallel.mesh import coordinate
from petune.parallel.plan import ParallelPlan
from petune.parallel.tensor import shard_params
from petune.parallel.tensor.shard_params import refuse_cut_form
from tests.methods import zoo
from tests.methods.zoo import of_64, table, tiny
from tests.parallel.cells import case
from tests.parallel.harness import check
from tests.parallel.plans import BACKENDS, COMPOSED, OVERLAPPED

long = pytest.mark.long
PARTS = {"targets": ("q", "v", "gate")}
WHOLE = {"targets": ("qkv", "gate_up", "down")}
ENTRIES = {"targets": ("qkv", "gate_up")}


def plan_of(backend: str, name: str, ranks: int) -> ParallelPlan:
    if backend in COMPOSED:
        return COMPOSED[backend](name)
    return {**BACKENDS, **{f"{one}, overlapped": own for one, own in OVERLAPPED.items()}}[backend](
        name, ranks
    )


@pytest.mark.parametrize(
    ("name", "method", "backend", "ranks", "tuning", "fused"),
    [
        ("phi3-causal", "lora", "tp", 3, PARTS, True),
        ("phi3-causal", "lora", "tp", 3, WHOLE, True),
        ("modernbert-classify", "lora", "galaxy2", 2, PARTS, True),
        pytest.param("phi3-causal", "full", "galaxy", 2, {}, True, marks=long),
        pytest.param(
            "glm4-causal", "lora", "dp x tp", 4, {"targets": ("q", "gate", "down")}, False, marks=long
        ),
        pytest.param("phi3-causal", "lora", "shard x tp", 4, PARTS, True, marks=long),
        pytest.param("phi3-causal", "full", "shard x tp", 4, {}, False, marks=long),
        pytest.param("phi3-causal", "lora", "tp x pp", 4, PARTS, True, marks=long),
        pytest.param("phi3-causal", "lora", "tp, overlapped", 2, PARTS, True, marks=long),
        pytest.param("phi3-causal", "lora", "cut", 2, PARTS, True, marks=long),
        pytest.param("phi3-causal", "dora", "tp", 2, ENTRIES, True, marks=long),
        pytest.param("phi3-causal", "ia3", "tp", 2, {**WHOLE, "inputs": ("down",)}, True, marks=long),
        pytest.param("phi3-causal", "miss", "tp", 2, ENTRIES, True, marks=long),
        pytest.param("modernbert-classify", "lora", "tp", 3, WHOLE, False, marks=long),
        pytest.param("modernbert-classify", "full", "tp", 2, {}, False, marks=long),
        pytest.param("modernbert-classify", "lora", "shard x tp", 4, PARTS, False, marks=long),
        pytest.param("phi3-causal", "lora", "tp", 2, PARTS, False, marks=long),
        pytest.param("glm4-causal", "full", "galaxy x pp", 4, {}, False, marks=long),
    ],
)
def test_ranks_train_as_one_process(
    name: str,
    method: str,
    backend: str,
    ranks: int,
    tuning: dict[str, Any],
    fused: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(zoo.SETTINGS, method, {} if method in ("full", "ia3") else {"r": 4})
    dtype = torch.float32 if fused else torch.float64  # angles are float32 in a fused block
    one = case(name, method, plan_of(backend, name, ranks), dtype=dtype, steps=3)
    check(replace(one, tuning=tuple(tuning.items()), blocks=MemoryConfig("attention") if fused else None))


@pytest.mark.parametrize("name", ["phi3-causal", pytest.param("modernbert-classify", marks=long)])
def test_dropout_and_recomputing_are_those_of_one_process(name: str) -> None:
    one = case(name, "lora", BACKENDS["tp"](name, 2), recompute=True, dropout=0.2, steps=2)
    check(replace(one, tuning=tuple(PARTS.items())))


def refusal(act: Callable[[], Any]) -> str:
    try:
        act()
    except UsageError as error:
        return str(error).splitlines()[0]
    return ""


@pytest.mark.parametrize("base_dtype", ["nf4", "int8"])
@pytest.mark.parametrize(
    ("name", "changes"),
    [("llama-causal", {"head_dim": 16}), ("t5-seq2seq", {"d_kv": 16}), ("qwen2moe-causal", {})],
)
def test_a_cut_that_a_form_cannot_have_is_refused_before_the_ranks_as_in_them(
    name: str, changes: dict[str, int], base_dtype: str
) -> None:
    model = tiny(name, **of_64(name) | changes).to("meta").requires_grad_(False)
    family, plan, seen = table(name), BACKENDS["tp"](name, 2), set()
    quantise_blocks(model, family, base_dtype)
    shape, own = family.shape(model.config), plan.cut
    assert own is not None
    for heads, columns in itertools.product(((4, 4), (6, 2)), ((64, 64), (96, 32))):
        cut = replace(own, heads=heads, columns=columns, kv_heads=heads if shape.kv_heads == 8 else (2, 2))
        ranks = (coordinate(plan, rank) for rank in (0, 1))
        there = {
            refusal(partial(shard_params.cut, copied(model), family, replace(plan, cut=cut), at))
            for at in ranks
        }
        before = refusal(partial(refuse_cut_form, base_dtype, cut, shape))
        assert bool(before) == any(there) and (shape.experts or {before} == there)
        seen.add(before)
    assert len(seen) == (2 if base_dtype == "nf4" and not shape.experts else 1)


@pytest.mark.parametrize(
    ("backend", "base_dtype"),
    [
        ("tp", "nf4"),
        pytest.param("tp", "int8", marks=long),
        pytest.param("galaxy", "nf4", marks=long),
        pytest.param("shard x tp", "int8", marks=long),
        pytest.param("shard x tp", "nf4", marks=long),
    ],
)
def test_a_quantised_base_trains_as_in_one_process(backend: str, base_dtype: str) -> None:
    name = "phi3-causal"
    plan = plan_of(backend, name, 2)
    assert plan.cut is not None
    plan = replace(plan, cut=replace(plan.cut, heads=(4, 4), kv_heads=(2, 2), columns=(64, 64)))
    one = case(name, "lora", plan, base_dtype=base_dtype, steps=1, passes=(3,))
    changes = {**of_64(name), "hidden_size": 128}  # 512 scales, of which two scales of scales are
    one = replace(one, settings=(*one.settings, *changes.items()))
    check(replace(one, blocks=MemoryConfig("all") if backend == "tp" else None))
