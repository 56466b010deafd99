"""An optimizer's state by the names of its parameters: as tensors and JSON, and put back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from petune.errors import FileError, Problem, nearest


def pack_optimizer(
    optimizer: torch.optim.Optimizer, names: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """An optimizer's state as tensors ("optimizer/exp_avg/NAME", ...) and JSON, keyed by parameter name and
    not by position.

    `names` maps names to parameters, as dict(model.named_parameters()). The tensors are the live ones: write
    them before the next step. Holds for optimizers whose state is elementwise or scalar (AdamW, Adam, SGD).
    Raises ValueError for a parameter without a name.
    """
    # of tied names the first
    name_of = {id(parameter): name for name, parameter in reversed([*names.items()])}
    tensors: dict[str, Tensor] = {}
    groups: list[dict[str, Any]] = []
    state: dict[str, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if (name := name_of.get(id(parameter))) is None:
                raise ValueError(
                    f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that has no name"
                )
            held = optimizer.state.get(parameter, {})
            kept = {key: value for key, value in held.items() if isinstance(value, Tensor)}
            if odd := [key for key, value in kept.items() if value.dim() and value.shape != parameter.shape]:
                raise ValueError(
                    f"{type(optimizer).__name__} keeps {odd} of {name} in another shape than the parameter's"
                )
            tensors |= {f"optimizer/{key}/{name}": value for key, value in kept.items()}
            values = {key: value for key, value in held.items() if key not in kept}
            state[name] = {"shape": list(parameter.shape), "tensors": sorted(kept), "values": values}
        options = {key: value for key, value in group.items() if key != "params"}
        moved = sorted(key for key, value in options.items() if isinstance(value, Tensor))  # lr may be one
        tensors |= {f"optimizer/group-{len(groups)}/{key}": options.pop(key) for key in moved}
        groups.append(
            {
                "options": options,
                "tensors": moved,
                "params": [name_of[id(parameter)] for parameter in group["params"]],
            }
        )
    facts = {"class": type(optimizer).__name__, "groups": groups, "state": state}
    json.dumps(facts, allow_nan=False)  # raises here, at the save, and not at the resume that needs it
    return tensors, facts


class OptimizerPacker:
    """`pack_optimizer` after every step: tensors that are still the same objects are not looked for again,
    nor described."""

    def __init__(self) -> None:
        self._held: list[tuple[Tensor, dict[str, Tensor]]] = []
        self._packed: tuple[dict[str, Tensor], dict[str, Any]] = {}, {}

    def __call__(
        self, optimizer: torch.optim.Optimizer, names: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """As `pack_optimizer`; nothing of the result may be changed."""
        if not self._same(optimizer, names):
            self._packed = pack_optimizer(optimizer, names)
            self._held = [(value, dict(optimizer.state.get(value, {}))) for value in names.values()]
            return self._packed
        tensors, facts = self._packed
        groups = [
            {**saved, "options": {key: value for key, value in group.items() if key != "params"}}
            for group, saved in zip(optimizer.param_groups, facts["groups"], strict=True)
        ]
        return tensors, {**facts, "groups": groups}

    def _same(self, optimizer: torch.optim.Optimizer, names: Mapping[str, Tensor]) -> bool:
        """Whether the parameters and all that is held of them are the tensors packed last, and the groups'
        options are no tensors."""
        if len(names) != len(self._held) or any(
            isinstance(value, Tensor) for group in optimizer.param_groups for value in group.values()
        ):
            return False
        for value, (before, held) in zip(names.values(), self._held, strict=True):
            now = optimizer.state.get(value, {})
            if (
                value is not before
                or len(now) != len(held)
                or any(now.get(key) is not one for key, one in held.items())
            ):
                return False
        return all(isinstance(one, Tensor) for _, held in self._held for one in held.values())


def restore_optimizer(
    optimizer: torch.optim.Optimizer,
    names: Mapping[str, Tensor],
    tensors: Mapping[str, Tensor],
    facts: Mapping[str, Any],
    where: str,
) -> None:
    """Put packed state into an optimizer made anew over the same parameters; bit-identical, and all of it or
    nothing.

    `tensors` may hold others beside "optimizer/..."; those become the optimizer's own. `where` names the
    checkpoint in errors. Raises as `check_optimizer`.
    """
    mine = check_optimizer(optimizer, names, tensors, facts, where)
    index = {name: at for at, name in enumerate(name for group in mine["groups"] for name in group["params"])}
    state: dict[int, dict[str, Any]] = {}
    for name, entry in facts["state"].items():
        if entry["tensors"] or entry["values"]:
            state[index[name]] = {
                key: tensors[f"optimizer/{key}/{name}"] for key in entry["tensors"]
            } | entry["values"]
    groups = []
    for at, (group, saved) in enumerate(zip(optimizer.param_groups, facts["groups"], strict=True)):
        options = {
            key: tuple(value) if isinstance(group.get(key), tuple) else value
            for key, value in saved["options"].items()
        }
        options |= {key: tensors[f"optimizer/group-{at}/{key}"] for key in saved["tensors"]}
        groups.append(options | {"params": [index[name] for name in mine["groups"][at]["params"]]})
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def check_optimizer(
    optimizer: torch.optim.Optimizer,
    names: Mapping[str, Tensor],
    tensors: Mapping[str, Tensor],
    facts: Mapping[str, Any],
    where: str,
) -> dict[str, Any]:
    """The JSON of an optimizer over whole parameters, to which packed state fits; all may be on the meta
    device. Raises FileError when class, groups, names, shapes or tensors differ."""
    mine = pack_optimizer(optimizer, names)[1]
    kept = {key: tensor for key, tensor in tensors.items() if key.startswith("optimizer/")}
    if problems := _differences(mine, facts, kept, where):
        raise FileError(problems)
    return mine


def _differences(
    mine: Mapping[str, Any], facts: Mapping[str, Any], kept: Mapping[str, Tensor], where: str
) -> list[Problem]:
    problems: list[Problem] = []

    def fault(what: str, *told: str | None) -> None:
        problems.append(Problem(what, where, *told))

    try:
        if facts["class"] != mine["class"]:
            remedy = "resume with the recipe that was saved"
            return [Problem("another optimizer", where, facts["class"], mine["class"], remedy)]
        here, saved = mine["state"], facts["state"]
        for name in sorted(set(here) - set(saved)):
            near = ", ".join(nearest(name, saved)) or None
            fault(f"no optimizer state of {name!r}, which trains here", None, near)
        for name in sorted(set(saved) - set(here)):
            near = ", ".join(nearest(name, here)) or None
            fault(f"optimizer state of {name!r}, which does not train here", near)
        theirs, ours = ([set(group["params"]) for group in side["groups"]] for side in (facts, mine))
        if not problems and theirs != ours:
            counts = f"{[*map(len, theirs)]} tensors", f"{[*map(len, ours)]}"
            fault("the optimizer's groups differ", *counts)
        wanted = {
            f"optimizer/{key}/{name}": here.get(name, entry)["shape"]
            for name, entry in saved.items()
            for key in entry["tensors"]
        }
        wanted |= {
            f"optimizer/group-{at}/{key}": []
            for at, group in enumerate(facts["groups"])
            for key in group["tensors"]
        }
        shapes = {name: entry["shape"] for name, entry in saved.items()}
        options = (group["options"] for group in facts["groups"])
        values = (one["values"] for one in saved.values())
        for mapping in (*options, *values):
            mapping.items()
    except (KeyError, TypeError, AttributeError) as error:
        return [Problem(f"the optimizer's JSON is not what pack_optimizer writes: {error!r}", where)]
    for name in sorted(set(here) & set(saved)):
        if here[name]["shape"] != shapes[name]:
            shape = str(here[name]["shape"]), str(shapes[name])
            fault(f"optimizer state of {name!r} has another shape", *shape)
    for key in sorted(set(wanted) - set(kept)):
        fault(f"the tensor {key!r} is missing")
    for key in sorted(set(kept) - set(wanted)):
        fault(f"the tensor {key!r} is unexpected")
    both = sorted(set(wanted) & set(kept))
    for key in both:
        if not kept[key].is_floating_point() or kept[key].element_size() == 1:
            dtype = str(kept[key].dtype).removeprefix("torch.")
            fault(f"the tensor {key!r} holds {dtype}, not moments", "a float")
    for key in both:
        if kept[key].dim() and [*kept[key].shape] != wanted[key]:
            fault(f"the tensor {key!r} has another shape", str(wanted[key]), str([*kept[key].shape]))
    return problems
