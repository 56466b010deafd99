"""A resumable state: what is tuned, the optimizer's moments, the generators, the progress. Written into and
read from one checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from petune.errors import FileError, Problem, told_apart
from petune.files.json_fields import (
    Anything,
    Fields,
    IntegerValue,
    Kind,
    ListOf,
    MapOf,
    Number,
    TextValue,
    check_fields,
)
from petune.files.range_writer import RangeWriter
from petune.files.ranges import RangeReader, sources
from petune.files.safetensors import (
    check_dtypes,
    read_header,
    read_json,
    read_tensors,
    refuse_failed,
    tensor_kinds,
    write_json,
    write_tensors,
)
from petune.models.decay import decays
from petune.parallel import Runner, ShardPlace, is_sharded, local
from petune.recipe import Recipe
from petune.rng.generators import rng_state, set_rng_state
from petune.run.progress import Progress, read_progress
from petune.saving import checkpoint
from petune.saving.optimizer_state import (
    OptimizerPacker,
    check_optimizer,
    pack_optimizer,
    restore_optimizer,
)

Make = Callable[[Mapping[str, nn.Parameter]], torch.optim.Optimizer]
TENSORS, FACTS = "state.safetensors", "state.json"
MOMENTS = ("exp_avg", "exp_avg_sq")  # of AdamW; beside them it counts its steps
_OPTIONS = Fields({}, {"lr": Number(0)}, others=True)
# the recipe's options are used
_GROUP = Fields({"options": _OPTIONS, "tensors": ListOf(TextValue()), "params": ListOf(TextValue())})
_MOMENTS = Fields(
    {"shape": ListOf(IntegerValue()), "tensors": ListOf(TextValue()), "values": MapOf(Number())}
)
_STATE: Mapping[str, Kind] = {
    "optimizer": Fields({"class": TextValue(), "groups": ListOf(_GROUP), "state": MapOf(_MOMENTS)}),
    "rng": MapOf(MapOf(Anything())),  # `set_rng_state` checks the rest
}


def make_optimizer(
    recipe: Recipe, tuned: Mapping[str, nn.Parameter], rates: Mapping[str, float] = MappingProxyType({})
) -> torch.optim.AdamW:
    """AdamW over tuned tensors by name, fused where all are on a GPU. rates: learning rates over the
    recipe's of those that have one of their own."""
    # one update takes shards or plain tensors, not both
    own = sorted({1.0, *rates.values()})
    kinds = [(matrix, sharded, rate) for matrix in (True, False) for sharded in (False, True) for rate in own]
    members: dict[Any, list[nn.Parameter]] = {kind: [] for kind in kinds}
    for name, value in tuned.items():
        members[decays(name, value), is_sharded(value), rates.get(name, 1.0)].append(value)
    groups: list[dict[str, Any]] = [
        {"params": values, "weight_decay": recipe.weight_decay * matrix}
        | ({} if rate == 1 else {"lr_ratio": rate})
        for (matrix, _, rate), values in members.items()
    ]
    groups = [group for group in groups if group["params"]] or groups[:1]
    fused = all(value.device.type == "cuda" for value in tuned.values())
    made = torch.optim.AdamW(
        groups, lr=recipe.learning_rate, betas=(recipe.beta1, recipe.beta2), fused=fused and bool(tuned)
    )
    set_rate(made, recipe.learning_rate)
    return made


def set_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Let `lr` be the learning rate of a run; groups with a ratio of their own have that much of it."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_ratio", 1.0)


