"""Blocks as a fold over steps: which operations a block calls, in which order, on each rung of the memory
ladder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from petune.kernels.block import attention as attending
from petune.kernels.block import fold
from petune.kernels.block.attention import How
from petune.kernels.block.cores import CoreSizes
from petune.kernels.block.dense import Dense
from petune.kernels.block.packed_linear import Group
from petune.kernels.block.program import Program, compiled
from petune.kernels.block.steps import BlockRun
from petune.kernels.block.turns import alone
from petune.kernels.configs import Level
from petune.kernels.dispatch import NAMES, Ops, reference_ops
from petune.kernels.memory.shaped_program import remade
from petune.models import bert, llama
from petune.models.spec import Attention
from petune.models.tuned_parts import TENSORS, LowRank

HEADS, KV, DIM, WIDTH, COLUMNS, TOKENS = 4, 2, 6, 20, 28, 12
KEEPS: tuple[Level, ...] = ("all", "projections", "attention", "input")
GROUP_CALLS = ("low", "product", "dproducts", "dlow", "dupdated", "learn")
LORA = dict.fromkeys(("q", "k", "v", "o", "gate", "up", "down"), 3)


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
    return compiled(tuple(found), CoreSizes(HEADS, KV, DIM, "gelu" if name == "bert" else "silu", 1e-6))


@contextmanager
def recorded(program: Program, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Ops, list[str]]]:
    """(operations, a list in which they, products of groups and attention write down that they are
    called)."""
    log: list[str] = []
    kinds = {
        place.first: "qkv" if place.kind == "in" else {"out": "o"}.get(place.kind, place.kind)
        for place in program.groups
    }

    def watched(name: str, own: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            log.append(f"{kinds[args[0].first]}.{name}" if name in GROUP_CALLS else name)
            return own(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        for name in GROUP_CALLS:
            patch.setattr(Group, name, watched(name, getattr(Group, name)))
        patch.setattr(attending, "forward", watched("attention", attending.forward))
        patch.setattr(attending, "backward", watched("attention_backward", attending.backward))
        own = {name: getattr(reference_ops(), name) for name in NAMES}
        inside = ("linear_low", "add_low")  # a product's own affair
        yield (
            Ops(
                "recording", **{name: op if name in inside else watched(name, op) for name, op in own.items()}
            ),
            log,
        )


def groups_of(program: Program, ops: Ops, rank: dict[str, int]) -> list[Group]:
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
    for place in program.groups:
        parts = []
        for role in place.roles:
            outputs, inputs = sizes[role]
            own = rank.get(role, 0)
            factors = (random(own, inputs), random(outputs, own)) if own else (None, None)
            parts.append(LowRank(random(outputs, inputs), random(outputs), *factors, 0.5))
        total = sum(0 if part.a is None else len(part.a) for part in parts)
        whole = torch.zeros(
            sum(len(part.weight) for part in parts), parts[0].weight.shape[1] + total, dtype=torch.float64
        )
        k = parts[0].weight.shape[1]
        whole[:, :k] = torch.cat([part.weight for part in parts])
        bias = torch.cat([part.bias for part in parts if part.bias is not None])
        base = Dense(whole[:, :k], bias, whole if total and place.kind != "out" else None)
        found.append(Group(parts, torch.float64, place.first, ops, base, gates=place.kind == "up"))
    return found


def run_of(program: Program, ops: Ops) -> BlockRun:
    """A pass of a block with LoRA."""
    generator = torch.Generator().manual_seed(1)
    norms = [
        tuple(
            torch.rand(DIM if one.over == "head" else WIDTH, generator=generator, dtype=torch.float64) + 0.5
            for _ in range(tensors)
        )
        for one in program.norms
        for tensors in (1 if one.kind == "rms" else 2,)
    ]
    angle = torch.rand(TOKENS // 2, DIM // 2, generator=generator, dtype=torch.float64).repeat(1, 2)
    how = How(True, DIM**-0.5, 2)
    return BlockRun(
        ops,
        groups_of(program, ops, LORA),
        norms,
        [None] * len(program.dropouts),
        [how],
        (angle.cos(), angle.sin()),
    )


def needs_of(program: Program) -> list[bool]:
    """Which tensors train: the factors of LoRA."""
    linears = sum(len(place.paths) for place in program.groups)
    return [at % TENSORS in (2, 3) for at in range(TENSORS * linears)] + [False] * sum(
        1 if one.kind == "rms" else 2 for one in program.norms
    )


# What a block of LoRA calls: operations, products of groups, attention, in order; of the way
# ahead, then of the way back. The sequences are those of the
# passes that were once written out by hand: a kernel more, or one in another place, has to be a decision.
CALLS = {
    ("llama", "all"): (
        (
            "rms_norm qkv.low qkv.product rope_ attention o.low o.product rms_norm up.low up.product activate"
            " down.product"
        ),
        (
            "down.dproducts activate_backward down.learn up.dproducts up.learn up.dupdated "
            "rms_norm_backward o.dproducts o.learn o.dupdated attention_backward rope_backward "
            "qkv.dproducts qkv.learn qkv.dupdated rms_norm_backward"
        ),
    ),
    ("llama", "projections"): (
        (
            "rms_norm qkv.low qkv.product rope_ attention o.low o.product rms_norm up.low up.product activate"
            " down.product"
        ),
        (
            "rms_norm up.low up.product down.dproducts activate_backward down.learn up.dproducts "
            "up.learn up.dupdated rms_norm_backward o.dproducts o.learn o.dupdated attention_backward "
            "rope_backward qkv.dproducts qkv.learn qkv.dupdated rms_norm_backward"
        ),
    ),
    ("llama", "attention"): (
        (
            "rms_norm qkv.low qkv.product rope_ attention o.low o.product rms_norm up.low up.product activate"
            " down.product"
        ),
        (
            "o.product rms_norm up.low up.product down.dproducts activate_backward down.learn "
            "up.dproducts up.learn up.dupdated rms_norm_backward o.dproducts o.learn o.dupdated "
            "rms_norm qkv.low qkv.product rope_ attention_backward rope_backward qkv.dproducts "
            "qkv.learn qkv.dupdated rms_norm_backward"
        ),
    ),
    ("llama", "input"): (
        (
            "rms_norm qkv.low qkv.product rope_ attention o.low o.product rms_norm up.low up.product activate"
            " down.product"
        ),
        (
            "rms_norm qkv.low qkv.product rope_ attention o.product rms_norm up.low up.product "
            "down.dproducts activate_backward down.learn up.dproducts up.learn up.dupdated "
            "rms_norm_backward o.dproducts o.learn o.dupdated attention_backward rope_backward "
            "qkv.dproducts qkv.learn qkv.dupdated rms_norm_backward"
        ),
    ),
    ("qwen3", "all"): (
        (
            "rms_norm qkv.low qkv.product norm_rope attention o.low o.product rms_norm up.low up.product"
            " activate down.product"
        ),
        (
            "down.dproducts activate_backward down.learn up.dproducts up.learn up.dupdated "
            "rms_norm_backward o.dproducts o.learn o.dupdated norm_rope "
            "attention_backward norm_rope_backward qkv.dproducts qkv.learn qkv.dupdated rms_norm_backward"
        ),
    ),
    ("qwen3", "projections"): (
        (
            "rms_norm qkv.low qkv.product norm_rope attention o.low o.product rms_norm up.low up.product"
            " activate down.product"
        ),
        (
            "rms_norm up.low up.product down.dproducts activate_backward down.learn up.dproducts "
            "up.learn up.dupdated rms_norm_backward o.dproducts o.learn o.dupdated norm_rope "
            "attention_backward norm_rope_backward qkv.dproducts qkv.learn qkv.dupdated rms_norm_backward"
        ),
    ),
    ("qwen3", "attention"): (
        (
            "rms_norm qkv.low qkv.product norm_rope attention o.low o.product rms_norm up.low up.product"
            " activate down.product"
        ),
        (
            "o.product rms_norm up.low up.product down.dproducts activate_backward down.learn "
            "up.dproducts up.learn up.dupdated rms_norm_backward o.dproducts o.learn o.dupdated "
            "rms_norm qkv.low qkv.product norm_rope attention_backward norm_rope_backward "
            "qkv.dproducts qkv.learn qkv.dupdated rms_norm_backward"
        ),
    ),
    ("qwen3", "input"): (
        (
            "rms_norm qkv.low qkv.product norm_rope attention o.low o.product rms_norm up.low up.product"
            " activate down.product"
        ),
        (
            "rms_norm qkv.low qkv.product norm_rope attention o.product rms_norm up.low "
            "up.product down.dproducts activate_backward down.learn up.dproducts up.learn up.dupdated "
            "rms_norm_backward o.dproducts o.learn o.dupdated norm_rope "
            "attention_backward norm_rope_backward qkv.dproducts qkv.learn qkv.dupdated rms_norm_backward"
        ),
    ),
    ("bert", "all"): (
        (
            "qkv.low qkv.product attention o.low o.product layer_norm up.low up.product activate down.product"
            " layer_norm"
        ),
        (
            "layer_norm_backward down.dproducts activate_backward down.learn up.dproducts up.learn "
            "layer_norm up.dupdated layer_norm_backward o.dproducts o.learn o.dupdated "
            "attention_backward qkv.dproducts qkv.learn qkv.dupdated"
        ),
    ),
    ("bert", "projections"): (
        (
            "qkv.low qkv.product attention o.low o.product layer_norm up.low up.product activate down.product"
            " layer_norm"
        ),
        (
            "layer_norm_backward layer_norm up.low up.product down.dproducts activate_backward "
            "down.learn up.dproducts up.learn up.dupdated layer_norm_backward o.dproducts o.learn "
            "o.dupdated attention_backward qkv.dproducts qkv.learn qkv.dupdated"
        ),
    ),
    ("bert", "attention"): (
        (
            "qkv.low qkv.product attention o.low o.product layer_norm up.low up.product activate down.product"
            " layer_norm"
        ),
        (
            "o.product layer_norm up.low up.product activate down.product layer_norm "
            "layer_norm_backward down.dproducts activate_backward down.learn up.dproducts up.learn "
            "up.dupdated layer_norm_backward o.dproducts o.learn o.dupdated qkv.low qkv.product "
            "attention_backward qkv.dproducts qkv.learn qkv.dupdated"
        ),
    ),
    ("bert", "input"): (
        (
            "qkv.low qkv.product attention o.low o.product layer_norm up.low up.product activate down.product"
            " layer_norm"
        ),
        (
            "qkv.low qkv.product attention o.product layer_norm up.low up.product activate down.product "
            "layer_norm layer_norm_backward down.dproducts activate_backward down.learn up.dproducts "
            "up.learn up.dupdated layer_norm_backward o.dproducts o.learn o.dupdated attention_backward "
            "qkv.dproducts qkv.learn qkv.dupdated"
        ),
    ),
}


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("name", ["llama", "qwen3", "bert"])
def test_a_block_calls_what_is_on_record_in_that_order(
    name: str, keep: Level, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = program_of(name)
    ahead, back = CALLS[name, keep]
    with recorded(program, monkeypatch) as (ops, log):
        run, x = run_of(program, ops), torch.ones(TOKENS, WIDTH, dtype=torch.float64)
        _, kept = alone(fold.forward(program, run, [x], keep, None))
        assert log == ahead.split()
        log.clear()
        alone(fold.backward(program, run, x, kept, needs_of(program), [True], keep, None))
        assert log == back.split()


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_a_first_block_makes_no_gradient_that_nobody_asks_for(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = program_of(name)
    with recorded(program, monkeypatch) as (ops, log):
        run, x = run_of(program, ops), torch.ones(TOKENS, WIDTH, dtype=torch.float64)
        _, kept = alone(fold.forward(program, run, [x], "all", None))
        log.clear()
        assert alone(fold.backward(program, run, x, kept, needs_of(program), [False], "all", None)) == [None]
        assert log[-2:] == ["qkv.dlow", "qkv.learn"]


def test_nothing_below_what_trains_is_gone_back_through(monkeypatch: pytest.MonkeyPatch) -> None:
    program = program_of("llama")
    down = next(place for place in program.groups if place.kind == "down")
    needs = [at in down.tensors for at in range(len(needs_of(program)))]
    with recorded(program, monkeypatch) as (ops, log):
        run, x = run_of(program, ops), torch.ones(TOKENS, WIDTH, dtype=torch.float64)
        _, kept = alone(fold.forward(program, run, [x], "attention", None))
        log.clear()
        alone(fold.backward(program, run, x, kept, needs, [False], "attention", None))
    assert not [
        call
        for call in log
        if call.startswith(("attention", "qkv", "o.d", "up.d", "up.learn", "rms_norm_backward"))
    ]
    assert run.sink.found


@pytest.mark.parametrize(("name", "again"), [("llama", {"gate", "up"}), ("bert", {"up"})])
def test_a_bottleneck_has_no_product_made_again_that_would_not_be_without_it(
    name: str, again: set[str]
) -> None:
    program = program_of(name)
    adapted = compiled(tuple(replace(one, bottleneck=4) for one in program.sublayers), program.sizes)
    assert adapted.bottlenecks == (adapted.groups[1].paths[0], adapted.groups[3].paths[0])
    assert remade(adapted, "all") == (set(), False) and remade(adapted, "projections") == (again, False)


class Watched:
    """A boundary of one rank, whose crossings write down that they are made."""

    connection, first, overlapped = "whole", 0, False

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def __getattr__(self, name: str) -> Any:
        def crossing(x: Tensor, own: bool = False) -> Tensor:
            self.log.append(name)
            return x

        return crossing


def cut(program: Program) -> Program:
    """The program of the same block, cut across ranks."""
    return compiled(tuple(replace(one, connection="whole") for one in program.sublayers), program.sizes)


# What is said in a backward pass: by a block that is cut, on each rung, the sum of what attention left a
# second time where it is gone.
AHEAD, BACK = ["leave", "leave"], ["leave_backward", "enter_backward", "leave_backward", "enter_backward"]
SAID = {
    "llama": {"all": BACK, "projections": BACK, "attention": ["leave", *BACK], "input": ["leave", *BACK]},
    "bert": {
        "all": BACK,
        "projections": BACK,
        "attention": ["leave", "leave", *BACK],
        "input": ["leave", "leave", *BACK],
    },
}


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_a_block_that_is_cut_calls_the_same_and_talks_as_is_on_record(
    name: str, keep: Level, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, said = cut(program_of(name)), list[str]()
    with recorded(program, monkeypatch) as (ops, log):
        run, x = run_of(program, ops), torch.ones(TOKENS, WIDTH, dtype=torch.float64)
        run.boundaries = {0: Watched(said), 1: Watched(said)}  # type: ignore[dict-item]
        _, kept = alone(fold.forward(program, run, [x], keep, None))
        assert log == CALLS[name, keep][0].split() and said == AHEAD
        log.clear()
        said.clear()
        alone(fold.backward(program, run, x, kept, needs_of(program), [True], keep, None))
        assert sorted(log) == sorted(CALLS[name, keep][1].split()) and sorted(said) == sorted(
            SAID[name][keep]
        )


@pytest.mark.parametrize("name", ["llama", "qwen3", "bert"])
def test_a_block_that_is_not_cut_has_no_step_for_it(name: str) -> None:
    whole, shared = program_of(name), cut(program_of(name))
    assert len(shared.steps) == len(whole.steps) + 4
    assert not [step for step in whole.steps if type(step).__name__ in ("Enter", "Leave")]
    assert shared.schedules.kept("attention") == whole.schedules.kept("attention")


@pytest.mark.parametrize("keep", KEEPS[1:])
@pytest.mark.parametrize("name", ["llama", "qwen3", "bert", "llama, cut", "bert, cut"])
def test_tiles_give_the_gradients_of_all_rows_at_once(name: str, keep: Level) -> None:
    own, _, shared = name.partition(", ")
    program = cut(program_of(own)) if shared else program_of(own)
    x = torch.linspace(-1, 1, TOKENS * WIDTH, dtype=torch.float64).view(TOKENS, WIDTH)
    found = []
    for tile in (None, 1, 5, TOKENS):
        run = run_of(program, reference_ops())
        run.boundaries = dict.fromkeys((0, 1), Watched([]))  # type: ignore[assignment]
        y, kept = alone(fold.forward(program, run, [x], keep, tile))
        (dx,) = alone(fold.backward(program, run, x.flip(0), kept, needs_of(program), [True], keep, tile))
        found.append({"y": y, "dx": dx, **{str(key): value for key, value in run.sink.found.items()}})
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-12, atol=1e-12)
