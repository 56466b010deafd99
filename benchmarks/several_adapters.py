"""Jobs on one base together, each row its own adapter, beside one after the other: `python
benchmarks/several_adapters.py`.

A Llama of random weights and four LoRAs of rank 8 on all linears. A job is a step of AdamW on 1 x TOKENS, and
then an answer of 16 tokens to 16. Both ways take turns on the same model; what is shown is the median of the
pairs' ratios, from which the machine's own speed cancels out.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.models.llama import LlamaConfig, LlamaForCausalLM

import petune
from petune.methods import tuned_parameters

NAMES = ("a", "b", "c", "d")


def model_of(width: int, blocks: int, device: str, dtype: torch.dtype) -> Any:
    """The base with its four adapters."""
    torch.manual_seed(0)
    sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": blocks}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=1024, num_attention_heads=width // 64, **sizes))
    model = model.to(device, dtype)
    for name in NAMES:
        petune.add(model, name, r=8)
    return model


def trained(model: Any, ids: Tensor) -> tuple[Callable[[], None], Callable[[], None]]:
    """A step of every job, together and one after the other."""

    def step(optimizer: torch.optim.Optimizer, rows: Tensor) -> None:
        optimizer.zero_grad()
        logits = model(input_ids=rows).logits[:, :-1].transpose(1, 2).float()
        losses = torch.nn.functional.cross_entropy(logits, rows[:, 1:], reduction="none").mean(1)
        losses.sum().backward()
        optimizer.step()

    def own(name: str) -> torch.optim.Optimizer:
        with petune.alone(model, name):
            return torch.optim.AdamW(tuned_parameters(model).values(), lr=1e-4)

    all_of_them = torch.optim.AdamW(tuned_parameters(model).values(), lr=1e-4)
    each = {name: own(name) for name in NAMES}

    def together() -> None:
        with petune.per_row(model, NAMES):
            step(all_of_them, ids)

    def one_by_one() -> None:
        for at, name in enumerate(NAMES):
            with petune.active(model, name):
                step(each[name], ids[at : at + 1])

    return together, one_by_one


def answered(model: Any, ids: Tensor) -> tuple[Callable[[], None], Callable[[], None]]:
    """An answer of every adapter, together and one after the other."""
    asked = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}

    def together() -> None:
        with petune.per_row(model, NAMES):
            model.generate(ids, **asked)

    def one_by_one() -> None:
        for at, name in enumerate(NAMES):
            with petune.active(model, name):
                model.generate(ids[at : at + 1], **asked)

    return together, one_by_one


def timed(call: Callable[[], None]) -> float:
    """Seconds of one call, of the processor on a CPU, where other programs do not count then."""
    now = time.perf_counter if torch.cuda.is_available() else time.process_time
    began = now()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return now() - began


def main() -> None:
    """Print a line for each kind of job."""
    known = argparse.ArgumentParser(description=__doc__)
    known.add_argument("--width", type=int, default=512)
    known.add_argument("--blocks", type=int, default=4)
    known.add_argument("--tokens", type=int, default=256)
    known.add_argument("--pairs", type=int, default=7)
    known.add_argument("--device", default="cpu")
    known.add_argument("--dtype", default="float32")
    given = known.parse_args()
    torch.set_num_threads(1)
    model = model_of(given.width, given.blocks, given.device, getattr(torch, given.dtype))
    ids = torch.randint(0, 1024, (len(NAMES), given.tokens), device=given.device)
    for what, (together, one_by_one) in {
        f"train 1 x {given.tokens}": trained(model, ids),
        "answer": answered(model.eval(), ids[:, :16]),
    }.items():
        together(), one_by_one()
        pairs = [(timed(one_by_one), timed(together)) for _ in range(given.pairs)]
        ratios = sorted(one / other for one, other in pairs)
        ms = [1000 * statistics.median(side) for side in zip(*pairs, strict=True)]
        print(
            f"width {given.width}, {what}: {ms[0]:.0f} ms one after the other, {ms[1]:.0f} together: "
            f"x {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        )


if __name__ == "__main__":
    main()
