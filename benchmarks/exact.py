"""How exact fused training is: losses over steps and the first step's gradients, beside the unfused model in bf16 and in float32.

    PYTHONPATH=. python3 benchmarks/exact.py                  50 steps of four blocks of the 8B shape
    PYTHONPATH=. python3 benchmarks/exact.py --steps 200 --fp8

The same weights, tokens (a small set of sequences, so that there is something to learn) and factors in every variant; LoRA r=16 on all
projections, AdamW at 2e-4.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import petune
from benchmarks.peers import SHAPES

ROWS, TOKENS, BATCHES = 2, 1024, 8


def build(dtype: torch.dtype, layers: int, **settings: Any) -> nn.Module:
    """The model of a variant on the device; the same numbers for all."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPES["8b"] | {"num_hidden_layers": layers, "vocab_size": 32000}, tie_word_embeddings=False))
    model = model.to("cuda", torch.bfloat16).to(dtype)  # float32 weights are the bf16 ones
    torch.manual_seed(1)
    petune.wrap(model, r=16, **settings)
    return model.train()


def train(model: nn.Module, dtype: torch.dtype, steps: int) -> tuple[list[float], Tensor]:
    """Losses of every step, and the gradients of a second pass at the start, when B is no longer zero, as one vector."""
    parameters = [value for value in model.parameters() if value.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=2e-4, fused=True)
    generator = torch.Generator("cuda").manual_seed(2)
    data = torch.randint(4, 2000, (BATCHES, ROWS, TOKENS), device="cuda", generator=generator)
    losses, gradient = [], torch.empty(0)
    for step in range(steps):
        ids = data[step % BATCHES]
        with torch.autocast("cuda", torch.bfloat16, enabled=dtype is torch.bfloat16):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        if step == 1:
            gradient = torch.cat([value.grad.float().flatten() for value in parameters if value.grad is not None])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(loss))
    return losses, gradient


def main() -> None:
    """Train every variant and print how far each is from the unfused float32 model."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--fp8", action="store_true")
    given = parser.parse_args()
    variants: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
        "unfused float32": (torch.float32, {"kernels": "off"}),
        "unfused bf16": (torch.bfloat16, {"kernels": "off"}),
        "fused bf16": (torch.bfloat16, {"kernels": "triton"}),
        "fused bf16, keep input": (torch.bfloat16, {"kernels": "triton", "memory": {"keep": "input", "offload": "input"}}),
    }
    if given.fp8:
        variants["fused fp8 base"] = (torch.bfloat16, {"kernels": "triton", "base_dtype": "fp8"})
    wanted: tuple[list[float], Tensor] | None = None
    for name, (dtype, settings) in variants.items():
        model = build(dtype, given.layers, **settings)
        losses, gradient = train(model, dtype, given.steps)
        wanted = wanted or (losses, gradient)
        worst = max(abs(a - b) / abs(b) for a, b in zip(losses, wanted[0], strict=True))
        cosine = float(nn.functional.cosine_similarity(gradient, wanted[1], dim=0))
        shown = f"{name:24} first {losses[0]:.5f} last {losses[-1]:.5f}"
        print(f"{shown}, worst relative difference {worst:.2e}, gradient cosine {cosine:.6f}", flush=True)
        del model
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
