"""Experts in forms of fewer bytes: each as a linear of its own would be, in copies, products and files."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from petune.errors import FileError, UsageError
from petune.kernels.grouped import grouped
from petune.methods import tune, tuned_parameters
from petune.methods.configs import make_config
from petune.models import contents, family_of
from petune.models.contents import attach
from petune.models.frozen_weight import (
    EXPERT_FORMS,
    FORMS,
    QuantisedWeight,
    dense_of,
    quantised,
    sampled,
)
from petune.models.loading import load_model
from petune.models.source import resolve_model
from petune.parallel import ALONE, alone, parallelize
from tests.methods.zoo import tiny


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    torch.manual_seed(0)
    yield


def experts(name: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Any]:
    """Experts [5, 80, 64], of scales that differ, dense and quantised."""
    dense = (torch.randn(5, 80, 64) * torch.logspace(-2, 2, 5)[:, None, None]).to(dtype)
    return dense, quantised(nn.Parameter(dense, requires_grad=False), name)


@pytest.mark.parametrize("name", FORMS)
def test_each_expert_has_the_values_of_a_linear_in_that_form(name: str) -> None:
    dense, held = experts(name)
    assert torch.equal(dense_of(held), torch.stack([FORMS[name].of(one).dense() for one in dense]))
    assert held.nbytes == sum(FORMS[name].of(one).nbytes for one in dense) < 1.1 * dense.numel()
    assert torch.equal(sampled(held), sampled(dense)) and "5 x 80 x 64" in repr(held)
    outline = quantised(nn.Parameter(dense.to("meta"), requires_grad=False), name)
    assert outline.nbytes == held.nbytes and outline.shape == held.shape == dense.shape


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "another dtype and back": lambda held: held.double().float(),
    "written": lambda held: torch.empty_like(held).copy_(held),
}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("name", FORMS)
def test_a_copy_is_the_same_to_the_bit(name: str, how: str) -> None:
    held = experts(name)[1]
    found = COPIES[how](held)
    assert isinstance(found, QuantisedWeight) and found.data_ptr() != held.data_ptr()
    assert torch.equal(dense_of(found), dense_of(held))


@pytest.mark.parametrize("name", FORMS)
def test_some_of_them_are_a_view_and_a_part_of_each_is_refused(name: str) -> None:
    dense, held = experts(name)
    some, columns = held.detach()[1:3], held.detach()[:, :16]
    assert isinstance(some, QuantisedWeight) and torch.equal(dense_of(some), dense_of(held)[1:3])
    assert type(columns) is Tensor and torch.equal(columns, dense_of(held)[:, :16])
    with pytest.raises(UsageError, match=f"{name} holds experts whole"):
        held.form.narrow(1, 0, 16)
    with torch.no_grad():
        held.copy_(2 * dense)
    assert torch.equal(dense_of(held), dense_of(quantised(nn.Parameter(2 * dense), name)))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", FORMS)
def test_products_are_those_of_the_dense_values_in_float64_and_keep_nothing_dense(
    name: str, transposed: bool
) -> None:
    """Of one expert, as transformers' loop multiplies, and grouped: to the rounding of float64."""
    held = experts(name, torch.float64)[1]
    values, ends = dense_of(held), torch.tensor([3, 3, 8, 9, 12], dtype=torch.int32)
    start = torch.randn(12, 80 if transposed else 64, dtype=torch.float64)
    sides, kept = [], dict[bool, list[Tensor]]()
    for weight in (values, held):
        x, own = start.clone().requires_grad_(), kept.setdefault(weight is held, [])
        with torch.autograd.graph.saved_tensors_hooks(
            lambda value, own=own: own.append(value) or value, _same
        ):
            one = weight[torch.tensor(2)]
            y = grouped(x, weight, ends, turned=not transposed)
            z = x @ one if transposed else F.linear(x, one)
        (y.square().sum() + z.square().sum()).backward()
        sides.append((y.detach(), z.detach(), x.grad))
    for found, expected in zip(*sides, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    large = [{value.numel() for value in own} & {values.numel(), one.numel()} for own in kept.values()]
    assert large[0] and not large[1]


def _same(value: Tensor) -> Tensor:
    return value


# ------------------------------------------------------------------ files


WIDE = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64, "head_dim": 16}


def read(folder: Path, base_dtype: str) -> nn.Module:
    found = load_model(resolve_model(str(folder), folder), "causal", None, torch.bfloat16, seed=3)
    tune(found.model, make_config("lora", {"r": 2, "targets": ["q"]}))
    assert found.contents is not None
    attach(found.model, found.contents)
    here = alone(torch.device("cpu"))
    placed = parallelize(
        found.model, family_of(found.model), ALONE, here, tuned_parameters, base_dtype=base_dtype
    )
    return placed.modules[0]


@pytest.mark.parametrize("name", FORMS)
def test_they_are_quantised_while_they_are_read_one_expert_at_a_time(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, sizes = tiny("qwen3moe-causal", **WIDE).bfloat16(), set[int]()
    model.save_pretrained(tmp_path)
    finite = contents.is_finite
    monkeypatch.setattr(contents, "is_finite", lambda value: (sizes.add(value.numel()), finite(value))[1])
    found = {path: weight for path, weight in read(tmp_path, name).named_parameters() if weight.dim() == 3}
    assert len(found) == 2 and all(isinstance(weight, QuantisedWeight) for weight in found.values())
    for path, weight in found.items():
        dense = model.get_parameter(path)
        assert torch.equal(dense_of(weight), EXPERT_FORMS[name].of(dense).dense())
        assert torch.equal(sampled(weight), sampled(dense)) and weight.nbytes < 1.1 * weight.numel()
        assert dense.numel() not in sizes and dense[0].numel() in sizes


def test_an_expert_that_is_not_finite_is_found(tmp_path: Path) -> None:
    tiny("qwen3moe-causal", **WIDE).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.mlp.experts.3.up_proj.weight"][5, 6] = float("nan")
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(FileError, match=r"experts\.gate_up_proj  holds a value that is not finite"):
        read(tmp_path, "int8")
