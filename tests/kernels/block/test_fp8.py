"""Frozen weights in eight bits: as near to the product as e4m3 with a scale per row allows, and refused where
they cannot be had."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import petune
from petune.errors import UsageError
from petune.kernels.block.fp8 import PackedFp8
from petune.kernels.dispatch import Ops, reference_ops, triton_ops
from petune.kernels.fuse import fuse, fuse_modules, unfuse
from petune.kernels.single_modules import FusedLora
from petune.models import family_of
from petune.models.fp8 import Fp8
from petune.models.frozen_weight import QuantisedWeight, dense_of, quantised_in, restore_dense
from petune.models.quantise import quantise_blocks
from tests.kernels.fused_pairs import MOVED, batch, blocks, gradients

CPU = torch.device("cpu")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
STEP = 2.0**-4  # half a unit in the last place of e4m3, relative: three bits of mantissa
CONFIG = LlamaConfig(
    vocab_size=50,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    torch.manual_seed(0)
    yield


@pytest.fixture(params=["reference", "triton"])
def ops(request: pytest.FixtureRequest) -> Iterator[Ops]:
    with torch.device(DEVICE if request.param == "triton" else CPU):
        yield reference_ops() if request.param == "reference" else triton_ops()


def assert_near(found: Tensor, left: Tensor, right: Tensor) -> None:
    """left @ right but for the rounding of each factor: at most 2 STEP of the sum of magnitudes, and what
    underflows."""
    exact, most = left.double() @ right.double(), left.double().abs() @ right.double().abs()
    floor = (
        2.0**-10
        / 448
        * (left.abs().amax(1, keepdim=True).double() * right.abs().amax(0).double())
        * left.shape[1]
    )
    assert bool(
        ((found.double() - exact).abs() <= (2 * STEP + STEP**2) * most + floor + 2**-8 * exact.abs()).all()
    )
    scale = (left.double().norm(dim=1, keepdim=True) * right.double().norm(dim=0)).mean()
    # errors of rounding are independent
    assert float((found.double() - exact).abs().mean()) < 0.03 * float(scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("bias", [False, True])
def test_products_are_as_near_as_the_rounding_of_their_factors_allows(
    ops: Ops, dtype: torch.dtype, bias: bool
) -> None:
    weight, x, dy = torch.randn(48, 64).to(dtype), torch.randn(9, 64).to(dtype), torch.randn(9, 48).to(dtype)
    weight[3] *= 1000  # a row of another size spoils no other
    offset = torch.randn(48).to(dtype) if bias else None
    eight = PackedFp8([Fp8.of(weight)], offset, ops)
    y = eight.linear(x)
    assert y.dtype == dtype and y.shape == (9, 48)
    assert_near(y - offset if bias else y, x, weight.T)
    assert_near(eight.dlinear(dy), dy, weight)


@pytest.mark.parametrize("bias", [False, True])
def test_a_product_with_its_update_is_the_product_and_the_update(ops: Ops, bias: bool) -> None:
    weight, x, s, b = torch.randn(48, 64), torch.randn(9, 64), torch.randn(9, 4), torch.randn(48, 4)
    weight[3] *= 1000
    eight = PackedFp8([Fp8.of(weight)], torch.randn(48) if bias else None, ops)
    torch.testing.assert_close(
        eight.linear_low(x, (s, b), ops, None), eight.linear(x) + s @ b.T, rtol=1e-5, atol=1e-4
    )


def test_the_low_rank_part_of_the_backward_product_is_exact(ops: Ops) -> None:
    weight, dy, b = torch.randn(48, 64), torch.randn(9, 48), torch.randn(48, 3)
    dx, ds = PackedFp8([Fp8.of(weight)], None, ops).dlinear_with(dy, b)
    assert torch.equal(ds, dy @ b)
    assert_near(dx, dy, weight)


def test_rows_of_zeros_stay_zero(ops: Ops) -> None:
    weight, x = torch.randn(16, 32), torch.randn(4, 32)
    weight[5], x[2] = 0, 0
    y = PackedFp8([Fp8.of(weight)], None, ops).linear(x)
    assert torch.equal(y[2], torch.zeros(16)) and torch.equal(y[:, 5], torch.zeros(4))


def test_no_rows_are_no_rows(ops: Ops) -> None:
    eight = PackedFp8([Fp8.of(torch.randn(16, 32))], torch.randn(16), ops)
    assert eight.linear(torch.empty(0, 32)).shape == (0, 16)
    assert eight.dlinear(torch.empty(0, 16)).shape == (0, 32)


# ------------------------------------------------------------------ in a model


def pair_of(**settings: Any) -> tuple[nn.Module, nn.Module]:
    """The same tuned model with fused blocks in eight bits, and with the model's own."""
    plain = petune.wrap(LlamaForCausalLM(copy.deepcopy(CONFIG)), kernels="off", **settings)
    with torch.no_grad():
        for name, value in plain.named_parameters():
            if any(part in name for part in MOVED):
                value.add_(torch.randn_like(value), alpha=0.1)
    eight = copy.deepcopy(plain)
    quantise_blocks(eight, family_of(eight), "fp8")
    assert fuse(eight, family_of(eight), "reference")
    return eight.train(), plain.train()


