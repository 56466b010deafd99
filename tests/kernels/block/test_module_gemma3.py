"""Gemma 3 with fused blocks: whole models against Hugging Face's own, on every rung; norms of 1 + weight to
the bit; what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import petune
from petune.kernels import reference
from petune.kernels.block import attention as attending
from petune.kernels.block import call
from petune.kernels.configs import Rung
from petune.kernels.dispatch import triton_ops
from petune.kernels.fuse import fuse, unfuse
from petune.kernels.graphs.replay import ungraph
from petune.kernels.memory import block_cost
from petune.kernels.memory.policy_hook import shape_of, typical
from petune.kernels.triton import norm
from petune.models import attention, family_of
from petune.models.copied import copied
from petune.models.stack import own_stacks
from petune.rng.context import Running
from petune.rng.dropout import drawing, step_key
from tests.kernels.fused_pairs import BATCHES, blocks, stand_on
from tests.methods.zoo import assert_same_gradients, batch, gradients, stir, tiny

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
METHODS: dict[str, dict[str, Any]] = {
    "lora": {"r": 4},
    "full": {},
    "adapter": {"reduction": 4},
    "side": {"reduction": 2},
    "dora": {"r": 4},
    "ia3": {},
    "miss": {"r": 12},
}
KEEPS = ("all", "projections", "attention", "input")


def wide_norm(self: Any, x: Tensor) -> Tensor:
    """Gemma's norm in the dtype of its input; its own goes through float32."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * (1 + self.weight)


wide_norm.__module__ = Gemma3RMSNorm.__module__  # or a block with it is a stranger's


@pytest.fixture
def _float64(float64: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gemma3RMSNorm, "forward", wide_norm)


def pair(
    name: str, method: str = "lora", dtype: torch.dtype = torch.float64, p: float = 0.0, **changes: Any
) -> tuple[Any, Any]:
    """A tuned model twice, fused and not, in training; updates and norms away from their start. p: of the
    updates' dropout."""
    plain = tiny(name, **changes).to(dtype)
    petune.wrap(plain, method, **METHODS[method], **({"dropout": p} if p else {}), kernels="off")
    stir(plain, std=0.1)
    for path, value in plain.named_parameters():
        if path.endswith("norm.weight"):
            value.data.normal_(std=0.3)
    fused = copied(plain)
    done = fuse(fused, family_of(fused), "reference")
    assert done.blocks and not done.reasons and len(blocks(fused)) == (4 if method == "side" else 2)
    return fused.train(), plain.train()


def said(model: nn.Module) -> set[str]:
    return {reason for block in blocks(model) for reason in block.spec.said}


# ------------------------------------------------------------------ whole models


@pytest.mark.crossed(1)
@pytest.mark.usefixtures("_float64")
@pytest.mark.parametrize("rows", BATCHES)
@pytest.mark.parametrize("method", METHODS)
def test_a_whole_model_is_hugging_faces_to_the_last_bits_of_float64_on_every_rung(
    method: str, rows: str
) -> None:
    # the loss of a language model is float32
    name = "gemma3-causal" if rows == "packed" else "gemma3-classify"
    near = 1e-6 if rows == "packed" else 1e-11
    fused, plain = pair(name, method)
    inputs = BATCHES[rows](batch(name))
    expected, wanted = gradients(plain, inputs)
    for keep in KEEPS:
        stand_on(fused, Rung(keep), tile=None if keep == "all" else 4)
        loss, found = gradients(fused, inputs)
        torch.testing.assert_close(loss, expected, rtol=near, atol=near, check_dtype=False)
        assert_same_gradients(found, wanted, near)
    assert not said(fused)


OWN = [(rows, "sdpa", dtype) for rows in BATCHES for dtype in (torch.float32, torch.float64)]
# whose float64 overflows where padding attends
OWN += [(rows, "eager", torch.float32) for rows in ("padded", "whole rows")]


