"""The verb that looks ahead: how a recipe would lie across ranks, and what it would cost them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from petune.errors import UsageError
from petune.log import human
from petune_cli.arguments import Given, Json, Overwrite, Words, refuse_place
from petune_cli.display import show_json, show_table
from petune_cli.echo import echo

if TYPE_CHECKING:
    from petune.estimate.advice import Advice
    from petune.estimate.forecast import Forecast, Rank
    from petune.estimate.fused_forecast import Outlook
    from petune.recipe import Recipe


def plan(
    words: Words = None,
    world: Annotated[
        int | None,
        typer.Option("--world", min=1, help="Processes to plan for; else as many as the recipe asks for."),
    ] = None,
    memory: Annotated[
        str | None, typer.Option("--memory", help="Memory of each device: 24GiB, or one for each rank: 8,24.")
    ] = None,
    speeds: Annotated[
        str | None,
        typer.Option("--speeds", help="Speeds of unequal devices, 3,1: print shares that suit them."),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            "--device", help="CUDA devices to plan for: H200, H100, A100-80, A100-40; others with --memory."
        ),
    ] = None,
    auto: Annotated[
        bool, typer.Option("--auto", help="Measure this machine's devices and links; print the best plan.")
    ] = False,
    cluster: Annotated[
        Path | None,
        typer.Option("--cluster", metavar="FILE", help="The same for the devices and links of a file."),
    ] = None,
    simulate: Annotated[
        Path | None,
        typer.Option("--simulate", metavar="FILE", help="The same for CUDA devices that are not here."),
    ] = None,
    svg: Annotated[
        Path | None, typer.Option("--svg", metavar="FILE", help="Draw the schedule as a picture, too.")
    ] = None,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Plan layout, memory, traffic, schedule, speed; reads no weights."""
    recipe = Given.of(words).recipe()
    if auto or recipe.parallel.auto or cluster is not None or simulate is not None:
        others = {"--memory": memory, "--speeds": speeds, "--device": device, "--svg": svg}
        _search(recipe, world, cluster, simulate, json, [name for name, value in others.items() if value])
        return
    if svg is not None:
        refuse_place(svg, overwrite, "--svg FILE")
    seen, advice = _foreseen(recipe, world, memory, speeds, device)
    if json:
        show_json(_plain_forecast(seen, advice))
    else:
        _show(seen)
        for line in _advice(advice) if advice else ():
            echo(line)
    if svg is not None:
        _draw(seen.forecast, svg)
    seen.forecast.check()


def _foreseen(
    recipe: Recipe, world: int | None, memory: str | None, speeds: str | None, device: str | None
) -> tuple[Outlook, Advice | None]:
    """How the recipe would lie across its ranks; where their speeds are given, with shares that suit them."""
    sizes: Sequence[int] | None = _sizes(memory) if memory is not None else None
    from petune.estimate import advice as shares
    from petune.estimate import forecast
    from petune.estimate.fused_forecast import on_device, outlook

    if device is not None:
        recipe, sizes = on_device(recipe, device, sizes)
    if speeds is None:
        return outlook(forecast.forecast(recipe, world, sizes), device), None
    rates = _rates(speeds)
    if world not in (None, len(rates)):
        raise UsageError(
            "one speed for each rank", where="--speeds", expected=f"{world} speeds", found=str(len(rates))
        )
    advice = shares.advise(recipe, rates, sizes)
    return outlook(advice.forecast, device), advice


def _search(
    recipe: Recipe,
    world: int | None,
    cluster: Path | None,
    simulate: Path | None,
    json: bool,
    others: Sequence[str],
) -> None:
    """Look for the best plan, of this machine or of a file's devices."""
    file = cluster or simulate
    if others or (cluster and simulate) or (file and world):
        found = ", ".join(others) or ("--world" if world else "--cluster and --simulate")
        raise UsageError("this does not go with a search for a plan", where=found, remedy="leave it out")
    from petune.estimate.cluster import read_cluster
    from petune.estimate.findings import explained, facts, table
    from petune.estimate.forecast import sketch
    from petune.estimate.planner import Planner

    if file is not None:
        devices = read_cluster(file)
    else:
        from petune.estimate.measure import measured

        echo("measuring the devices and the links between them", err=True)
        devices = measured(recipe, world)
    if simulate is not None and recipe.device == "auto":
        recipe = recipe.model_copy(update={"device": "cuda"})
    seen = Planner(sketch(recipe), devices).search()
    if json:
        show_json(facts(seen))
        return

    show_table(*table(seen))
    echo("")
    for line in explained(seen):
        echo(line)


def _draw(found: Forecast, file: Path) -> None:
    from petune.estimate.timeline import charts
    from petune_cli.drawing import as_svg

    drawn = charts(found)
    if not drawn:
        remedy = "leave --svg out, or name axes: parallel=tp"
        raise UsageError("one process has no schedule to draw", where="--svg", remedy=remedy)
    file.write_text(as_svg(drawn, found.facts), encoding="utf-8")
    echo(f"drawn    {file}")


