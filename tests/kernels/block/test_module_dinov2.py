"""Fused blocks of DINOv2, whose vectors scale what sub-layers give, compute what its own do: every method, on
every rung and over quantised weights; under plans; planted faults; what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from petune.errors import UsageError
from petune.kernels.block.program import _Build, compiled
from petune.kernels.block.scale_step import ScaleBy
from petune.kernels.fuse import fused_blocks
from petune.kernels.memory.policy_hook import shape_of
from petune.methods import wrap
from petune.parallel.plan import ParallelPlan
from tests.kernels.own_blocks import LEVELS, assert_trains_alike, cells_of_plans, fused, tuned, wide
from tests.methods.zoo import batch, of_64, tiny
from tests.parallel.cells import KEPT, case
from tests.parallel.harness import check
from tests.parallel.plans import BACKENDS, COMPOSED, OVERLAPPED

NAME = "dinov2-classify"
GATED: dict[str, Any] = {"use_swiglu_ffn": True, "mlp_ratio": 1, "hidden_size": 144}
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("full", {}),
    "lora": ("lora", {"r": 4, "dropout": 0.3}),
    "lora of q and v": ("lora", {"r": 4, "targets": ["q", "v"]}),
    "dora": ("dora", {"r": 4}),
    "ia3": ("ia3", {"targets": ["k", "v", "o", "down"]}),
    "miss": ("miss", {"r": 4}),
    "adapter": ("adapter", {"reduction": 4, "dropout": 0.3}),
    "adapter, pfeiffer": ("adapter", {"kind": "pfeiffer", "reduction": 4}),
    "adapter, parallel": ("adapter", {"kind": "parallel", "reduction": 4}),
    "side": ("side", {"reduction": 2}),
}
CELLS = [
    pytest.param(
        method,
        keep,
        gated,
        marks=() if at % 4 == level and (at % 2 == 0) == gated else pytest.mark.long,
    )
    for at, method in enumerate(METHODS)
    for level, keep in enumerate(LEVELS)
    for gated in (False, True)
]


def model_of(method: str, gated: bool = False, **config: Any) -> Any:
    name, settings = METHODS[method]
    return tuned(NAME, name, settings, **(GATED if gated else {}), **config)


def inputs() -> dict[str, Tensor]:
    return wide(batch(NAME, rows=2))


@pytest.mark.slow
@pytest.mark.parametrize(("method", "keep", "gated"), CELLS)
def test_every_method_trains_as_with_the_models_own_blocks(method: str, keep: str, gated: bool) -> None:
    plain = model_of(method, gated, attention_probs_dropout_prob=0.0 if method == "side" else 0.2)
    assert_trains_alike(fused(plain, keep), plain, inputs())


@pytest.mark.parametrize("form", ["int8", pytest.param("nf4", marks=pytest.mark.long)])
def test_over_a_quantised_base_it_trains_as_the_models_own_blocks(form: str) -> None:
    settings = {"r": 4, "base_dtype": form}
    plain = tuned(NAME, "lora", settings, torch.float32, **of_64(NAME), mlp_ratio=2)
    assert_trains_alike(fused(plain, "input"), plain, batch(NAME, rows=2), 1)


def test_what_a_vector_scales_is_kept_where_it_trains_alone() -> None:
    for method, kept in (("lora", False), ("full", True)):
        (spec, *_) = [block.spec for block in fused_blocks(fused(model_of(method)))]
        names = spec.program.schedules.kept("projections")
        assert [name in names for name in ("attention.o", "mlp.d")] == [kept, kept]
        described = shape_of(spec).sublayers
        assert [one.learns for one in described] == [kept, kept] and described == spec.program.sublayers


def test_a_vector_that_begins_to_train_sends_calls_to_the_models_own_blocks() -> None:
    plain = model_of("lora")
    made = fused(plain)
    for one in (made, plain):
        one.dinov2.encoder.layer[1].layer_scale2.lambda1.requires_grad_(True)
    with pytest.raises(AssertionError, match="trains, and did not when it was fused"):
        assert_trains_alike(made, plain, inputs(), 1)  # which asks last whether blocks ran unfused


# ------------------------------------------------------------------ plans

PLANS: dict[str, ParallelPlan] = {
    **{name: BACKENDS[name](NAME, 2) for name in ("tp", "galaxy", "sp-gather", "sp-ulysses", "sp-ring")},
    **{name: BACKENDS[name](NAME, 2) for name in ("shard", "pp-1f1b")},
    "tp, overlap": OVERLAPPED["tp"](NAME, 2),
    "dp x tp": COMPOSED["dp x tp"](NAME),
}
SHORT = [("galaxy", "full", 1)]


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "method", "kept"), cells_of_plans(PLANS, (1, 3), SHORT))
def test_ranks_of_a_plan_train_as_one_process(plan: str, method: str, kept: int) -> None:
    check(case(NAME, method, PLANS[plan], steps=1, blocks=KEPT[kept]))


# ------------------------------------------------------------------ planted faults


@pytest.fixture
def anew() -> Iterator[None]:
    """Programs are made anew, which hold their steps' passes."""
    compiled.cache_clear()
    yield
    compiled.cache_clear()


def _unlearned(self: ScaleBy, run: Any, v: Any) -> None:
    run.give(self.x, run.grads.pop(self.y) * run.vectors[self.at])


def _unscaled(self: ScaleBy, run: Any, v: Any) -> None:
    run.give(self.x, run.grads.pop(self.y))


def _the_other(self: ScaleBy, run: Any, v: Any) -> None:
    v[self.y] = v[self.x] * run.vectors[1 - self.at]


@pytest.mark.usefixtures("anew")
@pytest.mark.parametrize(
    ("name", "wrong"), [("backward", _unlearned), ("backward", _unscaled), ("forward", _the_other)]
)
def test_a_fault_of_the_step_is_seen(name: str, wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ScaleBy, name, wrong)
    plain = model_of("full")
    with pytest.raises(AssertionError):
        assert_trains_alike(fused(plain), plain, inputs(), 1)


@pytest.mark.usefixtures("anew")
def test_a_vector_in_place_of_what_others_read_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which (IA)^3 of o and down does, to find the way back through their scales."""
    plain, own = model_of("ia3"), _Build.sized
    monkeypatch.setattr(_Build, "sized", lambda self, *given: own(self, *given[:-1], False))
    with pytest.raises(AssertionError):
        assert_trains_alike(fused(plain), plain, inputs(), 1)


# ------------------------------------------------------------------ what is refused


def test_blocks_that_leave_sub_layers_out_at_random_are_not_fused() -> None:
    with pytest.raises(UsageError, match="drop_path is a Dinov2DropPath"):
        wrap(tiny(NAME, drop_path_rate=0.1), "full", kernels="reference")
