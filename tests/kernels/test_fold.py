"""Blocks as a fold over steps: the same calls in the same order, and the same numbers, as the passes that
were written out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from petune.kernels import attending, fold
from petune.kernels.attending import How
from petune.kernels.configs import Level, Rung
from petune.kernels.frame import Frame
from petune.kernels.group import Group, Sink
from petune.kernels.ops import NAMES, Ops, reference_ops
from petune.kernels.parts import Dense
from petune.kernels.postnorm import PostNorm
from petune.kernels.prenorm import PreNorm
from petune.kernels.program import Program, Sizes, compiled
from petune.kernels.steps import Run
from petune.methods.tuned import LowRank
from petune.models import bert, llama
from petune.sites import Attention

HEADS, KV, DIM, WIDTH, COLUMNS, TOKENS = 4, 2, 6, 20, 28, 12
KEEPS: tuple[Level, ...] = ("all", "projections", "attention", "input")
GROUP_CALLS = ("inlet", "low", "product", "dproducts", "dlow", "dupdated", "learn")


def program_of(name: str) -> Program:
    """The program of a block of a family."""
    block = {"llama": llama.BLOCK, "qwen3": llama.BLOCK, "bert": (bert.BLOCK[0], bert.BLOCK[2])}[name]
    found = []
    for sublayer in block:
        core = sublayer.core
        if isinstance(core, Attention):
            core = replace(core, scale=DIM**-0.5)
            core = core if name == "qwen3" else replace(core, q_norm=None, k_norm=None)
        found.append(replace(sublayer, core=core))
    return compiled(tuple(found), Sizes(HEADS, KV, DIM, "gelu" if name == "bert" else "silu", 1e-6))


def said(value: Any) -> Any:
    """What stands in the record for an argument."""
    if isinstance(value, Tensor):
        return tuple(value.shape)
    if isinstance(value, tuple | list):
        return tuple(map(said, value))
    return value if isinstance(value, str | int | float | bool | None) else type(value).__name__


@contextmanager
def recorded(log: list[Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[Ops]:
    """Operations, products and attention write down that they are called."""

    def watched(name: str, own: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            given = [said(value) for value in args if value is not None]
            log.append((name, *given, *((key, said(value)) for key, value in sorted(kwargs.items()) if value is not None)))
            return own(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        for name in GROUP_CALLS:
            patch.setattr(Group, name, watched(name, getattr(Group, name)))
        for name in ("forward", "backward"):
            patch.setattr(attending, name, watched(f"attention {name}", getattr(attending, name)))
        own = reference_ops()
        yield Ops("recording", **{name: watched(name, getattr(own, name)) for name in NAMES})


def groups_of(program: Program, ops: Ops, rank: dict[str, int], dropout: bool, room: bool) -> list[Group]:
    """Groups of random weights, and LoRA of that rank by role."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64) / 4

    sizes = {
        "q": (HEADS * DIM, WIDTH),
        "k": (KV * DIM, WIDTH),
        "v": (KV * DIM, WIDTH),
        "o": (WIDTH, HEADS * DIM),
        "gate": (COLUMNS, WIDTH),
        "up": (COLUMNS, WIDTH),
        "down": (WIDTH, COLUMNS),
    }
    found = []
    for at, place in enumerate(program.groups):
        parts = []
        for role in place.roles:
            outputs, inputs = sizes[role]
            own = rank.get(role, 0)
            factors = (random(own, inputs), random(outputs, own)) if own else (None, None)
            parts.append(LowRank(random(outputs, inputs), random(outputs), *factors, 0.5))
        total = sum(0 if part.a is None else len(part.a) for part in parts)
        whole = torch.zeros(sum(len(part.weight) for part in parts), parts[0].weight.shape[1] + total, dtype=torch.float64)
        k = parts[0].weight.shape[1]
        whole[:, :k] = torch.cat([part.weight for part in parts])
        bias = torch.cat([part.bias for part in parts if part.bias is not None])
        base = Dense(whole[:, :k], bias, whole if total and place.kind != "out" else None) if room else None
        drops = [dropping(at * 8 + number) if dropout and part.a is not None else None for number, part in enumerate(parts)]
        found.append(Group(parts, torch.float64, place.first, ops, base, drops, gates=place.kind == "up"))
    return found


