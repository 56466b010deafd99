"""Overlapped communication is the plain form in another order: same numbers, and transfers under way while
matmuls run.

A toy region, two linears in and one out, shows what happens when; tiny models under plans are held against
one process.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import silu
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from petune.models.transition import transition
from petune.parallel.collectives import REDUCE_SCATTER_SEQ, Transfer, copy, gather_seq, reduce
from petune.parallel.plan import Cut, ParallelPlan
from petune.parallel.tensor import overlap, tiles
from petune.parallel.tensor.overlap import Overlap, make_overlap
from petune.rng.context import Running, bound_to, running
from tests.methods.zoo import FOUR, SETTINGS
from tests.parallel.harness import Case, check
from tests.parallel.plans import BACKENDS, COMPOSED
from tests.pool import run

WIDTH, COLUMNS = 6, 4


# ------------------------------------------------------------------ a toy region


class Region(nn.Module):
    """One rank's part of a gated MLP."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(rank)
        self.gate, self.up = nn.Linear(WIDTH, COLUMNS), nn.Linear(WIDTH, COLUMNS, bias=False)
        self.down = nn.Linear(COLUMNS, WIDTH)
        self.double()

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down(silu(self.gate(hidden)) * self.up(hidden))


def overlapped(region: Region, route: tiles.Route | None) -> Callable[[Tensor], Tensor]:
    here = Overlap(dist.group.WORLD, dist.get_rank(), route)
    for site in (region.gate, region.up):
        here.column(site)
    row = here.row(region.down)
    region.register_forward_pre_hook(lambda module, args: (here.enter(args[0]),))
    region.down.register_forward_hook(lambda module, args, output: row.summed(module, output))
    return region


def plain(region: Region, whole: bool) -> Callable[[Tensor], Tensor]:
    def call(hidden: Tensor) -> Tensor:
        if whole:
            return reduce(region(copy(hidden, dist.group.WORLD)), dist.group.WORLD)
        sizes = running().sizes
        term = region(gather_seq(hidden, sizes, dist.group.WORLD))
        return transition(term, *REDUCE_SCATTER_SEQ, sizes, dist.group.WORLD)

    return call


def drawn(seed: int, length: int) -> Tensor:
    return torch.randn(2, length, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def both_ways(
    call: Callable[[Tensor], Tensor], region: Region, sizes: tuple[int, ...], recompute: bool = False
) -> list[Tensor]:
    """Output and gradients of the region for own tokens, or for all of them where `sizes` has one number."""
    rank = dist.get_rank()
    own = sizes[0] if len(sizes) == 1 else sizes[rank]
    seed = 0 if len(sizes) == 1 else rank
    hidden = drawn(20 + seed, own).requires_grad_()

    def again(x: Tensor) -> Tensor:
        with bound_to(Running(sizes=sizes if len(sizes) > 1 else ())):
            return call(x)

    output = checkpoint(again, hidden, use_reentrant=False) if recompute else again(hidden)
    output.backward(drawn(30 + seed, own))
    gradients = [value.grad for value in (hidden, *region.parameters())]
    return [output.detach(), *(one for one in gradients if one is not None)]


def compared(sizes: tuple[int, ...]) -> list[list[list[Tensor]]]:
    """The plain form and every overlapped one, recomputed and not."""
    rank, found = dist.get_rank(), []
    region = Region(rank)
    found.append(both_ways(plain(region, len(sizes) == 1), region, sizes))
    routes: tuple[tiles.Route | None, ...] = (None,) if len(sizes) == 1 else tiles.ROUTES
    for route in routes:
        for recompute in (False, True):
            region = Region(rank)
            found.append(both_ways(overlapped(region, route), region, sizes, recompute))
    return found


@pytest.mark.parametrize(
    ("ranks", "sizes"),
    [
        (2, (5, 2)),
        (2, (0, 3)),
        (3, (3, 2, 1)),
        (3, (4, 0, 3)),
        (4, (0, 2, 1, 0)),
        (2, (7,)),
        (3, (2,)),
        (2, (1,)),
    ],
    ids=str,
)
def test_an_overlapped_region_gives_the_numbers_of_the_plain_one(ranks: int, sizes: tuple[int, ...]) -> None:
    for expected, *others in run(ranks, compared, sizes):
        assert len(expected) == 7
        for found in others:
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one, other, atol=1e-13, rtol=0)


# ------------------------------------------------------------------ what happens when


