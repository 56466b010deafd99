"""What trains: marked by what modules declare, collected under base-model names, frozen everywhere else."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from petune.errors import UsageError
from petune.methods.configs import method_of
from petune.methods.targets import left_alone, within
from petune.methods.token_rows import RowLayer
from petune.methods.wrapped import bare, is_wrapped, tuning
from petune.models import family_of
from petune.models.checksums import ALONE, RankShare, digest
from petune.models.contents import checksums_of
from petune.models.stack import Stack
from petune.models.tuned_linear import tuned_layers, tuned_modules


def tuned_names(model: nn.Module) -> dict[str, nn.Parameter]:
    """Every name of every parameter that trains; a tensor tied to two of them appears under both, as a file
    must have it."""
    model = bare(model)
    record = tuning(model)
    if method_of(record.config).trains_base:
        family = family_of(model)
        fixed = () if family is None else family.fixed
        return {name: value for name, value in model.named_parameters() if not name.endswith(fixed)}
    found = {
        f"{name}.{own}": value
        for name, module in tuned_modules(model)
        for own, value in module.tuned().items()
    }
    return found | _whole_names(model)


def _whole_names(model: nn.Module) -> dict[str, nn.Parameter]:
    """Of what `tuned_names` has of a method beside a base: the base's own tensors, which train themselves."""
    record, modules = tuning(model), dict(model.named_modules(remove_duplicate=False))
    here = [head for head in record.also_train if head in modules]  # a pipeline's stage has them or not
    whole = {f"{head}.{own}": value for head in here for own, value in modules[head].named_parameters()}
    return _biases_here(model, record.biases) | whole | _ends_here(model, record.ends, whole)


def _biases_here(model: nn.Module, names: Iterable[str]) -> dict[str, nn.Parameter]:
    """Those of the biases that train which this rank has: another stage, or the first rank, may have them."""
    here = dict(model.named_parameters(remove_duplicate=False)) if names else {}
    return {name: here[name] for name in names if name in here}


def _ends_here(
    model: nn.Module, ends: Mapping[str, str], whole: Mapping[str, nn.Parameter]
) -> dict[str, nn.Parameter]:
    """What a pipeline's stage has of tensors trained whole whose own module lies on another one: the other
    ends of a tie, by their own names."""
    here = dict(model.named_parameters(remove_duplicate=False)) if ends else {}
    return {end: here[end] for end, name in ends.items() if name not in whole and end in here}


def tied_ends(model: nn.Module, also_train: Iterable[str]) -> dict[str, str]:
    """Every other name of the tensors of modules that are trained whole, of which they are tied to others,
    and their own."""
    owners = [(head, model.get_submodule(head)) for head in also_train]
    own = {id(value): f"{head}.{name}" for head, one in owners for name, value in one.named_parameters()}
    every = model.named_parameters(remove_duplicate=False) if own else ()
    return {name: own[id(value)] for name, value in every if own.get(id(value), name) != name}


def refuse_tied_heads(model: nn.Module, heads: Iterable[str]) -> None:
    """Raise UsageError for a module trained whole whose tensor is tied to one that is not."""
    heads = tuple(heads)
    inside = {id(value): head for head in heads for value in model.get_submodule(head).parameters()}
    if not inside:
        return
    for name, value in model.named_parameters(remove_duplicate=False):
        if id(value) in inside and not within(name, heads):
            raise UsageError(
                f"{inside[id(value)]} is trained whole and tied to {name}, which is not: peft files cannot"
                " say so",
                remedy=f"name both in also_train: [{inside[id(value)]}, {name.rpartition('.')[0]}]",
            )


def base_biases(model: nn.Module, which: str, also_train: Iterable[str]) -> dict[str, Tensor]:
    """The biases of the base that train beside a method, by each of their names, with copies of their values.

    which: none, all, or lora for those of tuned layers, of which a head that reads rows of its own is none;
    those in modules that are trained whole are none of them. Raises UsageError where there is no bias to
    train.
    """
    if which == "none":
        return {}
    tuned = {f"{name}.bias" for name, layer in tuned_layers(model) if not isinstance(layer, RowLayer)}
    found = {
        name: value.detach().clone()
        for name, value in model.named_parameters(remove_duplicate=False)
        if name.rpartition(".")[2] == "bias"
        and (which == "all" or name in tuned)
        and not within(name, also_train)
    }
    if not found:
        whose = "this model" if which == "all" else "no tuned layer"
        what = f"bias: {which} trains nothing, as {whose} has {'none' if which == 'all' else 'one'}"
        raise UsageError(what, remedy="set bias: none")
    return found


def widen(model: nn.Module, parameters: Iterable[nn.Parameter]) -> None:
    """Let these parameters of a model be float32; a norm whose bias is among them whole, as it computes in
    one dtype."""
    for value in _with_norms(model, parameters):
        value.data = value.data.float()


