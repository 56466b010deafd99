"""Making a plan: `make_plan` turns settings into shares and refuses what cannot be, with all reasons at once.

The file is long because most of its lines are what refusals say.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from petune.errors import Problem, UsageError
from petune.models.spec import Config, Family, Shape, StackName, StackRule
from petune.parallel.configs import (
    CUTS,
    LOOPED,
    ROWS,
    BackendLayout,
    CutConfig,
    DpConfig,
    EpConfig,
    ParallelConfig,
    PpConfig,
    layouts,
    size_of,
)
from petune.parallel.contradictions import contradictions
from petune.parallel.plan import (
    Cut,
    ParallelPlan,
    Sharding,
    Stage,
    apportion,
    attention_dropout,
    columns_together,
    features_of_block,
    in_grains,
)


def make_plan(
    config: ParallelConfig,
    family: Family | None,
    model_config: Config,
    world: int | None,
    batch_size: int,
    available: int = 2,
    vocabulary_head: bool = True,
    still: bool = False,
) -> ParallelPlan:
    """The plan `config` means for a model of `family` with `model_config`, for forward passes of `batch_size`
    rows in all.

    world: processes that exist, or None where they are yet to be started. A size that is left open takes what
    the other axes leave of `world`, or of `available` (CUDA devices, 2 on a CPU; such an axis then has 2
    ranks at least); of several open ones dp takes the rest, or else the cut, and the others have 2.
    vocabulary_head: whether the output is over the vocabulary, and so may be cut with the table. still:
    whether blocks drop nothing out, as before a head that trains alone. Pure. Raises UsageError with every
    reason at once why the plan cannot be.
    """
    faults = list(_contradictions(config))
    name, cut_config = next(
        ((name, one) for name in CUTS if (one := getattr(config, name)) is not None), ("", None)
    )
    dp, tp, pp, ep = _sizes(config, cut_config, world, available, faults)
    if family is None:
        faults += _needs_family(config, name, model_config)
    if (tp > 1 or pp > 1) and family is not None:
        faults += _dropped_blocks(model_config)
    shares, rows = _rows(config, dp, ep, batch_size, faults)
    cut = None
    if cut_config is not None and family is not None:
        cut = _Cutting(f"parallel.{name}", name, cut_config, tp, faults).cut(
            family, model_config, vocabulary_head, still
        )
    stages: tuple[Stage, ...] = ()
    microbatches = 1
    if config.pp is not None and family is not None:
        faults += _unstaged(family, model_config, vocabulary_head)
        head = head_in_blocks(family, model_config) if vocabulary_head else 0.0
        stages = _stages(config.pp, pp, dict(family.depth(model_config)), head, faults)
        microbatches = _microbatches(config.pp, pp, len(stages), rows, faults)
    plan = ParallelPlan(
        dp=dp * ep,
        tp=tp,
        pp=pp,
        shares=shares,
        sharding=_sharding(config.dp or DpConfig(), dp, faults),
        cut=cut if tp > 1 else None,
        stages=stages if pp > 1 else (),
        schedule=config.pp.schedule if config.pp and pp > 1 else "1f1b",
        microbatches=microbatches if pp > 1 else 1,
        ep=ep,
        experts=_experts(config.ep, ep, family, model_config, faults) if config.ep is not None else (),
    )
    if plan.sharding is not None and plan.pp > 1 and plan.schedule == "zero-bubble":
        what = (
            "dp.shard with pp.schedule zero-bubble: zero-bubble computes the gradients of weights when FSDP"
            " has freed them"
        )
        remedy = "use schedule: 1f1b or interleaved, or dp without shard"
        faults.append(Problem(what, "parallel.pp.schedule", remedy=remedy))
    if faults:
        raise UsageError(faults)
    return plan


def _unstaged(family: Family, model_config: Config, vocabulary_head: bool) -> Iterator[Problem]:
    """Why models of this config have no stages."""
    for reason in filter(None, (meets(rule, model_config) for rule in family.stacks.values())):
        yield Problem(reason, "parallel.pp", remedy="use tp or dp")
    if (why := family.refused(model_config).get("pp")) is not None:
        yield Problem(why, "parallel.pp", remedy="use dp, or sp")
    if vocabulary_head and family.tied is not None and not getattr(model_config, family.tied, True):
        what = f"its head asks the embedding, on another stage, for its table ({family.tied} = false)"
        yield Problem(what, "parallel.pp", remedy="use tp or dp")


def _contradictions(config: ParallelConfig) -> Iterator[Problem]:
    """What is wrong with the settings by themselves, each with its key as its place."""
    for path, problem in contradictions(config):
        key = ".".join(("parallel", *path))
        yield replace(problem, what=problem.what.removeprefix(f"{key}: "), where=key)


def _sizes(
    config: ParallelConfig, cut: CutConfig | None, world: int | None, available: int, faults: list[Problem]
) -> tuple[int, int, int, int]:
    """Ranks along dp, tp, pp and ep: given, as many as the lists have entries, or what is left."""
    axes = {"dp": config.dp, "tp": cut, "pp": config.pp, "ep": config.ep}
    wanted = {axis: size_of(one) for axis, one in axes.items() if one is not None}
    sizes = {axis: size for axis, size in wanted.items() if size is not None}
    open_axes = [axis for axis, size in wanted.items() if size is None]
    sizes |= dict.fromkeys(open_axes[1:], 2)
    if open_axes:
        rest = (available if world is None else world) // math.prod(sizes.values())
        sizes[open_axes[0]] = max(rest, 2 if world is None else 1)
    product = math.prod(sizes.values())
    if world is not None and world != product:
        said = " x ".join(f"{axis} {size}" for axis, size in sizes.items()) or "no axis"
        remedy = f"start {product}, or leave one size open" if sizes else "name an axis: parallel=dp"
        what, found = "the axes do not multiply to the number of processes", f"{world} processes"
        faults.append(Problem(what, "parallel", f"{product} ({said})", found, remedy))
    return sizes.get("dp", 1), sizes.get("tp", 1), sizes.get("pp", 1), sizes.get("ep", 1)


def _needs_family(config: ParallelConfig, cut: str, model_config: Config) -> list[Problem]:
    """What cannot be done with a model petune has no table for."""
    kind = getattr(model_config, "model_type", "this model")
    axes = ((cut, cut or None), ("pp", config.pp), ("ep", config.ep))
    asked = [name for name, one in axes if one is not None]
    if config.dp is not None and config.dp.shard:
        asked.append("dp.shard")
    remedy = "use dp without shard"
    what = f"petune has no table for {kind}, so its blocks are unknown"
    return [Problem(what, f"parallel.{name}", remedy=remedy) for name in asked]


def _dropped_blocks(model_config: Config) -> list[Problem]:
    """Why a stack cannot own these blocks, as `own_stacks` says it, before a weight is loaded."""
    faults = []
    for side in ("encoder_layerdrop", "decoder_layerdrop", "layerdrop"):
        if drop := getattr(model_config, side, None):
            what, remedy = "ranks would drop different layers", f"set {side} to 0"
            faults.append(Problem(what, "model", f"{side} 0", f"{side} {drop}", remedy))
    return faults


def _rows(
    config: ParallelConfig, dp: int, ep: int, batch_size: int, faults: list[Problem]
) -> tuple[tuple[int, ...], int]:
    """Shares of the replicas, those of dp times those of ep, and the rows of the one that has fewest."""
    own = {"dp": (config.dp or DpConfig()).shares, "ep": (config.ep or EpConfig()).shares}
    shares = tuple(outer * inner for outer in own["dp"] or (1,) * dp for inner in own["ep"] or (1,) * ep)
    if dp * ep > batch_size:
        remedy = f"raise batch_size to {dp * ep} or more, or use fewer replicas"
        what, where = (
            "a replica would have no row of a forward pass",
            "parallel.dp" if ep == 1 else "parallel.ep",
        )
        faults.append(Problem(what, where, f"at most {batch_size}", str(dp * ep), remedy))
    return shares, min(apportion(batch_size, shares))


def _experts(
    config: EpConfig, ep: int, family: Family | None, model_config: Config, faults: list[Problem]
) -> tuple[int, ...]:
    """Experts per rank, as given or evenly; empty where they are not cut."""
    total = family.shape(model_config).experts if family is not None else 0
    if family is None or ep == 1:
        return ()
    if ep > total:
        what = "every rank needs an expert" if total else "this model has no routed experts to cut"
        remedy = None if total else "use dp, tp, sp or pp"
        faults.append(
            Problem(what, "parallel.ep", f"at most {total} ranks" if total else None, f"ep {ep}", remedy)
        )
        return ()
    given, where = config.experts, "parallel.ep.experts"
    if len(given) == ep and sum(given) != total:
        what, found = "experts do not add up to the model's", f"{list(given)}: {sum(given)}"
        faults.append(Problem(what, where, str(total), found, suggested_list(total, given)))
    return given or apportion(total, (1,) * ep)


def _sharding(config: DpConfig, dp: int, faults: list[Problem]) -> Sharding | None:
    if not config.shard:
        return None
    where = "parallel.dp"
    if dp == 1:
        what = "there is one replica, so nothing to shard over"
        faults.append(Problem(what, f"{where}.shard", "2 replicas or more", "1"))
    elif size_of(config) is None and (
        dp % config.replicas or config.replicas == dp
    ):  # a size that is said is checked with the settings
        divisors = ", ".join(str(n) for n in range(1, dp) if dp % n == 0)
        what, expected = "replicas must divide dp and be fewer", f"one of {divisors}"
        faults.append(Problem(what, f"{where}.replicas", expected, str(config.replicas)))
    return Sharding(config.replicas, config.reshard, config.offload == "cpu", config.frozen == "sharded")


# ---------------------------------------------------------------- a cut


@dataclass(frozen=True)
class _Cutting:
    """One cut being settled: its key in the recipe, settings, ranks, and where faults are gathered."""

    where: str
    name: str
    config: CutConfig
    ranks: int
    faults: list[Problem]

    def fault(
        self,
        key: str,
        what: str,
        expected: str | None = None,
        found: str | None = None,
        remedy: str | None = None,
    ) -> None:
        self.faults.append(Problem(what, f"{self.where}.{key}", expected, found, remedy))

    def cut(
        self, family: Family, model_config: Config, vocabulary_head: bool, still: bool = False
    ) -> Cut | None:
        """Layouts and lists; None where the layouts are not settled."""
        found = layouts(self.name, self.config)
        if None in found.values():
            return None
        row = BackendLayout(**cast("Any", found))
        shape, config = family.shape(model_config), self.config
        by_heads = row.attention == "heads"
        kv_heads = self._kv_heads(shape) if by_heads else ()
        group = shape.heads // shape.kv_heads
        if not by_heads and config.exchange == "ulysses" and shape.kv_heads < self.ranks:
            remedy = "use exchange: gather or ring, or fewer ranks"
            what = "ulysses gives every rank a key and value head"
            self.fault("exchange", what, f"at most {shape.kv_heads} ranks", str(self.ranks), remedy)
        if by_heads or row.mlp == "heads" or config.exchange == "ulysses":
            self._same_stacks(model_config)
        if by_heads or row.mlp == "heads":
            self._divisible(family)
        self._stateless(family, row)
        self._undivided(family, row, model_config)
        parts = (family.part(model_config, stack) for stack in family.stacks)
        caps = {cap for one in parts if (cap := getattr(one, "attn_logit_softcapping", None))}
        for cap in caps if config.exchange == "ring" else ():
            remedy = "use exchange: gather or ulysses"
            self.fault("exchange", "a ring does not cap attention scores", "no cap", f"{cap:g}", remedy)
        if row.mlp == "heads" and shape.experts and config.overlap:
            what = "overlap hides communication behind products of linears, and experts are none"
            self.fault("overlap", what, remedy="remove overlap")
        dropout = 0.0 if still else attention_dropout(model_config)
        if config.exchange == "ring" and dropout:
            remedy = "use exchange: gather or ulysses, or set that dropout to 0 in the model's config"
            what = "no rank of a ring sees a whole row of probabilities to drop from"
            self.fault("exchange", what, "dropout 0", f"{dropout:g}", remedy)
        return Cut(
            attention=row.attention,
            mlp=row.mlp,
            connection=row.connection,
            exchange=config.exchange,
            heads=tuple(count * group for count in kv_heads),
            kv_heads=kv_heads,
            columns=self._columns(shape) if row.mlp == "heads" else (),
            sequence=(config.sequence or self._shares()) if row.connection == "sequence" else (),
            vocabulary=self._vocabulary(row, family, model_config, vocabulary_head),
            overlap=config.overlap,
        )

    def _kv_heads(self, shape: Shape) -> tuple[int, ...]:
        """Key and value heads per rank. Query heads follow: a rank holds whole groups of those that share
        keys and values."""
        group = shape.heads // shape.kv_heads
        if self.ranks > shape.kv_heads:
            found = f"{self.ranks} ranks for {shape.heads} heads in {shape.kv_heads} groups"
            self.fault(
                "size", "every rank needs a key and value head", f"at most {shape.kv_heads} ranks", found
            )
        heads = self.config.heads
        if not heads:
            return apportion(shape.kv_heads, self._shares())
        fine = len(heads) == self.ranks
        if fine and sum(heads) != shape.heads:
            near = suggested_list(shape.kv_heads, heads, group)
            what, found = "heads do not add up to the model's", f"{list(heads)}: {sum(heads)}"
            self.fault("heads", what, str(shape.heads), found, near)
        elif fine and any(count % group for count in heads):
            near = suggested_list(shape.kv_heads, heads, group)
            what = f"{group} query heads share keys and values"
            self.fault("heads", what, f"multiples of {group}", str(list(heads)), near)
        return tuple(count // group for count in heads)

    def _columns(self, shape: Shape) -> tuple[int, ...]:
        """MLP columns per rank, of each expert where there are experts; a shared one, and the MLP of a block
        without, are cut in their ratio."""
        columns, unit = shape.columns, columns_together(shape)
        fewest = min(filter(None, (columns // unit, shape.dense, shape.shared)))
        if self.ranks > fewest:
            several = f"every rank needs {unit} columns of an expert"
            what = "every rank needs a column of the MLP" if unit == 1 else several
            self.fault("size", what, f"at most {fewest} ranks", str(self.ranks))
        given = self.config.columns
        if not given:
            return in_grains(columns, self._shares(), unit)
        fine = len(given) == self.ranks
        if fine and sum(given) != columns:
            found, near = f"{list(given)}: {sum(given)}", suggested_list(columns // unit, given, unit)
            self.fault("columns", "columns do not add up to the model's", str(columns), found, near)
        elif fine and any(count % unit for count in given):
            what = "grouped products of experts read rows of whole 16 bytes"
            near = suggested_list(columns // unit, given, unit)
            self.fault("columns", what, f"multiples of {unit}", str(list(given)), near)
        return given

    def _shares(self) -> tuple[int, ...]:
        """The ratio of what no list says; even where `shares` is absent or of no use."""
        shares = self.config.shares
        return shares if len(shares) == self.ranks else (1,) * self.ranks

    def _same_stacks(self, model_config: Config) -> None:
        """One list of heads and one of columns serve both stacks."""
        for size in ("attention_heads", "ffn_dim"):
            encoder, decoder = (
                getattr(model_config, f"{side}_{size}", None) for side in ("encoder", "decoder")
            )
            if encoder != decoder:
                what = f"encoder and decoder differ in {size}, and one list cuts both"
                found = f"{encoder} and {decoder}"
                self.faults.append(Problem(what, self.where, found=found, remedy="use sp, pp or dp"))

    def _divisible(self, family: Family) -> None:
        """Whether a block of the family is one by heads and columns."""
        for why in {rule.uncut for rule in family.stacks.values() if rule.uncut is not None}:
            self.faults.append(Problem(why, self.where, remedy="use sp with exchange: gather, pp or dp"))

    def _stateless(self, family: Family, row: BackendLayout) -> None:
        """Whether a rank can have some tokens of a row."""
        if row.connection == "sequence" and any(rule.linear for rule in family.stacks.values()):
            what = "its mixers carry a state through all tokens of a row, and a rank has some"
            self.faults.append(Problem(what, self.where, remedy="use tp, pp or dp"))

    def _undivided(self, family: Family, row: BackendLayout, model_config: Config) -> None:
        """Whether attention of the family knows what to do where a rank has some tokens of a row, or, where
        it scores positions itself, some of the work on them."""
        cores = [layer.core for rule in family.stacks.values() for layer in rule.sublayers]
        if row.attention == "sequence" and any(getattr(core, "sinks", None) for core in cores):
            what = "attention with sinks does not see tokens of other ranks"
            self.faults.append(Problem(what, self.where, remedy="use tp, galaxy, ep, pp or dp"))
        rules = [rule for rule in family.stacks.values() if rule.positions is not None]
        for rule in rules:
            if row.attention == "sequence":
                what = "its attention scores the positions of all tokens itself, and a rank has some"
                self.faults.append(Problem(what, self.where, remedy="use tp, galaxy, pp or dp"))
            elif row.connection == "sequence" and (reason := meets(rule, model_config)):
                self.faults.append(Problem(reason, self.where, remedy="use tp or dp"))
            if self.config.overlap:
                what = "overlap does not know linears that positions go through as well"
                self.fault("overlap", what, remedy="remove overlap")

    def _vocabulary(
        self, row: BackendLayout, family: Family, model_config: Config, head: bool
    ) -> tuple[int, ...]:
        """The ratio in which table and output head are cut, that of the ranks' other work; empty where they
        are whole. null: cut for tp, where there is a head over the vocabulary."""
        wanted = self.config.vocabulary
        size = getattr(model_config, "vocab_size", 0)
        possible = head and size >= self.ranks
        if wanted and not possible:
            why = "this task's output is not over the vocabulary"
            if head:
                why = f"there are {size} entries for {self.ranks} ranks"
            self.fault("vocabulary", f"the vocabulary cannot be cut: {why}", remedy="leave it out")
        if not possible or not (row == ROWS["tp"] and family.kind != "encoder" if wanted is None else wanted):
            return ()
        lists = (self.config.shares, self.config.columns, self.config.heads)
        return next((one for one in lists if len(one) == self.ranks), (1,) * self.ranks)


def meets(rule: StackRule, model_config: Config) -> str | None:
    """Why what lies between two blocks needs whole rows and all blocks around it, or None."""
    size = getattr(model_config, rule.between, 0) if rule.between else 0
    return f"tokens meet between its blocks ({rule.between} = {size})" if size else None


# ---------------------------------------------------------------- stages of a pipeline


def head_in_blocks(family: Family, model_config: Config) -> float:
    """How many blocks compute as much as a head over the vocabulary, by their weights; 0 where blocks have
    experts, of which few compute."""
    own = family.part(model_config, list(family.stacks)[-1])
    shape, vocabulary = family.shape(own), getattr(own, "vocab_size", 0)
    if shape.experts or not shape.width:
        return 0.0
    return vocabulary / sum(features_of_block(family, shape))


def balanced(total: int, number: int, head: float) -> tuple[int, ...]:
    """`total` blocks on so many stages, the larger ones first: evenly with a head on the last stage that
    computes as much as `head` blocks. Every stage has a block, if there are enough."""
    last = max(1, min(total - number + 1, round((total + head) / number - head)))
    last = min(last, total // number)
    return (*apportion(total - last, (1,) * (number - 1)), last) if number > 1 else (total,)


def _stages(
    config: PpConfig, pp: int, depth: Mapping[StackName, int], head: float, faults: list[Problem]
) -> tuple[Stage, ...]:
    """Blocks of every stage: the given counts, or a `balanced` split of all blocks."""
    where, total = "parallel.pp.stages", sum(depth.values())
    counts = config.stages
    if not counts:
        number = pp * (2 if config.schedule in LOOPED else 1)
        if number > total:
            found = f"{number} stages on {pp} ranks with schedule {config.schedule}"
            faults.append(
                Problem("every stage needs a block", "parallel.pp.size", f"at most {total} stages", found)
            )
        counts = balanced(total, number, head) if number <= total else apportion(total, (1,) * number)
    elif config.schedule in LOOPED and (len(counts) < 2 * pp or (config.size is None and len(counts) % pp)):
        expected = f"a multiple of {pp}, at least {2 * pp}"
        faults.append(
            Problem(f"{config.schedule} has several stages on every rank", where, expected, f"{len(counts)}")
        )
    if config.stages and sum(counts) != total:
        blocks = " + ".join(f"{count} {name}" for name, count in depth.items())
        near = suggested_list(total, counts)
        what, expected = "stages do not add up to the model's blocks", f"{total} ({blocks})"
        faults.append(Problem(what, where, expected, f"{list(counts)}: {sum(counts)}", near))
    return _numbered(counts, depth)


def _numbered(counts: Sequence[int], depth: Mapping[StackName, int]) -> tuple[Stage, ...]:
    """Stages of so many blocks each, encoder before decoder, with the blocks' numbers in their stacks."""
    stages, first = [], 0
    for count in counts:
        blocks: dict[StackName, tuple[int, int]] = {}
        start = 0
        for name, number in depth.items():
            low, high = max(first - start, 0), min(first + count - start, number)
            if low < high:
                blocks[name] = (low, high)
            start += number
        stages.append(Stage(blocks))
        first += count
    return tuple(stages)