class Watched(TorchDispatchMode):
    """Writes down every matmul, forward and backward."""

    def __init__(self, story: list[str]) -> None:
        super().__init__()
        self.story = story

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() in ("aten::mm", "aten::addmm"):
            self.story.append("matmul")
        return func(*args, **(kwargs or {}))


@contextmanager
def told() -> Iterator[list[str]]:
    """Transfers that begin and are waited for, and matmuls, in order."""
    story: list[str] = []

    class Told(Transfer):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            story.append("go")

        def wait(self) -> Tensor:
            if self.works:
                story.append("come")
            return super().wait()

    with pytest.MonkeyPatch.context() as patch, Watched(story):
        patch.setattr(tiles, "Transfer", Told)
        yield story


def stories(route: tiles.Route) -> list[str]:
    """The story of a forward and of a backward pass on three ranks, a word for each event."""
    region = Region(dist.get_rank())
    call = overlapped(region, route)
    hidden = drawn(0, 3).requires_grad_()
    with bound_to(Running(sizes=(3, 3, 3))), told() as forward:
        output = call(hidden)
    with told() as backward:
        output.sum().backward()
    return [" ".join(forward), " ".join(backward)]


def test_tiles_travel_while_others_are_computed() -> None:
    """Forward there is a matmul for each of gate's tiles, one for up, and one for each of down's; backward
    two for each."""
    ring, star = (run(3, stories, route) for route in tiles.ROUTES)
    enter = "go matmul come go matmul come matmul"
    leave = "matmul go matmul come go matmul come"
    assert ring[0][0] == f"{enter} matmul {leave}"
    assert star[0][0] == "go go matmul come matmul come matmul matmul matmul go matmul go matmul come come"
    enter_back = "matmul matmul go matmul matmul come go matmul matmul come"
    leave_back = "go matmul matmul come go matmul matmul come matmul matmul"
    assert ring[0][1] == f"{leave_back} matmul matmul {enter_back}"
    assert all(story == found[0] for found in (ring, star) for story in found)


def left_under_way() -> list[str]:
    """The story of a recomputed region: recomputing stops inside the way out, once everything is there that
    backward needs."""
    region = Region(dist.get_rank())
    call = overlapped(region, "star")

    def again(x: Tensor) -> Tensor:
        with bound_to(Running(sizes=(3, 3, 3))):
            return call(x)

    output = checkpoint(again, drawn(0, 3).requires_grad_(), use_reentrant=False)
    with told() as story:
        output.sum().backward()
    return story


def test_recomputing_leaves_nothing_under_way() -> None:
    for story in run(3, left_under_way):
        # two for each entry and each exit, forward again and backward
        assert story.count("go") == story.count("come") == 8
        assert story.count("matmul") == 6 + 14  # it stopped before the last of down's tiles


def held_after_a_call(recompute: bool) -> list[int]:
    """How many of a call's objects are alive after its forward pass and after its backward pass, without
    collecting garbage."""
    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    made: list[str] = []

    def counted(kind: type) -> type:
        def init(self: Any, *args: Any) -> None:
            kind.__init__(self, *args)
            alive.add(self)
            made.append(kind.__name__)

        return type(kind.__name__, (kind,), {"__init__": init})

    region = Region(dist.get_rank())
    call = overlapped(region, "ring")

    def again(x: Tensor) -> Tensor:
        with bound_to(Running(sizes=(3, 1))):
            return call(x)

    gc.disable()
    with pytest.MonkeyPatch.context() as patch:
        for module, name in (
            (overlap, "Arriving"),
            (overlap, "Departing"),
            (tiles, "Transfer"),
            (tiles, "Gathering"),
            (tiles, "Scattering"),
        ):
            patch.setattr(module, name, counted(getattr(module, name)))
        hidden = drawn(0, (3, 1)[dist.get_rank()]).requires_grad_()
        output = checkpoint(again, hidden, use_reentrant=False) if recompute else again(hidden)
        first = len(alive)
        output.sum().backward()
    assert set(made) == {"Arriving", "Departing", "Transfer", "Gathering", "Scattering"}
    return [first, len(alive)]


@pytest.mark.parametrize("recompute", [False, True])
def test_nothing_of_a_call_is_held_when_it_is_over(recompute: bool) -> None:
    assert run(2, held_after_a_call, recompute) == [[0, 0]] * 2


