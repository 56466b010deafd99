"""The fastest a LoRA step can be on this device now: sustained rates of the library calls no step can do
without, added up.

    python3 benchmarks/ceiling.py 4x2048 1x8192 1x8192:input 1x32768:attention 1x131072:attention
    4x2048:all:fp8
    python benchmarks/ceiling.py --tiny 2x32 2x32:input             every path without a GPU

A SETTING is ROWSxTOKENS, then what every block keeps for its backward pass: all (the default), projections,
attention or input; then fp8. Measured, each until the clock has settled: a block's matmuls (q, k and v as
one, gate and up as one) and the output head's, forward and input gradient, at the setting's tokens but at
most MOST rows; causal attention forward and backward at its shape, by cuDNN on a GPU; a copy on the device.
Then, per token, with N weights in the blocks, n in the adapters, V words, A = 2 heads d T FLOP of attention
forward, and widths h (hidden), f (MLP), q, k:

    matmul     2N forward, 2N backward, and what is recomputed; of fp8 at the rate of products scaled by rows
    head       4hV, and 2V numbers of logits read and written
    attention  A forward, 2.5A backward; A again where only inputs are kept
    pointwise  every number that enters or leaves a fused norm, rotation, activation or sum, once, at the rate
               of a copy: forward 8h + 2(q + k) + 3f, backward 8h + 2(q + k) + 5f, and what is recomputed; of
               fp8 also what is quantised
    adapters   6n FLOP, or reading every site's input and output once for the factors, whichever takes longer

A step that reaches 95 % of this has nothing left to gain that can be had outside the libraries. The rates are
those of this very run: a card that is limited by power does not keep those of its first second.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

MOST = 16384  # rows of a measured matmul: its rate no longer depends on them
HEAD_ROWS = 8192
BYTES = 2  # of a number in bf16


@dataclass(frozen=True)
class Shape:
    """The widths of a Llama: layers, hidden, MLP columns, heads, heads of keys, width of a head, words; rank
    of the adapters."""

    layers: int = 32
    hidden: int = 4096
    columns: int = 14336
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    words: int = 128256
    rank: int = 16

    @property
    def q(self) -> int:
        """Width of the queries."""
        return self.heads * self.head_dim

    @property
    def kv(self) -> int:
        """Width of the keys, and of the values."""
        return self.kv_heads * self.head_dim

    @property
    def matmuls(self) -> dict[str, tuple[int, int]]:
        """(inputs, outputs) of a block's matmuls, those that share an input as one."""
        h, f = self.hidden, self.columns
        return {"qkv": (h, self.q + 2 * self.kv), "o": (self.q, h), "gate_up": (h, 2 * f), "down": (f, h)}

    @property
    def sites(self) -> tuple[tuple[int, int], ...]:
        """(inputs, outputs) of the linears that have adapters."""
        h, f = self.hidden, self.columns
        return ((h, self.q), (h, self.kv), (h, self.kv), (self.q, h), (h, f), (h, f), (f, h))


SHAPES = {"8b": Shape(), "tiny": Shape(2, 64, 96, 4, 2, 16, 320, 4)}

# What a block keeps -> what runs again: matmuls, whether attention, numbers of pointwise work a token. Never
# down: nobody reads that.
KEPT: Mapping[str, tuple[tuple[str, ...], bool, Callable[[Shape], int]]] = {
    "all": ((), False, lambda s: 0),
    "projections": (("gate_up",), False, lambda s: 2 * s.hidden),
    "attention": (("qkv", "o", "gate_up"), False, lambda s: 6 * s.hidden + 2 * (s.q + s.kv)),
    "input": (("qkv", "o", "gate_up"), True, lambda s: 6 * s.hidden + 2 * (s.q + s.kv)),
}


@dataclass(frozen=True)
class Setting:
    """Rows of tokens, what each block keeps, and whether frozen matmuls are in fp8."""

    rows: int
    tokens: int
    keep: str = "all"
    fp8: bool = False

    @classmethod
    def parse(cls, text: str) -> Setting:
        """`4x2048`, `1x8192:input`, `4x2048:all:fp8`. Raises ValueError that says what is wrong with it."""
        shape, *words = text.split(":")
        rows, _, tokens = shape.partition("x")
        if not (rows.isdigit() and tokens.isdigit()):
            raise ValueError(f"{text}: expected ROWSxTOKENS, found {shape!r}")
        keeps = [word for word in words if word != "fp8"]
        if len(keeps) > 1 or (keeps and keeps[0] not in KEPT):
            raise ValueError(
                f"{text}: expected one of {', '.join(KEPT)} and fp8 after it, found {':'.join(words)}"
            )
        return cls(int(rows), int(tokens), *keeps, fp8="fp8" in words)


@dataclass(frozen=True)
class Rates:
    """Per second: FLOP of a block's matmuls forward and backward, of the head's, of attention forward and
    backward; bytes of a copy."""

    forward: float
    backward: float
    head: float
    attention_forward: float
    attention_backward: float
    copy: float


# ------------------------------------------------------------------ the arithmetic


