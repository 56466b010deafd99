"""Routed experts under plans: equal to one process, or refused in words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from petune.errors import UsageError
from petune.kernels.configs import MemoryConfig
from petune.models import FAMILIES, experts
from petune.models.spec import Pieces
from petune.parallel.configs import CutConfig, ParallelConfig
from petune.parallel.plan import ParallelPlan
from petune.parallel.planning import make_plan
from petune.parallel.tensor import shard_params
from tests.methods.zoo import tiny
from tests.parallel.cells import BY_COLUMNS, EXPERTS, SHORT_WHOLE, WHOLE_EXPERTS, case, in_part, left
from tests.parallel.harness import Case, check
from tests.parallel.plans import BACKENDS, COMPOSED
from tests.pool import RankError


@pytest.mark.parametrize(("method", "backend", "name"), EXPERTS)
def test_a_plan_trains_experts_as_one_process_does(method: str, backend: str, name: str) -> None:
    check(case(name, method, BACKENDS[backend](name, 2), steps=1))


@pytest.mark.parametrize(("method", "backend", "name"), in_part(WHOLE_EXPERTS, SHORT_WHOLE))
def test_every_family_of_experts_trains_under_every_plan_that_leaves_them_whole(
    method: str, backend: str, name: str
) -> None:
    check(case(name, method, BACKENDS[backend](name, 2), steps=1))


FUSED = [
    ("lora", "shard", "qwen3moe-causal", "attention"),
    ("lora", "pp-1f1b", "qwen2moe-causal", "input"),
    ("adapter", "sp-gather", "mixtral-causal", "all"),
    ("lora", "sp-ring", "qwen2moe-causal", "attention"),
    ("lora", "galaxy2", "qwen3moe-causal", "input"),
    ("adapter", "tp", "mixtral-causal", "projections"),
    ("full", "galaxy", "gptoss-causal", "attention"),
    *left(
        ("full", "dp", "mixtral-causal", "input"),
        ("full", "shard", "qwen2moe-causal", "projections"),
        ("lora", "sp-ulysses", "qwen3moe-causal", "projections"),
        ("lora", "tp", "qwen2moe-causal", "input"),
        ("lora", "galaxy", "qwen3moe-causal", "all"),
    ),
]


@pytest.mark.parametrize(("method", "backend", "name", "keep"), FUSED)
def test_so_do_their_fused_blocks(method: str, backend: str, name: str, keep: Any) -> None:
    own = case(name, method, BACKENDS[backend](name, 2), steps=1)
    check(replace(own, blocks=MemoryConfig(keep)))


@pytest.mark.parametrize("backend", ["pp-1f1b", "galaxy2"])
def test_so_do_quantised_experts(backend: str) -> None:
    own = case("qwen3moe-causal", "lora", BACKENDS[backend]("qwen3moe-causal", 2), steps=1)
    check(replace(own, blocks=MemoryConfig("input"), base_dtype="int8"))


def exactly(one: Case) -> Case:
    """Three steps in float64, without transformers' grouped products, which have none."""
    return replace(
        one, dtype=torch.float64, steps=3, settings=(*one.settings, ("experts_implementation", "eager"))
    )


@pytest.mark.usefixtures("no_float32")
@pytest.mark.parametrize(
    ("method", "backend", "name"),
    [
        ("lora", "tp", "qwen2moe-causal"),
        ("full", "tp", "gptoss-causal"),
        *left(("side", "tp", "qwen3moe-causal")),
    ],
)
def test_three_steps_by_columns_leave_nothing_to_rounding(method: str, backend: str, name: str) -> None:
    check(exactly(case(name, method, BACKENDS[backend](name, 2))))


@pytest.mark.long
@pytest.mark.usefixtures("no_float32")
@pytest.mark.parametrize(("method", "backend", "name"), BY_COLUMNS)
def test_every_method_and_family_by_columns_in_float64(method: str, backend: str, name: str) -> None:
    ladder = (("reduction", 2),) if method == "side" else ()  # heads of Qwen2-MoE here are 4 columns wide
    own = case(name, method, BACKENDS[backend](name, 2), recompute=backend == "tp", tuning=ladder)
    check(exactly(own))


