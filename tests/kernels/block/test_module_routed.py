"""Mixtures of experts within fused blocks: whole models against Hugging Face's own, every gradient, on every
rung; planted faults; what is refused."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from petune.errors import UsageError
from petune.kernels import grouped
from petune.kernels.block import mixture, routed_steps, router_steps
from petune.kernels.configs import MemoryConfig, Rung
from petune.kernels.dispatch import triton_ops
from petune.kernels.fuse import fuse, unfuse
from petune.kernels.memory.policy_hook import shape_of, typical
from petune.methods import tuned_parameters
from petune.methods.configs import make_config
from petune.methods.registry import tune
from petune.models import family_of
from petune.models.copied import copied
from petune.models.loading import packs
from petune.models.routes import Routes
from petune.run.expert_load import ExpertLoad
from tests.kernels.fused_pairs import BATCHES, blocks, stand_on
from tests.methods.zoo import assert_same_gradients, batch, gradients, stir, tiny

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KEEPS = ("all", "projections", "attention", "input")
FAMILIES = ("qwen3moe-causal", "qwen2moe-causal", "mixtral-causal", "gptoss-causal")
NO_LADDER = ("mixtral-causal", "gptoss-causal")  # their blocks have no form without experts
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("lora", {"r": 4}),
    "lora on experts": ("lora", {"r": 3, "targets": ["experts"]}),
    "lora on attention": ("lora", {"r": 3, "targets": ["q", "v"]}),
    "lora on down": ("lora", {"r": 3, "targets": ["down_proj"]}),
    "lora of two ranks": ("lora", {"r": 3, "rank_pattern": {"down_proj": 2}}),
    "full": ("full", {}),
    "adapter": ("adapter", {"reduction": 4}),
    "adapter beside": ("adapter", {"kind": "parallel", "reduction": 4}),
    "adapter of sums": ("adapter", {"kind": "pfeiffer", "reduction": 4}),
    "side": ("side", {"reduction": 2}),
}
ROUTING = {  # shares as they are, or divided by their sum; of Mixtral always the latter
    "qwen3moe-causal": {"norm_topk_prob": True, "num_experts_per_tok": 3},
    "qwen2moe-causal": {"norm_topk_prob": True, "decoder_sparse_step": 2},
}


def pair(
    name: str, method: str = "lora", dtype: torch.dtype = torch.float64, **changes: Any
) -> tuple[Any, Any]:
    """A tuned model twice, fused and not, in training; nothing in it at identity, biases and sinks
    neither, and gates on both sides of where they are clamped."""
    plain = tiny(name, **changes).to(dtype)
    with torch.no_grad():
        for key, value in plain.named_parameters() if name == "gptoss-causal" else ():
            if key.endswith(("sinks", "bias")):
                value.normal_(std=0.5)
            elif key.endswith("gate_up_proj"):
                value.mul_(25)
    plain.set_experts_implementation("eager")  # transformers' loop over experts, in any dtype
    way, settings = METHODS[method]
    tune(plain, make_config(way, settings))
    stir(plain, std=0.1)
    fused = copied(plain)
    done = fuse(fused, family_of(fused), "reference")
    assert done.blocks and not done.reasons and len(blocks(fused)) == (4 if method == "side" else 2)
    return fused.train(), plain.train()


def assert_alike(fused: Any, plain: Any, inputs: dict[str, Tensor], close: float = 1e-6) -> None:
    """Equal losses and gradients, and no block that ran unfused."""
    loss, found = gradients(fused, inputs)
    expected, wanted = gradients(plain, inputs)
    torch.testing.assert_close(loss.double(), expected.double(), rtol=close, atol=0)
    assert_same_gradients(found, wanted, close)
    assert not [block.spec.said for block in blocks(fused) if block.spec.said]


# ------------------------------------------------------------------ whole models


CELLS = [(name, method, "padded") for name in FAMILIES for method in METHODS]
CELLS += [(name, "lora", rows) for name in FAMILIES for rows in BATCHES if rows != "padded"]
CELLS = [cell for cell in CELLS if cell[1] != "side" or cell[0] not in NO_LADDER]
CELLS.remove(("gptoss-causal", "lora", "packed"))  # transformers' masks do not tell its samples apart


def short(name: str, method: str, rows: str) -> bool:
    """Every other cell, like the fields of a chessboard."""
    return (FAMILIES.index(name) + list(METHODS).index(method) + list(BATCHES).index(rows)) % 2 == 0


@pytest.mark.parametrize(
    ("name", "method", "rows"),
    [pytest.param(*cell, marks=() if short(*cell) else pytest.mark.long) for cell in CELLS],
)
def test_a_whole_model_is_hugging_faces_on_every_rung(name: str, method: str, rows: str) -> None:
    fused, plain = pair(name, method)
    inputs = BATCHES[rows](batch(name))
    expected, wanted = gradients(plain, inputs)
    for keep in KEEPS:
        stand_on(fused, Rung(keep), tile=None if keep == "all" else 4)
        loss, found = gradients(fused, inputs)
        torch.testing.assert_close(loss.double(), expected.double(), rtol=1e-6, atol=0)
        assert_same_gradients(found, wanted, 1e-6)
    assert not [block.spec.said for block in blocks(fused) if block.spec.said]


@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("name", ROUTING)
def test_shares_are_divided_by_their_sum_where_the_config_says_so(name: str, method: str) -> None:
    fused, plain = pair(name, method, **ROUTING[name])
    kinds = [len(block.spec.mixtures) for block in blocks(fused)]
    assert kinds == [0, 1]  # Qwen3's first block is dense, and Qwen2's every other one here
    stand_on(fused, Rung("attention"))
    assert_alike(fused, plain, batch(name))


@pytest.mark.crossed
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("name", FAMILIES)
def test_three_steps_of_adamw_are_hugging_faces(name: str, method: str, dtype: torch.dtype) -> None:
    sides = pair(name, method, dtype)
    stand_on(sides[0], Rung("projections"))
    own = [{key: value for key, value in tuned_parameters(model).items()} for model in sides]
    # an entry whose true gradient is zero is moved by its rounding, unless eps is larger
    made = [torch.optim.AdamW(values.values(), lr=1e-3, eps=1e-4) for values in own]
    for step in range(3):
        inputs = batch(name, seed=step)
        losses = [model(**inputs).loss for model in sides]
        for loss, optimizer in zip(losses, made, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(*(loss.double() for loss in losses), rtol=1e-6, atol=0)
    for key, value in own[0].items():
        torch.testing.assert_close(value, own[1][key], rtol=0, atol=3e-6)  # norms are in float32


@pytest.mark.parametrize("name", FAMILIES)
def test_it_is_the_model_with_grouped_products_of_transformers_in_float32(name: str) -> None:
    fused, plain = pair(name, "lora on attention", torch.float32)
    plain.set_experts_implementation("grouped_mm")
    assert_alike(fused, plain, batch(name), 2e-6)


def test_autocast_rounds_it_no_further_than_hugging_faces_own() -> None:
    sides, inputs = pair("qwen2moe-causal", "lora", torch.bfloat16), batch("qwen2moe-causal")
    wanted, off = gradients(copied(sides[1]).double(), inputs)[1], []
    for model in sides:
        with torch.autocast("cpu", torch.bfloat16):
            found = gradients(model, inputs)[1]
        off.append(sum(float((found[key] - value).square().sum()) for key, value in wanted.items()) ** 0.5)
    assert 0 < off[0] < 1.2 * off[1]
    assert not [block.spec.said for block in blocks(sides[0]) if block.spec.said]


@pytest.mark.parametrize("name", ["gptoss-causal", pytest.param("qwen2moe-causal", marks=pytest.mark.long)])
def test_kernels_of_triton_train_as_plain_torch_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped, "_form", lambda name, *_: import_module(f"petune.kernels.triton.{name}"))
    monkeypatch.setattr("petune.kernels.fuse.select", lambda *args: triton_ops())
    fused, plain = (model.to(DEVICE) for model in pair(name, "lora", torch.float32))
    stand_on(fused, Rung("projections"))
    inputs = {key: value.to(DEVICE) for key, value in batch(name, rows=2, length=7).items()}
    assert_alike(fused, plain, inputs, 1e-5)


def test_experts_without_tokens_have_gradients_of_zero() -> None:
    fused, plain = pair("mixtral-causal")
    inputs = {"input_ids": torch.tensor([[5]]), "labels": torch.tensor([[5]])}
    for model in (fused, plain):
        model.zero_grad()
        model(**{**inputs, "use_cache": False}).logits.sum().backward()  # one token, two experts of four
    found, wanted = (
        {key: value.grad for key, value in tuned_parameters(model).items()} for model in (fused, plain)
    )
    assert_same_gradients(found, wanted)  # type: ignore[arg-type]
    for key, value in found.items():
        if "experts" in key:
            assert value is not None and sorted(bool(one.any()) for one in value) == [
                False,
                False,
                True,
                True,
            ]


def test_what_is_passed_by_and_what_is_unfused_again_compute_as_before() -> None:
    fused, plain = pair("qwen3moe-causal")
    for model in (fused, plain):
        for module in model.modules():
            if hasattr(module, "active"):
                module.active = False
    inputs = batch("qwen3moe-causal") | {"use_cache": False}  # type: ignore[dict-item]
    losses = [model(**inputs).loss.double() for model in (fused, plain)]
    torch.testing.assert_close(*losses, rtol=1e-6, atol=0)
    fused, plain = pair("qwen3moe-causal")
    unfuse(fused)
    assert not blocks(fused)
    assert_same_gradients(gradients(fused, inputs)[1], gradients(plain, inputs)[1], 1e-12)


# ------------------------------------------------------------------ faults


def wrongly_sorted(routes: Any) -> Tensor:
    return (routes.order + 1) // routes.chosen % (len(routes.order) // routes.chosen)


def without_shares(dm: Tensor, u: Tensor, share: Tensor, act: Any) -> Any:
    du, dshare, m = ROUTED(dm, u, share, act)
    return du, torch.zeros_like(dshare), m


def without_scale(*given: Any, **more: Any) -> Any:
    return LEARN(*given[:2], given[2]._replace(scale=1.0), *given[3:], **more)


ROUTED, LEARN = routed_steps.dgated, mixture.learn
FAULTS: dict[str, tuple[Any, str, Any]] = {
    "copies of the next token": (Routes, "tokens", property(wrongly_sorted)),
    "no gradient of shares": (routed_steps, "dgated", without_shares),
    "factors without their scale": (routed_steps, "learn", without_scale),
    "gates that stay shut": (router_steps.torch, "sigmoid", torch.tanh),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_step_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fused, plain = pair("qwen2moe-causal")
    assert_alike(fused, plain, batch("qwen2moe-causal"))
    expected, wanted = gradients(plain, batch("qwen2moe-causal"))
    owner, name, wrong = FAULTS[fault]
    monkeypatch.setattr(owner, name, wrong)
    loss, found = gradients(fused, batch("qwen2moe-causal"))
    with pytest.raises(AssertionError):
        torch.testing.assert_close(loss.double(), expected.double(), rtol=1e-6, atol=0)
        assert_same_gradients(found, wanted)


# ------------------------------------------------------------------ who listens, and what is refused


@pytest.mark.parametrize("keep", ["all", "input"])
def test_the_load_of_experts_is_counted_once_a_step_within_fused_blocks(keep: Any) -> None:
    fused, plain = pair("qwen2moe-causal")
    loads = [ExpertLoad([model]) for model in (fused, plain)]
    stand_on(fused, Rung(keep))
    inputs = {key: value[:1] for key, value in batch("qwen2moe-causal").items()}  # without padding
    for model in (fused, plain):
        gradients(model, inputs)
    assert [int(one.sum()) for one in loads[0].counts if one is not None] == [9 * 2] * 2
    assert loads[0].take(list) == loads[1].take(list)
    assert not [block.spec.said for block in blocks(fused) if block.spec.said]


def test_scores_that_are_asked_for_are_given_by_the_blocks_own_forward() -> None:
    fused, plain = pair("mixtral-causal")
    stand_on(fused, Rung("input"))
    inputs = batch("mixtral-causal") | {"output_router_logits": True, "use_cache": False}  # type: ignore[dict-item]
    assert_same_gradients(gradients(fused, inputs)[1], gradients(plain, inputs)[1])
    torch.testing.assert_close(fused(**inputs).aux_loss, plain(**inputs).aux_loss)
    assert blocks(fused)[0].spec.said == {"the scores of its routers are asked for (output_router_logits)"}


def refusal(name: str, method: str = "lora on attention", **changes: Any) -> str:
    model = tiny(name, **changes)
    tune(model, make_config(*METHODS[method]))
    done = fuse(model, family_of(model), "reference")
    assert not done.blocks
    return done.reasons[0]


def test_what_has_no_steps_stays_as_it_is_and_says_why() -> None:
    assert "reads their scores" in refusal("qwen3moe-causal", output_router_logits=True).replace(
        "read ", "reads "
    )
    assert "router_jitter_noise" in refusal("mixtral-causal", router_jitter_noise=0.1)
    assert "whose gate has no steps" in refusal("gptoss-causal", swiglu_limit=5.0)
    METHODS["lora on gates"] = ("lora", {"r": 2, "targets": ["q", "shared_expert_gate"]})
    try:
        assert "mlp.shared_expert_gate is a LoraLinear" in refusal("qwen2moe-causal", "lora on gates")
    finally:
        del METHODS["lora on gates"]


def test_what_experts_cannot_do_is_refused_in_words() -> None:
    model = tiny("mixtral-causal")
    tune(model, make_config("full", {}))
    with pytest.raises(UsageError, match="experts do not stream yet"):
        fuse(model, family_of(model), "reference", memory=MemoryConfig(stream="bf16"))


def test_the_commonest_block_stands_for_a_stack_and_tells_its_experts() -> None:
    fused, _ = pair("qwen2moe-causal")
    shape = shape_of(typical([block.spec for block in blocks(fused)]))
    experts = shape.routed
    assert (experts.number, experts.chosen, experts.columns, experts.up, experts.down) == (5, 2, 16, 4, 4)
    assert experts.shared and shape.columns == 24 and shape.gated and not shape.trained
    norms_and_biases = 2 * 32 + 32 + 16 + 16
    weights = sum(value.numel() for name, value in blocks(fused)[0].named_parameters() if "lora" not in name)
    assert shape.parameters + norms_and_biases == weights
    assert shape.adapters == sum(
        value.numel() for name, value in blocks(fused)[0].named_parameters() if "lora" in name
    )


def test_packed_samples_of_gpt_oss_would_see_one_another_and_are_refused() -> None:
    plain = tiny("gptoss-causal")
    inputs = batch("gptoss-causal")["input_ids"][:1, :8]
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])
    with torch.no_grad():
        packed, alone = plain(inputs, position_ids=positions).logits[:, 4:], plain(inputs[:, 4:]).logits
    assert float((packed - alone).abs().max()) > 1e-3 and not packs(plain.config)