def attention_flops(shape: Shape, tokens: int) -> int:
    """FLOP a token of causal attention forward, all layers."""
    return 2 * shape.q * tokens * shape.layers


def ideal(shape: Shape, setting: Setting, rates: Rates) -> dict[str, float]:
    """Seconds of a step by kind of work; see the head of this file."""
    again, attends_again, pointwise_again = KEPT[setting.keep]
    h, f, rotated = shape.hidden, shape.columns, 2 * (shape.q + shape.kv)
    weights = {name: 2 * inputs * outputs * shape.layers for name, (inputs, outputs) in shape.matmuls.items()}
    once = sum(weights.values())
    adapter = sum(shape.rank * (inputs + outputs) for inputs, outputs in shape.sites) * shape.layers
    entering, leaving = (sum(widths) for widths in zip(*shape.matmuls.values(), strict=True))
    numbers = (8 * h + rotated + 3 * f) + (8 * h + rotated + 5 * f) + pointwise_again(shape)
    # read in bf16 and written in one byte, forward and backward
    quantised = 1.5 * (entering + leaving) * setting.fp8
    attention = attention_flops(shape, setting.tokens)
    per_token = {
        "matmul": (once + sum(weights[name] for name in again)) / rates.forward + once / rates.backward,
        "head": 4 * h * shape.words / rates.head + 2 * shape.words * BYTES / rates.copy,
        "attention": (
            attention * (1 + attends_again) / rates.attention_forward
            + 2.5 * attention / rates.attention_backward
        ),
        "pointwise": (numbers + quantised) * shape.layers * BYTES / rates.copy,
        "adapters": max(
            6 * adapter / rates.forward, (2 * entering + leaving) * shape.layers * BYTES / rates.copy
        ),
    }
    return {name: seconds * setting.rows * setting.tokens for name, seconds in per_token.items()}


# ------------------------------------------------------------------ the measurements


@dataclass(frozen=True)
class Clock:
    """How long calls run before they count, and then how long, in seconds."""

    device: str
    settle: float
    count: float

    def seconds(self, call: Callable[[], object]) -> float:
        """The mean seconds of a call that is made over and over."""
        self._run(call, self.settle)
        return self._run(call, self.count)

    def _run(self, call: Callable[[], object], seconds: float) -> float:
        self._wait()
        calls, batch, began = 0, 1, time.perf_counter()
        while (spent := time.perf_counter() - began) < seconds or not calls:
            for _ in range(batch):
                call()
            self._wait()
            calls += batch
            batch = min(64, 2 * batch) if time.perf_counter() - began - spent < seconds / 20 else batch
        return spent / calls

    def _wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def matmul_rates(shapes: Sequence[tuple[int, int]], rows: int, clock: Clock) -> tuple[float, float]:
    """FLOP per second of x W^T and of dy W over matrices of these shapes, one after another."""
    make = partial(torch.randn, device=clock.device, dtype=torch.bfloat16)
    cases = [
        (make(rows, inputs), 0.02 * make(outputs, inputs), make(rows, outputs)) for inputs, outputs in shapes
    ]
    flops = sum(2 * rows * inputs * outputs for inputs, outputs in shapes)
    forward = clock.seconds(lambda: [x @ weight.t() for x, weight, _ in cases])
    backward = clock.seconds(lambda: [dy @ weight for _, weight, dy in cases])
    return flops / forward, flops / backward


def fp8_rate(shapes: Sequence[tuple[int, int]], rows: int, clock: Clock) -> float:
    """FLOP per second of x W^T with both quantised to e4m3 by rows, over matrices of these shapes."""

    def quantised(height: int, width: int) -> tuple[Tensor, Tensor]:
        values = torch.randn(height, width, device=clock.device)
        scale = values.abs().amax(1, keepdim=True) / 448
        return (values / scale).to(torch.float8_e4m3fn), scale

    cases = [(*quantised(rows, inputs), *quantised(outputs, inputs)) for inputs, outputs in shapes]

    def products() -> list[Tensor]:
        return [
            torch._scaled_mm(
                x, w.t(), scale_a=sx, scale_b=sw.t(), out_dtype=torch.bfloat16, use_fast_accum=True
            )
            for x, sx, w, sw in cases
        ]

    return sum(2 * rows * inputs * outputs for inputs, outputs in shapes) / clock.seconds(products)


def attention_rates(shape: Shape, setting: Setting, clock: Clock) -> tuple[float, float]:
    """FLOP per second of causal attention, forward and backward (2.5 times the FLOP), at the setting's rows
    and tokens."""

    def draw(heads: int) -> Tensor:
        size = (setting.rows, setting.tokens, heads, shape.head_dim)
        return torch.randn(size, device=clock.device, dtype=torch.bfloat16).transpose(1, 2).requires_grad_()

    q, k, v = draw(shape.heads), draw(shape.kv_heads), draw(shape.kv_heads)

    def attend() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    ways = [SDPBackend.CUDNN_ATTENTION] if clock.device == "cuda" else [SDPBackend.MATH]
    with sdpa_kernel(ways):
        out = attend()
        upstream = torch.randn_like(out)
        forward = clock.seconds(attend)
        backward = clock.seconds(lambda: torch.autograd.grad(out, (q, k, v), upstream, retain_graph=True))
    flops = attention_flops(shape, setting.tokens) / shape.layers * setting.rows * setting.tokens
    return flops / forward, 2.5 * flops / backward


