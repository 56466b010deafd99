"""What `parallel:` in a recipe lets you set. Torch-free, so that a recipe is checked without loading torch.

The range of a setting stands at its field, as for methods. Lists of shares may be left empty: then
the plan cuts evenly. What can be wrong between settings stands in contradictions.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from petune.setting import setting

CutBy = Literal["heads", "sequence"]
Connection = Literal["whole", "sequence"]


def _size() -> Any:
    return setting(
        None, "ranks of this axis; null: as many as the lists say, or all that are left", ge=1, le=4096
    )


def _list(doc: str) -> Any:
    return setting((), doc, ge=1)


@dataclass(frozen=True)
class DpConfig:
    """Data parallel: every replica trains on rows of its own."""

    size: int | None = _size()
    shares: tuple[int, ...] = _list("rows of a forward pass per replica, as a ratio: [3, 1]")
    shard: bool = setting(False, "shard parameters, gradients and optimizer over the replicas (FSDP2)")
    replicas: int = setting(1, "shard: groups of replicas that each hold a whole copy (HSDP)", ge=1)
    reshard: bool = setting(True, "shard: free gathered weights after the forward pass")
    offload: str = setting("none", "shard: where shards rest between uses", choices=("none", "cpu"))
    frozen: str = setting(
        "sharded", "shard: whether what does not train is sharded too", choices=("sharded", "replicated")
    )


@dataclass(frozen=True)
class CutConfig:
    """A block cut across ranks. `tp`, `sp`, `galaxy` and `galaxy2` are rows of ROWS; `cut` leaves the choice
    open.

    Galaxy: Ye et al. 2024, arXiv:2405.17245. tp: Shoeybi et al. 2019, arXiv:1909.08053. sp with ulysses:
    arXiv:2309.14509.
    """

    size: int | None = _size()
    attention: str | None = setting(None, "how attention is cut", choices=("heads", "sequence"))
    mlp: str | None = setting(
        None, "how the MLP is cut: by columns, or sequence", choices=("heads", "sequence")
    )
    connection: str | None = setting(
        None, "what lies between: norms, residuals, a method's own modules", choices=("whole", "sequence")
    )
    shares: tuple[int, ...] = _list("heads, columns, tokens and vocabulary per rank, as one ratio: [3, 1]")
    heads: tuple[int, ...] = _list("query heads per rank; they add up to the model's")
    columns: tuple[int, ...] = _list("MLP columns per rank; they add up to the model's")
    sequence: tuple[int, ...] = _list("tokens per rank, as a ratio scaled to the length of each batch")
    exchange: str = setting(
        "gather",
        "attention: sequence: how a rank sees the others' keys and values",
        choices=("gather", "ulysses", "ring"),
    )
    vocabulary: bool | None = setting(
        None,
        "cut embedding and output head by vocabulary, in the ratio of `shares`, else of columns or"
        " heads; null: for tp where the model allows it",
    )
    overlap: bool = setting(
        False,
        "hide communication: in fused blocks of one half of the rows behind the other half, else"
        " behind the adjoining matmul, in ring tiles",
    )


@dataclass(frozen=True)
class PpConfig:
    """Pipeline parallel: every rank holds some of the blocks."""

    size: int | None = _size()
    stages: tuple[int, ...] = _list(
        "blocks per stage, encoder before decoder; they add up to the model's; else as many on each, but"
        " fewer on the last for its head"
    )
    schedule: str = setting(
        "1f1b",
        "order of forward and backward passes",
        choices=("gpipe", "1f1b", "interleaved", "zero-bubble"),
    )
    microbatches: int | None = setting(
        None, "pieces of a forward pass; null: as many as stages", ge=1, le=4096
    )


@dataclass(frozen=True)
class EpConfig:
    """Expert parallel: every rank trains on rows of its own, as replicas do, and holds some of the experts.

    Tokens travel to the ranks of their experts and back: Lepikhin et al. 2020, arXiv:2006.16668.
    """

    size: int | None = _size()
    shares: tuple[int, ...] = _list("rows of a forward pass per rank, as a ratio: [3, 1]")
    experts: tuple[int, ...] = _list("routed experts per rank; they add up to the model's")


AxisConfig = DpConfig | CutConfig | PpConfig | EpConfig


@dataclass(frozen=True)
class ParallelConfig:
    """The axes of a plan. At most one of tp, sp, galaxy, galaxy2 and cut; all None means one process."""

    dp: DpConfig | None = setting(None, "data parallel: every replica trains on rows of its own")
    tp: CutConfig | None = setting(
        None, "tensor parallel: heads and MLP columns cut, what lies between is whole"
    )
    sp: CutConfig | None = setting(None, "sequence parallel: every block works on tokens of its own")
    galaxy: CutConfig | None = setting(None, "heads and MLP columns cut, what lies between is cut by tokens")
    galaxy2: CutConfig | None = setting(None, "heads cut; MLP and what lies between are cut by tokens")
    cut: CutConfig | None = setting(None, "attention, mlp and connection cut as you say")
    pp: PpConfig | None = setting(None, "pipeline parallel: every rank holds some of the blocks")
    ep: EpConfig | None = setting(
        None, "expert parallel: replicas that share the routed experts, and send them tokens"
    )
    auto: bool = setting(False, "axes are yet to be chosen for the devices")

    @property
    def axes(self) -> dict[str, AxisConfig]:
        """The axes that are there, by backend."""
        every = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return {name: axis for name, axis in every.items() if isinstance(axis, AxisConfig)}

    @property
    def shards(self) -> bool:
        """Whether weights are spread over replicas."""
        return any(isinstance(axis, DpConfig) and axis.shard for axis in self.axes.values())

    @property
    def spreads(self) -> bool:
        """Whether experts are cut over ranks."""
        return self.ep is not None and size_of(self.ep) != 1

    def __str__(self) -> str:
        """`dp 2 x tp 2`, `pp` for an axis without a size, `none` for one process, `auto`."""
        sizes = {name: size_of(axis) for name, axis in self.axes.items()}
        return " x ".join(name if size is None else f"{name} {size}" for name, size in sizes.items()) or (
            "auto" if self.auto else "none"
        )


@dataclass(frozen=True)
class BackendLayout:
    """What a backend that cuts blocks is: three layouts. Communication follows from them."""

    attention: CutBy
    mlp: CutBy
    connection: Connection


ROWS: Mapping[str, BackendLayout] = {
    "tp": BackendLayout("heads", "heads", "whole"),
    "sp": BackendLayout("sequence", "sequence", "sequence"),
    "galaxy": BackendLayout("heads", "heads", "sequence"),
    "galaxy2": BackendLayout("heads", "sequence", "sequence"),
}
CUTS: tuple[str, ...] = (*ROWS, "cut")
BACKENDS: Mapping[str, type[AxisConfig]] = {
    "dp": DpConfig,
    **dict.fromkeys(CUTS, CutConfig),
    "pp": PpConfig,
    "ep": EpConfig,
}
LOOPED = ("interleaved", "zero-bubble")  # schedules in which a rank may hold several stages
LISTS = ("shares", "heads", "columns", "sequence", "stages", "experts")  # with one entry per rank each


def size_of(axis: AxisConfig) -> int | None:
    """Ranks of an axis: its size, else the entries of its first list; None when neither says it."""
    if axis.size is None and isinstance(axis, PpConfig) and axis.schedule in LOOPED:
        return None  # a rank holds several of the stages
    lists = [len(getattr(axis, name)) for name in LISTS if getattr(axis, name, ())]
    return axis.size if axis.size is not None else next(iter(lists), None)


def layouts(name: str, cut: CutConfig) -> dict[str, str | None]:
    """Region -> layout of the backend `name`: those of its row; of `cut` the given ones, or None."""
    if (row := ROWS.get(name)) is not None:
        return asdict(row)
    return {region: getattr(cut, region) for region in ("attention", "mlp", "connection")}


def row_name(found: Mapping[str, str | None]) -> str:
    """The backend that has these layouts: a name of ROWS where there is one, else `cut`."""
    return next((name for name, row in ROWS.items() if asdict(row) == dict(found)), "cut")
