"""A parallel plan: frozen data that says which rank holds what, with the arithmetic of shares. Made of a
recipe and a model's config alone (petune.parallel.planning), so on a laptop too; everything that touches
devices reads it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from petune.models.spec import Attention, Config, Family, Shape, StackName, StackRule
from petune.parallel.configs import LOOPED, Connection, CutBy, row_name


@dataclass(frozen=True)
class Cut:
    """How blocks are cut over the ranks of the tp axis. Lists have one entry per rank; empty where that
    layout does not occur.

    heads, kv_heads, columns: exact counts, of an expert where there are experts (see `features_of`).
    sequence, vocabulary: ratios, scaled by `apportion` to every batch and by `in_grains` to the rows of
    embedding and head.
    """

    attention: CutBy
    mlp: CutBy
    connection: Connection
    exchange: str
    heads: tuple[int, ...]
    kv_heads: tuple[int, ...]
    columns: tuple[int, ...]
    sequence: tuple[int, ...]
    vocabulary: tuple[int, ...]
    overlap: bool

    def layout(self, kind: str) -> CutBy | Connection:
        """The layout of a region of a kind; a mixer is whole on every rank."""
        return {"attention": self.attention, "mlp": self.mlp}.get(kind, "whole")

    @property
    def folds(self) -> bool:
        """Whether ranks have two pieces of a sequence where a stack is `foldable`."""
        return self.attention == self.mlp == "sequence" and self.exchange == "gather"


def foldable(rule: StackRule) -> bool:
    """Whether ranks that gather keys may have two pieces of a stack's sequence (petune.models.exchange): its
    attention is causal, and reads of tokens nothing beside but masks and positions."""
    attends = [core for core in rule.cores if isinstance(core, Attention)]
    plain = all(core.causal and core.memory is None and core.positions is None for core in attends)
    return plain and bool(attends) and rule.linear is None and rule.bias is None


@dataclass(frozen=True)
class Stage:
    """One stage of a pipeline: for each stack, the numbers [first, end) of the blocks it holds; absent where
    it holds none."""

    blocks: dict[StackName, tuple[int, int]]


@dataclass(frozen=True)
class Sharding:
    """FSDP2 over the dp axis; see DpConfig."""

    replicas: int
    reshard: bool
    offload: bool
    frozen: bool


@dataclass(frozen=True)
class ParallelPlan:
    """Sizes of the three axes and what lies along each. World rank = (pp * dp_size + dp) * tp_size + tp.

    shares: rows per dp replica, as a ratio. stages: one per pipeline stage; with `interleaved` and
    `zero-bubble` several per rank, stage s on rank s % pp. microbatches: pieces of each forward pass.
    ep: replicas in a row that share the routed experts, a divisor of dp; experts: how many each of them
    holds, empty where ep is 1.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    shares: tuple[int, ...] = (1,)
    sharding: Sharding | None = None
    cut: Cut | None = None
    stages: tuple[Stage, ...] = ()
    schedule: str = "1f1b"
    microbatches: int = 1
    ep: int = 1
    experts: tuple[int, ...] = ()

    @cached_property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """The blocks [first, end) of each stage, counted over all stacks; none without stages."""
        counts = (sum(end - first for first, end in stage.blocks.values()) for stage in self.stages)
        return tuple(pairwise(accumulate(counts, initial=0)))

    def lasts(self, stack: StackName) -> set[int]:
        """The last block of each stage that has some of a stack; none without stages."""
        ends = (stage.blocks[stack][1] for stage in self.stages if stack in stage.blocks)
        return {end - 1 for end in ends if end}

    @property
    def edp(self) -> int:
        """Replicas that hold the same experts."""
        return self.dp // self.ep

    @property
    def together(self) -> bool:
        """Whether replicas need one another in every forward pass, so that none may leave one out."""
        return self.sharding is not None or self.ep > 1

    @property
    def world(self) -> int:
        """Ranks in all."""
        return self.dp * self.tp * self.pp


ALONE = ParallelPlan()


def in_flight(plan: ParallelPlan, rank: int, fused: bool = False) -> float:
    """Micro-batches whose activations rank `rank` of a pipeline holds at once for each of its stages, at the
    most.

    gpipe: all. 1f1b: as many as stages are left. Interleaved and zero-bubble: what torch's schedules warm up
    with, shared by the rank's stages; zero-bubble puts passes for weights off by as many as the rank's
    number. fused: of these, blocks hold what `waiting` counts.
    """
    pieces = plan.microbatches
    if plan.schedule not in LOOPED:
        return float(pieces if plan.schedule == "gpipe" or plan.pp == 1 else min(pieces, plan.pp - rank))
    per_rank = len(plan.stages) // plan.pp
    per_round = pieces // max(1, pieces // plan.pp)
    warm_up = (per_rank - 1) * per_round + (1 if plan.schedule == "zero-bubble" else 2) * (plan.pp - 1 - rank)
    put_off = rank if plan.schedule == "zero-bubble" and not fused else 0
    return min(pieces * per_rank, warm_up + 1 + put_off) / per_rank


def waiting(plan: ParallelPlan, rank: int) -> float:
    """Passes for weights that wait at once on rank `rank` of a pipeline, for each of its stages, at the
    most: those that are put off, and the one whose pass for inputs runs."""
    late = plan.schedule == "zero-bubble" and plan.pp > 1
    return min(plan.microbatches, rank + 1) * plan.pp / len(plan.stages) if late else 0.0


