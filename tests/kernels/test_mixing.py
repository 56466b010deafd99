"""The gate of a ladder's level as one node: plain torch's value and gradients, and nothing but its inputs
kept."""

from __future__ import annotations

import torch

from petune.kernels.dispatch import reference_ops
from petune.kernels.mixing import mixed


def inputs() -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    found = [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in ((2, 3, 4), (2, 3, 4), ())]
    return [value.requires_grad_() for value in found]


def test_one_node_gives_value_and_gradients_of_plain_torch() -> None:
    own, plain = inputs(), inputs()
    found, expected = mixed(reference_ops(), *own, 0.3), mixed(None, *plain, 0.3)
    torch.testing.assert_close(found, expected)
    (found.square().sum()).backward(), (expected.square().sum()).backward()
    for one, other in zip(own, plain, strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_it_keeps_its_inputs_alone() -> None:
    own, kept = inputs(), list[int]()
    with torch.autograd.graph.saved_tensors_hooks(
        lambda value: (kept.append(value.data_ptr()), value)[1], lambda value: value
    ):
        mixed(reference_ops(), *own, 0.3)
    assert kept == [value.data_ptr() for value in own]


def test_states_of_two_dtypes_are_mixed_as_torch_promotes_them() -> None:
    state, below, gate = inputs()
    assert mixed(reference_ops(), state, below.float(), gate, 0.3).dtype == torch.float64
