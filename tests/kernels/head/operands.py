"""What tests of the head share: its operands, what watches what is made, and how gradients are compared."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

SETTINGS = {
    "plain": {},
    "softcap": {"softcap": 3.0},
    "smoothing": {"smoothing": 0.1},
    "both": {"softcap": 3.0, "smoothing": 0.1},
}
N, K, V, R = 23, 12, 40, 3


class Made(TorchDispatchMode):
    """Watches what is made: the most elements of a result, and the rows that matmuls with `width` results
    have."""

    def __init__(self, width: int = V) -> None:
        super().__init__()
        self.width, self.largest, self.rows = width, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor) and value.device.type != "meta":
                self.largest = max(self.largest, value.numel())
                if func._opname in ("mm", "addmm", "addmm_") and value.shape[-1] == self.width:
                    self.rows += len(value)
        return result


def operands(dtype: torch.dtype = torch.float64, n: int = N) -> tuple[dict[str, Tensor], Tensor]:
    """hidden, weight, bias, a, b that want gradients, and labels of which every fourth but the first is
    ignored."""
    generator = torch.Generator().manual_seed(n)
    shapes = {"hidden": (n, K), "weight": (V, K), "bias": (V,), "a": (R, K), "b": (V, R)}
    drawn = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for name, shape in shapes.items()
    }
    labels = torch.randint(0, V, (n,), generator=generator)
    labels[4::4] = -100
    return drawn, labels


def grads(loss: Tensor, parts: dict[str, Tensor]) -> dict[str, Tensor]:
    return dict(zip(parts, torch.autograd.grad(loss, list(parts.values())), strict=True))


def assert_alike(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-9) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name].to(value.dtype),
            value,
            rtol=tolerance,
            atol=tolerance * float(value.abs().max()),
            msg=name,
        )