@pytest.mark.parametrize(("rows", "way", "dtype"), OWN)
def test_it_is_hugging_faces_own_with_its_own_norms_and_masks(
    rows: str, way: str, dtype: torch.dtype
) -> None:
    fused, plain = pair("gemma3-causal", "full", dtype, attn_implementation=way, final_logit_softcapping=None)
    inputs = BATCHES[rows](batch("gemma3-causal"))
    (loss, found), (expected, wanted) = gradients(fused, inputs), gradients(plain, inputs)
    torch.testing.assert_close(loss.float(), expected.float(), rtol=1e-6, atol=0)
    assert_same_gradients(found, wanted, 1e-6)
    assert not said(fused)


@pytest.mark.parametrize("rows", ["padded", "whole rows"])
def test_no_dense_mask_is_made_for_eager_attention(rows: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    choose = attending.choose
    monkeypatch.setattr(
        attending, "choose", lambda *args, masked, **more: asked.append(masked) or choose(*args, **more)
    )
    fused, _ = pair("gemma3-causal", "lora", torch.float32, attn_implementation="eager", sliding_window=64)
    gradients(fused, BATCHES[rows](batch("gemma3-causal")) | {"use_cache": False})
    assert asked and not any(asked)


@pytest.mark.usefixtures("_float64")
@pytest.mark.parametrize("keep", ["all", "input"])
def test_dropout_of_every_kind_draws_the_masks_of_the_unfused_model(keep: Any) -> None:
    fused, plain = pair("gemma3-causal", p=0.2, attention_dropout=0.3)
    own_stacks(plain, family_of(plain))  # type: ignore[arg-type]
    attention.use(plain)
    stand_on(fused, Rung(keep))
    found = []
    for model in (fused, plain):
        with drawing(Running(rows=torch.tensor([5, -1, 7]), key=step_key(7, 3))):
            found.append(gradients(model, batch("gemma3-causal") | {"use_cache": False}))  # type: ignore[dict-item]
    torch.testing.assert_close(found[0][0], found[1][0], rtol=2e-6, atol=0, check_dtype=False)
    assert_same_gradients(found[0][1], found[1][1], 2e-6)
    assert not said(fused)


def test_kernels_of_triton_train_as_plain_torch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "petune.kernels.fuse.select", lambda name, *_: None if name == "off" else triton_ops()
    )
    fused, plain = pair("gemma3-causal", "full", torch.float32, final_logit_softcapping=None)
    if DEVICE == "cpu":  # which records nothing
        ungraph(fused)
    inputs = {name: value.to(DEVICE) for name, value in batch("gemma3-causal", rows=2, length=7).items()}
    (loss, found), (expected, wanted) = (gradients(model.to(DEVICE), inputs) for model in (fused, plain))
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    assert_same_gradients(found, wanted, 1e-5)


def test_an_unfused_model_is_the_one_it_was() -> None:
    fused, plain = pair("gemma3-causal", "full", torch.float32)
    unfuse(fused)
    assert not blocks(fused)
    (loss, found), (expected, wanted) = (
        gradients(fused, batch("gemma3-causal")),
        gradients(plain, batch("gemma3-causal")),
    )
    assert torch.equal(loss, expected)
    assert all(torch.equal(value, found[name]) for name, value in wanted.items())


# ------------------------------------------------------------------ norms


def norms_of(width: int, dtype: torch.dtype) -> tuple[Gemma3RMSNorm, Tensor, Tensor]:
    """A norm of Gemma's with weights of a narrow dtype, x and dy [5, width]."""
    torch.manual_seed(4)
    own = Gemma3RMSNorm(width).to(DEVICE, dtype)
    own.weight.data.normal_(std=0.05)
    x, dy = torch.randn(2, 5, width, device=DEVICE).to(dtype)
    return own, x, dy


