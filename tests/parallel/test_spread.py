"""Experts cut over ranks train as in one process, and faults are noticed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from petune.errors import UsageError
from petune.kernels.configs import MemoryConfig
from petune.models import FAMILIES
from petune.models.experts import number_of
from petune.parallel.configs import DpConfig, EpConfig, ParallelConfig
from petune.parallel.mesh import Coordinate
from petune.parallel.plan import ParallelPlan, describe
from petune.parallel.planning import make_plan
from petune.parallel.runner import Runner
from petune.parallel.spread import ExpertRanks, SpreadHook, cut_experts
from tests.methods.zoo import tiny
from tests.parallel.cells import SPREAD, SPREAD_FUSED, carries_state, case
from tests.parallel.harness import Case, check
from tests.parallel.plans import ep
from tests.pool import run

GRADIENTS = "gradients of the first step"
LOGITS = "logits in eval mode"
NORMS = "norms of step 0"
# every method, every family; two ranks and three, uneven, and two replicas of two
CELLS = [
    ("full", "mixtral-causal", 3, 1),
    ("lora", "gptoss-causal", 2, 1),
    ("adapter", "qwen2moe-causal", 2, 2),
    ("side", "qwen3moe-causal", 2, 1),
]


def cell(method: str, name: str, ranks: int, replicas: int = 1, **changes: Any) -> Case:
    """A case with a row for every rank in both of its passes. LoRA on experts has no dropout."""
    own = {"steps": 1, "passes": (5, 4), "dropout": 0.0 if method == "lora" else 0.1}
    return case(name, method, ep(name, ranks, replicas), **{**own, **changes})


@pytest.mark.parametrize(("method", "name", "ranks", "replicas"), CELLS)
def test_ranks_that_share_experts_train_as_one_process(
    method: str, name: str, ranks: int, replicas: int
) -> None:
    check(cell(method, name, ranks, replicas, recompute=ranks == 3))


def test_three_steps_in_float64_leave_nothing_to_rounding() -> None:
    check(cell("lora", "qwen3moe-causal", 2, steps=3, dtype=torch.float64))
    check(eager(cell("full", "gptoss-causal", 3, dtype=torch.float64, dropout=0.0)))


def eager(one: Case) -> Case:
    """The same without transformers' grouped products, which have no float64."""
    return replace(one, settings=(*one.settings, ("experts_implementation", "eager")))


@pytest.mark.parametrize(("method", "name", "ranks", "replicas", "keep"), SPREAD_FUSED)
def test_so_do_their_fused_blocks(method: str, name: str, ranks: int, replicas: int, keep: Any) -> None:
    check(cell(method, name, ranks, replicas, blocks=MemoryConfig(keep)))


def test_so_do_adapters_behind_blocks_of_experts() -> None:
    own = {"tuning": (("kind", "pfeiffer"),), "blocks": MemoryConfig("input")}
    check(cell("adapter", "qwen3moe-causal", 2, **own))


def test_quantised_experts_train_on_the_ranks_that_own_them() -> None:
    check(cell("lora", "qwen3moe-causal", 2, base_dtype="int8"))
    check(cell("lora", "gptoss-causal", 2, base_dtype="int8", blocks=MemoryConfig("input")))


@pytest.mark.long
@pytest.mark.parametrize(("method", "name"), SPREAD)
@pytest.mark.parametrize(("ranks", "replicas"), [(2, 1), (3, 1), (2, 2)])
def test_every_method_and_family_in_float64(method: str, name: str, ranks: int, replicas: int) -> None:
    """But for models with mixers, of which transformers computes much in float32 whatever the dtype."""
    ladder = (("reduction", 2),) if method == "side" else ()  # heads of Qwen2-MoE here are 4 columns wide
    dtype = torch.float32 if carries_state(name) else torch.float64
    check(eager(cell(method, name, ranks, replicas, steps=3, dtype=dtype, tuning=ladder)))


# ------------------------------------------------------------------ whoever is chosen


