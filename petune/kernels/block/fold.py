"""Both passes of a fused block: the steps of its program one after the other, tile by tile where that is
asked for, and in turns with another pass where there is one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from petune.kernels.block.lent_steps import LENT
from petune.kernels.block.program import Program
from petune.kernels.block.rows import Sink
from petune.kernels.block.schedule import Section
from petune.kernels.block.steps import BlockRun, Values
from petune.kernels.block.turns import InTurns
from petune.kernels.configs import Level


def forward(
    program: Program, run: BlockRun, inputs: Sequence[Tensor | None], keep: Level, tile: int | None
) -> InTurns[tuple[Tensor, Values]]:
    """(the block's output, what the rung keeps, the inputs among it)."""
    schedule = program.schedules.forward(keep)
    v: Values = dict(zip(program.inputs, inputs, strict=True))
    run.kept = frozenset(schedule.kept)
    for section, drops in zip(schedule.sections, schedule.drops, strict=True):
        yield from _run(section, drops, run, v, _tiles(section, v, keep, tile))
    y: Tensor = v.pop(program.y)
    return y, {name: v[name] for name in schedule.kept}


def backward(
    program: Program,
    run: BlockRun,
    dy: Tensor,
    kept: Values,
    needs: Sequence[bool],
    given: Sequence[bool],
    keep: Level,
    tile: int | None,
    sink: Sink | None = None,
    lent: Tensor | None = None,
) -> InTurns[list[Tensor | None]]:
    """The gradients of the inputs, None for those not `given` as in need of one; those of what trains, as
    `needs` says, go into run.sink, which is `sink` where several passes share one.

    `kept` is used up. lent: the gradient of what it lends.
    """
    schedule = program.schedules.backward(keep, tuple(needs), tuple(given))
    run.sink, run.wants, run.grads = sink or Sink(needs), schedule.wants, {program.y: dy}
    run.grads |= {} if lent is None else {LENT: lent}
    for section, drops in zip(schedule.sections, schedule.drops, strict=True):
        yield from _run(section, drops, run, kept, _tiles(section, kept, keep, tile))
    return [run.grads.get(name) for name in program.inputs]


def _run(
    section: Section, drops: tuple[str, ...], run: BlockRun, v: Values, tiles: Sequence[slice]
) -> InTurns[None]:
    if len(tiles) < 2:
        yield from _act(section, run, v)
        return
    found: list[Values] = []
    back: list[dict[str, Tensor]] = []
    beside = {name: grad for name, grad in run.grads.items() if name not in section.returns}
    grads = {name: grad for name, grad in run.grads.items() if name not in beside}
    for rows in tiles:
        run.at(rows)
        run.grads = {name: grad[rows] for name, grad in grads.items()}
        tile = {name: None if v[name] is None else v[name][rows] for name in section.enters}
        yield from _act(section, run, tile)  # no step of rows talks
        found.append({name: tile[name] for name in section.leaves})
        back.append(run.grads)
        del tile
    run.at(None)
    for name in drops:
        del v[name]
    run.grads = beside | {name: torch.cat([one.pop(name) for one in back]) for name in list(back[0])}
    for name in section.leaves:
        v[name] = joined([one.pop(name) for one in found])


def _act(section: Section, run: BlockRun, v: Values) -> InTurns[None]:
    for action in section.actions:
        if run.turns is not None and action.step.talks(action.back):
            held = list(v.values()), list(run.grads.values())
            yield from run.turns.talk(partial(action.run, run, v))
            del held
        else:
            action.run(run, v)
        for name in action.drops:
            v.pop(name, None)
        if run.turns is not None and action.step.long:
            yield from run.turns.stop()


def _tiles(section: Section, v: Values, keep: Level, tile: int | None) -> Sequence[slice]:
    """The rows of each tile; nothing where there is but one."""
    if not section.tiles or tile is None or keep == "all":
        return ()
    m = next((len(v[name]) for name in section.enters if v[name] is not None), 0)
    size = max(1, tile)
    return [slice(start, min(start + size, m)) for start in range(0, m, size)]


def joined(pieces: list[Tensor | None]) -> Tensor | None:
    """Tiles one below the other; the only one as it is."""
    present = [piece for piece in pieces if piece is not None]
    return present[0] if len(present) == 1 else torch.cat(present) if present else None
