"""One linear layer with LoRA, beside the plain layer and peft's, on a CPU: 1,024 x 1,024, 512 tokens, r = 8.

    OMP_NUM_THREADS=1 PYTHONPATH=. python benchmarks/layer.py [--turns 60] [--repeats 4]

Measured in one run, in turn, each turn in another order: forward + backward of 512 tokens in float32 and
bfloat16, and the forward of one token. Printed are medians of the ratios to the plain layer of the same turn,
so that what slows the machine down for a while slows all of them. With one thread the seconds are of the
processor, so that other programs count less. The wrapping of 32 layers with DoRA and
PiSSA is measured in the same way, against peft. Exits 1 where a limit is not held.
"""

from __future__ import annotations

import argparse
import copy
import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import peft
import torch
from torch import Tensor, nn

from petune.methods import lora
from petune.methods.configs import DoraConfig, LoraConfig
from petune.methods.dora import LAYERS as DORA

WIDTH, TOKENS, RANK, LAYERS = 1024, 512, 8, 32
# largest ratio: of forward + backward and one token to the plain layer, of wrapping to peft
LIMITS = {"fp32": 1.08, "bf16": 1.12, "one token": 1.2, "wrap dora": 0.5, "wrap pissa": 0.5}


def layers(dtype: torch.dtype) -> dict[str, nn.Module]:
    """The plain layer, ours and peft's, with equal factors that are not zero."""
    torch.manual_seed(0)
    plain = nn.Linear(WIDTH, WIDTH).to(dtype).requires_grad_(False)
    ours = lora.tune(copy.deepcopy(plain), LoraConfig(r=RANK))
    nn.init.normal_(ours.lora_B, std=0.02)
    held = nn.Sequential(copy.deepcopy(plain))
    theirs = peft.get_peft_model(
        held,
        peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=["0"]),  # type: ignore[arg-type]
    ).base_model.model[0]
    with torch.no_grad():
        theirs.lora_A["default"].weight.copy_(ours.lora_A)
        theirs.lora_B["default"].weight.copy_(ours.lora_B)
    return {"plain": plain, "petune": ours, "peft": theirs}


def passes(layer: nn.Module, x: Tensor, upstream: Tensor) -> Callable[[], Any]:
    """Forward and backward as in a block: the input wants its gradient, factors theirs."""
    wanted = [x, *(value for value in layer.parameters() if value.requires_grad)]

    def run() -> Any:
        return torch.autograd.grad(layer(x), wanted, upstream)

    return run


def turns(calls: dict[str, Callable[[], Any]], count: int, repeats: int) -> dict[str, list[float]]:
    """Seconds of a call, turn by turn, each turn in an order of its own."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    draw = random.Random(0)
    warm = min(2, count - 1)
    for turn in range(count + warm):
        for name in draw.sample(list(calls), len(calls)):
            began = clock()
            for _ in range(repeats):
                calls[name]()
            if turn >= warm:
                seconds[name].append((clock() - began) / repeats)
    return seconds


def wrapped(method: str, count: int) -> dict[str, Callable[[], Any]]:
    """How each wraps so many layers. peft changes what it is given, so its time holds that of copies."""
    plain = [nn.Linear(WIDTH, WIDTH).requires_grad_(False) for _ in range(count)]
    settings = {"use_dora": True} if method == "dora" else {"init_lora_weights": "pissa"}

    def ours() -> None:
        for layer in plain:
            if method == "dora":
                DORA[nn.Linear].around(copy.copy(layer), DoraConfig(r=RANK))  # type: ignore[attr-defined]
            else:
                lora.tune(layer, LoraConfig(r=RANK, init="pissa"))

    def theirs() -> None:
        held = nn.Sequential(*map(copy.deepcopy, plain))
        names = [str(at) for at in range(count)]
        peft.get_peft_model(held, peft.LoraConfig(r=RANK, target_modules=names, **settings))  # type: ignore[arg-type]

    return {"petune": ours, "peft": theirs}


def main() -> int:
    """The table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--wraps", type=int, default=3, help="turns of wrapping")
    parser.add_argument("--layers", type=int, default=LAYERS, help="that are wrapped")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    threads = torch.get_num_threads()
    print(f"peft {peft.__version__}, torch {torch.__version__}, {threads} threads, {options.turns} turns\n")
    print("| | plain ms | petune | peft | limit | |\n|---|---|---|---|---|---|")
    held = [step(name, options) for name in ("fp32", "bf16", "one token")]
    held += [wrapping(method, options) for method in ("dora", "pissa") if options.wraps]
    return int(not all(held))


def step(name: str, options: argparse.Namespace) -> bool:
    """A line of the table: a pass of the layers."""
    dtype = torch.bfloat16 if name == "bf16" else torch.float32
    single = name == "one token"
    x = torch.randn(1 if single else TOKENS, WIDTH).to(dtype).requires_grad_(not single)
    upstream, calls = torch.randn_like(x), {}
    for which, layer in layers(dtype).items():
        calls[which] = forward(layer, x) if single else passes(layer, x, upstream)
    repeats = 25 * options.repeats if single else options.repeats
    found = turns(calls, options.turns, repeats)
    ratios = {
        who: statistics.median(a / b for a, b in zip(found[who], found["plain"], strict=True))
        for who in ("petune", "peft")
    }
    return line(name, statistics.median(found["plain"]), ratios["petune"], f"{ratios['peft']:.3f}")


def forward(layer: nn.Module, x: Tensor) -> Callable[[], Any]:
    """The forward alone, as in generation."""

    def run() -> Any:
        with torch.no_grad():
            return layer(x)

    return run


def wrapping(method: str, options: argparse.Namespace) -> bool:
    """A line of the table: layers wrapped, over peft's time."""
    found = turns(wrapped(method, options.layers), options.wraps, 1)
    ratio = statistics.median(a / b for a, b in zip(found["petune"], found["peft"], strict=True))
    theirs = statistics.median(found["peft"])
    return line(f"wrap {method}", theirs, ratio, "1")


def line(name: str, seconds: float, ratio: float, theirs: str) -> bool:
    """Print one, and whether its limit is held."""
    good = ratio <= LIMITS[name]
    word = "holds" if good else "MISSED"
    print(f"| {name} | {1e3 * seconds:.3f} | {ratio:.3f} | {theirs} | {LIMITS[name]} | {word} |", flush=True)
    return good


if __name__ == "__main__":
    sys.exit(main())
