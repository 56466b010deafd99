"""The plans that the parity tests run, written out by hand, so that they do not lean on what makes plans from
recipes.

Shares are uneven wherever the backend knows shares: 3:1 on two ranks, 2:1:1 of heads and 3:2:1 of the rest on
three. Tiny models have 8 query heads (Llama 4 key and value heads), 96 columns and two blocks per stack, or,
for a pipeline of Llama or BERT, three.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from petune.models.parts import Shape
from petune.parallel.configs import ROWS, BackendLayout
from petune.parallel.plan import Cut, ParallelPlan, Sharding, Stage
from tests.methods.zoo import MOE, ZOO, table, writes_beside

HEADS = {2: (6, 2), 3: (4, 2, 2)}
COLUMNS = {2: (72, 24), 3: (48, 32, 16)}
OF_EXPERTS = {16: {2: (8, 8)}, 24: {2: (16, 8), 3: (8, 8, 8)}}  # of so many in each
SEQUENCE = {2: (3, 1), 3: (3, 2, 1)}
VOCABULARY = {2: (3, 1), 3: (3, 2, 1)}
MIXED = BackendLayout("sequence", "heads", "sequence")  # what only `cut` can say
FSDP = Sharding(replicas=1, reshard=True, offload=False, frozen=True)
Plan = Callable[[str, int], ParallelPlan]  # of the zoo's model name and the ranks


@cache
def _shape(name: str) -> Shape:
    """Sizes of a block of the model `name`; lists of cells ask for them some hundred times."""
    _, config, values = (ZOO | MOE)[name]
    return table(name).shape(config(**values))


def cut(name: str, row: BackendLayout, ranks: int, exchange: str = "gather", vocabulary: bool = False) -> Cut:
    """The row of layouts over `ranks`, unevenly; lists of layouts that do not occur are empty."""
    by_heads = "heads" in (row.attention, exchange) or exchange == "ulysses"
    heads = HEADS[ranks] if by_heads else ()
    shape = _shape(name)
    group = shape.heads // shape.kv_heads
    return Cut(
        attention=row.attention,
        mlp=row.mlp,
        connection=row.connection,
        exchange=exchange,
        heads=heads,
        kv_heads=tuple(count // group for count in heads),
        columns=OF_EXPERTS.get(shape.columns, COLUMNS)[ranks] if row.mlp == "heads" else (),
        sequence=SEQUENCE[ranks] if row.connection == "sequence" else (),
        vocabulary=VOCABULARY[ranks] if vocabulary else (),
        overlap=False,
    )


def _cut(row: BackendLayout, exchange: str = "gather", vocabulary: bool = False) -> Plan:
    def plan(name: str, ranks: int) -> ParallelPlan:
        writes = not name.endswith(("classify", "tokens"))  # logits of the vocabulary
        return ParallelPlan(tp=ranks, cut=cut(name, row, ranks, exchange, vocabulary and writes))

    return plan


def _dp(name: str, ranks: int) -> ParallelPlan:
    return ParallelPlan(dp=ranks, shares={2: (3, 1), 3: (2, 1, 1)}[ranks])


def _shard(name: str, ranks: int) -> ParallelPlan:
    return replace(_dp(name, ranks), sharding=FSDP)


def stages(name: str, counts: Sequence[int]) -> tuple[Stage, ...]:
    """`counts` blocks per stage, the encoder's before the decoder's."""
    stacks = list(table(name).stacks)
    order: list[tuple[Any, int]] = (
        [(stack, 2) for stack in stacks] if len(stacks) > 1 else [(stacks[0], sum(counts))]
    )
    places = [(stack, index) for stack, number in order for index in range(number)]
    assert len(places) == sum(counts)
    found = []
    for at in range(len(counts)):
        held = places[sum(counts[:at]) : sum(counts[: at + 1])]
        mine = {stack: [index for other, index in held if other == stack] for stack, _ in order}
        found.append(
            Stage({stack: (min(indices), max(indices) + 1) for stack, indices in mine.items() if indices})
        )
    return tuple(found)


def counts_of(name: str, ranks: int, *, reverse: bool = False) -> tuple[int, ...]:
    """Uneven blocks per stage that add up to the model's, see `settings_of`."""
    both = writes_beside(name)
    counts = {2: (3, 1) if both else (2, 1), 3: (1, 2, 1) if both else (1, 1, 1)}[ranks]
    return counts[::-1] if reverse else counts


def pp(schedule: str, microbatches: int = 2, *, reverse: bool = False) -> Plan:
    """A pipeline over all ranks, with at least as many micro-batches as stages."""

    def plan(name: str, ranks: int) -> ParallelPlan:
        counts = counts_of(name, ranks, reverse=reverse)
        return ParallelPlan(
            pp=ranks, stages=stages(name, counts), schedule=schedule, microbatches=max(microbatches, ranks)
        )

    return plan