def dropping(seed: int) -> Any:
    """A dropout that zeroes the same elements of the same rows at every call."""

    def drop(x: Tensor, rows: slice | None) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        keep = torch.rand(TOKENS, x.shape[1], generator=generator) > 0.3
        return x * (keep if rows is None else keep[rows]) / 0.7

    return drop


ALL = dict.fromkeys(("q", "k", "v", "o", "gate", "up", "down"), 3)
CASES: dict[str, dict[str, Any]] = {
    "lora": dict(rank=ALL),
    "lora with dropout": dict(rank=ALL, dropout=True),
    "lora of q and v": dict(rank={"q": 3, "v": 3}),
    "lora of the mlp": dict(rank={"up": 2, "gate": 2, "down": 3}),
    "lora too large to fold": dict(rank=dict.fromkeys(ALL, 65)),
    "lora without room": dict(rank=ALL, room=False),
    "full": dict(rank={}, trained=True),
    "full with lora": dict(rank=ALL, trained=True),
    "lora and norms": dict(rank=ALL, norms=True),
    "lora of a first block": dict(rank=ALL, needs_x=False),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["llama", "qwen3", "bert"])
def test_the_fold_calls_what_the_written_passes_called_in_the_same_order(name: str, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = dict(dropout=False, trained=False, norms=False, needs_x=True, room=True) | CASES[case]
    program = program_of(name)
    generator = torch.Generator().manual_seed(1)
    count = sum(1 if norm.kind == "rms" else 2 for norm in program.norms)
    widths = [DIM if norm.over == "head" else WIDTH for norm in program.norms for _ in range(1 if norm.kind == "rms" else 2)]
    norms = [torch.rand(width, generator=generator, dtype=torch.float64) + 0.5 for width in widths]
    x, dy = (torch.randn(TOKENS, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
    angle = torch.rand(TOKENS // 2, DIM // 2, generator=generator, dtype=torch.float64).repeat(1, 2)
    angles = angle.cos(), angle.sin()
    linears = sum(len(place.paths) for place in program.groups)
    needs = [settings["trained"] if at % 4 < 2 else True for at in range(4 * linears)] + [settings["norms"] or settings["trained"]] * count
    drops = [dropping(100 + at) if settings["dropout"] else None for at in range(len(program.dropouts))]
    how = How(name != "bert", DIM**-0.5, 2)
    for keep in KEEPS:
        for tile in (None, 5) if keep != "all" else (None,):
            logs: tuple[list[Any], list[Any]] = [], []
            results: list[Any] = []
            for old, log in zip((True, False), logs, strict=True):
                with recorded(log, monkeypatch) as ops:
                    groups = groups_of(program, ops, settings["rank"], settings["dropout"], settings["room"])
                    if old:
                        sink = Sink(needs)
                        act: Any = "gelu" if name == "bert" else "silu"
                        frame = Frame(HEADS, KV, DIM, act, name != "bert", 1e-6, ops, how, Rung(keep), tile)
                        block: Any
                        if name == "bert":
                            block = PostNorm(frame, groups, norms, (drops[1], drops[2]))
                        else:
                            order = [norms[0], norms[-1], *(norms[1:3] if name == "qwen3" else (None, None))]
                            block = PreNorm(frame, groups, order, angles)
                            first = block.norms_at
                            place = {first: 0, first + 1: count - 1, first + 2: 1, first + 3: 2}
                        y, kept = block.forward(x)
                        log.append("the way back")
                        dx = block.backward(dy, kept, settings["needs_x"], sink)
                        found = (
                            sink.found
                            if name == "bert"
                            else {first + place[key] if key in place else key: value for key, value in sink.found.items()}
                        )
                    else:
                        pairs = iter(norms)
                        each = [tuple(next(pairs) for _ in range(1 if norm.kind == "rms" else 2)) for norm in program.norms]
                        run = Run(ops, groups, each, drops, [how], angles)
                        y, kept = fold.forward(program, run, [x], keep, tile)
                        log.append("the way back")
                        (dx,) = fold.backward(program, run, dy, kept, needs, [settings["needs_x"]], keep, tile)
                        found = run.sink.found
                    results.append((y, dx, found))
            assert logs[1] == logs[0], (keep, tile)
            (y, dx, found), (y2, dx2, found2) = results
            assert torch.equal(y, y2) and (dx is None) == (dx2 is None)
            assert dx is None or not settings["needs_x"] or torch.equal(dx, dx2)
            assert found.keys() == found2.keys()
            for key, value in found.items():
                assert torch.equal(value, found2[key]), key