def misused() -> list[Any]:
    here = Overlap(dist.group.WORLD, dist.get_rank(), "ring")
    with bound_to(Running(sizes=(2, 1))):
        stand_in = here.enter(drawn(0, (2, 1)[dist.get_rank()]))
    region = Region(0)
    row = here.row(region.down)
    with pytest.raises(RuntimeError, match="called without the layer itself") as caught:
        row.summed(region.down, drawn(0, 1))
    return [tuple(stand_in.shape), bool((stand_in + 1).isnan().all()), str(caught.value)]


def test_what_reads_hidden_states_before_they_are_here_gets_nan() -> None:
    for shape, poisoned, complaint in run(2, misused):
        assert shape == (2, 3, WIDTH)
        assert poisoned
        assert complaint == "the way out of Linear was called without the layer itself"


def after_a_failure() -> bool:
    """Whether a site takes other inputs as they are, once a call has failed in a site that had been given a
    tile."""
    here = Overlap(dist.group.WORLD, dist.get_rank(), "ring")
    failing, other = nn.Linear(WIDTH + 1, 2).double(), nn.Linear(WIDTH, 2).double()
    here.column(failing)
    here.column(other)
    with bound_to(Running(sizes=(2, 1))), pytest.raises(RuntimeError, match="shapes"):
        failing(here.enter(drawn(0, (2, 1)[dist.get_rank()])))
    x = drawn(1, 4)
    return torch.equal(other(x), other.forward(x))


def test_a_failed_call_leaves_nothing_to_the_next() -> None:
    assert run(2, after_a_failure) == [True, True]


def test_a_plan_that_cuts_nothing_by_heads_overlaps_nothing() -> None:
    by_sequence = Cut("sequence", "sequence", "sequence", "gather", (), (), (), (1, 1), False, overlap=True)
    plain_cut = Cut("heads", "heads", "whole", "gather", (4, 4), (4, 4), (2, 2), (), False, overlap=False)
    group: Any = None
    assert make_overlap(by_sequence, group, 0, torch.device("cpu")) is None
    assert make_overlap(plain_cut, group, 0, torch.device("cpu")) is None
    whole = make_overlap(replace(plain_cut, overlap=True), group, 0, torch.device("cpu"))
    assert whole is not None and whole.route is None


# ------------------------------------------------------------------ models under plans


def plan_of(kind: str, name: str, ranks: int) -> ParallelPlan:
    plan = COMPOSED[kind](name) if kind in COMPOSED else BACKENDS[kind](name, ranks)
    assert plan.cut is not None
    return replace(plan, cut=replace(plan.cut, overlap=True))


def case_of(name: str, method: str, at: int) -> Case:
    """Galaxy on two and three ranks, recomputed and not, with dropout and without, shifted from method to
    method and model to model."""
    ranks, recompute, dropout = [(2, True, 0.1), (3, False, 0.1), (3, True, 0.0), (2, False, 0.0)][at % 4]
    return Case(
        name, method, plan_of("galaxy", name, ranks), torch.float64, recompute, dropout, passes=(3,), steps=1
    )


def _cell(row: int, column: int) -> Any:
    """The short suite has every family and every method once."""
    case = case_of(FOUR[row], list(SETTINGS)[column], row + column // 2)
    return pytest.param(
        case, marks=pytest.mark.long if row != column else (), id=f"{case.name} {case.method}"
    )


@pytest.mark.parametrize("case", [_cell(row, column) for row in range(4) for column in range(4)])
def test_galaxy_overlapped_equals_one_process(case: Case) -> None:
    check(case)


OTHERS = [
    ("tp", "llama-causal", "lora", 2),
    pytest.param("tp", "t5-seq2seq", "adapter", 3, marks=pytest.mark.long),
    ("galaxy2", "bert-classify", "lora", 3),
    ("cut", "bart-seq2seq", "full", 2),
    ("galaxy x pp", "llama-causal", "lora", 2),
    ("shard x tp", "bert-classify", "adapter", 2),
]


@pytest.mark.parametrize(("kind", "name", "method", "ranks"), OTHERS)
def test_other_plans_overlapped_equal_one_process(kind: str, name: str, method: str, ranks: int) -> None:
    plan = plan_of(kind, name, ranks)
    settings = (("num_hidden_layers", 3),) if plan.pp > 1 else ()
    changes: dict[str, Any] = {"dropout": 0.1, "settings": settings, "passes": (3,), "steps": 1}
    check(Case(name, method, plan, torch.float64, recompute=True, **changes))