def _sizes(text: str) -> list[int]:
    """Bytes of `24GiB`, `8GB` or `24` (GiB), or of several with commas. Raises UsageError."""
    from petune.estimate.cluster import read_size

    found = []
    for word in text.split(","):
        size = read_size(word)
        if size is None:
            raise UsageError(
                "this is no size", where="--memory", expected="24GiB, 24GB or 24, or a list 8,24", found=word
            )
        found.append(size)
    return found


def _rates(text: str) -> list[float]:
    try:
        return [float(word) for word in text.split(",")]
    except ValueError:
        raise UsageError(
            "speeds are numbers", where="--speeds", expected="for example 3,1", found=text
        ) from None


def _plain_forecast(seen: Outlook, advice: Advice | None) -> dict[str, object]:
    """Facts, ranks with their bytes, what is sent, and what was advised."""
    from petune.estimate.findings import written

    found = seen.forecast
    return {
        "facts": [*found.facts, *seen.lines],
        "ranks": [
            asdict(rank) | {"held": rank.held, "total": rank.total, "fits": rank.fits} for rank in found.ranks
        ],
        "transitions": [asdict(one) for one in found.transitions],
        "bubble": found.bubble,
    } | ({"parallel": written(advice.parallel), "ratio": advice.ratio} if advice else {})


def _show(seen: Outlook) -> None:
    found = seen.forecast
    for line in (*found.facts, *seen.lines):
        echo(line)
    echo("")
    idle = [] if any(rank.memory.gathered for rank in found.ranks) else ["gathered"]
    idle += [] if found.plan.experts else ["experts"]
    idle += [] if any(rank.held for rank in found.ranks) else ["rows at most"]
    show_table(_HEADS, [_row(rank) for rank in found.ranks], without=idle)
    if found.transitions:
        echo("")
        rows = [
            (
                one.where,
                one.operations,
                str(one.times),
                *(human(size) if size else "-" for size in (one.forward, one.backward)),
            )
            for one in found.transitions
        ]
        show_table(("sent by a rank", "forward / backward", "times", "forward", "backward"), rows)
    _schedule(found)
    echo("")
    for line in _closing(found, fused=bool(seen.policies)):
        echo(line)


def _schedule(found: Forecast) -> None:
    from petune.estimate.timeline import charts
    from petune_cli.drawing import as_text

    lines = as_text(charts(found))
    for line in ["", *lines] if lines else []:
        echo(line)


_SHARES = ("rank", "blocks", "heads", "columns", "experts", "tokens", "rows")
_BYTES = ("frozen", "tuned", "gradients", "optimizer", "activations", "gathered", "in all", "of")
_HEADS = (*_SHARES, *_BYTES, "rows at most")


def _row(rank: Rank) -> tuple[str, ...]:
    memory = rank.memory
    numbers = (rank.heads, rank.columns, rank.experts, rank.tokens, rank.rows)
    parts = (memory.frozen, memory.tuned, memory.gradients, memory.optimizer, memory.activations)
    sizes = (*parts, memory.gathered, rank.total)
    return (
        str(rank.rank),
        rank.blocks,
        *("-" if number is None else str(number) for number in numbers),
        *map(human, sizes),
        "?" if rank.limit is None else human(rank.limit) + ("" if rank.fits else "  DOES NOT FIT"),
        human(rank.held),
    )


def _closing(found: Forecast, fused: bool) -> Iterator[str]:
    resting = max(rank.memory.at_rest for rank in found.ranks)
    if resting:
        what = "host    " if found.drawn.work.streamed is not None else "shards  "
        yield f"{what} {human(resting)} of each rank rest in the memory of the CPU"
    if found.plan.pp > 1:
        yield f"bubble   {found.bubble:.0%} of a step a rank waits for others, if all stages take as long"
    process = found.ranks[0].process
    activations = "what the peak above has besides the rest" if fused else "an estimate for the longest rows"
    yield f"memory   {human(process)} a process for itself is in the sums; activations are {activations}"
    if leaving := max(rank.memory.leaving for rank in found.ranks):
        later = max(rank.total - rank.memory.leaving for rank in found.ranks)
        yield f"cache    all rows known, {human(leaving)} of blocks leave memory: {human(later)} in all"
    if found.drawn.recipe.cache:
        yield _cache(found)
    if all(rank.fits for rank in found.ranks):
        unknown = any(rank.limit is None for rank in found.ranks)
        yield "fits     not known: these devices are not here, give --memory" if unknown else "fits     yes"


def _cache(found: Forecast) -> str:
    """What the activation cache takes, and how much of it a GPU has room for."""
    from petune.estimate.forecast import cached_row

    drawn, row = found.drawn, cached_row(found.drawn, found.plan)
    tokens = " + ".join(map(str, drawn.work.tokens.values()))
    line = f"cache    {human(row)} for a row of {tokens} tokens"
    room = [rank.held for rank in found.ranks if rank.limit is not None and rank.room]
    if not room:
        return line
    return f"{line}; on the device, besides, where all take at most {human(min(room))}, which is in the sums"


def _advice(advice: Advice) -> Iterator[str]:
    yield (
        f"gain     a step computes {1 / advice.ratio:.2f} times as fast as with even shares; communication"
        " does not count in this"
    )
    from petune.estimate.findings import written

    yield "write    " + written(advice.parallel)
