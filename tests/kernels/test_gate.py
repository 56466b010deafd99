"""What runs without a device: kernels compile for the devices they are meant for, and the interpreter
computes bfloat16 as those would."""

from __future__ import annotations

import re
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.errors import InterpreterError

from tests.kernels import interpreter
from tests.kernels.gate import HOPPER, SHARED, Compiled, Part, gate, modules

# ------------------------------------------------------------------ compiling


PARTS = pytest.mark.parametrize("part", ["crossed", pytest.param("all", marks=pytest.mark.long)])


@cache
def built(part: Part) -> list[Compiled]:
    """Compiled once: a process of its own takes as long to begin as to compile."""
    return gate(part=part)


@pytest.mark.slow
@pytest.mark.forks
@pytest.mark.timeout(900)
@PARTS
def test_every_kernel_compiles_and_fits_and_attention_of_narrow_heads_spills_nothing(part: Part) -> None:
    found = built(part)
    assert {row.kernel.partition(".")[0] for row in found} <= {name.rpartition(".")[2] for name in modules()}
    assert [f"{row.kernel} sm_{row.arch} {row.constexprs}: {row.error}" for row in found if row.error] == []
    assert [row for row in found if row.shared > SHARED[row.arch]] == []
    attention = [row for row in found if row.kernel.startswith("attention.")]
    assert len({row.kernel for row in attention}) == 4
    # before it, forms of 64 columns spill up to 32 bytes
    if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 7):
        # what it keeps in registers stays there, on Hopper; of wider heads the two sums of a backward pass do
        # not, and are twice as fast all the same with half the warps (benchmarks/RESULTS.md)
        narrow = [row for row in attention if row.arch == 90 and "D=64 " in row.constexprs]
        assert narrow and [row for row in narrow if row.spilled] == []


@pytest.mark.slow
@pytest.mark.forks
@pytest.mark.timeout(900)
@PARTS
def test_hopper_rounds_to_eight_bits_by_its_own_instruction(part: Part) -> None:
    (native,) = [row for row in built(part) if "NATIVE=True" in row.constexprs]
    (columns,) = re.findall(r"BLOCK=(\d+)", native.constexprs)
    assert native.arch == HOPPER and native.rounded == int(columns) // 32 // native.warps // 2 > 0
    assert not any(row.rounded for row in built(part) if row != native)


FAULTY = """
import triton
import triton.language as tl

@triton.jit
def mistyped(x, N: tl.constexpr):
    tl.store(x + tl.arange(0, N), tl.load(x))

@triton.jit
def greedy(x, y, out, N: tl.constexpr):
    row, column = tl.arange(0, 64)[:, None], tl.arange(0, 64)[None]
    inner, across = tl.arange(0, N)[:, None], tl.arange(0, N)[None]
    tl.store(out + row * 64 + column, tl.dot(tl.load(x + row * N + across), tl.load(y + inner * 64 + column)))

def variants():
    yield mistyped, {"x": "*fp32"}, {"N": 33}, 4, 2
    yield greedy, {"x": "*bf16", "y": "*bf16", "out": "*fp32"}, {"N": 64}, 4, 2
    yield greedy, {"x": "*bf16", "y": "*bf16", "out": "*fp32"}, {"N": 1024}, 4, 2
"""


@pytest.mark.slow
def test_the_gate_sees_what_does_not_compile_and_what_does_not_fit(tmp_path: Path) -> None:
    (tmp_path / "faulty.py").write_text(FAULTY)
    found: dict[tuple[str, str, int], Compiled] = {
        (row.kernel, row.constexprs, row.arch): row for row in gate(["faulty"], tmp_path)
    }
    for arch, limit in SHARED.items():
        assert "power of 2" in found["faulty.mistyped", "N=33", arch].error
        fine, greedy = found["faulty.greedy", "N=64", arch], found["faulty.greedy", "N=1024", arch]
        assert not fine.error
        assert 0 < fine.shared < limit
        assert greedy.error or greedy.shared > limit


# ------------------------------------------------------------------ bfloat16 in the interpreter

interpreted = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="is about the interpreter")
SIZE = 64


