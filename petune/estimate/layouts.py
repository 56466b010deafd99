"""Every way to lay the ranks of a cluster along the axes of a plan, evenly."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any, cast

from petune.parallel import ParallelConfig
from petune.parallel.configs import ROWS, CutConfig, DpConfig, EpConfig, PpConfig

PIECES = (1, 2, 4, 8)  # micro-batches that are tried, times the stages
WIDEST = 32  # ranks of a cut that are tried
LOOPS = 256  # stages times micro-batches beyond which interleaving is not tried: its order takes long to make


def layouts(world: int, rows: int, blocks: int, experts: int = 0) -> Iterator[ParallelConfig]:
    """Every way to lay `world` ranks along the axes, evenly, that could be a plan for so many rows, blocks
    and experts of each mixture."""
    for ep in _divisors(world)[1:] if world <= rows else ():
        if ep <= experts:
            whole = DpConfig(size=world // ep) if ep < world else None
            yield ParallelConfig(dp=whole, ep=EpConfig(size=ep))
    for tp in (ranks for ranks in _divisors(world) if ranks <= WIDEST):
        for pp in _divisors(world // tp):
            dp = world // tp // pp
            if dp > rows or pp > blocks:
                continue
            for sharded in (False, True) if dp > 1 else (False,):
                for cut in _cuts(tp):
                    for stages in _pipelines(pp, rows // dp, blocks):
                        whole = DpConfig(size=dp, shard=sharded) if dp > 1 else None
                        yield ParallelConfig(dp=whole, pp=stages, **cut)


def _divisors(number: int) -> list[int]:
    return [one for one in range(1, number + 1) if number % one == 0]


def _cuts(ranks: int) -> Iterator[dict[str, Any]]:
    if ranks == 1:
        yield {}
        return
    for name in ROWS:
        for exchange in ("gather", "ulysses") if name == "sp" else ("gather",):
            for vocabulary in (None,) if name == "tp" else (None, True):
                yield {name: CutConfig(size=ranks, exchange=exchange, vocabulary=vocabulary)}


def _pipelines(ranks: int, rows: int, blocks: int) -> Iterator[PpConfig | None]:
    if ranks == 1:
        yield None
        return
    for schedule, stages in (("1f1b", ranks), ("interleaved", 2 * ranks)):
        pieces = [ranks * times for times in PIECES if ranks * times <= rows] if stages <= blocks else []
        pieces = [number for number in pieces if schedule == "1f1b" or number * stages <= LOOPS]
        yield from (PpConfig(size=ranks, schedule=schedule, microbatches=number) for number in pieces)


def kind_of(parallel: ParallelConfig) -> str:
    """What recipes have rules about: which axes there are, and whether weights are sharded."""
    sharded = parallel.dp is not None and parallel.dp.shard
    looped = parallel.pp is not None and parallel.pp.schedule
    return f"{' '.join(parallel.axes)} {sharded} {looped}"


def overlapped(parallel: ParallelConfig) -> ParallelConfig:
    """The same with a cut whose ranks hide what they say."""
    axes = {
        name: replace(axis, overlap=True)
        for name, axis in parallel.axes.items()
        if isinstance(axis, CutConfig)
    }
    return replace(parallel, **cast("dict[str, Any]", axes))


def plain(parallel: ParallelConfig) -> dict[str, dict[str, Any]]:
    """The axes as a recipe has them, defaults left out."""
    return {
        name: {
            entry.name: list(value) if isinstance(value, tuple) else value
            for entry in fields(axis)
            if (value := getattr(axis, entry.name)) != entry.default
        }
        for name, axis in parallel.axes.items()
    }
