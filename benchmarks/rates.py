"""What a GPU sustains at its power limit: the figures of a preset of petune/kernels/memory/block_cost.py.

    PYTHONPATH=. python benchmarks/rates.py

Products are those of an 8B block on 8,192 tokens in bf16, and in fp8 by rows; attention is causal, by cuDNN,
of 32 query and 8 key heads of 128, on 16,384 tokens or one longer row; memory is an operation that reads as
much as it writes; the link is a copy to and from pinned host memory, each way alone. Every figure is the mean
over about a second after half a second that does not count.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

TOKENS, WIDTH, COLUMNS = 8192, 4096, 14336
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128


def seconds(work: Callable[[], object]) -> float:
    """Of one call among many, each launched behind the one before."""
    done, spent = 0, 0.0
    for counts, limit in ((False, 0.5), (True, 1.0)):
        torch.cuda.synchronize()
        began = time.perf_counter()
        while (spent := time.perf_counter() - began) < limit:
            for _ in range(10):
                work()
            torch.cuda.synchronize()
            done += 10 * counts
    return spent / done


def products() -> dict[str, float]:
    """TFLOP/s."""
    x, w = (torch.randn(rows, WIDTH, device="cuda", dtype=torch.bfloat16) for rows in (TOKENS, COLUMNS))
    flop = 2 * TOKENS * WIDTH * COLUMNS / 1e12
    found = {"matmul": flop / seconds(lambda: x @ w.T)}
    eight = [value.to(torch.float8_e4m3fn) for value in (x, w)]
    rows, columns = torch.ones(TOKENS, 1, device="cuda"), torch.ones(1, COLUMNS, device="cuda")
    found["matmul_fp8"] = flop / seconds(
        lambda: torch._scaled_mm(
            eight[0], eight[1].T, scale_a=rows, scale_b=columns, out_dtype=torch.bfloat16
        )
    )
    return found


def attention(length: int) -> dict[str, float]:
    """TFLOP/s of both passes."""
    batch = max(1, 16384 // length)
    q, k, v = (
        torch.randn(batch, heads, length, HEAD_DIM, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    flop = 2 * batch * HEADS * length**2 * HEAD_DIM / 1e12

    def forward() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
        with torch.no_grad():
            ahead = flop / seconds(forward)
        out = forward()
        grad = torch.randn_like(out)
        back = 2.5 * flop / seconds(lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True))
    return {f"attention of {length}": ahead, f"attention_backward of {length}": back}


def traffic() -> dict[str, float]:
    """GB/s."""
    x, y = (torch.empty(2**30, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    host, there = torch.empty(2**29, dtype=torch.uint8).pin_memory(), x.view(torch.uint8)[: 2**29]
    return {
        "memory": 2 * x.nbytes / seconds(lambda: torch.mul(x, 2, out=y)) / 1e9,
        "link to the device": host.nbytes / seconds(lambda: there.copy_(host, non_blocking=True)) / 1e9,
        "link to the host": host.nbytes / seconds(lambda: host.copy_(there, non_blocking=True)) / 1e9,
    }


def main() -> None:
    """Print all of them."""
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for length in (0, 2048, 8192, 32768):
        for name, rate in (attention(length) if length else products()).items():
            print(f"{name:32} {rate:8,.0f} TFLOP/s")
    for name, rate in traffic().items():
        print(f"{name:32} {rate:8,.1f} GB/s")


if __name__ == "__main__":
    main()
