"""The registered ops are the reference: values, gradients, autocast, compilation, recomputation, and inputs
left as they were."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from petune.kernels import reference, torch_ops

M, N, R, WIDTH = 6, 8, 3, 4
NUMBERS = torch.arange(M)


def drawn(*shape: int, seed: int = 0, grad: bool = True) -> Tensor:
    """Random numbers in float64, strided rows where there are rows, each size with values of its own."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    if len(shape) < 2:
        return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_(grad)
    wide = torch.randn(*shape[:-1], shape[-1] + 2, generator=generator, dtype=torch.float64)
    return wide[..., : shape[-1]].detach().requires_grad_(grad)


def fixed(*shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Tensors that need no gradient."""
    return tuple(drawn(*shape, grad=False) for shape in shapes)


def angles() -> tuple[Tensor, Tensor]:
    """cos and sin of two positions."""
    half = torch.randn(2, WIDTH // 2, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    angle = torch.cat([half, half], 1)
    return angle.cos(), angle.sin()


def lora(x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """What `lora_linear` is, in plain torch."""
    y = x @ weight.T + scale * (x @ a.T) @ b.T
    return y if bias is None else y + bias


# op, the same in plain torch, arguments
Case = tuple[Callable[..., Any], Callable[..., Any], tuple[Any, ...]]

DIFFERENTIABLE: dict[str, Case] = {
    "rms_norm": (
        torch_ops.rms_norm,
        lambda *args: reference.rms_norm(*args)[0],
        (drawn(M, N), drawn(N), 1e-3),
    ),
    "rms_norm whose weight is frozen": (
        torch_ops.rms_norm,
        lambda *args: reference.rms_norm(*args)[0],
        (drawn(M, N), drawn(N, grad=False), 1e-3),
    ),
    "lora_linear": (
        torch_ops.lora_linear,
        lora,
        (drawn(M, N), drawn(5, N), drawn(5), drawn(R, N), drawn(5, R), 0.7),
    ),
    "lora_linear of a frozen base": (
        torch_ops.lora_linear,
        lora,
        (drawn(M, N), drawn(5, N, grad=False), None, drawn(R, N), drawn(5, R), 0.7),
    ),
}
REST: dict[str, Case] = {
    "rms_norm_backward": (
        torch_ops.rms_norm_backward,
        lambda *args: reference.rms_norm_backward(*args[:4], None, args[4]),
        (*fixed((M, N), (M, N), (N,), (M,)), True),
    ),
    "lora_linear_backward": (
        torch_ops.lora_linear_backward,
        lambda dy, x, weight, bias, a, b, scale, needs: (
            dy @ weight + scale * dy @ b @ a,
            dy.T @ x,
            None,
            None,
            scale * dy.T @ x @ a.T,
        ),
        (*fixed((M, 5), (M, N), (5, N)), None, *fixed((R, N), (5, R)), 0.7, [True, True, False, False, True]),
    ),
}
EVERY = DIFFERENTIABLE | REST


def flat(found: Any) -> list[Tensor]:
    """Results of an op or of the reference, without what is not there."""
    return [
        one
        for one in (found if isinstance(found, tuple) else (found,))
        if one is not None and one.dim() + one.numel() != 1
    ]


def differentiable(found: Any) -> list[Tensor]:
    """The results that gradients come back through."""
    return [one for one in flat(found) if one.requires_grad]


def copies(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same arguments as fresh leaves, their rows still strided."""
    return tuple(
        one.detach().requires_grad_(one.requires_grad) if isinstance(one, Tensor) else one for one in args
    )


def has_rows(value: Any) -> bool:
    """Whether an argument is one with M rows."""
    return isinstance(value, Tensor) and len(value) == M


def gradients(function: Callable[..., Any], args: tuple[Any, ...]) -> list[Tensor | None]:
    """Gradients of every tensor, of a sum in which every number has a weight of its own."""
    own = copies(args)
    total = sum(
        (one * torch.linspace(-1, 2, one.numel(), dtype=one.dtype, device=one.device).view(one.shape)).sum()
        for one in differentiable(function(*own))
    )
    total.backward()  # type: ignore[union-attr]
    return [one.grad for one in own if isinstance(one, Tensor)]


def assert_same(found: list[Tensor | None], expected: list[Tensor | None], tolerance: float = 1e-12) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert one.dtype == other.dtype
            torch.testing.assert_close(one.double(), other.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_torch_finds_nothing_wrong_with_the_registration(name: str) -> None:
    op, _, args = EVERY[name]
    torch.library.opcheck(op, copies(args))


@pytest.mark.parametrize("name", EVERY)
def test_results_are_those_of_the_reference(name: str) -> None:
    op, plain, args = EVERY[name]
    found, expected = flat(op(*args)), flat(plain(*args))
    if name in DIFFERENTIABLE:
        found = [one for one in found if one.requires_grad]
    assert_same(list(found), list(expected))


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradients_are_those_that_autograd_makes_of_the_reference(name: str) -> None:
    op, plain, args = DIFFERENTIABLE[name]
    assert_same(gradients(op, args), gradients(plain, args))


@pytest.mark.parametrize("name", EVERY)
def test_no_input_is_changed_or_given_back(name: str) -> None:
    op, _, args = EVERY[name]
    before = [one.clone() for one in args if isinstance(one, Tensor)]
    found = flat(op(*args))
    if name in DIFFERENTIABLE:
        gradients(op, args)
    tensors = [one for one in args if isinstance(one, Tensor)]
    assert all(torch.equal(*pair) for pair in zip(tensors, before, strict=True))
    at = {one.untyped_storage().data_ptr() for one in tensors}
    assert not at & {one.untyped_storage().data_ptr() for one in found}


@pytest.mark.parametrize("name", EVERY)
def test_no_rows_give_no_rows(name: str) -> None:
    op, _, args = EVERY[name]
    empty = tuple(one[:0] if has_rows(one) else one for one in copies(args))
    assert len(flat(op(*empty))[0]) == 0


@pytest.mark.parametrize("name", EVERY)
def test_a_last_dim_that_is_not_dense_is_no_obstacle(name: str) -> None:
    op, _, args = EVERY[name]
    turned = tuple(
        one.mT.contiguous().mT if isinstance(one, Tensor) and one.dim() > 1 else one for one in args
    )
    assert_same(list(flat(op(*turned))), list(flat(op(*args))))


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_a_compiled_function_is_one_graph_for_any_number_of_rows(name: str) -> None:
    op, plain, args = DIFFERENTIABLE[name]
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda *own: tuple(one * 1 for one in differentiable(op(*own))),
        backend="aot_eager",
        fullgraph=True,
        dynamic=True,
    )
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rows in (M, M - 2):
            own = tuple(
                one[:rows].detach().requires_grad_(one.requires_grad) if has_rows(one) else one
                for one in args
            )
            assert_same(gradients(compiled, own), gradients(plain, own))


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_recomputing_and_parking_what_is_kept_changes_no_gradient(name: str) -> None:
    op, plain, args = DIFFERENTIABLE[name]
    expected = gradients(plain, args)
    assert_same(gradients(lambda *own: checkpoint(op, *own, use_reentrant=False), args), expected)
    parked: list[Tensor] = []

    def park(tensor: Tensor) -> int:
        parked.append(tensor.detach().clone())
        return len(parked) - 1

    with torch.autograd.graph.saved_tensors_hooks(park, parked.__getitem__):
        assert_same(gradients(op, args), expected)
    assert parked


def test_gradients_of_half_precision_come_in_the_dtype_of_each_tensor() -> None:
    x, weight, a, b = (drawn(*shape, grad=False) for shape in ((M, N), (5, N), (R, N), (5, R)))
    tensors = [x.bfloat16(), weight.bfloat16(), a.float(), b.float()]
    for one in tensors:
        one.requires_grad_()
    torch_ops.lora_linear(tensors[0], tensors[1], None, *tensors[2:], 0.5).sum().backward()
    assert [one.grad.dtype for one in tensors if one.grad is not None] == [
        torch.bfloat16,
        torch.bfloat16,
        torch.float32,
        torch.float32,
    ]


@pytest.mark.parametrize("compiled", [False, True])
def test_under_autocast_a_tuned_linear_computes_in_its_dtype_and_factors_keep_theirs(compiled: bool) -> None:
    torch._dynamo.reset()
    args = [
        drawn(*shape, grad=False).float().requires_grad_() for shape in ((M, N), (5, N), (5,), (R, N), (5, R))
    ]
    function = (
        torch.compile(torch_ops.lora_linear, backend="aot_eager", fullgraph=True)
        if compiled
        else torch_ops.lora_linear
    )
    with torch.autocast("cpu", torch.bfloat16):
        y = function(*args, 0.7)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    expected = [one.detach().clone().requires_grad_() for one in args]
    lora(*expected, 0.7).sum().backward()
    for one, other in zip(args, expected, strict=True):
        assert one.grad is not None and one.grad.dtype == torch.float32
        torch.testing.assert_close(one.grad, other.grad, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("name", [name for name in DIFFERENTIABLE if "lora" not in name])
def test_autocast_leaves_every_other_op_in_the_dtype_of_its_input(name: str) -> None:
    op, _, args = DIFFERENTIABLE[name]
    single = tuple(
        one.detach().float().requires_grad_(one.requires_grad)
        if torch.is_tensor(one) and one.dtype.is_floating_point
        else one
        for one in args
    )
    outside = [*flat(op(*single)), *gradients(op, single)]
    with torch.autocast("cpu", torch.bfloat16):
        assert_same([*flat(op(*single)), *gradients(op, single)], outside, tolerance=0)
    assert all(one is None or one.dtype == torch.float32 for one in outside)


def test_statistics_of_norms_have_no_gradient() -> None:
    x, weight = drawn(M, N), drawn(N)
    y, rstd = torch_ops.rms_norm(x, weight, 1e-6)
    assert y.requires_grad and not rstd.requires_grad


def test_a_gradient_cannot_be_differentiated_again() -> None:
    x, weight = drawn(M, N), drawn(N)
    (dx,) = torch.autograd.grad(torch_ops.rms_norm(x, weight, 1e-6)[0].sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        dx.sum().backward()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", EVERY)
def test_on_a_device_the_ops_are_the_kernels_and_compute_the_same(name: str) -> None:
    op, _, args = EVERY[name]

    def there(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return (
            value.detach()
            .to("cuda", torch.float32 if value.is_floating_point() else None)
            .requires_grad_(value.requires_grad)
        )

    moved = tuple(there(one) for one in args)
    found, expected = flat(op(*moved)), flat(op(*args))
    if name in DIFFERENTIABLE:
        found, expected = [*found, *gradients(op, moved)], [*expected, *gradients(op, args)]
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one.cpu().double(), other.double(), rtol=1e-4, atol=1e-4)
    torch.library.opcheck(op, moved)
