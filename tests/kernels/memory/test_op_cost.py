"""The cost of an operation is what a hand computes, and every operation has one."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from petune.kernels import reference
from petune.kernels.memory import op_cost
from petune.kernels.memory.op_cost import Cost
from tests.kernels.shapes import DEPTH


def test_costs_add_and_scale() -> None:
    assert Cost(1, 2) + 3 * Cost(10, 20) * 2 == Cost(61, 122)


# what is priced as something else: as its product and `add_low`, as `dropped_low`; a ladder's gates by nobody
UNPRICED = {"linear_low", "dropped_low_backward", "mix", "mix_backward"}


def test_every_operation_of_a_step_has_a_cost() -> None:
    functions = [
        value
        for value in vars(reference).values()
        if inspect.isfunction(value) and value.__module__ == reference.__name__
    ]
    names = {value.__name__ for value in functions if not value.__name__.startswith("_")} - {
        "wide",
        "written",
        *UNPRICED,
    }
    assert "cross_entropy_" in names
    assert [name for name in names if not hasattr(op_cost, name)] == []
    assert not any(hasattr(op_cost, name) for name in UNPRICED)


@pytest.mark.parametrize(
    ("found", "flop", "moved"),
    [
        (op_cost.matmul(2, 3, 5), 60, 2 * (6 + 15 + 10)),
        (op_cost.low_rank(100, 10, 4), 8000, 2 * (1000 + 440)),
        (op_cost.low_rank(100, 10, 0), 0, 0),
        (op_cost.dropped_low(100, 10, 4, 2), 8000, 2 * (1000 + 440)),
        (op_cost.add_dropped_low_(100, 10, 4, 2), 8000, 2 * (2000 + 440)),
        (op_cost.dropped_low(100, 10, 0, 2), 0, 0),
        (op_cost.rms_norm(10, 8), 320, 2 * 2 * 80 + 40),
        (op_cost.rms_norm(10, 8, residual=True), 400, 4 * 2 * 80 + 40),
        (op_cost.rms_norm_backward(10, 8, dresidual=True), 720, 4 * 2 * 80 + 40),
        (op_cost.layer_norm(10, 8), 560, 2 * 2 * 80 + 80),
        (op_cost.rope_(10, 8), 240, 2 * 2 * 80),
        (op_cost.rope_unscale(10, 8), 800, 3 * 2 * 80),
        (op_cost.norm_rope(10, 8), 560, 2 * 2 * 80),
        (op_cost.norm_rope_backward(10, 8), 1200, 3 * 2 * 80),
        (op_cost.activate(10, 8, gated=True), 400, 3 * 2 * 80),
        (op_cost.activate(10, 8, gated=False), 400, 2 * 2 * 80),
        (op_cost.activate_backward(10, 8, gated=True), 960, 5 * 2 * 80),
        (op_cost.add(10, 8), 80, 3 * 2 * 80),
        (op_cost.add_low(10, 8, rank=4), 9 * 80, 6 * 80 + 2 * 4 * 18),
        (op_cost.unscale(10, 8), 4 * 80, 6 * 80),
        (op_cost.over_lengths(10, 8, 4), 10 * 80, 2 * (80 + 4 * 18)),
        (op_cost.dense_into(10, 8, 0.5), 0, 2.5 * 80),
        (op_cost.cross_entropy_(10, 100), 6000, 3 * 2 * 1000),
        (op_cost.drop(10, 8), 1600, 2 * 2 * 80),
        (op_cost.quantise(10, 8), 240, 3 * 80 + 40),
        (op_cost.attention(10, 10, 2, 1, 4), 4 * 2 * 4 * 100 / 2, 10 * (2 * 3 * 4 * 2 + 8)),
        (op_cost.attention(10, 10, 2, 1, 4, causal=False), 4 * 2 * 4 * 100, 10 * (2 * 3 * 4 * 2 + 8)),
        (op_cost.attention(10, 5, 2, 1, 4, False, keys=20), 4 * 2 * 4 * 10 * 20, 10 * (2 * 6 * 4 * 2 + 8)),
        (op_cost.attention(100, 100, 2, 1, 4, window=100), 4 * 2 * 4 * 100 * 50, 100 * (2 * 3 * 4 * 2 + 8)),
        (op_cost.attention(100, 100, 2, 1, 4, window=20), 4 * 2 * 4 * 100 * 18, 100 * (2 * 3 * 4 * 2 + 8)),
        (
            op_cost.attention_backward(10, 5, 2, 1, 4, False, keys=20),
            2.5 * 6400,
            10 * (4 * 6 * 4 * 2 + 8 * 8 + 16),
        ),
        (op_cost.adamw(10), 140, 280),
    ],
)
def test_an_operation_costs_what_a_hand_computes(found: Cost, flop: float, moved: float) -> None:
    assert (found.flop, found.bytes) == (flop, moved)


def test_what_drops_out_is_hashed_element_by_element() -> None:
    assert op_cost.drop(10, 8).hashes == 80
    assert [cost(100, 10, 4, 3).hashes for cost in (op_cost.dropped_low, op_cost.add_dropped_low_)] == [
        3000
    ] * 2
    assert op_cost.dropped_low(100, 10, 0, 0).hashes == 0


def test_attention_backward_makes_five_products_to_forwards_two() -> None:
    sizes = (8192, 8192, 32, 8, 128)
    assert op_cost.attention_backward(*sizes).flop == 2.5 * op_cost.attention(*sizes).flop
    assert op_cost.attention(*sizes).flop * DEPTH / 8192 == pytest.approx(2.15e9, rel=2e-3)


@pytest.mark.parametrize(
    ("heads", "window", "own", "rate"),
    [
        ((32, 8, 128), None, False, (487, 374)),  # cuDNN's, of which the others are shares
        ((4, 1, 256), 512, False, (209, 171)),  # Gemma 3 by flash attention
        ((8, 4, 256), 4096, True, (137, 89)),  # Gemma 2 by our own kernels, its scores capped
        ((32, 8, 128), None, True, (268, 253)),
    ],
)
def test_attention_of_other_heads_and_kernels_is_priced_as_measured(
    heads: tuple[int, int, int], window: float | None, own: bool, rate: tuple[float, float]
) -> None:
    """TFLOP/s on an H200, 4 x 2,048 tokens (benchmarks/RESULTS.md), to a fifth."""
    priced = (
        op_cost.attention(8192, 2048, *heads, window=window, own=own),
        op_cost.attention_backward(8192, 2048, *heads, window=window, own=own),
    )
    for cost, base, found in zip(priced, (487, 374), rate, strict=True):
        assert base * cost.flop / (cost.flop + cost.beside) == pytest.approx(found, rel=0.2)


class _Moved(TorchDispatchMode):
    """Counts bytes that operations read and write; views move none, and what is broadcast is read once."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        read = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        places = {one.untyped_storage().data_ptr() for one in read}
        own = [one for one in tree_leaves(made) if isinstance(one, torch.Tensor)]
        if not all(one.untyped_storage().data_ptr() in places for one in own):
            self.bytes += sum(min(one.nbytes, one.untyped_storage().nbytes()) for one in (*read, *own))
        return made


@pytest.mark.parametrize(("dtype", "itemsize"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_a_norm_by_torch_moves_what_its_operations_read_and_write(dtype: torch.dtype, itemsize: int) -> None:
    norm = LlamaRMSNorm(256).to(dtype).requires_grad_(False)
    before, after = (torch.randn(64, 256, dtype=dtype, requires_grad=True) for _ in range(2))
    costs = [sum(one.bytes for one in way) for way in op_cost.stepwise_rms_norm(64, 256, itemsize)]
    with _Moved() as ahead:
        total = before + after
        found = norm(total)
    ones = torch.ones_like(found), torch.ones_like(total)
    with _Moved() as back:
        torch.autograd.grad((found, total), (before, after), ones)
    assert costs == pytest.approx([ahead.bytes, back.bytes], rel=0.06)
    assert costs[0] > 2 * op_cost.rms_norm(64, 256, itemsize, residual=True).bytes