def copy_rate(clock: Clock, size: int) -> float:
    """Bytes read and written per second by a copy of `size` bytes on the device."""
    source = torch.zeros(size, dtype=torch.uint8, device=clock.device)
    target = torch.empty_like(source)
    return 2 * size / clock.seconds(lambda: target.copy_(source))


class Measured:
    """Rates of this device now, each measured once."""

    def __init__(self, shape: Shape, clock: Clock) -> None:
        self.shape, self.clock = shape, clock
        self.copy = copy_rate(clock, 2**30 if clock.device == "cuda" else 2**22)
        head = matmul_rates([(shape.hidden, shape.words)], HEAD_ROWS if clock.device == "cuda" else 64, clock)
        self.head = 2 / (1 / head[0] + 1 / head[1])
        self.blocks: dict[tuple[int, bool], tuple[float, float]] = {}
        self.attention: dict[tuple[int, int], tuple[float, float]] = {}

    def rates(self, setting: Setting) -> Rates:
        """The rates at the shapes of a setting."""
        rows, shapes = min(MOST, setting.rows * setting.tokens), list(self.shape.matmuls.values())
        if (rows, setting.fp8) not in self.blocks:
            fp8 = setting.fp8 and (fp8_rate(shapes, rows, self.clock),) * 2
            self.blocks[rows, setting.fp8] = fp8 or matmul_rates(shapes, rows, self.clock)
        if (setting.rows, setting.tokens) not in self.attention:
            self.attention[setting.rows, setting.tokens] = attention_rates(self.shape, setting, self.clock)
        forward, backward = self.attention[setting.rows, setting.tokens]
        return Rates(*self.blocks[rows, setting.fp8], self.head, forward, backward, self.copy)


# ------------------------------------------------------------------ what is printed

RATES = ("forward", "backward", "head", "attention", "its backward")
PARTS = ("matmul", "head", "attention", "pointwise", "adapters")
HEADS = (
    "rows x tokens",
    "kept",
    *(f"{name}, TFLOP/s" for name in RATES),
    *(f"{name}, ms" for name in PARTS),
    "step, ms",
    "tokens/s",
)


def line(setting: Setting, rates: Rates, parts: Mapping[str, float]) -> str:
    """A setting as a row of the table."""
    total = sum(parts.values())
    found = [f"{rate / 1e12:.0f}" for rate in list(asdict(rates).values())[:-1]]
    split = [f"{1e3 * parts[name]:.1f}" for name in PARTS]
    name, keep = f"{setting.rows} x {setting.tokens}", setting.keep + (", fp8" if setting.fp8 else "")
    return (
        "| "
        + " | ".join(
            [
                name,
                keep,
                *found,
                *split,
                f"{1e3 * total:.1f}",
                f"{setting.rows * setting.tokens / total:,.0f}",
            ]
        )
        + " |"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; settings whose rates cannot be measured here are named with the reason, and make the
    exit code 1."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("settings", nargs="+", metavar="SETTING")
    parser.add_argument("--tiny", action="store_true", help="a tiny shape on the CPU")
    parser.add_argument(
        "--settle", type=float, default=2.0, help="seconds of each kind of call before those that count"
    )
    parser.add_argument("--count", type=float, default=1.5, help="seconds of each kind of call that count")
    given = parser.parse_args(arguments)
    try:
        settings = [Setting.parse(text) for text in given.settings]
    except ValueError as error:
        parser.error(str(error))
    shape = SHAPES["tiny" if given.tiny else "8b"]
    clock = Clock("cpu", 0.0, 0.01) if given.tiny else Clock("cuda", given.settle, given.count)
    measured, found, failed = Measured(shape, clock), [], []
    for text, setting in zip(given.settings, settings, strict=True):
        try:
            rates = measured.rates(setting)
        except (RuntimeError, NotImplementedError) as error:
            failed.append(f"- failed: {text}: {str(error).splitlines()[0][:200]}")
            continue
        found.append((setting, rates, ideal(shape, setting, rates)))
    device = torch.cuda.get_device_name() if clock.device == "cuda" else "CPU"
    print(
        f"{time.strftime('%Y-%m-%d')}: {device}, torch {torch.__version__}; a copy moves"
        f" {measured.copy / 1e12:.2f} TB/s\n"
    )
    print(
        "\n".join(
            [
                "| " + " | ".join(HEADS) + " |",
                "|---" * len(HEADS) + "|",
                *(line(*one) for one in found),
                "",
                *failed,
            ]
        )
    )
    records = [asdict(setting) | asdict(rates) | {"seconds": parts} for setting, rates, parts in found]
    if "OUT" in os.environ:
        Path(os.environ["OUT"], "ceiling.json").write_text(json.dumps(records, indent=1), encoding="utf-8")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
