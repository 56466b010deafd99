"""Fused blocks compute what Hugging Face's own do, whatever is kept, recomputed, tiled or parked, for every
method that can be fused."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    PreTrainedModel,
)
from transformers.models.llama.modeling_llama import LlamaAttention

import petune
from petune.errors import UsageError
from petune.kernels.block import fold
from petune.kernels.configs import Rung
from petune.kernels.fuse import fuse, unfuse
from petune.models import attention, family_of
from petune.models.spec import Family
from petune.models.stack import own_stacks
from petune.rng.context import Running
from petune.rng.dropout import drawing, step_key
from tests.kernels.fused_pairs import METHODS, MODELS, assert_alike, batch, blocks, gradients, pair, stand_on

PARKED = "attention, which rests on the host"


@pytest.fixture(autouse=True)
def _float64(float64: None) -> None:
    """Every test here."""


# Hugging Face's RMS norms and rotary angles are float32 in a float64 model; BERT has neither
TOLERANCE = {"bert": 1e-12}


@lru_cache(maxsize=4)
def standing(name: str, method: str) -> tuple[nn.Module, nn.Module]:
    """A pair for several rungs, which change nothing but what is kept."""
    return pair(name, METHODS[method])


@pytest.mark.crossed
@pytest.mark.parametrize("keep", ["all", "projections", "attention", "input", PARKED])
@pytest.mark.parametrize("offload", ["none", "input"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["llama", "qwen3", "bert"])
def test_loss_and_every_gradient_are_those_of_the_unfused_model_on_every_rung(
    name: str, method: str, offload: Any, keep: Any
) -> None:
    fused, plain = standing(name, method)
    stand_on(fused, Rung("attention", "attention") if keep == PARKED else Rung(keep, offload))
    assert_alike(fused, plain, batch(name), TOLERANCE.get(name, 2e-6))


@pytest.mark.crossed
@pytest.mark.parametrize("tile", [1, 4, 100])
@pytest.mark.parametrize(
    ("name", "method"),
    [
        *(("llama", "lora"), ("bert", "lora"), ("bert", "adapter"), ("llama", "dora"), ("bert", "ia3")),
        *(("llama", "adapter beside"), ("llama", "adapter of sums"), ("bert", "adapter of sums")),
    ],
)
@pytest.mark.parametrize("keep", ["projections", "attention", "input"])
def test_tiling_the_mlp_changes_nothing(name: str, method: str, keep: Any, tile: int) -> None:
    fused, plain = standing(name, method)
    stand_on(fused, Rung(keep), tile)
    assert_alike(fused, plain, batch(name), TOLERANCE.get(name, 2e-6))


@pytest.mark.parametrize("name", ["mistral", "qwen2"])
@pytest.mark.parametrize("padded", [True, False])
def test_kin_of_llama_are_fused_with_biases_and_without_padding(name: str, padded: bool) -> None:
    fused, plain = pair(name, METHODS["lora"])
    assert_alike(fused, plain, batch(name, padded), 2e-6)


@pytest.mark.parametrize("name", MODELS)
def test_state_names_and_values_survive_fusing(name: str) -> None:
    fused, plain = pair(name, METHODS["lora"])
    assert list(fused.state_dict()) == list(plain.state_dict())
    for (key, value), other in zip(fused.state_dict().items(), plain.state_dict().values(), strict=True):
        assert torch.equal(value, other), key


@pytest.mark.crossed(1)
@pytest.mark.parametrize("keep", ["all", "projections", "attention", "input"])
@pytest.mark.parametrize(
    ("name", "method"),
    [
        *((name, method) for method in ("lora", "adapter", "miss") for name in ("llama", "bert")),
        *(("llama", "adapter beside"), ("llama", "adapter of sums"), ("bert", "adapter of sums")),
    ],
)
def test_dropout_of_every_kind_draws_the_masks_of_the_unfused_model(
    name: str, method: str, keep: Any
) -> None:
    fused, plain = pair(name, METHODS[method] | {"dropout": 0.3})
    for module in (*fused.modules(), *plain.modules()):
        if name == "bert" and isinstance(module, nn.Dropout):
            module.p = 0.2
        if isinstance(module, LlamaAttention):
            module.attention_dropout = 0.2
    attention.use(cast("PreTrainedModel", plain))
    own_stacks(plain, cast("Family", family_of(plain)))
    stand_on(fused, Rung(keep), tile=4)
    inputs = batch(name)
    found = []
    for model in (fused, plain):
        with drawing(Running(rows=torch.arange(2), key=step_key(7, 3))):
            found.append(gradients(model, inputs))
    torch.testing.assert_close(found[0][0].float(), found[1][0].float(), rtol=2e-6, atol=0)
    for key, value in found[1][1].items():
        torch.testing.assert_close(
            found[0][1][key], value, rtol=1e-4, atol=2e-6 * float(value.abs().max()) + 1e-12
        )


class Largest(TorchDispatchMode):
    """Bytes of what operations return, by the shape's first dim."""

    def __init__(self) -> None:
        super().__init__()
        self.matmuls: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.matmuls.append(tuple(args[-1].shape if func is torch.ops.aten.mm.default else args[2].shape))
        return func(*args, **(kwargs or {}))


