"""Blocks whose mixers, and attention that is gated, are called as they are: every method trains as their own
blocks do, on every rung and under plans; planted faults; what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from petune.errors import UsageError
from petune.kernels import fuse as fusing
from petune.kernels.block.called import BoundCore, CalledCore, CoreCall
from petune.kernels.configs import MemoryConfig, Rung
from petune.kernels.fuse import fuse, fused_blocks, unfuse
from petune.kernels.memory.offload import Store
from petune.kernels.single_modules import FusedSite
from petune.models import family_of
from petune.parallel.plan import ParallelPlan
from tests.kernels import own_blocks
from tests.kernels.fused_pairs import stand_on
from tests.kernels.own_blocks import LEVELS, assert_trains_alike, fused
from tests.methods.zoo import assert_same_gradients, batch, gradients, of_64, tiny
from tests.parallel.cells import KEPT, case
from tests.parallel.harness import check
from tests.parallel.plans import BACKENDS, COMPOSED, LOOPED, OVERLAPPED

NAME = "qwen3_5-causal"
DROPPED: dict[str, Any] = {"r": 4, "dropout": 0.3}
METHODS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": DROPPED,
    "dora": {"r": 4},
    "ia3": {"targets": ["qkv", "k", "v", "o", "down"]},
    "miss": DROPPED,
    "adapter": {"reduction": 4, "dropout": 0.3},
    "side": {"reduction": 4},
}


def tuned(
    method: str,
    settings: dict[str, Any] | None = None,
    dtype: Any = torch.float64,
    name: str = NAME,
    **config: Any,
) -> Any:
    """A model of Qwen3.5 or of its kin."""
    return own_blocks.tuned(name, method, METHODS[method] if settings is None else settings, dtype, **config)


def packed() -> dict[str, Any]:
    """Two rows of two samples each."""
    return own_blocks.packed(NAME)


CELLS = own_blocks.cells_of_methods(METHODS)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "keep", "rows"), CELLS)
def test_every_method_trains_as_with_the_models_own_blocks(method: str, keep: str, rows: str) -> None:
    plain = tuned(method, attention_dropout=0.0 if method == "side" else 0.2)
    assert_trains_alike(fused(plain, keep), plain, batch(NAME) if rows == "padded" else packed())


def test_under_bfloat16_autocast_losses_and_gradients_are_near() -> None:
    plain = tuned("lora", {"r": 4}, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        (loss, found), (expected, wanted) = (
            gradients(one, packed()) for one in (fused(plain, "input"), plain)
        )
    assert float(loss) == pytest.approx(float(expected), rel=2e-2)
    for name, value in wanted.items():
        assert float((found[name] - value).norm()) < 0.1 * float(value.norm()) + 1e-4, name


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("qwen3next-causal", "full"),
        ("qwen3_5moe-causal", "lora"),
        pytest.param("qwen3next-causal", "lora", marks=pytest.mark.long),
        pytest.param("qwen3_5moe-causal", "full", marks=pytest.mark.long),
    ],
)
def test_beside_experts_it_trains_as_the_models_own_blocks_on_every_rung(name: str, method: str) -> None:
    plain = tuned(method, {"r": 4} if method == "lora" else {}, name=name)
    made, inputs = fused(plain), packed()
    expected, wanted = gradients(plain, inputs)
    for keep in LEVELS:
        stand_on(
            made, Rung(keep, "input" if keep == "attention" else "none"), tile=None if keep == "all" else 4
        )
        loss, found = gradients(made, inputs)
        assert float(loss) == pytest.approx(float(expected), rel=1e-6)
        assert_same_gradients(found, wanted, 2e-6)


@pytest.mark.parametrize("form", ["int8", pytest.param("nf4", marks=pytest.mark.long)])
def test_over_a_quantised_base_it_trains_as_the_models_own_blocks(form: str) -> None:
    plain = tuned("lora", {"r": 4, "base_dtype": form}, torch.float32, **of_64(NAME))
    assert_trains_alike(fused(plain, "input"), plain, packed(), 1)


def test_without_gradients_and_in_eval_mode_it_computes_the_same() -> None:
    plain = tuned("lora").eval()
    made, inputs = fused(plain), packed()
    with torch.no_grad():
        assert torch.allclose(made(**inputs).logits, plain(**inputs).logits, atol=1e-5)
    ids = {name: value for name, value in batch(NAME).items() if name != "labels"}
    assert torch.allclose(made(**ids).logits, plain(**ids).logits, atol=1e-5)


def test_dropout_without_a_key_is_what_it_was_when_it_is_made_again() -> None:
    """torch's own generator then draws inside a core, and goes on behind it."""
    plain, found = tuned("lora"), []
    for keep in ("all", "input"):
        torch.manual_seed(0)
        found.append((*gradients(fused(plain, keep), batch(NAME)), torch.rand(1)))
    (loss, grads, after), (again, others, behind) = found
    assert torch.equal(loss, again) and torch.equal(after, behind)
    assert_same_gradients(grads, others, 1e-12)


@pytest.mark.parametrize("keep", ["all", "input"])
def test_a_graph_is_gone_through_twice_and_hooks_see_gradients_once(keep: str) -> None:
    made, seen = fused(tuned("lora", {"r": 4}), keep), list[Tensor]()
    factor = made.get_parameter("model.layers.0.linear_attn.in_proj_z.lora_A")
    factor.register_hook(seen.append)
    loss = made(packed()["input_ids"], use_cache=False).logits.square().mean()  # of a loss of logits
    loss.backward(retain_graph=True)
    first = factor.grad.clone()
    assert len(seen) == 1 and torch.equal(seen[0], first)
    loss.backward()
    assert torch.allclose(factor.grad, 2 * first)