TUNINGS: list[dict[str, Any]] = [
    {"method": "lora"},
    {"method": "adapter", "reduction": 2},
    {"method": "adapter", "reduction": 2, "kind": "pfeiffer"},
    {"method": "dora"},
    {"method": "ia3"},
    {"method": "miss", "r": 8},
    {"method": "side", "reduction": 2},
]


@pytest.mark.parametrize("settings", TUNINGS, ids=str)
def test_every_frozen_product_of_a_block_is_in_eight_bits(settings: dict[str, Any]) -> None:
    eight, _ = pair_of(**settings)
    banks = [bank for block in blocks(eight) for bank in block.spec.banks if bank is not None]  # no ladder's
    assert [isinstance(bank.base, PackedFp8) for bank in banks] == [True] * 8


@pytest.mark.parametrize("settings", TUNINGS[:-1], ids=str)
def test_loss_and_the_direction_of_gradients_are_nearly_the_unfused_models(settings: dict[str, Any]) -> None:
    eight, plain = pair_of(**settings)
    (loss, found), (expected, wanted) = gradients(eight, batch("llama")), gradients(plain, batch("llama"))
    assert loss != expected and float(loss) == pytest.approx(float(expected), rel=0.01)
    assert found.keys() == wanted.keys()
    whole = [torch.cat([grads[name].flatten() for name in wanted]) for grads in (found, wanted)]
    assert float(torch.cosine_similarity(*whole, dim=0)) > 0.99
    for name, value in wanted.items():
        assert float(torch.cosine_similarity(found[name].flatten(), value.flatten(), dim=0)) > 0.95, name


