"""Which rung of the memory ladder each block stands on, so that a step fits its memory and takes the least
time.

A plan is a prefix of blocks on one rung and a suffix that keeps at least as much on the device: what the
blocks next to the loss keep lives shortest. The last block is never offloaded, for its backward pass follows
at once; unless several passes are on the way, as in a stage of a pipeline: then other passes come in between,
and what blocks keep is there once for each. The choice is exact among all plans of that form. Two rules say
what is best:

* device memory has a price: a GiB must save WORTH of a step, or it stays free. Without it the last GiB of a
  card would be spent on a ten-thousandth of the time at long context, where the prediction of the peak is
  least safe;
* host memory is used where that makes the step faster, and not at all where it does not.

More device memory never makes the chosen plan slower: a plan that becomes possible needs more memory than all
that were possible before, so it can win only by its time. More host memory makes it slower by no more than
the price of the device memory it had.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby, product
from math import ceil, inf
from typing import get_args

from petune.errors import UsageError
from petune.kernels.configs import LEVELS, Level, MemoryConfig, Parks, Rung, refuse_contradiction
from petune.kernels.memory import block_cost, buffers
from petune.kernels.memory.block_step import GIB, BlockStep
from petune.kernels.memory.op_cost import total

TILES = (16384, 8192, 4096, 2048)  # tokens per tile of the MLP that are tried, after no tiles at all
SLOTS = 2  # offloaded blocks with their tensors on the device: one that computes, one in transit
UNBOUNDED = 2**62  # bytes
PARKED: tuple[Parks, ...] = get_args(Parks)


@dataclass(frozen=True)
class Policy:
    """A rung for every block and what it comes to.

    tile: tokens per tile of the MLP where a block does not keep all, None for whole; peak: predicted bytes on
    the device, of `budget`; host: bytes pinned in host memory; seconds: of a step; recompute: FLOP done again
    over the FLOP of a step without recomputation; roofline: seconds of that step.
    """

    rungs: tuple[Rung, ...]
    tile: int | None
    peak: int
    budget: int
    host: int
    seconds: float
    recompute: float
    roofline: float

    def agreed(self, least: Callable[[Sequence[int]], list[int]]) -> Policy:
        """What all ranks that share the blocks keep: the least of what each would. They talk to one another
        in what they compute again, so that all have to do the same. least: of each number among the ranks."""
        *levels, tile = least(levels_of(self))
        rungs = tuple(_lowered(rung, LEVELS[level]) for rung, level in zip(self.rungs, levels, strict=True))
        return replace(self, rungs=rungs, tile=None if tile == sys.maxsize else tile)

    def lines(self) -> tuple[str, ...]:
        """The policy for a reader: who keeps what and where, then what it comes to."""
        tiled = f"; MLP in tiles of {self.tile:,} tokens" if self.tile else ""
        host = f", host {_gib(self.host)}" if self.host else ""
        return (
            f"memory: {_spans(self.rungs)}{tiled}",
            (
                f"memory: peak {_gib(self.peak)} of {self.budget / GIB:.1f}{host}; step"
                f" {_duration(self.seconds)} predicted, roofline {_duration(self.roofline)},"
                f" {self.recompute:.0%} of the FLOP done again"
            ),
        )


def levels_of(policy: Policy) -> list[int]:
    """The rung of each block by its place on the ladder, and the rows of a tile."""
    return [*(LEVELS.index(rung.keep) for rung in policy.rungs), policy.tile or sys.maxsize]


def _lowered(rung: Rung, keep: Level) -> Rung:
    """The rung with less kept, of which no more is parked than there is."""
    return Rung(keep, "input" if keep == "input" and rung.offload == "attention" else rung.offload)


def choose(step: BlockStep, config: MemoryConfig, budget: int, host: int) -> Policy:
    """The best policy within `budget` bytes of device memory and `host` bytes of pinned host memory.

    Keep, offload and tile that `config` names hold for all blocks, the last one's offload excepted; its own
    budget and host are the caller's business, as are its streams. Raises UsageError when nothing fits, saying
    what would, or when `config` contradicts itself.
    """
    refuse_contradiction(config)
    plan = _best(step, config, budget, host)
    if plan is None:
        raise _does_not_fit(step, config, budget, host)
    return _policy(step, plan, budget)


def least_bytes(step: BlockStep, config: MemoryConfig) -> int:
    """Bytes of device memory that its blocks need at least beside what holds anyway, without host memory."""
    plan = _smallest(step, config, 0) or _smallest(step, config, UNBOUNDED)
    return plan.peak if plan is not None else 0


# ------------------------------------------------------------------ prices


@dataclass(frozen=True)
class _Option:
    """A rung priced for one block: bytes it keeps on the device and on the host, bytes alive beside that
    while it runs, seconds of both passes with their copies; `alone` is the seconds without."""

    rung: Rung
    place: tuple[int, int]  # of keep in LEVELS, of offload in PARKED
    kept: int
    host: int
    working: int
    seconds: float
    alone: float


@dataclass(frozen=True)
class _Plan:
    """The last `suffix` blocks stand on the rung `last`, those before on `first`."""

    first: _Option
    last: _Option
    suffix: int
    tile: int | None
    peak: int
    host: int
    seconds: float


def _tables(step: BlockStep, config: MemoryConfig) -> Iterator[tuple[int | None, list[_Option]]]:
    """(tile, the options it leaves), each list from the least that blocks keep to the most."""
    keeps = [keep for keep in LEVELS if config.keep in ("auto", keep)]
    levels = tuple(level for level in PARKED if config.offload in ("auto", level))
    tiles = (None, *TILES) if config.tile is None else (config.tile,)
    whole = _options(step, "all", None, levels) if "all" in keeps else ()
    for tile in dict.fromkeys(None if tile is None or tile >= step.own else tile for tile in tiles):
        tiled = (option for keep in keeps if keep != "all" for option in _options(step, keep, tile, levels))
        yield tile, [*tiled, *whole]


@lru_cache(maxsize=128)
def _options(
    step: BlockStep, keep: Level, tile: int | None, levels: tuple[Parks, ...]
) -> tuple[_Option, ...]:
    """A rung's options by what is offloaded; the attention output can be where it is kept. Kept, for a step
    is searched again where a budget holds nothing, or for another budget."""
    shape, tokens = step.shape, step.own
    ahead = step.seconds(lambda one: block_cost.forward(one.shape, one.tokens, one.sequence, tile))
    back = step.seconds(
        lambda one: (
            block_cost.backward(one.shape, one.tokens, one.sequence, tile)
            + block_cost.recomputed(one.shape, keep, one.tokens, one.sequence, tile)
        )
    )
    alone = ahead + back + _waiting(step, 0, ahead, back)
    working, kept = buffers.working_set(shape, keep, tokens, tile), buffers.kept_bytes(shape, keep)
    every = buffers.offloadable(shape)
    moved = {"none": 0, "input": every["input"]} | (
        {} if keep == "input" else {"attention": every["attention"]}
    )
    return tuple(
        _Option(
            Rung(keep, level),
            (LEVELS.index(keep), PARKED.index(level)),
            (kept - moved[level]) * tokens,
            moved[level] * tokens,
            working,
            ahead + back + _waiting(step, moved[level] * tokens, ahead, back),
            alone,
        )
        for level in levels
        if level in moved
    )


def _waiting(step: BlockStep, moved: int, ahead: float, back: float) -> float:
    """Seconds by which a block's copies outlast its passes of `ahead` and `back` seconds, and by which they
    slow its memory.

    Both directions of the link run at once. Forward, offloaded tensors leave and streamed weights come;
    backward, tensors come with weights and states, and the updated ones leave.
    """
    shape, streams = step.shape, step.wide is not None
    weights = shape.itemsize * shape.parameters if streams else 0
    states = buffers.states_bytes(shape.itemsize, bool(step.wide)) * shape.parameters if streams else 0
    outlasting = max(0.0, max(moved, weights) / step.rates.link - ahead) + max(
        0.0, (moved + weights + states) / step.rates.link - back
    )
    return outlasting + (2 * moved + 3 * weights + 2 * states) / step.rates.memory


# ------------------------------------------------------------------ search


def _best(step: BlockStep, config: MemoryConfig, budget: int, host: int) -> _Plan | None:
    """The best plan without offloading, unless the best of all is faster. None when nothing fits."""
    resident, best = None, None
    for tile, options in _tables(step, config):
        resident = _search(
            step, tile, [option for option in options if not option.host], budget, host, resident
        )
        best = _search(step, tile, options, budget, host, best)
    return resident if resident and best and resident.seconds <= best.seconds else best


def _search(
    step: BlockStep, tile: int | None, options: list[_Option], budget: int, host: int, best: _Plan | None
) -> _Plan | None:
    """The best of `best` and of all plans of `options` at `tile` that fit."""
    least = step.price(best.seconds, best.peak) if best else inf
    for first, last in _pairs(options):
        if _bound(step, first, last) >= least:
            continue
        for suffix in _suffixes(step, first, last, budget, host):
            late, early, pinned = _memory(step, first, last, suffix)
            peak = max(late, early)
            before, parked = (step.depth - suffix) * first.seconds, (suffix - step.here) * last.seconds
            seconds = step.other + before + parked + step.here * last.alone
            if peak <= budget and pinned <= host and (price := step.price(seconds, peak)) < least:
                least, best = price, _Plan(first, last, suffix, tile, peak, pinned, seconds)
    return best


def _pairs(options: list[_Option]) -> Iterator[tuple[_Option, _Option]]:
    """Rungs for a prefix and a suffix that keeps no less and offloads no more, the most kept first."""
    for last, first in product(reversed(options), repeat=2):
        if first.place[0] <= last.place[0] and first.place[1] >= last.place[1]:
            yield first, last


def _bound(step: BlockStep, first: _Option, last: _Option) -> float:
    """A price that no plan of this pair undercuts: the fewest seconds in every block, the fewest bytes."""
    seconds = step.other + (step.depth - 1) * min(first.seconds, last.seconds) + last.alone
    kept = int(step.passes * ((step.depth - 1) * first.kept + last.kept)) + step.here * last.host
    return step.price(seconds, step.standing + kept + max(last.working, step.head))


def _memory(step: BlockStep, first: _Option, last: _Option, suffix: int) -> tuple[int, int, int]:
    """Bytes (on the device in the head or the last block, in the last block on `first`, on the host)."""
    before, parked = step.depth - suffix, suffix - step.here
    others = ceil((step.passes - 1) * (before * first.kept + suffix * last.kept))
    prefix = step.standing + others + before * first.kept
    firsts, lasts = first.host if before else 0, last.host if parked else 0
    own = suffix * last.kept + step.here * last.host + SLOTS * (lasts or firsts)
    late = prefix + own + max(last.working, step.head)
    early = prefix + SLOTS * max(firsts, lasts) + first.working if before else 0
    return late, early, step.pinned + ceil(step.passes * (before * first.host + parked * last.host))


def _suffixes(step: BlockStep, first: _Option, last: _Option, budget: int, host: int) -> Iterable[int]:
    """Lengths of the suffix among which the best one is.

    From 2 on, seconds and bytes are linear in it and the peak is the greater of two lines, so the price is
    convex and what fits is an interval. The best length is then 1, at one end of all, or beside a point where
    a line meets its limit or the other line.
    """
    if first is last:
        return (step.depth,)
    ends = (1, 2, step.depth - 1)
    (late, early, pinned), (next_late, next_early, next_pinned) = (
        _memory(step, first, last, suffix) for suffix in (2, 3)
    )
    lines = (
        (budget - late, next_late - late),
        (budget - early, next_early - early),
        (host - pinned, next_pinned - pinned),
        (early - late, (next_late - late) - (next_early - early)),
    )
    beside = (2 + room // slope + more for room, slope in lines if slope for more in (0, 1))
    return sorted({suffix for suffix in (*ends, *beside) if 1 <= suffix < step.depth})


def _smallest(step: BlockStep, config: MemoryConfig, host: int) -> _Plan | None:
    """The plan with the lowest peak within `host`, whatever its time."""
    frugal, smallest = replace(step, worth=1e9), None
    for tile, options in _tables(step, config):
        smallest = _search(frugal, tile, options, UNBOUNDED, host, smallest)
    return smallest


# ------------------------------------------------------------------ answers


def _policy(step: BlockStep, plan: _Plan, budget: int) -> Policy:
    rungs = _rungs(step, plan)
    again = {
        keep: sum(
            one.number * total(block_cost.recomputed(one.shape, keep, one.tokens, one.sequence)).flop
            for one in step.every
        )
        / step.depth
        for keep in {rung.keep for rung in rungs}
    }
    return Policy(
        rungs=rungs,
        tile=_tile(plan),
        peak=plan.peak,
        budget=budget,
        host=plan.host,
        seconds=plan.seconds,
        recompute=sum(again[rung.keep] for rung in rungs) / step.flop,
        roofline=step.roofline,
    )


def _rungs(step: BlockStep, plan: _Plan) -> tuple[Rung, ...]:
    own = (plan.first.rung,) * (step.depth - plan.suffix) + (plan.last.rung,) * (plan.suffix - step.here)
    return (*own, Rung(plan.last.rung.keep)) if step.here else own


def _tile(plan: _Plan) -> int | None:
    """The plan's tile, where a block is tiled at all. First keeps no more than last."""
    return None if plan.first.rung.keep == "all" else plan.tile