def _with_norms(model: nn.Module, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """These parameters, and the weights of norms whose biases are among them."""
    wanted = {id(value): value for value in parameters}
    for module in model.modules():
        weight, bias = (module._parameters.get(name) for name in ("weight", "bias"))
        if weight is not None and weight.dim() == 1 and id(bias) in wanted:
            wanted[id(weight)] = weight
    return list(wanted.values())


def trained_whole(model: nn.Module) -> list[nn.Parameter]:
    """What `widen` lets be float32 of the base of a wrapped model: biases that train, with their norms, and
    modules trained whole. None of a fully tuned one, which is of one dtype."""
    whole = not method_of(tuning(model).config).trains_base
    return _with_norms(model, _whole_names(model).values()) if whole else []


def base_dtype(model: nn.Module) -> torch.dtype:
    """The dtype of the base of a wrapped model, beside which something may train in float32."""
    trained = {id(value) for value in [*trained_whole(model), *tuned_parameters(model).values()]}
    floating = [value for value in model.parameters() if value.is_floating_point()]
    return next((value.dtype for value in floating if id(value) not in trained), floating[0].dtype)


def bias_changes(model: nn.Module) -> dict[str, tuple[nn.Parameter, Tensor]]:
    """The biases that train, by their first names, and their values in the base."""
    record, first = tuning(model), dict[int, str]()
    here = _biases_here(model, record.biases)
    for name, value in here.items():
        first.setdefault(id(value), name)
    before, kinds = record.held or record.biases, record.biases
    return {name: (here[name], before[name].to(kinds[name].dtype)) for name in first.values()}


def tuned_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Every parameter that trains, by its name in the base model. A tensor tied to two names appears once,
    under the first."""
    first: dict[int, tuple[str, nn.Parameter]] = {}
    for name, value in tuned_names(model).items():
        first.setdefault(id(value), (name, value))
    return dict(first.values())


def learning_rates(model: nn.Module) -> dict[str, float]:
    """Learning rates over the run's, by name, of the tuned parameters that have one of their own."""
    return {
        f"{name}.{own}": rate
        for name, module in tuned_modules(model)
        for own, rate in module.rates().items()
        if rate != 1
    }


def moving(model: nn.Module) -> dict[str, nn.Parameter]:
    """Every parameter that trains, by name: `tuned_parameters`, and of a model that is not wrapped those that
    require gradients."""
    if is_wrapped(model):
        return tuned_parameters(model)
    return {name: value for name, value in model.named_parameters() if value.requires_grad}


def frozen_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and persistent buffer that must not move, by name."""
    trained = {id(value) for value in moving(model).values()}  # a tied tensor has several names
    every = model.state_dict(keep_vars=True).items()
    return {name: value for name, value in every if id(value) not in trained}


def frozen_digest(model: nn.Module, share: RankShare = ALONE) -> str:
    """The digest of the frozen tensors of a whole model, which need not be read yet; all ranks of `share`
    take it together."""
    return digest(checksums_of(model, frozen_tensors(model), share))


def mark_only_trainable(model: nn.Module) -> None:
    """Let exactly the tuned parameters of a wrapped model require gradients, as `wrap` does. Raises
    UsageError for a model that is not wrapped.

        >>> frozen = model.requires_grad_(False)
        >>> petune.mark_only_trainable(model)
        >>> sum(value.requires_grad for value in model.parameters()) == len(petune.tuned_state(model))
        True
    """
    wanted = {id(value) for value in tuned_parameters(model).values()}
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in wanted)


def tuned_state(model: nn.Module) -> dict[str, Tensor]:
    """{base-model name: tensor}, detached: what a save writes.

        >>> shapes = {name: tuple(value.shape) for name, value in petune.tuned_state(model).items()}
        >>> shapes["model.layers.0.self_attn.q_proj.lora_A"]  # [r, in]
        (8, 32)

    Raises UsageError for a model that is not wrapped.
    """
    return {name: value.detach() for name, value in tuned_names(model).items()}


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """(trained, all) parameters; a tied one counts once."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad), sum(
        p.numel() for p in model.parameters()
    )


@contextmanager
def without_tuning(model: nn.Module) -> Iterator[nn.Module]:
    """The model as it was before its method, heads excepted, for as long as the block lasts. Biases that
    train have the base's values again. Raises UsageError for `full`."""
    record = tuning(model)
    if method_of(record.config).trains_base:
        raise UsageError(
            "full fine-tuning keeps no untouched base to go back to", remedy="load the base model again"
        )
    layers = [layer for _, layer in tuned_layers(model)]
    stacks = [module for module in model.modules() if isinstance(module, Stack)]
    before = [layer.active for layer in layers], [stack.climbs for stack in stacks]
    biases = _biases_here(model, record.biases)
    trained = {name: value.detach().clone() for name, value in biases.items()}
    try:
        fill(biases, {**record.biases, **record.held})
        for layer in layers:
            layer.active = False
        for stack in stacks:
            stack.climbs = False
        yield model
    finally:
        fill(biases, trained)
        for layer, active in zip(layers, before[0], strict=True):
            layer.active = active
        for stack, climbs in zip(stacks, before[1], strict=True):
            stack.climbs = climbs


def hold_biases(model: nn.Module) -> None:
    """Remember the biases that train as this rank of a plan holds them, before anything has trained."""
    record = tuning(model)
    held = {name: value.detach().clone() for name, value in _biases_here(model, record.biases).items()}
    cast("Any", model).petune_tuning = replace(record, held=held)


def fill(parameters: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Overwrite these parameters with values of the same names."""
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(values[name])


def describe(model: nn.Module) -> str:
    """One line: method, its settings, trained parameters of all."""
    record = tuning(model)
    trained, total = count_parameters(model)
    settings = (
        f"{name}={value}"
        for name, value in asdict(record.config).items()
        if value is not False and value not in ("auto", "none", (), {}, None)
    )
    shown = ", ".join(record.adapters or settings)
    return f"{record.method}({shown}): trainable {trained:,} / {total:,} ({100 * trained / total:.3f} %)"


def untouched(model: nn.Module) -> str | None:
    """One line about what the targets `auto` and `all-linear` leave alone in a wrapped model of a family
    without a table, or None."""
    record = tuning(model)
    if record.family is not None or asdict(record.config).get("targets") not in ("auto", "all-linear"):
        return None
    layers = [layer for _, layer in tuned_layers(model)]
    return left_alone(record.method, model, layers, tuned_parameters(model).values())