def _called(chosen: list[list[int]], double: bool) -> dict[str, Any]:
    """Mixtral's four experts, of which rank 1 has one, called with own tokens for the experts chosen."""
    experts: Any = tiny("mixtral-causal").model.layers[0].mlp.experts
    index, x, share = _given(chosen)
    if double:
        rank = dist.get_rank()
        cut_experts(nn.ModuleDict({"experts": experts}), PLAN, Coordinate(dp=rank, ep=rank))
        assert number_of(experts) == 4 and experts.num_experts == (3, 1)[rank]
        hooks = SpreadHook(ExpertRanks((3, 1), rank, dist.group.WORLD))
        experts.register_forward_pre_hook(hooks.before)
        experts.register_forward_hook(hooks.after)
        index, x, share = (one.detach()[rank::2].clone() for one in (index, x, share))
    x.requires_grad_(), share.requires_grad_()
    y = experts(x, index, share)
    (y * torch.linspace(0, 1, y.shape[1], dtype=y.dtype)).sum().backward()
    return {"y": y.detach(), "x": x.grad, "share": share.grad, "down": experts.down_proj.grad}


PLAN = ParallelPlan(dp=2, shares=(1, 1), ep=2, experts=(3, 1))


def _given(chosen: list[list[int]]) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(5)
    index = torch.tensor(chosen)
    return index, torch.randn(len(index), 32, generator=draw), torch.rand(index.shape, generator=draw)


@pytest.mark.parametrize(
    "chosen",
    [[[0, 3], [1, 2], [3, 1], [2, 0], [0, 1]], [[0, 1], [2, 1], [1, 0], [0, 2]], [[3, 3], [3, 3]]],
    ids=["all", "nobody of the second rank", "nobody of the first"],
)
def test_experts_give_what_they_give_together_whoever_is_chosen(chosen: list[list[int]]) -> None:
    ranks = run(2, _called, chosen, True)
    alone = _called(chosen, False)
    for name in ("y", "x", "share"):
        for rank, found in enumerate(ranks):
            torch.testing.assert_close(found[name], alone[name][rank::2], rtol=0, atol=1e-6)
    whole = torch.cat([found["down"] for found in ranks])
    torch.testing.assert_close(whole, alone["down"], rtol=0, atol=1e-6)


def _sent(index: list[list[int]]) -> tuple[Any, ...]:
    """The way of own tokens to four experts, of which rank 1 has one: rows sent, rows that come and the
    experts here of each, and what comes back."""
    spread, x = ExpertRanks((3, 1), dist.get_rank(), dist.group.WORLD), torch.tensor([[1.0], [2.0], [3.0]])
    way, here = spread.way(torch.tensor(index))
    rows = spread.there(x + 10 * dist.get_rank(), way)
    experts = [sorted(here.groups[here.tokens == row].tolist()) for row in range(len(rows))]
    return way.sent, rows[:, 0].tolist(), experts, spread.back(rows, way)[:, 0].tolist()


def test_a_token_goes_once_to_each_rank_that_has_some_of_its_experts() -> None:
    first, second = run(2, _sent, [[0, 2], [3, 1], [2, 3]])
    assert first == ((3, 2), [1, 2, 3, 11, 12, 13], [[0, 2], [1], [2]] * 2, [1, 4, 6])
    assert second == ((3, 2), [2, 3, 12, 13], [[0]] * 4, [11, 24, 26])


def test_where_nobody_goes_stands_a_row_of_zeros_for_the_first_expert() -> None:
    first, second = run(2, _sent, [[0, 2], [1, 0], [2, 1]])
    assert second == ((3, 0), [0], [[0]], [11, 12, 13])
    assert first[1] == [1, 2, 3, 11, 12, 13]


# ------------------------------------------------------------------ faults, each of which a comparison sees


def lost(self: ExpertRanks, x: Tensor, way: Any, plain: Callable[..., Tensor] = ExpertRanks.back) -> Tensor:
    """What other ranks send back is zeros."""
    found, first = plain(self, x, way), sum(way.sent[: self.index])
    own = torch.zeros_like(found)
    own[first : first + way.sent[self.index]] = found[first : first + way.sent[self.index]]
    return own


