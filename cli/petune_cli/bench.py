"""The verb that measures: how fast a recipe trains on this machine, and in how much memory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from petune_cli.arguments import Given, Json, Overwrite, Words, refuse_place
from petune_cli.display import show_json, show_table
from petune_cli.echo import echo

if TYPE_CHECKING:
    from petune.profiling.throughput import Measured

HEADS = (
    "method",
    "memory",
    "blocks kept",
    "tokens/s",
    "quartiles",
    "step, ms",
    "MFU",
    "HFU",
    "peak GiB",
    "host GiB",
    "loss",
)
_BELOW = """
MFU, HFU  against {:.3g} TFLOP/s of large matmuls, measured here for a second
          MFU counts what the model asks for: 4 FLOP a token for each frozen weight the gradient passes, 6 for
          one that trains
          HFU counts what was computed, the method and recomputation included"""


def bench(
    words: Words = None,
    methods: Annotated[
        str | None, typer.Option("--methods", metavar="LIST", help="Methods: lora,full; else the recipe's.")
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            "--memory", metavar="LIST", help="Memory policies, KEEP or KEEP/OFFLOAD: all,attention/input."
        ),
    ] = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps that count.")] = 20,
    warm: Annotated[
        float | None, typer.Option("--warm", min=0, help="Seconds of steps before them; else 3 on a GPU.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw speed over memory as a PNG.")
    ] = None,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Measure the training step: speed, use of the device, memory."""
    if plot is not None:
        refuse_place(plot, overwrite, "--plot FILE")
    recipe = Given.of(words).recipe()
    from petune.profiling import throughput as room

    wanted = room.cases(recipe, _listed(methods), _listed(memory))
    rate = room.probe(recipe)
    found = []
    for case in wanted:
        echo(f"measuring {' '.join(filter(None, (case.method, case.memory)))}", err=True)
        found.append(room.measure(case, steps, warm))
    if json:
        show_json([_plain(one, rate) for one in found])
    else:
        show_table(HEADS, [_row(one, rate) for one in found])
        echo(_BELOW.format(rate / 1e12))
    if plot is not None:
        room.draw(found, rate, plot)
        echo(f"drawn    {plot}", err=json)


def _listed(text: str | None) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()] if text else []


def _plain(one: Measured, rate: float) -> dict[str, object]:
    """What was measured of a case, in units: seconds and tokens of each step, bytes, shares of `rate`."""
    found = {name: value for name, value in vars(one).items() if name not in ("case", "flops", "executed")}
    found |= {"method": one.case.method, "memory": one.case.memory}
    if one.error is None:
        shares = {"mfu": one.utilisation(rate), "hfu": one.hardware_utilisation(rate)}
        found |= {"tokens_per_s": one.quartiles[1], "flop_per_s": rate, **shares}
    return found


def _row(one: Measured, rate: float) -> tuple[str, ...]:
    names = (one.case.method, one.case.memory or "-")
    if one.error is not None:
        return (*names, one.error, *[""] * (len(HEADS) - 3))
    low, median, high = one.quartiles
    used = (one.utilisation(rate), one.hardware_utilisation(rate))
    return (
        *names,
        one.kept or "-",
        f"{median:,.0f}",
        f"{low:,.0f} to {high:,.0f}",
        f"{1e3 * sum(one.seconds) / len(one.seconds):.1f}",
        *("-" if share is None else f"{share:.1%}" for share in used),
        *("-" if size is None else f"{size / 2**30:.2f}" for size in (one.peak, one.host)),
        f"{one.loss:.4f}",
    )
