"""Full fine-tuning of a Llama-3.1-8B shape on one GPU, weights and optimizer states streamed from the host:
time and peak of steps.

    PYTHONPATH=. python3 benchmarks/streamed.py --tokens 131072 --steps 2 --keep auto --offload auto --host
    100 --budget 30
    PYTHONPATH=. python3 benchmarks/streamed.py --layers 4 --tokens 16384        a rehearsal

Random weights and tokens, bf16 weights and states with stochastic rounding, AdamW at 1e-5; unless told
otherwise blocks keep their input alone, in pinned host memory. A step is forward, backward with the update of
every block inside it, and `step()`; it ends when the device is idle.
"""

from __future__ import annotations

import argparse
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import petune
from benchmarks.peers import SHAPES
from petune.kernels.fuse import fused_blocks
from petune.kernels.memory.offloaded_adamw import StreamedAdamW

GIB = 2**30


def main() -> None:
    """Run the steps and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--keep", default="input")
    parser.add_argument("--offload", default="input")
    parser.add_argument("--budget", type=float, default=None, help="GiB of device memory to stay within")
    parser.add_argument(
        "--host",
        type=float,
        default=None,
        help="GiB of host memory for activations; default: what the system calls free",
    )
    given = parser.parse_args()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = LlamaForCausalLM(
            LlamaConfig(**SHAPES["8b"] | {"num_hidden_layers": given.layers}, tie_word_embeddings=False)
        )
    torch.set_default_dtype(torch.float32)
    memory = {name: getattr(given, name) for name in ("keep", "offload", "host", "budget")}
    petune.wrap(model, method="full", kernels="triton", memory=memory)
    model.train()
    began = time.perf_counter()
    optimizer = StreamedAdamW(model, fused_blocks(model), lr=1e-5)
    left = torch.cuda.memory_allocated() / GIB
    print(
        f"moved to the host in {time.perf_counter() - began:.1f} s, {left:.2f} GiB left on the device",
        flush=True,
    )
    ids = torch.randint(
        4, 2000, (1, given.tokens), device="cuda", generator=torch.Generator("cuda").manual_seed(1)
    )
    torch.cuda.reset_peak_memory_stats()
    for number in range(given.steps):
        torch.cuda.synchronize()
        began = time.perf_counter()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        torch.cuda.synchronize()
        seconds, peak = time.perf_counter() - began, torch.cuda.max_memory_allocated() / GIB
        shown = (
            f"step {number + 1}: {seconds:.1f} s, {given.tokens / seconds:,.0f} tokens/s, peak {peak:.2f} GiB"
        )
        print(
            f"{shown}, reserved {torch.cuda.max_memory_reserved() / GIB:.2f} GiB, loss {float(loss):.4f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
