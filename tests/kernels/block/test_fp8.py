"""Frozen weights in eight bits: as near to the product as e4m3 with a scale per row allows, and refused where they cannot be had."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import petune
from petune.errors import UsageError
from petune.kernels.block.fp8 import Eight, refuse_eight
from petune.kernels.block.linear import Dense, FrozenWeight
from petune.kernels.dispatch import Ops, reference_ops, triton_ops
from petune.kernels.fuse import fuse
from petune.models import family_of
from tests.kernels.fused_pairs import batch, blocks, gradients

CPU = torch.device("cpu")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
STEP = 2.0**-4  # half a unit in the last place of e4m3, relative: three bits of mantissa
CONFIG = LlamaConfig(vocab_size=50, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    torch.manual_seed(0)
    yield


@pytest.fixture(params=["reference", "triton"])
def ops(request: pytest.FixtureRequest) -> Iterator[Ops]:
    with torch.device(DEVICE if request.param == "triton" else CPU):
        yield reference_ops() if request.param == "reference" else triton_ops()


def assert_near(found: Tensor, left: Tensor, right: Tensor) -> None:
    """left @ right but for the rounding of each factor: at most 2 STEP of the sum of magnitudes, and what underflows."""
    exact, most = left.double() @ right.double(), left.double().abs() @ right.double().abs()
    floor = 2.0**-10 / 448 * (left.abs().amax(1, keepdim=True).double() * right.abs().amax(0).double()) * left.shape[1]
    assert bool(((found.double() - exact).abs() <= (2 * STEP + STEP**2) * most + floor + 2**-8 * exact.abs()).all())
    scale = (left.double().norm(dim=1, keepdim=True) * right.double().norm(dim=0)).mean()
    assert float((found.double() - exact).abs().mean()) < 0.03 * float(scale)  # errors of rounding are independent


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("bias", [False, True])
def test_products_are_as_near_as_the_rounding_of_their_factors_allows(ops: Ops, dtype: torch.dtype, bias: bool) -> None:
    weight, x, dy = torch.randn(48, 64).to(dtype), torch.randn(9, 64).to(dtype), torch.randn(9, 48).to(dtype)
    weight[3] *= 1000  # a row of another size spoils no other
    offset = torch.randn(48).to(dtype) if bias else None
    eight = Eight(weight, offset, ops, ())
    y = eight.linear(x)
    assert y.dtype == dtype and y.shape == (9, 48)
    assert_near(y - offset if bias else y, x, weight.T)
    assert_near(eight.dlinear(dy), dy, weight)


@pytest.mark.parametrize("bias", [False, True])
def test_a_product_with_its_update_is_the_product_and_the_update(ops: Ops, bias: bool) -> None:
    weight, x, s, b = torch.randn(48, 64), torch.randn(9, 64), torch.randn(9, 4), torch.randn(48, 4)
    weight[3] *= 1000
    eight = Eight(weight, torch.randn(48) if bias else None, ops, ())
    torch.testing.assert_close(eight.linear_low(x, (s, b), ops, None), eight.linear(x) + s @ b.T, rtol=1e-5, atol=1e-4)


def test_the_low_rank_part_of_the_backward_product_is_exact(ops: Ops) -> None:
    weight, dy, b = torch.randn(48, 64), torch.randn(9, 48), torch.randn(48, 3)
    dx, ds = Eight(weight, None, ops, ()).dlinear_with(dy, b)
    assert torch.equal(ds, dy @ b)
    assert_near(dx, dy, weight)


def test_rows_of_zeros_stay_zero(ops: Ops) -> None:
    weight, x = torch.randn(16, 32), torch.randn(4, 32)
    weight[5], x[2] = 0, 0
    y = Eight(weight, None, ops, ()).linear(x)
    assert torch.equal(y[2], torch.zeros(16)) and torch.equal(y[:, 5], torch.zeros(4))


@pytest.mark.parametrize("kind", ["dense", "fp8"])
def test_a_slice_of_a_weight_multiplies_as_that_slice_of_the_whole(kind: str) -> None:
    weight, offset, x, dy = torch.randn(48, 64), torch.randn(48), torch.randn(9, 64), torch.randn(9, 48)
    weight[3], weight[:, 5] = weight[3] * 1000, weight[:, 5] * 100  # scales belong to their own rows
    whole: FrozenWeight = Dense(weight, offset) if kind == "dense" else Eight(weight, offset, reference_ops(), ())
    assert whole.shape == (48, 64)
    assert whole.nbytes == (0 if kind == "dense" else 2 * 48 * 64 + 4 * (48 + 64))
    torch.testing.assert_close(whole.dense(), weight, rtol=2**-4, atol=weight.abs().max().item() * 2**-9)
    outputs, inputs = whole.narrow(0, 16, 32), whole.narrow(1, 32, 16)
    assert outputs.shape == (32, 64) and inputs.shape == (48, 16)
    torch.testing.assert_close(outputs.linear(x), whole.linear(x)[:, 16:], rtol=1e-5, atol=1e-3)
    torch.testing.assert_close(inputs.dlinear(dy), whole.dlinear(dy)[:, 32:48], rtol=1e-5, atol=1e-3)
    own = torch.zeros_like(x)
    own[:, 32:48] = x[:, 32:48]
    torch.testing.assert_close(inputs.linear(x[:, 32:48].contiguous()), whole.linear(own) - offset, rtol=1e-5, atol=1e-3)


def test_no_rows_are_no_rows(ops: Ops) -> None:
    eight = Eight(torch.randn(16, 32), torch.randn(16), ops, ())
    assert eight.linear(torch.empty(0, 32)).shape == (0, 16)
    assert eight.dlinear(torch.empty(0, 16)).shape == (0, 32)


@pytest.mark.parametrize("sizes", [(24, 32), (32, 40), (8, 8)])
def test_sizes_that_are_no_multiples_of_sixteen_are_refused(sizes: tuple[int, int]) -> None:
    with pytest.raises(UsageError, match="base_dtype") as caught:
        refuse_eight(CPU, torch.bfloat16, sizes)
    assert f"{sizes[0]} x {sizes[1]}" in str(caught.value)


@pytest.mark.parametrize(
    ("capability", "dtype", "fits"),
    [((9, 0), torch.bfloat16, True), ((8, 9), torch.bfloat16, True), ((8, 0), torch.bfloat16, False), ((9, 0), torch.float32, False)],
)
def test_what_a_device_must_be(capability: tuple[int, int], dtype: torch.dtype, fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    if fits:
        refuse_eight(torch.device("cuda"), dtype, (32, 32))
    else:
        with pytest.raises(UsageError, match="base_dtype"):
            refuse_eight(torch.device("cuda"), dtype, (32, 32))


# ------------------------------------------------------------------ in a model


def pair_of(**settings: Any) -> tuple[nn.Module, nn.Module]:
    """The same tuned model with fused blocks in eight bits, and with the model's own."""
    plain = petune.wrap(LlamaForCausalLM(copy.deepcopy(CONFIG)), kernels="off", **settings)
    with torch.no_grad():
        for name, value in plain.named_parameters():
            if "lora_B" in name or "adapter_" in name:
                value.normal_(std=0.1)
    eight = copy.deepcopy(plain)
    assert fuse(eight, family_of(eight), "reference", base_dtype="fp8")
    return eight.train(), plain.train()