def averaged(self: Runner, plain: Callable[..., None] = Runner._complete) -> None:
    """The gradients of experts are divided by the ranks that share them, as a mean over replicas would."""
    plain(self)
    for name, value in self.tuned.items():
        if self._over(name, "ep"):
            assert value.grad is not None
            value.grad /= self.plan.ep


def alone(self: Runner, values: Any, axis: str, plain: Callable[..., None] = Runner._sum_over) -> None:
    """Replicas with the same experts do not sum their gradients."""
    if axis != "edp":
        plain(self, values, axis)


def twice(self: Runner, name: str) -> int:
    """Replicas with the same experts count them each in the norm."""
    return 1 if self._over(name, "ep") else self.plan.dp


def half(self: Runner, name: str) -> int:
    """Experts count in the norm as if every rank held them."""
    return self.plan.dp


@pytest.mark.parametrize(
    "keep", [pytest.param(None, id="unfused", marks=pytest.mark.long), pytest.param("input", id="fused")]
)
def test_a_copy_that_is_not_sent_back_is_noticed(keep: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ExpertRanks, "back", lost)
    one = cell("lora", "mixtral-causal", 2, blocks=None if keep is None else MemoryConfig(keep))
    with pytest.raises(AssertionError, match=LOGITS):
        check(one)


@pytest.mark.parametrize(
    ("name", "fault", "match"),
    [
        pytest.param("_complete", averaged, GRADIENTS, id="averaged", marks=pytest.mark.long),
        pytest.param("_sum_over", alone, GRADIENTS, id="not summed over replicas"),
        pytest.param("_replicas", twice, NORMS, id="counted twice in the norm", marks=pytest.mark.long),
        pytest.param("_replicas", half, NORMS, id="half counted in the norm"),
    ],
)
def test_a_gradient_of_experts_is_theirs_once(
    name: str, fault: Any, match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Runner, name, fault)
    with pytest.raises(AssertionError, match=match):
        check(cell("lora", "mixtral-causal", 2, 2))


# ------------------------------------------------------------------ plans


def planned(config: ParallelConfig, name: str = "qwen3moe-causal", rows: int = 8) -> ParallelPlan:
    model = tiny(name).config
    return make_plan(config, FAMILIES[model.model_type], model, None, rows)


def test_experts_and_rows_are_shared_out_as_lists_say_else_evenly() -> None:
    assert planned(ParallelConfig(ep=EpConfig(size=2))).experts == (3, 2)
    lists = EpConfig(shares=(3, 1), experts=(1, 4))
    plan = planned(ParallelConfig(dp=DpConfig(size=2), ep=lists))
    assert (plan.world, plan.dp, plan.ep, plan.edp, plan.together) == (4, 4, 2, 2, True)
    assert (plan.experts, plan.shares) == ((1, 4), (3, 1, 3, 1))
    assert describe(plan) == "dp 2 x ep 2 (experts 1,4; rows 3:1:3:1)"


@pytest.mark.parametrize(
    ("config", "name", "said"),
    [
        (EpConfig(experts=(3, 3)), "qwen3moe-causal", "do not add up to the model's\n.*5, found .*6"),
        (EpConfig(size=6), "qwen3moe-causal", "every rank needs an expert"),
        (EpConfig(size=2), "llama-causal", "no routed experts to cut"),
    ],
)
def test_experts_that_cannot_be_shared_out_are_refused(config: EpConfig, name: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        planned(ParallelConfig(ep=config), name)


def test_a_tensor_of_experts_that_has_none_in_front_is_refused() -> None:
    model: Any = tiny("mixtral-causal")
    model.model.layers[0].mlp.experts.odd = nn.Parameter(torch.zeros(7))
    with pytest.raises(UsageError, match=r"experts\.odd  a tensor of experts is not cut by them"):
        cut_experts(model, PLAN, Coordinate())
    with pytest.raises(UsageError, match="not of a known form"):
        cut_experts(tiny("llama-causal"), PLAN, Coordinate())