def _does_not_fit(step: BlockStep, config: MemoryConfig, budget: int, host: int) -> UsageError:
    """What the settings need at least, and what would fit."""
    smallest = _smallest(step, config, host) or _smallest(step, config, UNBOUNDED)
    assert smallest is not None
    fits = _best(step, MemoryConfig(), budget, host)
    pinned = _best(step, MemoryConfig(), budget, UNBOUNDED) if fits is None else None
    fewer = "fewer tokens per step (batch_size, max_length)"
    if fits is not None:
        remedy = f"memory: auto fits: {_needs(step, fits)}"
    elif pinned is not None:
        remedy = f"{fewer}, or more host memory: {_needs(step, pinned)}"
    else:
        remedy = (
            f"{fewer}, a model of fewer bytes, or a plan over several devices: {_gib(step.standing)} hold"
            " before the first token"
        )
    what = f"a step of {step.own:,} tokens does not fit its memory"
    expected, found = f"at most {_gib(budget)}, host {_gib(host)}", f"at least {_needs(step, smallest)}"
    return UsageError(what, where="memory", expected=expected, found=found, remedy=remedy)


def _needs(step: BlockStep, plan: _Plan) -> str:
    tile = _tile(plan)
    tiled = f", tile {tile}" if tile else ""
    return f"{_gib(plan.peak)}, host {_gib(plan.host)} ({_spans(_rungs(step, plan))}{tiled})"


_RESTING = {
    "none": "",
    "input": " (input in host memory)",
    "attention": " (input and attention output in host memory)",
}


def _spans(rungs: tuple[Rung, ...]) -> str:
    """`blocks 0-25 keep attention (input in host memory), 26-31 keep all`."""
    found, start = [], 0
    for rung, group in groupby(rungs):
        count = len(list(group))
        who = f"{start}-{start + count - 1} keep" if count > 1 else f"{start} keeps"
        found.append(f"{who} {rung.keep}{_RESTING[rung.offload]}")
        start += count
    return f"block{'s' if '-' in found[0] else ''} {', '.join(found)}"


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"


def _duration(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms"
    return f"{seconds:.1f} s" if seconds >= 10 else f"{seconds:.2f} s"
