"""The tensors of a resumable state: what is tuned, the optimizer's moments, the generators. Written into and read from one checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from petune import checkpoint
from petune.errors import FileError, Problem
from petune.generators import rng_state, set_rng_state
from petune.json_fields import Anything, Fields, Kind, ListOf, MapOf, Number, Text, Whole, check_fields
from petune.parallel import Runner
from petune.tensorfile import check_dtypes

TENSORS, FACTS = "state.safetensors", "state.json"
MOMENTS = ("exp_avg", "exp_avg_sq")  # of AdamW; beside them it counts its steps
_GROUP = Fields({"options": MapOf(Anything()), "tensors": ListOf(Text()), "params": ListOf(Text())})  # the recipe's options are used
_MOMENTS = Fields({"shape": ListOf(Whole()), "tensors": ListOf(Text()), "values": MapOf(Number())})
_STATE: Mapping[str, Kind] = {
    "optimizer": Fields({"class": Text(), "groups": ListOf(_GROUP), "state": MapOf(_MOMENTS)}),
    "rng": MapOf(MapOf(Anything())),  # `set_rng_state` checks the rest
}


def write_state(folder: Path, tuned: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    """Write everything that a step changes, beside the progress, into `folder`."""
    moments, optimizer_facts = checkpoint.pack_optimizer(optimizer, tuned)
    rng, rng_facts = rng_state()
    tensors = {f"tuned/{name}": value.detach() for name, value in tuned.items()}
    checkpoint.write_tensors(folder / TENSORS, tensors | moments | rng)
    checkpoint.write_json(folder / FACTS, {"optimizer": optimizer_facts, "rng": rng_facts})


def restore_state(folder: Path, tuned: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    """Put a written state back, bit for bit. Raises FileError when it is of other tensors than these."""
    tensors, facts = checkpoint.read_tensors(folder / TENSORS), checkpoint.read_json(folder / FACTS)
    check_fields(facts, _STATE, folder / FACTS)
    fill(tuned, _tuned(tensors), str(folder))
    for saved, group in zip(facts["optimizer"]["groups"], optimizer.param_groups, strict=False):  # another number of them is refused below
        saved["options"] = {key: value for key, value in group.items() if key != "params" and key not in saved["tensors"]}
    checkpoint.restore_optimizer(optimizer, tuned, tensors, facts["optimizer"], str(folder))
    set_rng_state(tensors, facts["rng"], str(folder))


def tuned_of(folder: Path) -> dict[str, Tensor]:
    """The tuned tensors of a written state, whole, by name. Raises FileError."""
    return _tuned(checkpoint.read_tensors(folder / TENSORS, under="tuned/"))


def _tuned(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix("tuned/"): value for name, value in tensors.items() if name.startswith("tuned/")}


def fill(tuned: Mapping[str, nn.Parameter], saved: Mapping[str, Tensor], where: str) -> None:
    """Copy saved tensors into the model's. Raises FileError naming up to ten that do not fit; `where` is where they come from."""
    wrong = sorted(set(saved) ^ set(tuned)) or [name for name in saved if saved[name].shape != tuned[name].shape]
    if wrong:
        raise FileError([Problem("is not the tensor this recipe trains", where=f"{where}: {name}") for name in wrong[:10]])
    for name in check_dtypes(saved, {name: value.dtype for name, value in tuned.items()}, where)[:1]:
        sides = {"expected": str(tuned[name].dtype), "found": str(saved[name].dtype)}
        raise FileError("would be rounded", where=f"{where}  {name}", remedy="resume with the dtype that the run began with", **sides)
    with torch.no_grad():
        for name, value in saved.items():
            tuned[name].copy_(value)


def gather_state(
    runner: Runner, optimizer: torch.optim.Optimizer, make: Callable[[Mapping[str, nn.Parameter]], torch.optim.Optimizer]
) -> tuple[dict[str, nn.Parameter], torch.optim.Optimizer]:
    """The tuned tensors and the optimizer of the whole model, on the CPU of the main process; empty ones elsewhere.

    `make` builds an optimizer over tuned tensors by name. Every process must call this.
    """
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
    for group in made.param_groups:
        group["lr"] = optimizer.param_groups[0]["lr"]
    return whole, made


def scatter_state(
    runner: Runner, optimizer: torch.optim.Optimizer, whole: Mapping[str, nn.Parameter], restored: torch.optim.Optimizer
) -> None:
    """Put what `restore_state` has filled, whole, into this process' parts."""
    runner.fill({name: value.detach() for name, value in whole.items()})
    states = {name: restored.state.get(value, {}) for name, value in whole.items()}
    moments = {key: runner.local({name: state[key] for name, state in states.items() if key in state}) for key in MOMENTS}
    for name, value in runner.tuned.items():
        if name in moments[MOMENTS[0]]:
            step = states[name]["step"].to(value.device) if optimizer.param_groups[0].get("fused") else states[name]["step"]
            optimizer.state[value] = {"step": step.clone(), **{key: moments[key][name] for key in MOMENTS}}


def refuse_tuned_folder(folder: Path) -> None:
    """Raise FileError for a folder of tuned weights, from which nothing can be resumed: it has no optimizer and no step."""
    if any((folder / name).is_file() for name in ("petune.json", "adapter_config.json")):
        raise FileError(
            "holds tuned weights, not a state to resume from", where=str(folder), remedy=f"start a new run from them: init_adapter={folder}"
        )
