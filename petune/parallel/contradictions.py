"""What is wrong between the settings of `parallel:`, as far as neither a model nor the number of processes is
needed to know it; a plan knows the rest. Torch-free, as configs.py."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from petune.errors import Problem
from petune.parallel.configs import (
    CUTS,
    LOOPED,
    ROWS,
    AxisConfig,
    CutConfig,
    DpConfig,
    EpConfig,
    ParallelConfig,
    PpConfig,
    layouts,
    row_name,
    size_of,
)

# What is wrong, and where: a key path below `parallel`. The problem names the full path and has no place yet.
Contradiction = tuple[tuple[str, ...], Problem]

# List -> the region and the layout of it that the list shares out.
_SHARED_OUT = {
    "heads": ("attention", "heads"),
    "columns": ("mlp", "heads"),
    "sequence": ("connection", "sequence"),
}


def contradictions(config: ParallelConfig) -> Iterator[Contradiction]:
    """Everything wrong with `config` that needs neither a model nor a number of processes."""
    yield from too_many_cuts(config.axes)
    yield from beside_experts(config.axes)
    for name, axis in config.axes.items():
        yield from axis_contradictions(name, axis)


def too_many_cuts(names: Iterable[str]) -> Iterator[Contradiction]:
    """A block is cut in one way: one problem for every backend after the first that cuts blocks."""
    first, *others = [name for name in names if name in CUTS] or [""]
    for name in others:
        what = f"parallel.{name}: {first} and {name} both say how a block is cut"
        remedy = f"keep one of them; from the command line, parallel={{{name}: ...}} replaces the whole plan"
        yield (name,), Problem(what, expected="at most one of " + ", ".join(CUTS), remedy=remedy)


def beside_experts(axes: Mapping[str, AxisConfig]) -> Iterator[Contradiction]:
    """Experts are cut over replicas that are else whole: one problem for each axis that says else."""
    axis = axes.get("ep")
    if axis is None or size_of(axis) == 1:
        return
    whole = "the ranks of ep hold all but the experts whole"
    for name, other in axes.items():
        remedy = f"use dp and ep, or {name} without ep"
        if isinstance(other, CutConfig | PpConfig) and size_of(other) != 1:
            yield (name,), Problem(f"parallel.{name}: {whole}", found=f"ep beside {name}", remedy=remedy)
        elif isinstance(other, DpConfig) and other.shard:
            what = f"parallel.dp.shard: {whole}"
            yield ("dp", "shard"), Problem(what, remedy="use dp and ep without shard, or shard without ep")


def axis_contradictions(name: str, axis: AxisConfig) -> Iterator[Contradiction]:
    """What is wrong between the settings of one axis."""
    if isinstance(axis, DpConfig):
        yield from _lengths(name, axis, ("shares",))
        yield from _sharding(axis)
    elif isinstance(axis, PpConfig):
        yield from _stages(axis)
    elif isinstance(axis, EpConfig):
        yield from _lengths(name, axis, ("shares", "experts"))
    else:
        yield from _layouts(name, axis)
        yield from _without_use(name, axis)
        yield from _lengths(name, axis, ("shares", *_SHARED_OUT))
        if axis.shares and (given := [one for one in _SHARED_OUT if getattr(axis, one)]):
            what = f"parallel.{name}.shares: {', '.join(given)} {'are' if len(given) > 1 else 'is'} given too"
            remedy = "keep shares, one ratio for everything that is cut, or the lists"
            yield (name, "shares"), Problem(what, remedy=remedy)


def _lengths(name: str, axis: AxisConfig, lists: Iterable[str]) -> Iterator[Contradiction]:
    given = {one: len(getattr(axis, one)) for one in lists if getattr(axis, one)}
    first = next(iter(given), "")
    remedy = "give every list as many entries" + (
        "" if axis.size is None else " as size says, or remove size"
    )
    number, whose = given.get(first, 0), f"parallel.{name}.{first} has"
    if axis.size is not None:
        number, whose = axis.size, "size says"
    for one, length in given.items():
        if length != number:
            what = f"parallel.{name}.{one} has one entry per rank"
            expected = f"{number}, as {whose}"
            yield (name, one), Problem(what, expected=expected, found=str(length), remedy=remedy)


def _layouts(name: str, cut: CutConfig) -> Iterator[Contradiction]:
    given = {region: getattr(cut, region) for region in layouts(name, cut)}
    if name in ROWS:
        meant = {region: given[region] or layout for region, layout in layouts(name, cut).items()}
        for region, layout in layouts(name, cut).items():
            if given[region] not in (None, layout):
                what = f"parallel.{name}.{region}: this is what {name} fixes"
                remedy = _as_cut(meant)
                yield (name, region), Problem(what, expected=layout, found=given[region], remedy=remedy)
        return
    if missing := [region for region, layout in given.items() if layout is None]:
        what = f"parallel.cut: {' and '.join(missing)} {'are' if len(missing) > 1 else 'is'} missing"
        example = "for example  cut: {attention: sequence, mlp: heads, connection: sequence}"
        yield ("cut",), Problem(what, expected="attention, mlp and connection", remedy=example)
    by_sequence = [region for region in ("attention", "mlp") if given[region] == "sequence"]
    if given["connection"] == "whole" and by_sequence:
        what = (
            f"parallel.cut.connection: whole beside {' and '.join(by_sequence)} by sequence; an all-reduce"
            " would sum different tokens"
        )
        remedy = "set connection: sequence"
        yield ("cut", "connection"), Problem(what, expected="sequence", found="whole", remedy=remedy)


def _as_cut(meant: Mapping[str, str | None]) -> str:
    written = ", ".join(f"{region}: {layout}" for region, layout in meant.items())
    name = row_name(meant)
    return f"that is `cut`: {{{written}}}" + (f", or {name}" if name in ROWS else "")


def _without_use(name: str, cut: CutConfig) -> Iterator[Contradiction]:
    """Settings that nothing under these layouts reads. A layout not given yet (`cut`) excuses them."""
    found = layouts(name, cut)
    for one, (region, layout) in _SHARED_OUT.items():
        used = "sequence" in found.values() if one == "sequence" else found[region] == layout
        if getattr(cut, one) and not used and None not in found.values():
            rows = [other for other, row in ROWS.items() if getattr(row, region) == layout]
            idle = "nothing is cut by tokens" if one == "sequence" else f"{region} is not cut by {one}"
            instead = f"or set {region}: {layout}"
            if name in ROWS:
                instead = f"{one} belongs to {', '.join(rows)} and cut"
            what = f"parallel.{name}.{one}: under {name} {idle}"
            yield (name, one), Problem(what, remedy=f"remove it; {instead}")
    if cut.exchange != "gather" and found["attention"] == "heads":
        what = (
            f"parallel.{name}.exchange: attention under {name} is cut by heads, which see every key and value"
        )
        remedy = "remove it; exchange belongs to sp and cut"
        yield (name, "exchange"), Problem(what, found=cut.exchange, remedy=remedy)
    if cut.overlap and cut.exchange == "ring" and found["attention"] == found["mlp"] == "sequence":
        what = f"parallel.{name}.overlap: in a ring keys and values travel while attention is computed"
        yield (name, "overlap"), Problem(what, remedy="remove it")


def _sharding(dp: DpConfig) -> Iterator[Contradiction]:
    plain = DpConfig()
    for one in ("replicas", "reshard", "offload", "frozen"):
        if not dp.shard and getattr(dp, one) != getattr(plain, one):
            what = f"parallel.dp.{one}: it has a meaning only with shard"
            yield ("dp", one), Problem(what, remedy="set shard: true, or remove it")
    size = size_of(dp)
    if dp.shard and size is not None and dp.replicas > 1 and (size % dp.replicas or dp.replicas == size):
        what = "parallel.dp.replicas: every copy is sharded over as many ranks, more than one"
        expected = f"a divisor of size, {size}, and below it"
        yield ("dp", "replicas"), Problem(what, expected=expected, found=str(dp.replicas))


def _stages(pp: PpConfig) -> Iterator[Contradiction]:
    if not pp.stages or pp.size is None:
        return
    length = len(pp.stages)
    if pp.schedule in LOOPED and length % pp.size:
        what = f"parallel.pp.stages: {pp.schedule} gives every rank the same number of stages"
        yield ("pp", "stages"), Problem(what, expected=f"a multiple of size, {pp.size}", found=str(length))
    if pp.schedule not in LOOPED and length != pp.size:
        what = f"parallel.pp.stages: {pp.schedule} has one stage per rank"
        remedy = (
            f"several stages per rank: schedule: {' or '.join(LOOPED)}" if length % pp.size == 0 else None
        )
        expected = f"{pp.size}, as size says"
        yield ("pp", "stages"), Problem(what, expected=expected, found=str(length), remedy=remedy)