@triton.jit
def arithmetic(x, y, out, OP: tl.constexpr, N: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.arange(0, N)
    a, b = tl.load(x + place), tl.load(y + place)
    if OP == "add":
        result = a + b
    elif OP == "sub":
        result = a - b
    elif OP == "mul":
        result = a * b
    elif OP == "scaled":
        result = a * 3.0
    elif OP == "less":
        result = ((a < b) & (b > 0)).to(tl.bfloat16)
    else:
        result = tl.where(a > b, a, tl.full((N,), 1.5, tl.bfloat16))
    tl.store(out + place, result)


@triton.jit
def casts(x, out, N: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.arange(0, N)
    tl.store(out + place, tl.load(x + place).to(out.dtype.element_ty))


@triton.jit
def product(x, y, out, N: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None]
    tl.store(out + place, tl.dot(tl.load(x + place), tl.load(y + place)))


@triton.jit
def total(x, out, N: tl.constexpr, FAILS: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.store(out, tl.sum(tl.load(x + tl.arange(0, N)), 0))
    if FAILS:
        tl.store(out + tl.arange(0, N), tl.arange(0, 2 * N))


def every_kind() -> Tensor:
    """float32 of every magnitude and both signs: ties between two bfloat16 numbers, numbers too small to be
    normal, infinities."""
    bits = torch.randint(-(2**31), 2**31, (4096,), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    bits[1024:2048] = bits[1024:2048] & -0x10000 | 0x8000
    bits[2048:2100] &= -0x7F800001
    values = bits.view(torch.float32).nan_to_num(1.0)
    return torch.cat([values, torch.tensor([0.0, -0.0, float("inf"), -float("inf"), 3.4e38])])


@interpreted
@pytest.mark.parametrize("op", ["add", "sub", "mul", "scaled", "less", "where"])
def test_arithmetic_is_bit_for_bit_torchs(op: str) -> None:
    x, y = torch.randn(2, SIZE, generator=torch.Generator().manual_seed(1)).bfloat16()
    results: dict[str, Any] = {
        "add": x + y,
        "sub": x - y,
        "mul": x * y,
        "scaled": x * 3.0,
        "less": ((x < y) & (y > 0)).bfloat16(),
        "where": torch.where(x > y, x, torch.tensor(1.5).bfloat16()),
    }
    out = torch.empty_like(x)
    arithmetic[(1,)](x, y, out, op, SIZE)
    assert torch.equal(out.view(torch.int16), results[op].view(torch.int16))


@interpreted
@pytest.mark.parametrize("source", [torch.float32, torch.float64, torch.float16, torch.int32])
def test_casts_are_bit_for_bit_torchs(source: torch.dtype) -> None:
    values = every_kind()
    values = (values.clamp(-1e4, 1e4) if source in (torch.float16, torch.int32) else values)[:4096].to(source)
    out = torch.empty(4096, dtype=torch.bfloat16)
    casts[(1,)](values, out, 4096)
    assert torch.equal(out.view(torch.int16), values.bfloat16().view(torch.int16))
    back = torch.empty(4096)
    casts[(1,)](out, back, 4096)
    assert torch.equal(back, out.float())


@interpreted
def test_what_is_not_a_number_stays_so_and_infinities_do() -> None:
    values = torch.tensor([float("nan"), -float("nan"), float("inf"), -float("inf")] * 4)
    values.view(torch.int32)[4] = 0x7F800001  # whose payload the cast cuts off
    out = torch.empty(16, dtype=torch.bfloat16)
    casts[(1,)](values, out, 16)
    assert torch.equal(out.isnan(), values.isnan())
    assert torch.equal(out[2:4].float(), values[2:4])


@interpreted
def test_a_product_of_matrices_is_float32_of_exact_products() -> None:
    x, y = torch.randint(-8, 9, (2, 32, 32), generator=torch.Generator().manual_seed(2)).bfloat16() / 4
    out = torch.empty(32, 32)
    product[(1,)](x, y, out, 32)
    assert torch.equal(out, x.float() @ y.float())


@interpreted
@pytest.mark.parametrize("fails", [False, True])
def test_a_kernel_that_calls_a_function_leaves_the_language_as_it_was(fails: bool) -> None:
    def language() -> list[dict[str, object]]:
        return [dict(vars(owner)) for owner in (tl, tl.core, tl.math, tl.tensor, tl.dtype)]

    before, x, out = language(), torch.arange(8.0), torch.zeros(1)
    with pytest.raises(InterpreterError) if fails else nullcontext():
        total[(1,)](x, out, 8, fails)
    assert float(out) == 28
    assert language() == before


def test_mending_twice_is_mending_once() -> None:
    before = interpreter.InterpreterBuilder.binary_op
    interpreter.apply()
    interpreter.apply()
    assert (interpreter.InterpreterBuilder.binary_op is before) == bool(triton.knobs.runtime.interpret)
