"""A step of a plan as charts: who computes and sends what, and when. The command line draws them.

The chart of a pipeline is to scale. Its order is what torch's schedules do when they are run
(petune.parallel.pipeline.order); a pass begins when its rank is free and what it reads has been made, and
takes as long as petune.estimate.comm_cost.bubble has it: a unit a block forward, one for inputs, and for
weights the part of the parameters that train. Transport takes no time. The other charts tell the order alone,
and what is sent from the same table as `petune plan` prints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from petune.estimate.comm_cost import Transition, When, regions_of
from petune.estimate.durations import Both
from petune.estimate.footprint import held_by
from petune.estimate.forecast import Forecast
from petune.estimate.fused_forecast import block_shapes
from petune.log import human
from petune.methods import count_parameters
from petune.models.spec import Family, StackName
from petune.parallel import ParallelPlan
from petune.parallel.mesh import Coordinate
from petune.parallel.pipeline.order import Pass, StageStep, order_of
from petune.parallel.pipeline.stage_module import SELECTIVE
from petune.parallel.pipeline.stages import ends_of
from petune.parallel.plan import Stage

SpanKind = Literal["forward", "backward", "weights", "compute", "send"]  # what a rank is busy with
KINDS: Mapping[Pass, SpanKind] = {"F": "forward", "B": "backward", "I": "backward", "W": "weights"}
WORDS: Mapping[Pass, str] = {
    "F": "forward",
    "B": "backward",
    "I": "backward for inputs",
    "W": "backward for weights",
}


@dataclass(frozen=True)
class Box:
    """Something that a rank does from `start` to `end`. text: in a few letters; title: in full."""

    kind: SpanKind
    text: str
    title: str
    start: float
    end: float


@dataclass(frozen=True)
class TimelineRow:
    """What some ranks do alike, in the order of time."""

    label: str
    boxes: tuple[Box, ...]


@dataclass(frozen=True)
class Arrow:
    """What goes from row `source` at the end of a pass to row `target` ahead of another."""

    source: int
    target: int
    start: float
    end: float
    title: str


@dataclass(frozen=True)
class Chart:
    """Rows above one another. unit: what a unit of time is; empty where the order alone counts. notes: lines
    below."""

    title: str
    rows: tuple[TimelineRow, ...]
    unit: str = ""
    arrows: tuple[Arrow, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def end(self) -> float:
        """When the last row is done."""
        return max(box.end for row in self.rows for box in row.boxes)

    @property
    def idle(self) -> float:
        """The part of its time in which a row waits, on average."""
        busy = sum(box.end - box.start for row in self.rows for box in row.boxes)
        return 1 - busy / (len(self.rows) * self.end)


def charts(found: Forecast) -> tuple[Chart, ...]:
    """The charts of a plan of several ranks; none for one process."""
    if found.plan.world == 1:
        return ()
    pipeline = [_pipeline(found)] if found.plan.pp > 1 else []
    return (*pipeline, *_blocks(found), *_step(found))


# ---------------------------------------------------------------- a pipeline


def timed(
    order: Sequence[Sequence[StageStep]],
    last: int,
    length: Callable[[StageStep], float],
    travel: Callable[[int, int], float] = lambda source, target: 0.0,
) -> list[list[tuple[StageStep, float, float]]]:
    """Start and end of each step of each rank, all as early as their order and what they read allow. last:
    the number of the last stage; travel: how long what a stage makes is on its way to another, once that is
    free to receive it."""
    found: list[list[tuple[StageStep, float, float]]] = [[] for _ in order]
    for rank, step, start, end in _played(_followed(order, last), length, travel):
        found[rank].append((step, start, end))
    return found


_Result = tuple[str, int, int]
_Followed = tuple[int, StageStep, _Result, set[_Result]]


def _played(
    steps: Iterable[_Followed],
    length: Callable[[StageStep], float],
    travel: Callable[[int, int], float],
) -> Iterator[tuple[int, StageStep, float, float]]:
    """The rank of each step with its start and end; see `timed`."""
    free, ends = dict[int, float](), dict[_Result, float]()
    for rank, step, result, needs in steps:
        start = ready = free.get(rank, 0.0)
        for need in needs:
            start = max(start, max(ready, ends[need]) + travel(need[1], step.stage))
        free[rank] = ends[result] = start + length(step)
        yield rank, step, start, free[rank]


def _followed(order: Sequence[Sequence[StageStep]], last: int) -> Iterator[_Followed]:
    """All steps, each behind those that it waits for: its rank, what it makes and what it reads."""
    done, made = [0] * len(order), set[_Result]()
    while moved := [rank for rank, steps in enumerate(order) if done[rank] < len(steps)]:
        before = len(made)
        for rank in moved:
            step = order[rank][done[rank]]
            if (needs := _needs(step, last)) <= made:
                yield rank, step, _result(step), needs
                made.add(_result(step))
                done[rank] += 1
        if len(made) == before:
            raise RuntimeError("the ranks of this schedule wait for one another for ever")


def end_of(plan: ParallelPlan, lengths: Sequence[Both], sends: Sequence[Both]) -> float:
    """Seconds until the last pass of a pipeline is done, of stages with such passes and messages."""

    def length(step: StageStep) -> float:
        one = lengths[step.stage]
        return 0.0 if step.kind == "W" else one.forward if step.kind == "F" else one.backward

    def travel(source: int, target: int) -> float:
        if source == target:
            return 0.0
        return sends[source].forward if target > source else sends[target].backward

    steps = _steps(plan.pp, len(lengths), plan.schedule, plan.microbatches)
    return max(end for *_, end in _played(steps, length, travel))


@lru_cache(maxsize=256)
def _steps(pp: int, stages: int, schedule: str, pieces: int) -> tuple[_Followed, ...]:
    plan = ParallelPlan(pp=pp, stages=(Stage({}),) * stages, schedule=schedule, microbatches=pieces)
    return tuple(_followed(order_of(plan), stages - 1))


def _result(step: StageStep) -> tuple[str, int, int]:
    """What the pass makes; a backward pass for inputs makes what others read of a whole one."""
    return "B" if step.kind == "I" else step.kind, step.stage, step.piece


def _needs(step: StageStep, last: int) -> set[tuple[str, int, int]]:
    """What the pass reads."""
    stage, piece = step.stage, step.piece
    if step.kind == "F":
        return {("F", stage - 1, piece)} if stage else set()
    if step.kind == "W":
        return {("B", stage, piece)}
    return {("F", stage, piece)} | ({("B", stage + 1, piece)} if stage < last else set())


def _pipeline(found: Forecast) -> Chart:
    plan, last = found.plan, len(found.plan.stages) - 1
    passes, sent = timed(order_of(plan), last, _length(found)), _between(found)
    rows = tuple(
        TimelineRow(_ranks(found, rank), tuple(_box(plan, sent, *one) for one in of_rank))
        for rank, of_rank in enumerate(passes)
    )
    starts = {_result(step): start for of_rank in passes for step, start, _ in of_rank}
    arrows = tuple(
        Arrow(rank, onward[1] % plan.pp, end, starts[onward], title)
        for rank, of_rank in enumerate(passes)
        for step, _, end in of_rank
        if (onward := _onward(step, last)) is not None and (title := _parcel(step, sent))
    )
    pieces = f"{plan.microbatches} micro-batch{'es' * (plan.microbatches != 1)}"
    name = f"a step by {plan.schedule}, {pieces}, {last + 1} stages"
    notes = tuple(
        f"stage {stage} to {stage + 1}: {human(ahead)} a micro-batch forward, {human(back)} back"
        for stage, (ahead, back) in sent.items()
    )
    return Chart(name, rows, "a block's forward pass", arrows, notes)


def _length(found: Forecast) -> Callable[[StageStep], float]:
    """Units that a pass takes."""
    plan = found.plan
    trained, every = count_parameters(found.drawn.model)
    splits = plan.schedule == "zero-bubble" and _all_split(found)

    def length(step: StageStep) -> float:
        blocks = sum(end - first for first, end in plan.stages[step.stage].blocks.values())
        whole = 1 + trained / every
        if step.kind == "W":
            return blocks * (whole - 1) if splits else 0.0
        return blocks * (1.0 if step.kind == "F" or (step.kind == "I" and splits) else whole)

    return length


def _all_split(found: Forecast) -> bool:
    """Whether torch splits the backward pass of every stage, or fused blocks do; where not, the pass for
    inputs makes all."""
    drawn, plan = found.drawn, found.plan
    parts = [held_by(drawn.model, drawn.family, plan, Coordinate(pp=rank)).modules for rank in range(plan.pp)]
    if SELECTIVE and all(ends_of(module).splits for part in parts for module in part):
        return True
    return any(shape.trained for shape in block_shapes(drawn, plan, parts[0]))


def _between(found: Forecast) -> dict[int, tuple[int, int]]:
    """Bytes of a micro-batch from stage n to the next and back, by n."""
    sizes: dict[int, tuple[int, int]] = {}
    pieces = found.plan.microbatches
    for one in found.transitions:
        if one.when == "stage":
            number = int(one.where.split()[-3])
            ahead, back = sizes.get(number, (0, 0))
            sizes[number] = ahead + one.forward // pieces, back + one.backward // pieces
    return sizes


def _onward(step: StageStep, last: int) -> tuple[str, int, int] | None:
    """The pass that reads what this one sends."""
    if step.kind == "F":
        return ("F", step.stage + 1, step.piece) if step.stage < last else None
    return ("B", step.stage - 1, step.piece) if step.kind != "W" and step.stage else None


def _parcel(step: StageStep, sent: Mapping[int, tuple[int, int]]) -> str:
    """What a pass sends, in words; empty for nothing."""
    if step.kind == "F":
        size, what, to = sent.get(step.stage, (0, 0))[0], "hidden states", step.stage + 1
    else:
        size, what, to = sent.get(step.stage - 1, (0, 0))[1], "gradients", step.stage - 1
    nothing = step.kind == "W" or not size
    return "" if nothing else f"{what} of micro-batch {step.piece}, {human(size)}, to stage {to}"


def _box(
    plan: ParallelPlan, sent: Mapping[int, tuple[int, int]], step: StageStep, start: float, end: float
) -> Box:
    several = len(plan.stages) > plan.pp
    text = f"{step.stage if several else ''}{step.kind}{step.piece}"
    parcel = _parcel(step, sent)
    title = (
        f"{WORDS[step.kind]} of micro-batch {step.piece} through stage {step.stage}"
        f" ({_span(plan.stages[step.stage])})" + (f"; sends {parcel}" if parcel else "")
    )
    return Box(KINDS[step.kind], text, title, start, end)


def _span(stage: Stage) -> str:
    return ", ".join(f"{name} {first}-{end - 1}" for name, (first, end) in stage.blocks.items())


def _ranks(found: Forecast, pp: int | None = None) -> str:
    """The ranks at a place of the pp axis, or all of them."""
    numbers = [rank.rank for rank in found.ranks if pp is None or rank.at.pp == pp]
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {numbers[0]}-{numbers[-1]}"


# ---------------------------------------------------------------- a block


def _blocks(found: Forecast) -> Iterator[Chart]:
    """One block of each stack that is cut, forward and backward."""
    family, cut = found.drawn.family, found.plan.cut
    if family is None or cut is None:
        return
    depth = family.depth(found.drawn.config)
    stacks = [stack for stack in family.stacks if depth.get(stack)]
    for stack in stacks:
        ahead, back = _of_block(found, family, stack, crossed=stack == "decoder" and "encoder" in stacks)
        title = f"a block of the {stack}, {depth[stack]} times, on {_ranks(found)}"
        rows = [TimelineRow("forward", _in_order(ahead))] + (
            [TimelineRow("backward", _in_order(back))] if back else []
        )
        notes = tuple(
            f"beside it, {one.where}: {one.operations}, {human(one.forward)} and {human(one.backward)}"
            for one in found.transitions
            if one.where.startswith(f"ladder, {stack} ")
        )
        yield Chart(title, tuple(rows), notes=notes)


Item = tuple[SpanKind, str, str]  # kind, text, title


def _of_block(
    found: Forecast, family: Family, stack: StackName, *, crossed: bool
) -> tuple[list[Item], list[Item]]:
    """What happens in a block, forward and backward."""
    ahead: list[Item] = []
    back: list[Item] = []
    for name, region in regions_of(family, stack, crossed=crossed):
        own = {one.when: one for one in found.transitions if one.where == name}
        words = name.removeprefix(f"{stack} "), f"{name}, {_layout(found, region.kind)}"
        ahead += [*_sent(own, 0, "enter"), _computed(own, 0, *words), *_sent(own, 0, "leave", "ends")]
        # the way back, which is turned round below
        back += [*_sent(own, 1, "enter", "ends"), _computed(own, 1, *words), *_sent(own, 1, "leave")]
    flows = any(one.backward for one in found.transitions if one.where.startswith(f"{stack} "))
    return ahead, back[::-1] if flows else []


def _computed(own: Mapping[When, Transition], way: Literal[0, 1], text: str, title: str) -> Item:
    """A region, with what its ranks exchange within it."""
    inside = "".join(f" ({sent} inside)" for _, sent, _ in _sent(own, way, "within"))
    return "compute", text + inside, title + inside


def _layout(found: Forecast, kind: str) -> str:
    assert found.plan.cut is not None
    by = found.plan.cut.layout(kind)
    if by == "whole":
        return "whole on every rank"
    return f"cut by {'columns' if by == 'heads' and kind == 'mlp' else by}"


def _sent(own: Mapping[When, Transition], way: Literal[0, 1], *times: When) -> Iterator[Item]:
    """What is sent at some of the times, forward (0) or backward (1)."""
    for one in (own[when] for when in times if when in own):
        size = (one.forward, one.backward)[way]
        if size:
            operation = one.operations.split(" / ")[way]
            title = f"{operation} at {one.where}: each rank sends {human(size)}"
            yield "send", f"{operation} {human(size)}", title


def _in_order(items: Sequence[Item]) -> tuple[Box, ...]:
    return tuple(
        Box(kind, text, title, float(at), float(at + 1)) for at, (kind, text, title) in enumerate(items)
    )


# ---------------------------------------------------------------- a step


BEFORE: tuple[When, ...] = ("weights", "vocabulary")
AFTER: tuple[tuple[When, ...], tuple[When, ...]] = (("exit",), ("states", "entry", "gradients"))


def _step(found: Forecast) -> Iterator[Chart]:
    """What is sent outside of blocks and not between stages: around the two passes, and once a step."""
    items: list[Item] = []
    for way, name in enumerate(("forward", "backward")):
        items += (item for when in BEFORE for item in _all_sent(found, way, when))
        items.append(("compute", name, f"the {name} pass of all blocks"))
        items += (item for when in AFTER[way] for item in _all_sent(found, way, when))
    by_block = any(one.when == "weights" for one in found.transitions)
    notes = ("weights are gathered block by block, each ahead of the block that needs them",) * by_block
    if any(kind == "send" for kind, _, _ in items):
        yield Chart("a step", (TimelineRow(_ranks(found), _in_order(items)),), notes=notes)


def _all_sent(found: Forecast, way: int, when: When) -> Iterator[Item]:
    for one in found.transitions:
        size = (one.forward, one.backward)[way]
        if one.when == when and size:
            operation = one.operations.split(" / ")[way]
            times = f", {one.times} times" if one.times > 1 else ""
            title = f"{operation}, {one.where}: each rank sends {human(size)}{times}"
            yield "send", f"{operation} {human(size)} ({one.where})", title