def apportion(total: int, parts: Sequence[int]) -> tuple[int, ...]:
    """`total` things in the ratio of `parts`, by largest remainder; one for each, if there are enough."""
    whole = sum(parts)
    sizes = [total * part // whole for part in parts]
    order = sorted(range(len(parts)), key=lambda index: (-(total * parts[index] % whole), index))
    for index in order[: total - sum(sizes)]:
        sizes[index] += 1
    for index in range(len(parts)):
        if not sizes[index] and (most := max(sizes)) > 1:
            sizes[sizes.index(most)] -= 1
            sizes[index] = 1
    return tuple(sizes)


def grain(total: int, ranks: int, least: int = 1) -> int:
    """Of how many columns or rows of a table ranks but the last take multiples where no list says how many: a
    power of two up to 128, of which there are at least 16 a rank, and `least` at the least. Tensor cores are
    slower at other sizes: of two GPUs with 14,336 columns and 32,000 rows in about 3 to 1, by a fifth."""
    return max(least, next((size for size in (128, 64, 32, 16, 8, 4, 2) if total // size >= 16 * ranks), 1))


def in_grains(total: int, parts: Sequence[int], least: int = 1) -> tuple[int, ...]:
    """`total` columns or rows of a table in the ratio of `parts`: equal ones in eights where that comes out
    even, else by its `grain`, and what is left over goes to the last."""
    ranks = len(parts)
    if len(set(parts)) == 1 and total % (8 * ranks) == 0:
        return (total // ranks,) * ranks
    unit = grain(total, ranks, least)
    sizes = [unit * count for count in apportion(total // unit, parts)]
    return (*sizes[:-1], sizes[-1] + total % unit)


def slow_columns(cut: Cut | None) -> str | None:
    """That a list of columns slows tensor cores down, and one near it that does not; or None."""
    columns = () if cut is None else cut.columns
    listed = len(set(columns)) > 1 and any(count % 64 for count in columns[:-1])
    if not listed or grain(sum(columns), len(columns)) < 64:
        return None
    near = list(in_grains(sum(columns), columns))
    return f"columns {list(columns)}: tensor cores are faster at multiples of 64, as {near}"


def columns_together(shape: Shape) -> int:
    """Of how many columns a rank takes all or none: where there are experts, of as many as 16 bytes are in
    two-byte floats."""
    return math.gcd(shape.columns, 8) if shape.experts else 1


def attention_dropout(model_config: Config) -> float:
    """The rate at which a model in training drops attention probabilities."""
    names = ("attention_probs_dropout_prob", "attention_dropout", "dropout_rate", "attn_pdrop")
    return float(
        next((value for name in names if (value := getattr(model_config, name, None)) is not None), 0.0)
    )


def features_of_block(family: Family, shape: Shape) -> tuple[int, int]:
    """How many features a block's attention makes, and its MLP: times the width, their weights."""
    roles = {role for rule in family.stacks.values() for region in rule.regions for role in region.sites}
    gated = bool(roles & {"gate", "gate_up"})
    return 2 * (shape.heads + shape.kv_heads) * shape.head_dim, (2 + gated) * shape.columns


# ---------------------------------------------------------------- saying what a plan is


def describe(plan: ParallelPlan) -> str:
    """One line: the axes with more than one rank and what lies along each, as `galaxy 2 (heads 6,2; columns
    48,16; sequence 3:1)`."""
    parts = [_describe_dp(plan)] if plan.edp > 1 or plan.sharding else []
    parts += [_describe_ep(plan)] if plan.ep > 1 else []
    if plan.cut is not None:
        parts.append(_describe_cut(plan.cut, plan.tp))
    if plan.pp > 1:
        counts = _commas(sum(end - first for first, end in stage.blocks.values()) for stage in plan.stages)
        parts.append(f"pp {plan.pp} (stages {counts}; {plan.schedule}, {plan.microbatches} micro-batches)")
    return " x ".join(parts) or "one process"


def _describe_dp(plan: ParallelPlan) -> str:
    facts = [f"rows {':'.join(map(str, plan.shares))}"] if len(set(plan.shares)) > 1 else []
    if plan.ep > 1:
        return f"dp {plan.edp}"
    if (sharding := plan.sharding) is not None:
        facts.append("sharded" + (f" in {sharding.replicas} whole copies" if sharding.replicas > 1 else ""))
        facts += [] if sharding.frozen else ["frozen replicated"]
        facts += [] if sharding.reshard else ["kept gathered"]
        facts += ["shards on the CPU"] if sharding.offload else []
    return f"dp {plan.dp}" + (f" ({'; '.join(facts)})" if facts else "")


def _describe_ep(plan: ParallelPlan) -> str:
    facts = [f"experts {_commas(plan.experts)}"]
    facts += [f"rows {':'.join(map(str, plan.shares))}"] if len(set(plan.shares)) > 1 else []
    return f"ep {plan.ep} ({'; '.join(facts)})"


def _describe_cut(cut: Cut, ranks: int) -> str:
    name = row_name({"attention": cut.attention, "mlp": cut.mlp, "connection": cut.connection})
    facts = (
        [] if name != "cut" else [f"attention {cut.attention}, mlp {cut.mlp}, connection {cut.connection}"]
    )
    facts += [f"heads {_commas(cut.heads)}"] if cut.heads else []
    facts += [f"columns {_commas(cut.columns)}"] if cut.columns else []
    facts += [f"sequence {':'.join(map(str, cut.sequence))}"] if cut.sequence else []
    facts += [cut.exchange] if cut.attention == "sequence" else []
    if cut.vocabulary:
        even = len(set(cut.vocabulary)) == 1
        facts.append("vocabulary cut" if even else f"vocabulary {':'.join(map(str, cut.vocabulary))}")
    facts += ["overlapped"] if cut.overlap else []
    return f"{name} {ranks} ({'; '.join(facts)})"


def _commas(values: Iterable[int]) -> str:
    return ",".join(map(str, values))