def reachable(model: nn.Module) -> int:
    """Bytes of every tensor that can be reached from a model, whoever holds it."""
    found: dict[int, int] = {}
    seen: set[int] = set()
    left: list[Any] = [model]
    while left:
        one = left.pop()
        if id(one) in seen or isinstance(one, type | ModuleType | FunctionType):
            continue
        seen.add(id(one))
        if isinstance(one, Tensor) and not isinstance(one, QuantisedWeight):
            found[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
        left += gc.get_referents(one)
    return sum(found.values())


def test_a_base_in_eight_bits_holds_a_byte_a_weight_and_its_scales() -> None:
    eight, plain = pair_of()
    for steps in range(2):
        weights = [
            layer.weight for block in blocks(eight) for layers in block.spec.layers for layer in layers
        ]
        # and the samples it is known again by
        own = sum(weight.numel() + 4 * len(weight) + 32 for weight in weights)
        assert len(weights) == 14 and own < 1.2 * sum(weight.numel() for weight in weights)
        saved = reachable(plain) - reachable(eight)
        # what else fusing holds
        assert saved == pytest.approx(4 * sum(weight.numel() for weight in weights) - own, abs=512), steps
        gradients(eight, batch("llama"))
        for value in (*eight.parameters(), *plain.parameters()):
            value.grad = None


@pytest.mark.parametrize("settings", TUNINGS[:-1], ids=str)
def test_unfused_forward_and_backward_are_those_of_the_fused_blocks(settings: dict[str, Any]) -> None:
    eight, _ = pair_of(**settings)
    other = copy.deepcopy(eight)
    unfuse(other)
    assert not blocks(other) and len(list(quantised_in(other))) == 14
    (loss, found), (expected, wanted) = gradients(eight, batch("llama")), gradients(other, batch("llama"))
    assert float(loss) == pytest.approx(float(expected), rel=1e-4)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        # scales' are sums over rows of what was quantised with q, k and v side by side here, one by one there
        near = 0.05 if "ia3_l" in name else 0.02
        assert float((found[name] - value).norm()) < near * float(value.norm()), name
    with torch.no_grad():
        one, two = (
            model.eval()(input_ids=torch.arange(24).view(2, 12), use_cache=False).logits
            for model in (eight, other)
        )
    assert float((one - two).norm()) < 0.01 * float(two.norm())


def test_a_block_that_declines_a_call_multiplies_as_the_unfused_one() -> None:
    eight, _ = pair_of()
    other = copy.deepcopy(eight)
    unfuse(other)
    with torch.no_grad():
        one, two = (model.eval()(**batch("llama"), use_cache=True).logits for model in (eight, other))
    assert torch.equal(one, two)


def test_linears_that_are_fused_alone_leave_quantised_ones_to_themselves() -> None:
    eight, _ = pair_of()
    unfuse(eight)
    loss, wanted = gradients(eight, batch("llama"))
    assert fuse_modules([eight], "reference", CPU, "a plan cuts its blocks").sites
    assert not any(isinstance(module, FusedLora) for module in eight.modules())
    again, found = gradients(eight, batch("llama"))
    assert float(again) == pytest.approx(float(loss), rel=1e-4)
    assert all(
        float((found[name] - value).norm()) < 0.05 * float(value.norm()) for name, value in wanted.items()
    )


def test_loss_and_gradients_are_near_those_in_float64_of_the_weights_they_stand_for() -> None:
    eight, _ = pair_of()
    truth = copy.deepcopy(eight)
    unfuse(truth)
    restore_dense(truth.double())
    (loss, found), (expected, wanted) = gradients(eight, batch("llama")), gradients(truth, batch("llama"))
    assert float(loss) == pytest.approx(float(expected), rel=0.01)
    whole = [torch.cat([grads[name].double().flatten() for name in wanted]) for grads in (found, wanted)]
    assert float(torch.cosine_similarity(*whole, dim=0)) > 0.99


def test_the_gradient_of_what_enters_a_block_is_near_that_in_float64() -> None:
    eight, _ = pair_of()
    truth = copy.deepcopy(eight)
    unfuse(truth)
    restore_dense(truth.double())
    found = []
    for model in (eight, truth):
        entered = torch.randn(2, 6, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        entered = entered.to(next(model.parameters()).dtype).requires_grad_()
        model(inputs_embeds=entered, labels=torch.arange(12).view(2, 6)).loss.backward()
        found.append(entered.grad.double().flatten())
    assert float(torch.cosine_similarity(*found, dim=0)) > 0.98


def test_names_of_the_state_stay_and_it_is_loaded_to_the_bit() -> None:
    eight, plain = pair_of()
    assert list(eight.state_dict()) == list(plain.state_dict())
    again, _ = pair_of()
    again.load_state_dict(eight.state_dict())
    (loss, found), (expected, wanted) = gradients(again, batch("llama")), gradients(eight, batch("llama"))
    assert loss == expected and all(torch.equal(found[name], value) for name, value in wanted.items())


def test_unfusing_gives_every_weight_memory_of_its_own() -> None:
    eight, _ = pair_of()
    before = {name: dense_of(value).clone() for name, value in eight.named_parameters()}
    unfuse(eight)
    assert all(torch.equal(dense_of(value), before[name]) for name, value in eight.named_parameters())
    for _, _, weight in quantised_in(eight):
        assert all(value.untyped_storage().nbytes() == value.nbytes for value in weight.form.tensors)


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_weights_that_are_loaded_later_count(steps: int) -> None:
    eight, plain = pair_of()
    for _ in range(steps):
        gradients(eight, batch("llama"))
    state = {
        name: value * 1.5 if "proj.weight" in name else value for name, value in plain.state_dict().items()
    }
    for model in (eight, plain):
        model.load_state_dict(state)
    assert float(gradients(eight, batch("llama"))[0]) == pytest.approx(
        float(gradients(plain, batch("llama"))[0]), rel=0.01
    )
    y, x = blocks(eight)[0].spec.banks[1].base, torch.eye(64)
    torch.testing.assert_close(y.linear(x), blocks(eight)[0].self_attn.o_proj.weight.T, rtol=0.1, atol=0.01)


@pytest.mark.parametrize(
    "change", [lambda model: model.double().float(), copy.deepcopy], ids=["moved", "copied"]
)
@pytest.mark.parametrize("first", ["training", "evaluation"])
def test_a_model_that_was_moved_or_copied_multiplies_in_eight_bits_all_the_same(
    change: Any, first: str
) -> None:
    eight, _ = pair_of()
    inputs = batch("llama")
    with torch.no_grad():
        expected = eight.eval()(**inputs, use_cache=False).logits
    loss = gradients(eight.train(), inputs)[0]
    other = change(eight)
    if first == "training":
        assert gradients(other.train(), inputs)[0] == loss
        pairs = [
            pair
            for block in blocks(other)
            for pair in zip(block.spec.banks, block.linears().groups, strict=True)
        ]
        assert all(bank.intact(parts) for bank, parts in pairs)
    with torch.no_grad():
        torch.testing.assert_close(
            other.eval()(**inputs, use_cache=False).logits, expected, rtol=1e-5, atol=1e-6
        )


def test_fusing_again_what_was_unfused_is_in_eight_bits_again() -> None:
    eight, _ = pair_of()
    loss = gradients(eight, batch("llama"))[0]
    unfuse(eight)
    assert fuse(eight, family_of(eight), "reference")
    assert [isinstance(bank.base, PackedFp8) for block in blocks(eight) for bank in block.spec.banks] == [
        True
    ] * 8
    assert gradients(eight, batch("llama"))[0] == loss


@pytest.mark.parametrize(
    "settings", [{"method": "full"}, {"method": "lora", "also_train": ("self_attn",)}], ids=["full", "some"]
)
def test_weights_that_train_are_refused(settings: dict[str, Any]) -> None:
    model = petune.wrap(LlamaForCausalLM(copy.deepcopy(CONFIG)), kernels="off", **settings)
    with pytest.raises(UsageError, match="base_dtype"):
        quantise_blocks(model, family_of(model), "fp8")


def test_a_model_whose_sizes_do_not_fit_is_refused() -> None:
    config = copy.deepcopy(CONFIG)
    config.intermediate_size = 72
    with pytest.raises(UsageError, match="divisible by 16"):
        petune.wrap(LlamaForCausalLM(config), kernels="reference", base_dtype="fp8")