def test_frozen_cores_below_all_that_trains_need_no_way_back() -> None:
    plain = tuned("lora", {"r": 4, "targets": ["down"]})
    made, inputs = fused(plain), batch(NAME)
    (loss, found), (expected, wanted) = gradients(made, inputs), gradients(plain, inputs)
    assert float(loss) == pytest.approx(float(expected), rel=1e-6) and found.keys() == wanted.keys()
    assert_same_gradients(found, wanted, 2e-6)


def test_linears_and_norms_inside_a_core_are_fused_one_by_one_and_undone() -> None:
    made = fused(tuned("lora"))
    inside = [one for block in fused_blocks(made) for core in block.spec.called for one in core.layers]
    assert sum(isinstance(one, FusedSite) for one in inside) == 5 + 4 + 2  # q_norm and k_norm
    unfuse(made)
    assert not any(isinstance(one, FusedSite) for one in made.modules()) and not fused_blocks(made)


# ------------------------------------------------------------------ plans

PLANS: dict[str, ParallelPlan] = {
    **{name: BACKENDS[name](NAME, 2) for name in ("shard", "pp-1f1b", "dp", "tp")},
    "pp-zero-bubble": LOOPED["pp-zero-bubble"](NAME, 2),
    **{name: COMPOSED[name](NAME) for name in ("dp x tp", "tp x pp", "shard x tp")},
}
SHORT = [("shard", 0)]  # tp is a cell of the matrix


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "kept"),
    [
        pytest.param(plan, kept, marks=() if (plan, kept) in SHORT else pytest.mark.long)
        for plan in PLANS
        for kept in (0, 3)
    ],
)
def test_ranks_of_a_plan_train_as_one_process_with_dropout(plan: str, kept: int) -> None:
    check(case(NAME, "lora", PLANS[plan], steps=1, dropout=0.1, blocks=KEPT[kept]))


# ------------------------------------------------------------------ planted faults


def _unasked(self: BoundCore, graph: Any, dy: Tensor, asked: Any, needs: Any) -> Any:
    grads, found = BoundCore.gradients(self, graph, dy, asked, needs)
    return [None if grad is None else torch.zeros_like(grad) for grad in grads], found


def _the_first_alone(self: BoundCore, graph: Any, dy: Tensor, asked: Any, needs: Any) -> Any:
    dx, found = BoundCore.gradients(self, graph, dy, asked, needs)
    return dx, {at: grad for at, grad in found.items() if at == min(found)}


def _elsewhere(self: CoreCall, tensors: Any, x: Tensor) -> Tensor:
    self.here = replace(self.here, bases=tuple(base + 1 for base in self.here.bases))  # from call to call
    return CoreCall.__call__(self, tensors, x)


def _one_sample(self: CalledCore, given: Any, known: Any) -> Any:
    found = CalledCore.arguments(self, given, known)
    return {name: value for name, value in found.items() if name != "seq_idx"}


FAULTS: dict[str, tuple[Any, str, Any]] = {
    "the draws of a core are not counted": (CalledCore, "draws", property(lambda self: 0)),
    "what is made again drops out anew": (CoreCall, "__call__", _elsewhere),
    "samples see one another": (CalledCore, "arguments", _one_sample),
    "nothing below a core learns": (BoundCore, "gradients", _unasked),
    "one tensor of a core learns": (BoundCore, "gradients", _the_first_alone),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_around_a_core_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, wrong = FAULTS[fault]
    plain = tuned("lora", attention_dropout=0.2)
    made = fused(plain, "input")
    right = getattr(owner, name)
    twin = type(owner.__name__, (), {name: right})
    if callable(wrong):  # it calls what it stands for
        monkeypatch.setitem(wrong.__globals__, owner.__name__, twin)
    monkeypatch.setattr(owner, name, wrong)
    with pytest.raises(AssertionError):
        assert_trains_alike(made, plain, packed(), 1)


# ------------------------------------------------------------------ what is refused


def test_blocks_that_call_modules_do_not_stream() -> None:
    with pytest.raises(UsageError, match=r"memory\.stream(.|\n)*modules that blocks call do not stream"):
        fuse(
            tuned("full", dtype=torch.float32),
            family_of(tiny(NAME)),
            "reference",
            MemoryConfig(stream="bf16"),
        )


def test_blocks_that_call_modules_are_never_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    made = fused(tuned("lora"))
    specs = [block.spec for block in fused_blocks(made)]
    ops = replace(specs[0].ops, name="triton")
    plan = fusing.Plan(ops, MemoryConfig(), Store(torch.device("cpu"), None), [made], 1.0, 1, 0.0)
    assert not fusing._recordable(made, specs, plan)
    for spec in specs:
        monkeypatch.setattr(spec, "called", ())
    assert fusing._recordable(made, specs, plan)


def test_a_layer_of_a_core_that_is_exchanged_is_an_error() -> None:
    made = fused(tuned("lora"))
    made.model.layers[0].linear_attn.out_proj = nn.Linear(48, 64, bias=False).double()
    with pytest.raises(UsageError, match="a layer of a fused block was exchanged: out_proj"):
        made(**batch(NAME))


def test_attention_that_hides_its_communication_leaves_blocks_unfused() -> None:
    own = replace(case(NAME, "lora", OVERLAPPED["tp"](NAME, 2), steps=1), blocks=KEPT[0])
    with pytest.raises(Exception, match="hides what it says to other ranks in its own way"):
        check(own)


def test_padding_is_computed_and_the_run_says_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    fused(tuned("lora"))
    assert "padding, where there is any, is computed too: its mixers carry a state" in caplog.text
