"""A quantised weight stands where the dense one did: in layers, states, copies, moves and slices, and it
refuses what would be lost."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_model
from torch import Tensor, nn

from petune.errors import UsageError
from petune.models.frozen_weight import (
    FORMS,
    QuantisedWeight,
    dense_of,
    quantised,
    quantised_in,
    restore_dense,
    sampled,
)


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    torch.manual_seed(0)
    yield


def layer(bias: bool = True, name: str = "fp8") -> nn.Linear:
    """A frozen linear whose weight is quantised."""
    made = nn.Linear(64, 48, bias=bias).requires_grad_(False)
    made.weight = quantised(made.weight, name)
    return made


def reachable(weight: Tensor) -> int:
    """Bytes of every plain tensor that a weight holds."""
    assert isinstance(weight, QuantisedWeight)
    found, seen = [*vars(weight).values(), *weight._sampled, *vars(weight.form).values()], {}
    seen = {
        value.untyped_storage().data_ptr(): value.untyped_storage().nbytes()
        for value in found
        if type(value) is Tensor
    }
    return sum(seen.values())


def test_it_is_the_same_parameter_in_a_quarter_of_the_bytes() -> None:
    made = layer()
    weight = made.weight
    assert isinstance(weight, nn.Parameter) and not weight.requires_grad
    assert (
        weight.shape == (48, 64)
        and weight.dtype == torch.float32
        and list(made.state_dict()) == ["weight", "bias"]
    )
    assert weight.nbytes == 48 * 64 + 4 * 48 and reachable(weight) == weight.nbytes + 4 * 8  # and its samples
    assert (
        reachable(quantised(nn.Parameter(torch.randn(512, 512), requires_grad=False), "fp8"))
        < 1.01 * 512 * 512
    )


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(64,), (5, 64), (2, 5, 64), (0, 64)], ids=str)
def test_a_layer_multiplies_in_its_form_forward_and_backward(
    shape: tuple[int, ...], bias: bool, name: str
) -> None:
    made, x, dy = layer(bias, name), torch.randn(shape, requires_grad=True), torch.randn(*shape[:-1], 48)
    y = made(x)
    y.backward(dy)
    form, rows = made.weight.form, x.detach().reshape(-1, 64)
    expected = form.linear(rows).view(dy.shape)
    assert torch.equal(y, expected if made.bias is None else expected + made.bias)
    assert torch.equal(x.grad, form.dlinear(dy.reshape(-1, 48)).view(shape))


def test_the_gradient_of_a_bias_that_trains_is_there() -> None:
    made = layer()
    made.bias.requires_grad_(True)
    made(torch.randn(5, 64)).sum().backward()
    assert torch.equal(made.bias.grad, torch.full((48,), 5.0))


def test_autocast_says_the_dtype_of_the_product() -> None:
    made, x = layer(), torch.randn(5, 64, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = made(x)
    y.float().sum().backward()
    assert y.dtype == torch.bfloat16 and x.grad.dtype == torch.float32
    with pytest.raises(RuntimeError, match="float64"):
        made(torch.randn(5, 64, dtype=torch.float64))


def test_everything_else_reads_its_values() -> None:
    weight = layer().weight
    values = dense_of(weight)
    assert type(values) is Tensor and torch.equal(weight.T, values.T) and torch.equal(weight + 1, values + 1)
    assert torch.equal(weight.view(-1), values.view(-1)) and torch.equal(
        torch.cat([weight, weight]), torch.cat([values, values])
    )
    assert weight.mean() == values.mean() and torch.equal(F.embedding(torch.tensor([3]), weight), values[3:4])


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "to another dtype and back": lambda module: copy.deepcopy(module).double().float(),
    "a state that is loaded": lambda module: _loaded(module),
}


def _loaded(module: nn.Module) -> nn.Module:
    other = layer(name=cast("Any", module.weight).form.name)
    other.load_state_dict(module.state_dict())
    return other


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("how", COPIES)
def test_a_copy_is_the_same_to_the_bit_in_memory_of_its_own(how: str, name: str) -> None:
    made = layer(name=name)
    again = COPIES[how](made)
    one, two = made.weight, again.weight
    assert isinstance(two, QuantisedWeight) and isinstance(two, nn.Parameter) and not two.requires_grad
    assert all(
        torch.equal(a.float(), b.float()) for a, b in zip(one.form.tensors, two.form.tensors, strict=True)
    )
    assert two.dtype == two.form.dtype == torch.float32 and torch.equal(sampled(one), sampled(two))
    assert one.data_ptr() != two.data_ptr() and reachable(two) == reachable(one)
    x = torch.randn(5, 64)
    assert torch.equal(made(x), again(x))


def test_a_move_takes_the_form_along() -> None:
    moved = layer().to("meta")
    assert isinstance(moved.weight, QuantisedWeight) and {
        value.device.type for value in moved.weight.form.tensors
    } == {"meta"}
    doubled = layer().double()
    assert (
        doubled.weight.dtype == doubled.weight.form.dtype == torch.float64
        and doubled(torch.randn(2, 64).double()).dtype == torch.float64
    )


@pytest.mark.parametrize("name", FORMS)
def test_dense_weights_that_are_loaded_are_quantised_and_quantised_ones_made_dense(name: str) -> None:
    made, plain = layer(name=name), nn.Linear(64, 48)
    made.load_state_dict(plain.state_dict())
    assert isinstance(made.weight, QuantisedWeight) and torch.equal(
        dense_of(made.weight), quantised(plain.weight, name).form.dense()
    )
    assert torch.equal(sampled(made.weight), sampled(plain.weight))
    plain.load_state_dict(made.state_dict())
    assert type(plain.weight) is nn.Parameter and torch.equal(plain.weight, dense_of(made.weight))


@pytest.mark.parametrize("dim", [0, 1])
def test_a_slice_keeps_the_form_and_as_a_copy_holds_nothing_more(dim: int) -> None:
    weight = layer().weight
    part = nn.Parameter(weight.detach().narrow(dim, 16, 32).clone(), requires_grad=False)
    assert isinstance(part, QuantisedWeight) and torch.equal(
        dense_of(part), dense_of(weight).narrow(dim, 16, 32)
    )
    assert reachable(part) == part.nbytes == part.numel() + 4 * len(part)


def test_slices_and_copies_are_made_in_inference_mode_too() -> None:
    weight = layer().weight
    with torch.inference_mode():
        parts = weight[8:16], weight[:, 8:16], copy.deepcopy(weight)
        found = [dense_of(part) for part in parts]
        views = weight.T, weight.view(-1), weight[0], weight.unbind()[1], weight.T.contiguous()
    whole = dense_of(weight)
    for view, expected in zip(views, (whole.T, whole.view(-1), whole[0], whole[1], whole.T), strict=True):
        assert torch.equal(view, expected)
    for part, expected in zip(found, (whole[8:16], whole[:, 8:16], whole), strict=True):
        assert torch.equal(part, expected)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("start", [0, 8])
def test_a_box_of_a_dense_weight_is_that_of_the_quantised_whole(start: int, name: str) -> None:
    whole = nn.Parameter(torch.randn(48, 128), requires_grad=False)
    form = quantised(whole, name).form
    part = (
        QuantisedWeight(form).narrow(0, start, 48 - start).narrow(1, 64 * bool(start), 128 - 64 * bool(start))
    )
    held = torch.empty_like(part)
    assert isinstance(held, QuantisedWeight) and held.data_ptr() != part.data_ptr()
    held.hold(type(held.form).of(whole), (start, 64 * bool(start)), sampled(whole))
    assert torch.equal(dense_of(held), form.dense()[start:, 64 * bool(start) :])
    assert torch.equal(sampled(held), sampled(whole if start == 0 else dense_of(held)))


@pytest.mark.parametrize("how", [torch.clone, copy.deepcopy, Tensor.double], ids=["clone", "copy", "move"])
def test_a_slice_is_written_by_nobody_however_it_was_copied(how: Callable[[Tensor], Tensor]) -> None:
    part = how(layer(name="nf4").weight.detach().narrow(0, 16, 32))
    with torch.no_grad(), pytest.raises(UsageError, match="a part of it"):
        part.copy_(torch.ones(32, 64))


WRITES: dict[str, Callable[[Tensor], object]] = {
    "zero_": lambda weight: weight.zero_(),
    "mul_ of its data": lambda weight: weight.data.mul_(2),
    "init": lambda weight: nn.init.normal_(weight),
    "an index": lambda weight: weight.__setitem__(0, 0.0),
    "a list": lambda weight: torch._foreach_mul_([weight], 2.0),
    "some columns": lambda weight: weight[:, :16].copy_(torch.ones(48, 16)),
    "some rows": lambda weight: weight[:16].copy_(torch.ones(16, 64)),
    "dense data": lambda weight: setattr(weight, "data", torch.ones(48, 64)),
    "out": lambda weight: torch.mul(torch.ones(48, 64), 2, out=weight),
}


@pytest.mark.parametrize("how", WRITES)
def test_what_would_write_into_a_part_of_it_is_refused(how: str) -> None:
    weight = layer().weight
    before = dense_of(weight).clone()
    with torch.no_grad(), pytest.raises(UsageError, match=r"in fp8 cannot be written(.|\n)*copy_"):
        WRITES[how](weight)
    assert torch.equal(dense_of(weight), before)


def test_it_does_not_train() -> None:
    made = layer()
    with pytest.raises(UsageError, match="in fp8 cannot train"):
        made.requires_grad_(True)
    made.weight.requires_grad = True
    with pytest.raises(UsageError, match="in fp8 cannot train"):
        made(torch.randn(5, 64))


def test_a_model_becomes_dense_again_and_what_was_shared_is() -> None:
    model = nn.ModuleList([layer(), layer(False), nn.Linear(4, 4)])
    model[1].weight = model[0].weight
    values = dense_of(model[0].weight)
    assert len(list(quantised_in(model))) == 2
    restore_dense(model)
    assert (
        not list(quantised_in(model))
        and torch.equal(model[0].weight, values)
        and model[0].weight is model[1].weight
    )


def test_values_that_are_written_by_another_name_are_known_again() -> None:
    weight = layer().weight
    weight.data.copy_(torch.ones(48, 64))
    assert bool((sampled(weight) == 1).all())


def test_in_a_narrower_dtype_it_is_known_by_the_values_of_that() -> None:
    dense = torch.randn(48, 64)
    weight = quantised(nn.Parameter(dense.clone(), requires_grad=False), "fp8")
    moved = weight.to(torch.bfloat16)
    assert torch.equal(sampled(moved), sampled(dense.bfloat16()))
    with torch.no_grad():
        moved.copy_(dense)
    assert torch.equal(sampled(moved), sampled(dense.bfloat16()))


@pytest.mark.parametrize("name", FORMS)
def test_files_of_torch_hold_it_and_those_of_plain_tensors_refuse_it(name: str, tmp_path: Path) -> None:
    made, other = layer(name=name), layer(name=name)
    torch.save(made.state_dict(), tmp_path / "state.pt")
    assert other.load_state_dict(torch.load(tmp_path / "state.pt"))
    assert torch.equal(dense_of(other.weight), dense_of(made.weight))
    with pytest.raises(UsageError, match=rf"a weight in {name} is no plain tensor(.|\n)*petune.save"):
        save_model(made, str(tmp_path / "model.safetensors"))