def pack_state(
    tuned: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    packer: OptimizerPacker | None = None,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Everything that a step changes, beside the progress: tensors, of which the tuned ones and moments are
    the live ones, and JSON.

    packer: remembers what stays the same from one call to the next.
    """
    moments, optimizer_facts = (packer or pack_optimizer)(optimizer, tuned)
    rng, rng_facts = rng_state()
    tensors: dict[str, Tensor] = {f"tuned/{name}": value.detach() for name, value in tuned.items()}
    return tensors | moments | rng, {"optimizer": optimizer_facts, "rng": rng_facts}


def write_packed(folder: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Write what `pack_state` gave, or copies of it, into `folder`; of what is on the meta device the
    room."""
    write_tensors(folder / TENSORS, tensors)
    write_json(folder / FACTS, facts)


# ---------------------------------------------------------------- the parts of a rank


@dataclass(frozen=True)
class HeldState:
    """The state of a whole run as one rank holds it. tensors, facts: what `pack_state` gives, on the meta
    device what lies over the ranks. parts: what this rank writes of those, each with where it lies."""

    tensors: Mapping[str, Tensor]
    facts: Mapping[str, Any]
    parts: Mapping[str, tuple[Tensor, ShardPlace]]

    def begin(self, folder: Path) -> None:
        """Make the files of the state in an empty folder."""
        write_packed(folder, self.tensors, self.facts)

    def fill(self, folder: Path, check: Callable[[], None] = lambda: None) -> None:
        """Write this rank's parts into them. `check`, called before each, may raise."""
        if self.parts:
            with RangeWriter(folder / TENSORS) as writer:
                for name, (value, place) in self.parts.items():
                    for box, start in place.boxes(value):
                        check()
                        writer.write(name, box, start)

    @property
    def here(self) -> dict[str, Tensor]:
        """Every tensor that this rank holds of it, by name."""
        own = {name: value for name, value in self.tensors.items() if not value.is_meta}
        return own | {name: value for name, (value, _) in self.parts.items()}

    def of(self, copies: Mapping[str, Tensor]) -> HeldState:
        """The same state, with `copies` in the place of what is `here`."""
        tensors = {name: value if value.is_meta else copies[name] for name, value in self.tensors.items()}
        parts = {name: (copies[name], place) for name, (_, place) in self.parts.items()}
        return HeldState(tensors, self.facts, parts)


def held_state(runner: Runner, optimizer: torch.optim.Optimizer, make: Make) -> HeldState:
    """What this rank holds of the state, as it is now: live tensors. Every rank must call this."""
    if runner.uncut:
        return HeldState(*pack_state(runner.tuned, optimizer), {})
    states = {name: optimizer.state.get(value, {}) for name, value in runner.tuned.items()}
    step = max(runner.gather(max((float(state["step"]) for state in states.values() if state), default=0.0)))
    tuned, made = _whole_on_meta(runner, make)
    for value in tuned.values() if step else ():  # everywhere or nowhere: a stage may train nothing
        made.state[value] = {"step": torch.tensor(step)} | {key: torch.empty_like(value) for key in MOMENTS}
    first = optimizer.param_groups[0]
    set_rate(made, first["lr"] / first.get("lr_ratio", 1.0))
    parts: dict[str, tuple[Tensor, ShardPlace]] = {}
    for name, value in runner.tuned.items():
        if runner.writes(name):
            held = {"tuned": value.detach()}
            held |= {f"optimizer/{key}": states[name][key] for key in MOMENTS if step}
            parts |= {f"{key}/{name}": (local(one), runner.place(name)) for key, one in held.items()}
    return HeldState(*pack_state(tuned, made), parts)


def _whole_on_meta(runner: Runner, make: Make) -> tuple[dict[str, nn.Parameter], torch.optim.Optimizer]:
    """The tuned tensors of the whole model, on the meta device, and an optimizer over them."""
    kinds = runner.shapes.items()
    whole = {
        name: nn.Parameter(torch.empty(shape, dtype=dtype, device="meta")) for name, (shape, dtype) in kinds
    }
    return whole, make(whole)


def restore_parts(folder: Path, runner: Runner, optimizer: torch.optim.Optimizer, make: Make) -> None:
    """Put what this rank holds of the state in `folder` back, bit for bit. Raises FileError, before anything
    is filled, when that is of other tensors than these."""
    facts, saved = read_json(folder / FACTS), tensor_kinds(folder / TENSORS)
    check_fields(facts, _STATE, folder / FACTS)
    tuned, made = (runner.tuned, optimizer) if runner.uncut else _whole_on_meta(runner, make)
    _keep_options(facts["optimizer"], made)
    check_tuned(folder, runner)
    check_optimizer(made, tuned, saved, facts["optimizer"], str(folder))
    read_tuned(folder, runner)
    if runner.uncut:
        moments = read_tensors(folder / TENSORS, under="optimizer/")
        restore_optimizer(optimizer, tuned, moments, facts["optimizer"], str(folder))
    else:
        _read_moments(folder, runner, optimizer, facts["optimizer"]["state"])
        first = facts["optimizer"]["groups"][0]["options"]
        set_rate(optimizer, first["lr"] / first.get("lr_ratio", 1.0))
    set_rng_state(read_tensors(folder / TENSORS, under="rng/"), facts["rng"], str(folder))


def _keep_options(facts: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> None:
    """Let the recipe's options count in the groups that were saved, but for the rate, which is of the step
    that was saved."""
    # another number of them is refused later
    for saved, group in zip(facts["groups"], optimizer.param_groups, strict=False):
        recent = {key: value for key, value in saved["options"].items() if key == "lr"}
        saved["options"] = {
            key: value for key, value in group.items() if key != "params" and key not in saved["tensors"]
        } | recent


def check_tuned(folder: Path, runner: Runner) -> None:
    """Raise FileError naming up to ten tensors of the state in `folder` that are not what trains here."""
    saved = {
        name.removeprefix("tuned/"): value
        for name, value in tensor_kinds(folder / TENSORS).items()
        if name.startswith("tuned/")
    }
    shapes = {name: shape for name, (shape, _) in runner.shapes.items()}
    wrong = sorted(set(saved) ^ set(shapes)) or [name for name in saved if saved[name].shape != shapes[name]]
    if wrong:
        raise FileError(
            [
                Problem("is not the tensor this recipe trains", where=f"{folder}: {name}")
                for name in wrong[:10]
            ]
        )
    dtypes = {name: dtype for name, (_, dtype) in runner.shapes.items()}
    for name in check_dtypes(saved, dtypes, str(folder))[:1]:
        what = "would be rounded"
        where = f"{folder}  {name}"
        expected = str(dtypes[name])
        remedy = "resume with the dtype that the run began with"
        raise FileError(what, where=where, expected=expected, found=str(saved[name].dtype), remedy=remedy)


def read_tuned(folder: Path, runner: Runner) -> None:
    """Put the tuned tensors of the state in `folder`, which fits, into this rank's."""
    with _reader(folder) as reader:
        for name, value in runner.tuned.items():
            _read(reader, f"tuned/{name}", local(value.detach()), runner.place(name))


def _read_moments(
    folder: Path, runner: Runner, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]
) -> None:
    """Give the optimizer what this rank holds of the moments in `folder`, which fit."""
    optimizer.state.clear()  # a state before the first step has none
    on_device = optimizer.param_groups[0].get("fused")
    with _reader(folder) as reader:
        for name, value in runner.tuned.items():
            for key in saved[name]["tensors"]:
                if key in MOMENTS:
                    made = torch.empty_like(value.detach())
                    _read(reader, f"optimizer/{key}/{name}", local(made), runner.place(name))
                else:
                    made = torch.empty((), device=value.device if on_device else None)
                    _read(reader, f"optimizer/{key}/{name}", made, ShardPlace([]))
                optimizer.state[value][key] = made


def _reader(folder: Path) -> RangeReader:
    return RangeReader(sources({folder / TENSORS: read_header(folder / TENSORS)}))


def _read(reader: RangeReader, name: str, out: Tensor, place: ShardPlace) -> None:
    for box, start in place.boxes(out):
        reader.read(name, box, start)
    refuse_failed(out, f"{reader.sources[name].path}  {name}")


# ---------------------------------------------------------------- what fits


def refuse_foreign(
    saved: Mapping[str, Any], now: Mapping[str, Any], path: Path, allow_change: Collection[str]
) -> None:
    """Raise FileError where the facts `saved` in the checkpoint at `path` are of other rows, another base or
    another method than `now`."""
    reasons = {
        "rows": (
            "the data has changed",
            "put its files back as they were, say --allow-change data, or start anew: --overwrite",
        ),
        "frozen": ("the base model is another one", "put its files back as they were, or choose another out"),
        "method": ("the method is another one", "give it back its settings, or choose another out"),
    }
    problems = [
        Problem(
            f"{reason} since this checkpoint was saved",
            str(path),
            *told_apart(str(saved[key]), str(now[key])),
            remedy,
        )
        for key, (reason, remedy) in reasons.items()
        if saved[key] != now[key]
        and not (key == "rows" and any(name.split(".")[0] == "data" for name in allow_change))
    ]
    if problems:
        raise FileError(problems)


def progress_of(
    path: Path,
    manifest: checkpoint.Manifest,
    root: Path,
    planned: int | None,
    metric: str,
    larger_is_better: bool,
) -> Progress:
    """The progress of the checkpoint at `path`, whose best state is one that is still in the folder `root`.

    Where the one it names was removed since, the best of the checkpoints of this run up to its step takes its
    place, if any was scored. Raises as `read_progress`.
    """
    progress = read_progress(manifest.facts, manifest.step, planned, metric, path)
    if progress.best_step is None or (root / f"step-{progress.best_step}").is_dir():
        return progress
    saved = []
    for other in reversed([one for one in checkpoint.candidates(root) if one.parent == root]):
        with suppress(FileError):
            own = checkpoint.verify(other)
            if own.run_id == manifest.run_id and own.step <= manifest.step:
                saved.append(read_progress(own.facts, own.step, None, metric, other))
    progress.choose_best(saved, metric, larger_is_better)
    return progress


def held_here(runner: Runner, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The tensors of the state that this rank has: what trains and what the optimizer keeps of it."""
    kept = [value for own in optimizer.state.values() for value in own.values() if isinstance(value, Tensor)]
    return [local(value.detach()) for value in [*runner.tuned.values(), *kept]]


def bytes_of_state(runner: Runner, optimizer: torch.optim.Optimizer) -> tuple[int, int]:
    """Of the whole model's tuned tensors, and of these and the optimizer's moments together."""
    tuned = sum(shape.numel() * dtype.itemsize for shape, dtype in runner.shapes.values())
    held = sum(value.nbytes for own in optimizer.state.values() for value in own.values())
    # AdamW makes its two moments in the first step, unless they have a place from the start
    return tuned, tuned + (held or 2 * tuned)


def refuse_tuned_folder(folder: Path) -> None:
    """Raise FileError for a folder of tuned weights, from which nothing can be resumed: it has no optimizer
    and no step."""
    if any((folder / name).is_file() for name in ("petune.json", "adapter_config.json")):
        what = "holds tuned weights, not a state to resume from"
        raise FileError(what, where=str(folder), remedy=f"start a new run from them: init_adapter={folder}")