@pytest.mark.parametrize("ops", ["reference", "triton"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_norm_multiplies_by_the_digits_of_hugging_faces(dtype: torch.dtype, ops: str) -> None:
    """1 + w is made in float32: rounded to bf16, as w is, it would have lost most of w."""
    own, x, _ = norms_of(64, dtype)
    ((scale,),) = call._shifted([(own.weight.detach(),)], [1.0])
    found = (norm if ops == "triton" else reference).rms_norm(x, scale, own.eps)[0]
    expected = own(x).detach()
    if ops == "reference" and DEVICE == "cpu":
        assert torch.equal(found, expected)
    torch.testing.assert_close(found, expected, rtol=4 * float(torch.finfo(dtype).eps), atol=0)
    lost = reference.rms_norm(x, own.weight.detach() + 1, own.eps)[0]
    assert dtype == torch.float32 or not torch.equal(lost, expected)


def test_only_norms_with_an_offset_are_made_anew_each_with_its_own() -> None:
    first, second, third = (torch.randn(n, dtype=torch.bfloat16) for n in (4, 6, 3))
    norms = call._shifted([(first,), (second, third), (third,)], [1.0, 0.0, 2.0])
    assert norms[1][0] is second and norms[1][1] is third
    assert torch.equal(norms[0][0], first.float() + 1) and torch.equal(norms[2][0], third.float() + 2)


# ------------------------------------------------------------------ what is refused


class Halved(Gemma3RMSNorm):
    """What its parent computes, halved."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / 2


def become_halved(model: Any) -> None:
    Halved.forward.__module__ = Halved.__module__ = Gemma3RMSNorm.__module__
    model.model.layers[1].self_attn.k_norm.__class__ = Halved


def become_llamas(model: Any) -> None:
    model.model.layers[1].post_feedforward_layernorm = LlamaRMSNorm(64, eps=1e-6)


REFUSED: dict[str, tuple[Callable[[Any], None], dict[str, Any], str]] = {
    "a norm that computes something else": (
        become_halved,
        {},
        "its norm Halved is not an RMS norm that scales by 1 + weight",
    ),
    "a norm that scales by its weight": (
        become_llamas,
        {},
        "its norm LlamaRMSNorm is not an RMS norm that scales by 1 + weight",
    ),
    "both directions": (lambda model: None, {"use_bidirectional_attention": True}, "sees later tokens too"),
    "scores with a soft cap": (lambda model: None, {"attn_logit_softcapping": 5.0}, "choose eager"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_the_table_does_not_say_is_not_fused_and_computed_as_it_was(what: str) -> None:
    change, settings, words = REFUSED[what]
    plain = petune.wrap(tiny("gemma3-causal", **settings), "lora", kernels="off", r=4)
    stir(plain, std=0.1)
    change(plain)
    fused = copied(plain)
    done = fuse(fused, family_of(fused), "reference")
    assert not done.blocks and words in done.reasons[0]
    (loss, found), (expected, wanted) = (
        gradients(fused, batch("gemma3-causal")),
        gradients(plain, batch("gemma3-causal")),
    )
    torch.testing.assert_close(loss, expected, rtol=2e-6, atol=0)
    assert_same_gradients(found, wanted, 2e-6)


# ------------------------------------------------------------------ what it costs


def test_a_window_costs_as_many_keys_as_it_sees() -> None:
    fused, _ = pair("gemma3-causal", sliding_window=16)
    sliding, full = (shape_of(block.spec) for block in blocks(fused))
    cost = [
        sum(one.cost.flop for one in block_cost.forward(shape, 64, 64) if one.kind == "attention")
        for shape in (sliding, full)
    ]
    assert cost[1] == 4 * 8 * 16 * 64 * 32 and cost[0] == 4 * 8 * 16 * 64 * 16 * (1 - 16 / 128)
    norms = [one for one in block_cost.forward(full, 64, 64) if one.stage in ("attention.n", "mlp.n")]
    assert len(norms) == 2  # those before the sums


def test_the_commonest_block_stands_for_a_stack() -> None:
    kinds = ["full_attention", "sliding_attention", "sliding_attention"]
    fused = petune.wrap(
        tiny("gemma3-causal", num_hidden_layers=3, layer_types=kinds), "lora", kernels="reference", r=4
    )
    specs = [block.spec for block in blocks(fused)]
    assert typical(specs) is specs[1] and typical(specs[:2]) is specs[0]