TUNINGS: list[dict[str, Any]] = [{"method": "lora"}, {"method": "adapter", "reduction": 2}, {"method": "side", "reduction": 2}]


@pytest.mark.parametrize("settings", TUNINGS, ids=str)
def test_every_frozen_product_of_a_block_is_in_eight_bits(settings: dict[str, Any]) -> None:
    eight, _ = pair_of(**settings)
    assert [isinstance(bank.base, Eight) for block in blocks(eight) for bank in block.spec.banks] == [True] * 8


@pytest.mark.parametrize("settings", TUNINGS[:2], ids=str)
def test_loss_and_the_direction_of_gradients_are_nearly_the_unfused_models(settings: dict[str, Any]) -> None:
    eight, plain = pair_of(**settings)
    (loss, found), (expected, wanted) = gradients(eight, batch("llama")), gradients(plain, batch("llama"))
    assert loss != expected and float(loss) == pytest.approx(float(expected), rel=0.01)
    assert found.keys() == wanted.keys()
    whole = [torch.cat([grads[name].flatten() for name in wanted]) for grads in (found, wanted)]
    assert float(torch.cosine_similarity(*whole, dim=0)) > 0.99
    for name, value in wanted.items():
        assert float(torch.cosine_similarity(found[name].flatten(), value.flatten(), dim=0)) > 0.95, name


def test_state_and_files_are_those_of_the_weights_as_they_were() -> None:
    eight, plain = pair_of()
    for (name, value), (other_name, other) in zip(eight.state_dict().items(), plain.state_dict().items(), strict=True):
        assert name == other_name and torch.equal(value, other)


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_weights_that_are_loaded_later_count(steps: int) -> None:
    eight, plain = pair_of()
    for _ in range(steps):
        gradients(eight, batch("llama"))
    state = {name: value * 1.5 if "proj.weight" in name else value for name, value in plain.state_dict().items()}
    for model in (eight, plain):
        model.load_state_dict(state)
    assert float(gradients(eight, batch("llama"))[0]) == pytest.approx(float(gradients(plain, batch("llama"))[0]), rel=0.01)
    y, x = blocks(eight)[0].spec.banks[1].base, torch.eye(64)
    torch.testing.assert_close(y.linear(x), blocks(eight)[0].self_attn.o_proj.weight.T, rtol=0.1, atol=0.01)


def test_a_model_that_has_moved_does_not_leave_eight_bits_without_a_word() -> None:
    eight, _ = pair_of()
    eight.double().float()
    with pytest.raises(UsageError, match="after they were quantised"):
        gradients(eight, batch("llama"))


@pytest.mark.parametrize("settings", [{"method": "full"}, {"method": "lora", "also_train": ("self_attn",)}], ids=["full", "some"])
def test_weights_that_train_are_refused(settings: dict[str, Any]) -> None:
    model = petune.wrap(LlamaForCausalLM(copy.deepcopy(CONFIG)), kernels="off", **settings)
    with pytest.raises(UsageError, match="base_dtype"):
        fuse(model, family_of(model), "reference", base_dtype="fp8")


@pytest.mark.parametrize("kernels", ["off", "auto"])
def test_without_fused_blocks_it_is_refused(kernels: Any) -> None:
    with pytest.raises(UsageError, match="base_dtype"):
        petune.wrap(LlamaForCausalLM(copy.deepcopy(CONFIG)), kernels=kernels, base_dtype="fp8")


def test_a_model_whose_sizes_do_not_fit_is_refused() -> None:
    config = copy.deepcopy(CONFIG)
    config.intermediate_size = 72
    with pytest.raises(UsageError, match="divisible by 16"):
        petune.wrap(LlamaForCausalLM(config), kernels="reference", base_dtype="fp8")
