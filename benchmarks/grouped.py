"""Each kernel of a mixture's experts beside torch's grouped products and separate steps, at the sizes of
Qwen3-30B-A3B: 8,192 tokens of 2,048, 8 of 128 experts of 768 columns each, rank 16, in bf16.

    PYTHONPATH=. python3 benchmarks/grouped.py                          on a GPU, about a minute
    TRITON_INTERPRET=1 PYTHONPATH=. python benchmarks/grouped.py        without one: every path, tiny, float32

Experts are unevenly loaded and two of them have no token. Forms of an operation: `torch`, petune's plain form
(on a GPU F.grouped_mm, with rows copied and the update added apart); `base`, F.grouped_mm of sorted rows
without an update, which a product by index with one can be measured by; `triton`, the kernel with the tile
of petune's rule; then the kernel with other tiles, ROWSxCOLUMNSxDEPTH/warps/stages.

error: of a result, written over NaN, against the plain form in float32: the largest norm of a row's
difference over the mean norm of a row. Above LIMIT, or where a form does not run, the exit code is 1 (other
tiles may not fit a device). us: the median of BATCHES, after the clock has settled. GB/s: every matrix once;
of rows that are read by index, each time they are. Records go to grouped.jsonl in $OUT.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from math import nan
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from petune.kernels import grouped_reference as plain
from petune.kernels.triton import grouped as products
from petune.kernels.triton import routed
from petune.kernels.triton.grouped import GroupedTile
from petune.models.routes import Routes, routes_of

BEGAN = time.perf_counter()
TINY = not torch.cuda.is_available()
DEVICE, DTYPE = ("cpu", torch.float32) if TINY else ("cuda", torch.bfloat16)
TOKENS, CHOSEN, EXPERTS, HIDDEN, COLUMNS, RANK = (
    (12, 2, 5, 32, 16, 8) if TINY else (8192, 8, 128, 2048, 768, 16)
)
ROWS = TOKENS * CHOSEN
LIMIT = 0.01  # rounding a row to bf16 once is about 0.002
BATCHES, BATCH_SECONDS, SETTLE_SECONDS = (1, 0.0, 0.0) if TINY else (5, 0.03, 3.0)
TILE_SECONDS = 65.0  # after which no other tile is tried: each takes a second to compile

WIDE = (
    GroupedTile(128, 256, 64, 8, 4),
    GroupedTile(128, 128, 64, 8, 4),
    GroupedTile(128, 128, 64, 4, 3),
    GroupedTile(256, 128, 64, 8, 3),
    GroupedTile(64, 256, 64, 4, 4),
)
NARROW = (GroupedTile(128, 16, 64, 4, 4), GroupedTile(64, 16, 64, 4, 4), GroupedTile(128, 16, 128, 4, 3))
OUTER = (GroupedTile(64, 16, 64, 4, 4), GroupedTile(128, 16, 128, 4, 3), GroupedTile(256, 16, 32, 4, 4))

Cast = Callable[[Tensor | None], Any]


@dataclass(frozen=True)
class Operation:
    """What is computed. run(forms, cast, **how): its result by a module of forms, of operands that are cast.
    base: what is measured beside it."""

    name: str
    kernels: Any
    run: Callable[..., Any]
    flop: float
    bytes: float
    tiles: Sequence[GroupedTile] = ()
    base: Callable[[], Any] | None = None

    def forms(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        """Every form with its name."""
        yield "torch", partial(self.run, plain, _as_it_is)
        if self.base is not None:
            yield "base", self.base
        yield "triton", partial(self.run, self.kernels, _as_it_is)
        for tile in () if TINY else self.tiles:
            rows, columns, depth, warps, stages = tile
            name = f"{rows}x{columns}x{depth}/{warps}/{stages}"
            yield name, partial(self.run, self.kernels, _as_it_is, tile=tile)


@dataclass
class Record:
    """A line of the table. error: NaN where nothing is compared; failure: why it did not run."""

    operation: str
    form: str
    us: float = nan
    tflops: float = nan
    gbs: float = nan
    error: float = nan
    failure: str = ""

    @property
    def failed(self) -> bool:
        """Whether it is wrong, or did not run where it has to."""
        return self.error > LIMIT or bool(self.failure and "x" not in self.form)


# ------------------------------------------------------------------ what is timed


def _as_it_is(x: Tensor | None) -> Tensor | None:
    return x


def _exact(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.float()


def _matrix(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=DTYPE)


def _routes() -> Routes:
    logits = torch.randn(TOKENS, EXPERTS, device=DEVICE) + 0.5 * torch.randn(EXPERTS, device=DEVICE)
    logits[:, [0, EXPERTS // 2]] = float("-inf")
    return routes_of(logits.topk(CHOSEN, 1).indices, EXPERTS)


def _product(
    name: str,
    x: Tensor,
    weight: Tensor,
    ends: Tensor,
    rows: Tensor | None = None,
    low: Tensor | None = None,
    up: Tensor | None = None,
) -> Operation:
    """x, of which rows are read by index where `rows` is there, times each expert's weight."""
    (_, k, n), r = weight.shape, 0 if low is None else RANK

    def run(forms: Any, cast: Cast, **how: Any) -> Any:
        return forms.product(cast(x), cast(weight), ends, rows=rows, low=cast(low), up=cast(up), **how)

    moved = ROWS * (k + n + r) + EXPERTS * (k * n + r * n)
    flop, in_order = 2.0 * ROWS * n * (k + r), x if rows is None else x[rows]
    base = None if rows is None and low is None else partial(plain.product, in_order, weight, ends)
    tiles = NARROW if n <= 64 else WIDE
    return Operation(name, products, run, flop, moved * x.element_size(), tiles, base)


