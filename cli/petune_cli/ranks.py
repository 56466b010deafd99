"""The ranks of a plan on a terminal, while a run goes on: a line each, as the first of them hears the
others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from petune.log import human

if TYPE_CHECKING:
    from rich.table import Table

    from petune.parallel.launch.beats import Health

ROWS = 16  # ranks that are shown at the most
HEADS = ("rank", "device", "holds", "step", "s/step", "peak memory", "heard")


def share(held: Mapping[str, Any]) -> str:
    """What a rank holds, in a few words: its stage's blocks, its heads, its experts, its part of tokens
    and rows."""
    words = {
        "heads": "{} heads",
        "experts": "experts {}",
        "tokens": "{} of tokens",
        "rows": "{} of rows",
    }
    said = [form.format(held[key]) for key, form in words.items() if key in held]
    return "; ".join([str(held["blocks"]), *said] if "blocks" in held else said)


def cells(one: Health, holds: str) -> list[str]:
    """A rank's line."""
    seconds, peak, device = one.work or (None, None, "-")
    return [
        str(one.rank),
        device,
        holds,
        str(one.step + 1),  # the one it is at, from 1 as everywhere
        "-" if seconds is None else f"{seconds:.2f}",
        "-" if peak is None else human(peak),
        f"{one.age_s:.1f} s ago" if one.age_s else "here",
    ]


def panel(health: Sequence[Health], ranks: Sequence[Mapping[str, Any]]) -> Table:
    """Every rank that is heard of, those that are late for certain, and how many more there are. ranks: what
    each holds."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from petune.parallel.launch.beats import SILENT_S

    first = sorted(health, key=lambda one: (one.age_s < SILENT_S, one.rank))[:ROWS]
    shown = sorted(first, key=lambda one: one.rank)
    more = len(ranks) - len(shown)
    caption = f"and {more} more, of whom none is late" if more > 0 else None
    table = Table(*HEADS, box=SIMPLE_HEAD, caption=caption, caption_justify="left", pad_edge=False)
    for one in shown:
        holds = share(ranks[one.rank]) if one.rank < len(ranks) else ""
        table.add_row(*cells(one, holds), style="red" if one.age_s >= SILENT_S else None)
    return table


def height(world: int) -> int:
    """Lines that the bar and the panel of so many ranks take."""
    return min(world, ROWS) + 6