def looped(schedule: str, microbatches: int = 4) -> Plan:
    """A pipeline with two stages on each rank, stage s on rank s % ranks."""

    def plan(name: str, ranks: int) -> ParallelPlan:
        counts = (1,) * (2 * ranks) if writes_beside(name) else (2,) + (1,) * (2 * ranks - 1)
        return ParallelPlan(
            pp=ranks, stages=stages(name, counts), schedule=schedule, microbatches=microbatches
        )

    return plan


def settings_of(name: str, plan: ParallelPlan) -> tuple[tuple[str, Any], ...]:
    """What the model's config must say under this plan.

    For the stages of a pipeline, three blocks where two cannot be shared out unevenly. For a ring, no dropout
    in attention, which it refuses; T5 has one rate for everything.
    """
    found: list[tuple[str, Any]] = []
    family = name.partition("-")[0]
    if plan.pp > 1 and not writes_beside(name):
        found.append(
            ("num_hidden_layers", max(end for stage in plan.stages for _, end in stage.blocks.values()))
        )
    if plan.cut is not None and plan.cut.exchange == "ring":
        found.append(
            (
                {"bert": "attention_probs_dropout_prob", "t5": "dropout_rate"}.get(
                    family, "attention_dropout"
                ),
                0.0,
            )
        )
    return tuple(found)


BACKENDS: dict[str, Plan] = {
    "dp": _dp,
    "shard": _shard,
    "tp": _cut(ROWS["tp"], vocabulary=True),
    "tp-whole-vocabulary": _cut(ROWS["tp"]),
    "sp-gather": _cut(ROWS["sp"]),
    "sp-ulysses": _cut(ROWS["sp"], "ulysses"),
    "sp-ring": _cut(ROWS["sp"], "ring"),
    "galaxy": _cut(ROWS["galaxy"]),
    "galaxy2": _cut(ROWS["galaxy2"]),
    "cut": _cut(MIXED),
    "pp-1f1b": pp("1f1b"),
    "pp-gpipe": pp("gpipe", reverse=True),
}


def _times(*axes: str) -> Callable[[str], ParallelPlan]:
    """Two ranks along each of the axes named."""

    def plan(name: str) -> ParallelPlan:
        found = ParallelPlan()
        for axis in axes:
            own = BACKENDS[axis](name, 2)
            if own.dp > 1:
                found = replace(found, dp=own.dp, shares=own.shares, sharding=own.sharding)
            elif own.tp > 1:
                found = replace(found, tp=own.tp, cut=own.cut)
            else:
                found = replace(
                    found, pp=own.pp, stages=own.stages, schedule=own.schedule, microbatches=own.microbatches
                )
        return found

    return plan


def ep(name: str, ranks: int, replicas: int = 1) -> ParallelPlan:
    """Experts over `ranks`, rows too, both unevenly; as many replicas of all of them."""
    experts = _shape(name).experts
    first = experts - 2 * (ranks - 1) if experts >= 2 * ranks else experts - ranks + 1
    counts = (first, *(((experts - first) // (ranks - 1),) * (ranks - 1)))
    own = {2: (1, 3), 3: (1, 2, 1)}[ranks]
    shares = own * replicas
    return ParallelPlan(dp=ranks * replicas, shares=shares, ep=ranks, experts=counts)


def overlapping(backend: str) -> Plan:
    """The same with communication hidden behind the matmuls beside it."""

    def plan(name: str, ranks: int) -> ParallelPlan:
        found = BACKENDS[backend](name, ranks)
        assert found.cut is not None
        return replace(found, cut=replace(found.cut, overlap=True))

    return plan


OVERLAPPED: dict[str, Plan] = {
    backend: overlapping(backend) for backend in ("tp", "galaxy", "galaxy2", "cut")
}
LOOPED: dict[str, Plan] = {"pp-interleaved": looped("interleaved"), "pp-zero-bubble": looped("zero-bubble")}

COMPOSED: dict[str, Callable[[str], ParallelPlan]] = {
    "dp x tp": _times("dp", "tp"),
    "dp x galaxy": _times("dp", "galaxy"),
    "dp x pp": _times("dp", "pp-1f1b"),
    "tp x pp": _times("tp", "pp-1f1b"),
    "galaxy x pp": _times("galaxy", "pp-1f1b"),
    "sp x pp": _times("sp-gather", "pp-1f1b"),
    "shard x tp": _times("shard", "tp"),
    "shard x pp": _times("shard", "pp-1f1b"),
}
EIGHT: dict[str, Callable[[str], ParallelPlan]] = {
    "dp x tp x pp": _times("dp", "tp", "pp-1f1b"),
    "dp x galaxy x pp": _times("dp", "galaxy", "pp-1f1b"),
}
