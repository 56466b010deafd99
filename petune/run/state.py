"""A resumable state: what is tuned, the optimizer's moments, the generators, the progress. Written into and
read from one checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from petune.errors import FileError, Problem
from petune.files.json_fields import Anything, Fields, Kind, ListOf, MapOf, Number, Text, Whole, check_fields
from petune.files.safetensors import check_dtypes
from petune.parallel import Runner, is_sharded
from petune.recipe import Recipe
from petune.rng.generators import rng_state, set_rng_state
from petune.run.progress import Progress, read_progress
from petune.saving import checkpoint

TENSORS, FACTS = "state.safetensors", "state.json"
MOMENTS = ("exp_avg", "exp_avg_sq")  # of AdamW; beside them it counts its steps
_OPTIONS = Fields({}, {"lr": Number(0)}, others=True)
# the recipe's options are used
_GROUP = Fields({"options": _OPTIONS, "tensors": ListOf(Text()), "params": ListOf(Text())})
_MOMENTS = Fields({"shape": ListOf(Whole()), "tensors": ListOf(Text()), "values": MapOf(Number())})
_STATE: Mapping[str, Kind] = {
    "optimizer": Fields({"class": Text(), "groups": ListOf(_GROUP), "state": MapOf(_MOMENTS)}),
    "rng": MapOf(MapOf(Anything())),  # `set_rng_state` checks the rest
}


def make_optimizer(
    recipe: Recipe, tuned: Mapping[str, nn.Parameter], rates: Mapping[str, float] = MappingProxyType({})
) -> torch.optim.AdamW:
    """AdamW over tuned tensors by name, fused where all are on a GPU. rates: learning rates over the
    recipe's of those that have one of their own."""
    decays = {True: recipe.weight_decay, False: 0.0}  # biases, norms and gates do not decay
    # one update takes shards or plain tensors, not both
    own = sorted({1.0, *rates.values()})
    kinds = [(matrix, sharded, rate) for matrix in decays for sharded in (False, True) for rate in own]
    members: dict[Any, list[nn.Parameter]] = {kind: [] for kind in kinds}
    for name, value in tuned.items():
        members[value.dim() > 1, is_sharded(value), rates.get(name, 1.0)].append(value)
    groups: list[dict[str, Any]] = [
        {"params": values, "weight_decay": decays[matrix]} | ({} if rate == 1 else {"lr_ratio": rate})
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
    packer: checkpoint.OptimizerPacker | None = None,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Everything that a step changes, beside the progress: tensors, of which the tuned ones and moments are
    the live ones, and JSON.

    packer: remembers what stays the same from one call to the next.
    """
    moments, optimizer_facts = (packer or checkpoint.pack_optimizer)(optimizer, tuned)
    rng, rng_facts = rng_state()
    tensors: dict[str, Tensor] = {f"tuned/{name}": value.detach() for name, value in tuned.items()}
    return tensors | moments | rng, {"optimizer": optimizer_facts, "rng": rng_facts}


def write_packed(folder: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Write what `pack_state` gave, or copies of it, into `folder`."""
    checkpoint.write_tensors(folder / TENSORS, tensors)
    checkpoint.write_json(folder / FACTS, facts)


def restore_state(folder: Path, tuned: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    """Put a written state back, bit for bit. Raises FileError when it is of other tensors than these."""
    tensors, facts = checkpoint.read_tensors(folder / TENSORS), checkpoint.read_json(folder / FACTS)
    check_fields(facts, _STATE, folder / FACTS)
    fill(tuned, _tuned(tensors), str(folder))
    # another number of them is refused below
    for saved, group in zip(facts["optimizer"]["groups"], optimizer.param_groups, strict=False):
        # of the step that was saved
        recent = {key: value for key, value in saved["options"].items() if key == "lr"}
        saved["options"] = {
            key: value for key, value in group.items() if key != "params" and key not in saved["tensors"]
        } | recent
    checkpoint.restore_optimizer(optimizer, tuned, tensors, facts["optimizer"], str(folder))
    set_rng_state(tensors, facts["rng"], str(folder))


def tuned_of(folder: Path) -> dict[str, Tensor]:
    """The tuned tensors of a written state, whole, by name. Raises FileError."""
    return _tuned(checkpoint.read_tensors(folder / TENSORS, under="tuned/"))


def _tuned(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        name.removeprefix("tuned/"): value for name, value in tensors.items() if name.startswith("tuned/")
    }


def fill(tuned: Mapping[str, nn.Parameter], saved: Mapping[str, Tensor], where: str) -> None:
    """Copy saved tensors into the model's. Raises FileError naming up to ten that do not fit; `where` is
    where they come from."""
    wrong = sorted(set(saved) ^ set(tuned)) or [
        name for name in saved if saved[name].shape != tuned[name].shape
    ]
    if wrong:
        raise FileError(
            [Problem("is not the tensor this recipe trains", where=f"{where}: {name}") for name in wrong[:10]]
        )
    for name in check_dtypes(saved, {name: value.dtype for name, value in tuned.items()}, where)[:1]:
        sides = {"expected": str(tuned[name].dtype), "found": str(saved[name].dtype)}
        raise FileError(
            "would be rounded",
            where=f"{where}  {name}",
            remedy="resume with the dtype that the run began with",
            **sides,
        )
    with torch.no_grad():
        for name, value in saved.items():
            tuned[name].copy_(value)


def whole_state(
    runner: Runner,
    optimizer: torch.optim.Optimizer,
    make: Callable[[Mapping[str, nn.Parameter]], torch.optim.Optimizer],
) -> tuple[Mapping[str, nn.Parameter], torch.optim.Optimizer]:
    """The tuned tensors and the optimizer of the whole model, on the CPU of the main process; empty ones
    elsewhere.

    `make` builds an optimizer over tuned tensors by name. Every process must call this. Where every rank has
    all tensors whole, each gets its own, which are the live ones, wherever they are.
    """
    if runner.uncut:
        return runner.tuned, optimizer
    states = {name: optimizer.state.get(value, {}) for name, value in runner.tuned.items()}
    tuned = runner.whole({name: value.detach() for name, value in runner.tuned.items()})
    whole = {name: nn.Parameter(value) for name, value in tuned.items()}
    moments: dict[str, dict[str, Tensor]] = {}
    step = max(runner.gather(max((float(state["step"]) for state in states.values() if state), default=0.0)))
    if step:  # everywhere or nowhere: a stage may train nothing
        moments = {key: runner.whole({name: state[key] for name, state in states.items()}) for key in MOMENTS}
    made = make(whole)
    for name, value in whole.items():
        if moments:
            made.state[value] = {"step": torch.tensor(step), **{key: moments[key][name] for key in MOMENTS}}
    first = optimizer.param_groups[0]
    set_rate(made, first["lr"] / first.get("lr_ratio", 1.0))
    return whole, made


def restore_parts(
    folder: Path,
    runner: Runner,
    optimizer: torch.optim.Optimizer,
    make: Callable[[Mapping[str, nn.Parameter]], torch.optim.Optimizer],
) -> None:
    """Fill this process' parts from the whole state in `folder`. `make` builds an optimizer over tuned
    tensors by name."""
    if runner.plan.world == 1:
        restore_state(folder, runner.tuned, optimizer)
        return
    whole = {
        name: nn.Parameter(torch.empty(shape, dtype=dtype)) for name, (shape, dtype) in runner.shapes.items()
    }
    restored = make(whole)
    restore_state(folder, whole, restored)
    runner.fill({name: value.detach() for name, value in whole.items()})
    states = {name: restored.state.get(value, {}) for name, value in whole.items()}
    optimizer.state.clear()  # a state before the first step has none
    moments = {
        key: runner.local({name: state[key] for name, state in states.items() if key in state})
        for key in MOMENTS
    }
    for name, value in runner.tuned.items():
        if name in moments[MOMENTS[0]]:
            step = (
                states[name]["step"].to(value.device)
                if optimizer.param_groups[0].get("fused")
                else states[name]["step"]
            )
            optimizer.state[value] = {"step": step.clone(), **{key: moments[key][name] for key in MOMENTS}}


def refuse_foreign(
    saved: Mapping[str, Any], now: Mapping[str, Any], path: Path, allow_change: Collection[str]
) -> None:
    """Raise FileError where the facts `saved` in the checkpoint at `path` are of other rows, another base or
    another method than `now`."""
    reasons = {
        "rows": "the data has changed",
        "frozen": "the base model is another one",
        "method": "the method is another one",
    }
    problems = [
        Problem(
            f"{reason} since this checkpoint was saved",
            where=str(path),
            expected=str(saved[key])[:16],
            found=str(now[key])[:16],
        )
        for key, reason in reasons.items()
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
        raise FileError(
            "holds tuned weights, not a state to resume from",
            where=str(folder),
            remedy=f"start a new run from them: init_adapter={folder}",
        )