@pytest.mark.long
@pytest.mark.parametrize("backend", list(COMPOSED))
def test_columns_of_experts_beside_other_axes(backend: str) -> None:
    check(case("mixtral-causal", "lora", COMPOSED[backend]("mixtral-causal"), steps=1))


@pytest.mark.parametrize("fused", [False, True])
def test_dropout_inside_a_shared_expert_is_that_of_one_process(fused: bool) -> None:
    own = case("qwen2moe-causal", "lora", BACKENDS["tp"]("qwen2moe-causal", 2), steps=1, dropout=0.1)
    own = replace(own, tuning=(("exclude", ("experts",)),))
    check(replace(own, blocks=MemoryConfig("input")) if fused else own)


# ------------------------------------------------------------------ faults, each of which a comparison sees


def contiguous(module: nn.Module, name: str, dim: int) -> Pieces:
    """gate | up is cut as if it were one."""
    return Pieces(dim, places=2 if name == "gate_up_proj" else 1)


def twice(module: nn.Module, leaf: str, value: Tensor) -> None:
    """Biases that one rank adds are added by all, and train on one."""
    del module._parameters[leaf]
    module.register_buffer(leaf, value.detach(), persistent=False)


def kept(*args: Any, plain: Callable[..., set[str]] = shard_params.narrow) -> set[str]:
    """One rank's gradient of a whole tensor is taken for all of it."""
    plain(*args)
    return set()


@pytest.mark.parametrize(
    ("where", "attribute", "fault", "method", "name"),
    [
        pytest.param(experts, "along", contiguous, "lora", "qwen2moe-causal", id="gate and up as one"),
        *(
            pytest.param(shard_params, *one, id=what, marks=pytest.mark.long)
            for what, one in {
                "a bias twice": ("_without", twice, "full", "gptoss-causal"),
                "a factor not summed": ("narrow", kept, "lora", "mixtral-causal"),
            }.items()
        ),
    ],
)
def test_a_wrong_cut_is_noticed(
    where: Any, attribute: str, fault: Any, method: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(where, attribute, fault)
    with pytest.raises(AssertionError, match=r"logits in eval mode|gradients of the first step"):
        check(case(name, method, BACKENDS["tp"](name, 2), steps=1))


# ------------------------------------------------------------------ plans


def planned(name: str, **asked: Any) -> ParallelPlan:
    config = tiny(name, moe_intermediate_size=24, shared_expert_intermediate_size=40).config
    return make_plan(ParallelConfig(**asked), FAMILIES[config.model_type], config, None, 8)


def test_a_rank_has_columns_of_every_expert_in_eights() -> None:
    plan = planned("qwen2moe-causal", tp=CutConfig(shares=(2, 1)))
    assert plan.cut is not None and plan.cut.columns == (16, 8)
    assert planned("gptoss-causal", galaxy=CutConfig(size=2)).cut.columns == (16, 8)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("cut", "said"),
    [
        (CutConfig(columns=(12, 12)), "rows of whole 16 bytes\n.*multiples of 8, found .*12, 12"),
        (CutConfig(size=4), "every rank needs 8 columns of an expert\n.*at most 3"),
        (CutConfig(columns=(16, 16)), "do not add up to the model's\n.*24, found"),
        (CutConfig(size=2, overlap=True), "products of linears, and experts are none"),
    ],
)
def test_columns_that_experts_cannot_have_are_refused(cut: CutConfig, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        planned("qwen2moe-causal", tp=cut)


def test_quantised_experts_are_not_cut_by_columns() -> None:
    own = case("qwen3moe-causal", "lora", BACKENDS["tp"]("qwen3moe-causal", 2), steps=1, base_dtype="int8")
    with pytest.raises(RankError, match="int8 holds experts whole, and this plan cuts their columns"):
        check(own)


@pytest.mark.parametrize("cut", [CutConfig(size=2, exchange=how) for how in ("gather", "ulysses", "ring")])
def test_tokens_of_other_ranks_are_refused_where_attention_has_sinks(cut: CutConfig) -> None:
    with pytest.raises(UsageError, match="attention with sinks does not see tokens of other ranks"):
        planned("gptoss-causal", sp=cut)