def test_recomputing_never_runs_the_product_with_the_down_projection_again() -> None:
    fused, _ = pair("llama", METHODS["lora"])
    stand_on(fused, Rung("input"))
    with Largest() as seen:
        gradients(fused, batch("llama"))
    # [W_down | b]^T, the right factor of the forward product
    forward = [shape for shape in seen.matmuls if shape == (56 + 4, 32)]
    assert len(forward) == 3  # once per block


def test_a_weight_that_is_replaced_leaves_the_bank_and_counts() -> None:
    fused, plain = pair("llama", METHODS["lora"])
    for model in (fused, plain):
        for name, module in model.named_modules():
            if name.endswith("k_proj"):
                module.weight = nn.Parameter(module.weight.detach() * 2, requires_grad=False)
    assert_alike(fused, plain, batch("llama"), 2e-6)


def test_layers_of_one_input_are_one_product() -> None:
    fused, _ = pair("llama", METHODS["lora"])
    block = blocks(fused)[0]
    q, k = block.self_attn.q_proj.weight, block.self_attn.k_proj.weight
    assert k.data_ptr() == q.data_ptr() + len(q) * q.stride(0) * q.itemsize


def test_evaluation_generation_and_unfusing_give_what_the_model_gave() -> None:
    fused, plain = pair("llama", METHODS["lora"])
    inputs = batch("llama", padded=False)
    fused.eval(), plain.eval()
    ask = {"input_ids": inputs["input_ids"], "attention_mask": inputs["attention_mask"]}
    with torch.no_grad():
        torch.testing.assert_close(fused(**ask).logits, plain(**ask).logits, rtol=1e-5, atol=1e-6)
    answers = [
        model.generate(**ask, max_new_tokens=4, do_sample=False, pad_token_id=0) for model in (fused, plain)
    ]
    assert torch.equal(*answers)
    unfuse(fused)
    assert not blocks(fused)
    assert_alike(fused.train(), plain.train(), inputs, 1e-6)


@pytest.mark.parametrize("method", ["lora", "adapter"])
def test_a_tuning_that_is_passed_by_is_not_computed(method: str) -> None:
    fused, plain = pair("llama", METHODS[method])
    inputs = {name: value for name, value in batch("llama").items() if name != "labels"}
    with petune.methods.without_tuning(fused), petune.methods.without_tuning(plain), torch.no_grad():
        torch.testing.assert_close(
            fused(**inputs).logits[inputs["attention_mask"].bool()],
            plain(**inputs).logits[inputs["attention_mask"].bool()],
            rtol=1e-5,
            atol=1e-6,
        )


def test_blocks_that_cannot_be_fused_keep_fused_norms_and_loss_and_the_log_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    said: list[str] = []
    monkeypatch.setattr("petune.kernels.fuse.say", said.append)
    model = petune.wrap(MODELS["llama"](), method="dora", dropout=0.1, kernels="reference")
    assert not blocks(model) and any("DoraLinear" in line for line in said)
    assert type(model.model.norm).__name__ != "LlamaRMSNorm"


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_blocks_beside_a_ladder_run_ahead_alone_and_it_reads_what_they_give(
    name: str, padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fused, plain = pair(name, {"method": "side", "reduction": 2})
    assert len(blocks(fused)) == 6
    ahead: list[tuple[int, str]] = []
    back: list[int] = []

    def width(run: Any) -> int:
        return len(run.groups[-1].parts[0].weight)

    def forward(*args: Any, own: Any = fold.forward) -> Any:
        ahead.append((width(args[1]), args[3]))
        return own(*args)

    def backward(*args: Any, own: Any = fold.backward) -> Any:
        back.append(width(args[1]))
        return own(*args)

    monkeypatch.setattr(fold, "forward", forward)
    monkeypatch.setattr(fold, "backward", backward)
    assert_alike(fused, plain, batch(name, padded), TOLERANCE.get(name, 2e-6))
    assert ahead == [(32, "input"), (16, "all")] * 3  # side blocks keep all, and they alone go back
    assert back == [16] * 3 and not any(block.spec.said for block in blocks(fused))


def test_a_ladder_beside_fused_blocks_still_computes_its_levels_again() -> None:
    model = petune.wrap(MODELS["llama"](), method="side", reduction=2, kernels="off")
    (stack,) = own_stacks(model, cast("Family", family_of(model))).values()
    stack.recompute = True
    assert fuse(model, family_of(model), "reference")
    assert stack.recompute


def test_nothing_is_fused_on_a_cpu_unless_it_is_asked_for() -> None:
    assert not blocks(petune.wrap(MODELS["llama"](), kernels="auto"))


def test_a_model_in_which_nothing_can_be_fused_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="nothing of this Sequential"):
        petune.wrap(nn.Sequential(nn.Linear(4, 4)), method="full", kernels="reference")


def test_triton_without_a_device_is_an_error_that_names_the_remedy() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a device")
    with pytest.raises(UsageError, match="kernels: auto"):
        petune.wrap(MODELS["llama"](), kernels="triton")