def _outer(name: str, x: Tensor, dy: Tensor, ends: Tensor, **rows: Tensor) -> Operation:
    k, n = x.shape[1], dy.shape[1]

    def run(forms: Any, cast: Cast, **how: Any) -> Any:
        return forms.outer(cast(x), cast(dy), ends, **rows, **how)

    moved = (ROWS * (k + n) + EXPERTS * k * n) * x.element_size()
    return Operation(name, products, run, 2.0 * ROWS * k * n, moved, OUTER)


def _activation(name: str, function: str, matrices: int, share: Tensor, *given: Tensor) -> Operation:
    def run(forms: Any, cast: Cast) -> Any:
        return getattr(forms, function)(*map(cast, given), share, "silu")

    moved = ROWS * (matrices * COLUMNS * given[0].element_size() + 4.0)
    return Operation(name, routed, run, 0.0, moved)


def _sum(name: str, y: Tensor, routes: Routes, weights: Tensor | None) -> Operation:
    def run(forms: Any, cast: Cast) -> Any:
        return forms.combined(cast(y), routes.inverse, CHOSEN, weights)

    return Operation(name, routed, run, 0.0, (y.numel() + TOKENS * HIDDEN) * y.element_size() + 8.0 * len(y))


def operations() -> Iterator[Operation]:
    """Those of one mixture, ahead and back, LoRA on both weights."""
    routes = _routes()
    rows, ends = routes.order // CHOSEN, routes.ends
    x, dout, y = _matrix(TOKENS, HIDDEN), _matrix(TOKENS, HIDDEN), _matrix(ROWS, HIDDEN)
    gate_up, inner, low = _matrix(ROWS, 2 * COLUMNS), _matrix(ROWS, COLUMNS), _matrix(ROWS, RANK)
    share = torch.rand(ROWS, device=DEVICE)
    w_up, w_down = _matrix(EXPERTS, 2 * COLUMNS, HIDDEN), _matrix(EXPERTS, HIDDEN, COLUMNS)
    a_up, b_up = _matrix(EXPERTS, RANK, HIDDEN), _matrix(EXPERTS, 2 * COLUMNS, RANK)
    a_down, b_down = _matrix(EXPERTS, RANK, COLUMNS), _matrix(EXPERTS, HIDDEN, RANK)

    yield _product("low of gate_up", x, a_up.mT, ends, rows)
    yield _product("gate_up", x, w_up.mT, ends, rows, low, b_up.mT)
    yield _activation("activation", "gated", 3, share, gate_up)
    yield _product("low of down", inner, a_down.mT, ends)
    yield _product("down", inner, w_down.mT, ends, None, low, b_down.mT)
    yield _sum("sum of copies", y, routes, None)
    yield _sum("weighted sum of copies", y, routes, torch.rand(TOKENS, CHOSEN, device=DEVICE))
    yield _product("low of down, back", dout, b_down, ends, rows)
    yield _product("down, back", dout, w_down, ends, rows, low, a_down)
    yield _outer("B of down, back", dout, low, ends, x_rows=rows)
    yield _outer("A of down, back", low, inner, ends)
    yield _activation("activation, back", "dgated", 6, share, inner, gate_up)
    yield _product("low of gate_up, back", gate_up, b_up, ends)
    yield _product("gate_up, back", gate_up, w_up, ends, None, low, a_up)
    yield _outer("B of gate_up, back", gate_up, low, ends)
    yield _outer("A of gate_up, back", low, x, ends, dy_rows=rows)