def _microbatches(config: PpConfig, pp: int, stages: int, rows: int, faults: list[Problem]) -> int:
    """Pieces of a forward pass. The limits are those of torch.distributed.pipelining's schedules."""
    where = "parallel.pp.microbatches"
    if pp == 1:
        return 1
    least = stages if config.schedule == "1f1b" else 1
    several = config.schedule in LOOPED
    usual = max(min(stages, rows), least)
    number = config.microbatches or (usual // pp * pp if several and usual > pp else usual)
    if number < least:
        remedy = f"use {least} or more, or schedule: gpipe"
        what = "1f1b fills every stage before it begins to alternate"
        faults.append(Problem(what, where, f"at least {least}", str(number), remedy))
    if number > rows:
        remedy = f"raise batch_size so that every replica has {number} rows" + (
            ", or use schedule: gpipe" if number == least > 1 else ""
        )
        what, expected = "a micro-batch would have no row", f"at most {rows}, the rows of a replica"
        faults.append(Problem(what, where, expected, str(number), remedy))
    rounds = max(1, number // pp)
    if several and number % rounds:
        what, near = f"{config.schedule} goes in rounds of equal length", f"for example {number // pp * pp}"
        faults.append(Problem(what, where, f"a multiple of {rounds}", str(number), near))
    return number


# ---------------------------------------------------------------- lists


def suggested_list(total: int, parts: Sequence[int], unit: int = 1) -> str:
    """A remedy for a list that does not fit: `total` units in its ratio, or how long it may be where somebody
    would get none."""
    shared = [count * unit for count in apportion(total, parts)]
    return f"for example {shared}" if all(shared) else f"give a list of at most {total}"
