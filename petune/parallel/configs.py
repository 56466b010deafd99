"""What `parallel:` in a recipe lets you set. Torch-free, so that a recipe is checked without loading torch.

The range of a setting stands in its field's metadata, as for methods. Lists of shares may be left empty: then
the plan cuts evenly. `contradictions` is what can be wrong between settings without knowing a model or the
number of processes; a plan knows the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Literal

from petune.errors import Problem

Layout = Literal["heads", "sequence"]
Connection = Literal["whole", "sequence"]

SIZE = {
    "ge": 1,
    "le": 4096,
    "doc": "ranks of this axis; null: as many as the lists say, or all that are left",
}


def _list(doc: str) -> tuple[int, ...]:
    found: tuple[int, ...] = field(default=(), metadata={"ge": 1, "doc": doc})
    return found


@dataclass(frozen=True)
class DpConfig:
    """Data parallel: every replica trains on rows of its own."""

    size: int | None = field(default=None, metadata=SIZE)
    shares: tuple[int, ...] = _list("rows of a forward pass per replica, as a ratio: [3, 1]")
    shard: bool = field(
        default=False, metadata={"doc": "shard parameters, gradients and optimizer over the replicas (FSDP2)"}
    )
    replicas: int = field(
        default=1, metadata={"ge": 1, "doc": "shard: groups of replicas that each hold a whole copy (HSDP)"}
    )
    reshard: bool = field(
        default=True, metadata={"doc": "shard: free gathered weights after the forward pass"}
    )
    offload: str = field(
        default="none", metadata={"choices": ("none", "cpu"), "doc": "shard: where shards rest between uses"}
    )
    frozen: str = field(
        default="sharded",
        metadata={
            "choices": ("sharded", "replicated"),
            "doc": "shard: whether what does not train is sharded too",
        },
    )


@dataclass(frozen=True)
class CutConfig:
    """A block cut across ranks. `tp`, `sp`, `galaxy` and `galaxy2` are rows of ROWS; `cut` leaves the choice
    open.

    Galaxy: Ye et al. 2024, arXiv:2405.17245. tp: Shoeybi et al. 2019, arXiv:1909.08053. sp with ulysses:
    arXiv:2309.14509.
    """

    size: int | None = field(default=None, metadata=SIZE)
    attention: str | None = field(
        default=None, metadata={"choices": ("heads", "sequence"), "doc": "how attention is cut"}
    )
    mlp: str | None = field(
        default=None,
        metadata={"choices": ("heads", "sequence"), "doc": "how the MLP is cut: by columns, or sequence"},
    )
    connection: str | None = field(
        default=None,
        metadata={
            "choices": ("whole", "sequence"),
            "doc": "what lies between: norms, residuals, a method's own modules",
        },
    )
    shares: tuple[int, ...] = _list("heads, columns, tokens and vocabulary per rank, as one ratio: [3, 1]")
    heads: tuple[int, ...] = _list("query heads per rank; they add up to the model's")
    columns: tuple[int, ...] = _list("MLP columns per rank; they add up to the model's")
    sequence: tuple[int, ...] = _list("tokens per rank, as a ratio scaled to the length of each batch")
    exchange: str = field(
        default="gather",
        metadata={
            "choices": ("gather", "ulysses", "ring"),
            "doc": "attention: sequence: how a rank sees the others' keys and values",
        },
    )
    vocabulary: bool | None = field(
        default=None,
        metadata={
            "doc": "cut embedding and output head by vocabulary, in the ratio of `shares`, else of columns or"
            " heads; null: for tp where the model allows it"
        },
    )
    overlap: bool = field(
        default=False, metadata={"doc": "hide communication behind the adjoining matmul, in ring tiles"}
    )


@dataclass(frozen=True)
class PpConfig:
    """Pipeline parallel: every rank holds some of the blocks."""

    size: int | None = field(default=None, metadata=SIZE)
    stages: tuple[int, ...] = _list("blocks per stage, encoder before decoder; they add up to the model's")
    schedule: str = field(
        default="1f1b",
        metadata={
            "choices": ("gpipe", "1f1b", "interleaved", "zero-bubble"),
            "doc": "order of forward and backward passes",
        },
    )
    microbatches: int | None = field(
        default=None,
        metadata={"ge": 1, "le": 4096, "doc": "pieces of a forward pass; null: as many as stages"},
    )


AxisConfig = DpConfig | CutConfig | PpConfig


@dataclass(frozen=True)
class ParallelConfig:
    """The axes of a plan. At most one of tp, sp, galaxy, galaxy2 and cut; all None means one process."""

    dp: DpConfig | None = field(
        default=None, metadata={"doc": "data parallel: every replica trains on rows of its own"}
    )
    tp: CutConfig | None = field(
        default=None,
        metadata={"doc": "tensor parallel: heads and MLP columns cut, what lies between is whole"},
    )
    sp: CutConfig | None = field(
        default=None, metadata={"doc": "sequence parallel: every block works on tokens of its own"}
    )
    galaxy: CutConfig | None = field(
        default=None, metadata={"doc": "heads and MLP columns cut, what lies between is cut by tokens"}
    )
    galaxy2: CutConfig | None = field(
        default=None, metadata={"doc": "heads cut; MLP and what lies between are cut by tokens"}
    )
    cut: CutConfig | None = field(
        default=None, metadata={"doc": "attention, mlp and connection cut as you say"}
    )
    pp: PpConfig | None = field(
        default=None, metadata={"doc": "pipeline parallel: every rank holds some of the blocks"}
    )
    auto: bool = field(default=False, metadata={"doc": "axes are yet to be chosen for the devices"})

    @property
    def axes(self) -> dict[str, AxisConfig]:
        """The axes that are there, by backend."""
        every = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return {name: axis for name, axis in every.items() if isinstance(axis, AxisConfig)}

    @property
    def unfused(self) -> str | None:
        """Why blocks under these axes are not fused, or None."""
        staged = self.pp is not None and size_of(self.pp) != 1
        if staged and self.dp is not None and self.dp.shard:
            return STAGES_SHARDED
        cuts = [axis for axis in self.axes.values() if isinstance(axis, CutConfig) and size_of(axis) != 1]
        return OVERLAPPED if any(axis.overlap for axis in cuts) else None

    @property
    def shards(self) -> bool:
        """Whether weights are spread over replicas."""
        return any(isinstance(axis, DpConfig) and axis.shard for axis in self.axes.values())

    def __str__(self) -> str:
        """`dp 2 x tp 2`, `pp` for an axis without a size, `none` for one process, `auto`."""
        sizes = {name: size_of(axis) for name, axis in self.axes.items()}
        return " x ".join(name if size is None else f"{name} {size}" for name, size in sizes.items()) or (
            "auto" if self.auto else "none"
        )


@dataclass(frozen=True)
class Row:
    """What a backend that cuts blocks is: three layouts. Communication follows from them."""

    attention: Layout
    mlp: Layout
    connection: Connection


ROWS: Mapping[str, Row] = {
    "tp": Row("heads", "heads", "whole"),
    "sp": Row("sequence", "sequence", "sequence"),
    "galaxy": Row("heads", "heads", "sequence"),
    "galaxy2": Row("heads", "sequence", "sequence"),
}
CUTS: tuple[str, ...] = (*ROWS, "cut")
BACKENDS: Mapping[str, type[AxisConfig]] = {"dp": DpConfig, **dict.fromkeys(CUTS, CutConfig), "pp": PpConfig}
LOOPED = ("interleaved", "zero-bubble")  # schedules in which a rank may hold several stages

# What is wrong, and where: a key path below `parallel`. The problem names the full path and has no place yet.
Contradiction = tuple[tuple[str, ...], Problem]

# List -> the region and the layout of it that the list shares out.
_SHARED_OUT = {
    "heads": ("attention", "heads"),
    "columns": ("mlp", "heads"),
    "sequence": ("connection", "sequence"),
}


def size_of(axis: AxisConfig) -> int | None:
    """Ranks of an axis: its size, else the entries of its first list; None when neither says it."""
    if axis.size is None and isinstance(axis, PpConfig) and axis.schedule in LOOPED:
        return None  # a rank holds several of the stages
    lists = [
        len(getattr(axis, name)) for name in ("shares", *_SHARED_OUT, "stages") if getattr(axis, name, ())
    ]
    return axis.size if axis.size is not None else next(iter(lists), None)


def layouts(name: str, cut: CutConfig) -> dict[str, str | None]:
    """Region -> layout of the backend `name`: those of its row, for `cut` the given ones, None where not
    given."""
    row = ROWS.get(name)
    return (
        asdict(row)
        if row
        else {region: getattr(cut, region) for region in ("attention", "mlp", "connection")}
    )


OVERLAPPED = "overlap hides communication behind matmuls tile by tile"
STAGES_SHARDED = "the parallel plan cuts the model into stages and shards their weights"


def row_name(found: Mapping[str, str | None]) -> str:
    """The backend that has these layouts: a name of ROWS where there is one, else `cut`."""
    return next((name for name, row in ROWS.items() if asdict(row) == dict(found)), "cut")


def contradictions(config: ParallelConfig) -> Iterator[Contradiction]:
    """Everything wrong with `config` that needs neither a model nor a number of processes."""
    yield from too_many_cuts(config.axes)
    for name, axis in config.axes.items():
        yield from axis_contradictions(name, axis)


def too_many_cuts(names: Iterable[str]) -> Iterator[Contradiction]:
    """A block is cut in one way: one problem for every backend after the first that cuts blocks."""
    first, *others = [name for name in names if name in CUTS] or [""]
    for name in others:
        what = f"parallel.{name}: {first} and {name} both say how a block is cut"
        remedy = f"keep one of them; from the command line, parallel={{{name}: ...}} replaces the whole plan"
        yield (name,), Problem(what, expected="at most one of " + ", ".join(CUTS), remedy=remedy)


def axis_contradictions(name: str, axis: AxisConfig) -> Iterator[Contradiction]:
    """What is wrong between the settings of one axis."""
    if isinstance(axis, DpConfig):
        yield from _lengths(name, axis, ("shares",))
        yield from _sharding(axis)
    elif isinstance(axis, PpConfig):
        yield from _stages(axis)
    else:
        yield from _layouts(name, axis)
        yield from _without_use(name, axis)
        yield from _lengths(name, axis, ("shares", *_SHARED_OUT))
        if axis.shares and (given := [one for one in _SHARED_OUT if getattr(axis, one)]):
            what = f"parallel.{name}.shares: {', '.join(given)} {'are' if len(given) > 1 else 'is'} given too"
            yield (
                (name, "shares"),
                Problem(what, remedy="keep shares, one ratio for everything that is cut, or the lists"),
            )


def _lengths(name: str, axis: AxisConfig, lists: Iterable[str]) -> Iterator[Contradiction]:
    given = {one: len(getattr(axis, one)) for one in lists if getattr(axis, one)}
    first = next(iter(given), "")
    remedy = "give every list as many entries" + (
        "" if axis.size is None else " as size says, or remove size"
    )
    number, whose = (
        (given.get(first, 0), f"parallel.{name}.{first} has")
        if axis.size is None
        else (axis.size, "size says")
    )
    for one, length in given.items():
        if length != number:
            what = f"parallel.{name}.{one} has one entry per rank"
            yield (
                (name, one),
                Problem(what, expected=f"{number}, as {whose}", found=str(length), remedy=remedy),
            )


def _layouts(name: str, cut: CutConfig) -> Iterator[Contradiction]:
    given = {region: getattr(cut, region) for region in layouts(name, cut)}
    if name in ROWS:
        meant = {region: given[region] or layout for region, layout in layouts(name, cut).items()}
        for region, layout in layouts(name, cut).items():
            if given[region] not in (None, layout):
                what = f"parallel.{name}.{region}: this is what {name} fixes"
                yield (
                    (name, region),
                    Problem(what, expected=layout, found=given[region], remedy=_as_cut(meant)),
                )
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
        yield (
            ("cut", "connection"),
            Problem(what, expected="sequence", found="whole", remedy="set connection: sequence"),
        )


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
            instead = (
                f"{one} belongs to {', '.join(rows)} and cut"
                if name in ROWS
                else f"or set {region}: {layout}"
            )
            yield (
                (name, one),
                Problem(f"parallel.{name}.{one}: under {name} {idle}", remedy=f"remove it; {instead}"),
            )
    if cut.exchange != "gather" and found["attention"] == "heads":
        what = (
            f"parallel.{name}.exchange: attention under {name} is cut by heads, which see every key and value"
        )
        yield (
            (name, "exchange"),
            Problem(what, found=cut.exchange, remedy="remove it; exchange belongs to sp and cut"),
        )
    if cut.overlap and found["attention"] == found["mlp"] == "sequence":
        what = f"parallel.{name}.overlap: no matmul under {name} adjoins communication"
        yield (
            (name, "overlap"),
            Problem(what, remedy="remove it; overlap belongs to what is cut by heads or columns"),
        )


def _sharding(dp: DpConfig) -> Iterator[Contradiction]:
    plain = DpConfig()
    for one in ("replicas", "reshard", "offload", "frozen"):
        if not dp.shard and getattr(dp, one) != getattr(plain, one):
            yield (
                ("dp", one),
                Problem(
                    f"parallel.dp.{one}: it has a meaning only with shard",
                    remedy="set shard: true, or remove it",
                ),
            )
    size = size_of(dp)
    if dp.shard and size is not None and dp.replicas > 1 and (size % dp.replicas or dp.replicas == size):
        what = "parallel.dp.replicas: every copy is sharded over as many ranks, more than one"
        yield (
            ("dp", "replicas"),
            Problem(what, expected=f"a divisor of size, {size}, and below it", found=str(dp.replicas)),
        )


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
        yield (
            ("pp", "stages"),
            Problem(what, expected=f"{pp.size}, as size says", found=str(length), remedy=remedy),
        )