# ------------------------------------------------------------------ how


def _tensors(found: Any) -> tuple[Tensor, ...]:
    return found if isinstance(found, tuple) else (found,)


def _error(call: Callable[[], Any], exact: tuple[Tensor, ...]) -> float:
    """How far from `exact` a call comes that writes where NaN stood."""
    for one in _tensors(call()):
        one.fill_(nan)
    worst = 0.0
    for one, other in zip(_tensors(call()), exact, strict=True):
        apart, size = (value.view(len(one), -1).norm(dim=1) for value in (one.float() - other, other))
        worst = max(worst, float((apart.max() / size.mean()).nan_to_num(nan=float("inf"))))
    return worst


def _seconds(call: Callable[[], Any]) -> float:
    """Of one call, the median of batches."""
    if TINY:
        began = time.perf_counter()
        call()
        return time.perf_counter() - began
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def batch(calls: int) -> float:
        first.record()
        for _ in range(calls):
            call()
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) / 1e3 / calls

    calls = max(3, round(BATCH_SECONDS / batch(5)))
    return statistics.median(batch(calls) for _ in range(BATCHES))


def _settle() -> None:
    """Work until the clock is that of a long run."""
    size, began = 64 if TINY else 8192, time.perf_counter()
    square = _matrix(size, size)
    while time.perf_counter() - began < SETTLE_SECONDS:
        for _ in range(20):
            square @ square
        torch.cuda.synchronize()


def measured(operation: Operation) -> Iterator[Record]:
    """Every form of an operation."""
    exact = _tensors(operation.run(plain, _exact))
    for name, call in operation.forms():
        if "x" in name and time.perf_counter() - BEGAN > TILE_SECONDS:
            break
        record = Record(operation.name, name)
        try:
            record.error = nan if name == "base" else _error(call, exact)
            seconds = _seconds(call)
            record.us, record.tflops = 1e6 * seconds, operation.flop / seconds / 1e12
            record.gbs = operation.bytes / seconds / 1e9
        except Exception as error:  # the others may run
            record.failure = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:90]}"
        yield record


def _main() -> int:
    torch.manual_seed(0)
    _settle()
    device, records = "cpu" if TINY else torch.cuda.get_device_name(), []
    print(f"{device}, torch {torch.__version__}, {DTYPE}; {ROWS} rows, {EXPERTS} experts")
    print(f"{'operation':<24}{'form':<18}{'us':>9}{'TFLOP/s':>9}{'GB/s':>7}{'error':>9}")
    for operation in operations():
        for one in measured(operation):
            figures = f"{one.us:>9.1f}{one.tflops:>9.0f}{one.gbs:>7.0f}{one.error:>9.1e}"
            verdict = f"{'  FAILED' * one.failed}  {one.failure}".rstrip()
            print(f"{one.operation:<24}{one.form:<18}{figures}{verdict}", flush=True)
            records.append(one)
    for form in ("torch", "triton"):
        total = sum(one.us for one in records if one.form == form)
        print(f"{'all of them':<24}{form:<18}{total:>9.1f}")
    if "OUT" in os.environ:
        lines = "".join(json.dumps(asdict(one)) + "\n" for one in records)
        Path(os.environ["OUT"], "grouped.jsonl").write_text(lines, encoding="utf-8")
    return int(any(one.failed for one in records))


if __name__ == "__main__":
    sys.exit(_main())
