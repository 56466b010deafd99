"""(IA)^3 folders as peft lays them out: keys `base_model.model.<module>.ia3_l`, and a config whose
`feedforward_modules` are the linears whose inputs are scaled. Read as strictly as LoRA's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from petune.errors import FileError, Problem
from petune.files.json_fields import Fields, Kind, ListOf, OneOf, Text, Truth, check_fields
from petune.files.safetensors import check_dtypes
from petune.methods import Tuning, ia3, tuning
from petune.methods.configs import Ia3Config
from petune.methods.ia3 import SCALE, Ia3Linear
from petune.methods.saving import remember
from petune.methods.targets import within
from petune.models import family_of
from petune.models.tuned_linear import tuned_layers
from petune.saving.fingerprint import MOST, plain_name
from petune.saving.peft import (
    CONFIG,
    PEFT_VERSION,
    PREFIX,
    TENSORS,
    check_tensors,
    is_named,
    is_saved_whole,
    refuse_tied_heads,
    refuse_untied,
    shortest,
    strip_wrappers,
    task_type,
)

_NAMES, _MAYBE_TEXT = OneOf(Text(), ListOf(Text()), None), OneOf(Text(), None)
_KINDS: Mapping[str, Kind] = {
    "base_model_name_or_path": _MAYBE_TEXT,
    "exclude_modules": _NAMES,
    "fan_in_fan_out": OneOf(Truth(), None),
    "feedforward_modules": _NAMES,
    "inference_mode": OneOf(Truth(), None),
    "init_ia3_weights": OneOf(Truth(), None),
    "modules_to_save": OneOf(ListOf(Text()), None),
    "target_modules": _NAMES,
    "task_type": _MAYBE_TEXT,
}
_READ = {*_KINDS, "auto_mapping", "peft_type", "peft_version", "revision"}
_IDLE: tuple[object, ...] = (None, False, {}, [], "")


def to_ia3(
    model: nn.Module, state: Mapping[str, Tensor], base_model: str | None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The config of a model wrapped with ia3, and its tuned state, as peft names them.

    Raises as `to_peft`.
    """
    record = tuning(model)
    refuse_tied_heads(model, record.also_train)
    heads = tuple(plain_name(head) for head in record.also_train)
    layers = {plain_name(name): cast("Ia3Linear", layer) for name, layer in tuned_layers(model)}
    names = [plain_name(name) for name, _ in model.named_modules() if name]
    frozen = [name for name in names if not within(name, heads)]
    task, scaled = task_type(model, frozen), [name for name, layer in layers.items() if layer.of_inputs]
    targets, inputs = shortest(tuple(layers), frozen), {name.rpartition(".")[2] for name in scaled}
    # peft takes the end of a name, whatever stands before it, for an entry of feedforward_modules
    ends = tuple(inputs) if inputs <= set(targets) else tuple(scaled)
    if {name for name in layers if name.endswith(ends)} != set(scaled) or ends == tuple(scaled):
        targets, ends = sorted(layers), tuple(scaled)
    mapping = {"base_model_class": type(model).__name__, "parent_library": type(model).__module__}
    config = {
        "auto_mapping": None if task else mapping,
        "base_model_name_or_path": base_model,
        "exclude_modules": None,
        "fan_in_fan_out": False,
        "feedforward_modules": sorted(ends),
        "inference_mode": True,
        "init_ia3_weights": True,
        "modules_to_save": shortest(heads, names) or None,
        "peft_type": "IA3",
        "peft_version": PEFT_VERSION,
        "revision": None,
        "target_modules": targets,
        "task_type": task,
    }
    return config, {PREFIX + name: value for name, value in state.items()}


def check_ia3(config: Mapping[str, Any], file: Path) -> None:
    """Raise FileError naming every field of an (IA)^3 config that is of another kind or unknown."""
    required = {name: _KINDS[name] for name in ("target_modules", "feedforward_modules")}
    check_fields(config, Fields(required, _KINDS, others=True), file)
    unknown = [field for field, value in config.items() if field not in _READ and value not in _IDLE]
    if not config["target_modules"]:
        raise FileError("target_modules is empty", where=str(file), remedy="name the modules that are tuned")
    if unknown:
        remedy = "load it with peft, merge it into its base and save that"
        raise FileError([Problem(f"{name} is unknown", str(file), remedy=remedy) for name in unknown[:MOST]])


def load_ia3(
    model: nn.Module, config: Mapping[str, Any], tensors: Mapping[str, Tensor], folder: Path
) -> None:
    """Tune `model`, in place, as an (IA)^3 folder says, whose files hold `config` and `tensors`.

    Raises FileError for a setting petune lacks, for a target that is not nn.Linear, and for tensors that are
    missing, unexpected, mis-shaped or no weights, before the model is changed.
    """
    modules = {plain_name(name): module for name, module in model.named_modules() if name}
    full = {plain_name(name): name for name, _ in model.named_modules()}
    heads = tuple(name for name in modules if is_saved_whole(name, config))
    targets, fed = config["target_modules"], config["feedforward_modules"] or ()
    places = {}
    for name, module in modules.items():
        if (
            not is_named(name, targets)
            or is_named(name, config.get("exclude_modules"))
            or within(name, heads)
        ):
            continue
        if type(module) is not nn.Linear:
            where, found = f"{folder / CONFIG}  {name}", type(module).__name__
            raise FileError("tunes no linear", where=where, expected="Linear", found=found)
        places[name] = is_named(name, fed) if isinstance(fed, str) else name.endswith(tuple(fed))
    given = strip_wrappers(tensors, modules, folder)
    linears = {name: cast("nn.Linear", modules[name]) for name in places}
    shapes: dict[str, tuple[int, ...]] = {
        f"{name}.{SCALE}": Ia3Linear.shape(linears[name], of_inputs) for name, of_inputs in places.items()
    }
    own = {f"{head}.{key}": value for head in heads for key, value in modules[head].named_parameters()}
    shapes |= {name: tuple(value.shape) for name, value in own.items()}
    check_tensors(
        shapes, {name: tuple(value.shape) for name, value in given.items()}, folder / TENSORS, heads
    )
    refuse_untied(model, heads, given, folder)
    wide = {name: torch.promote_types(layer.weight.dtype, torch.float32) for name, layer in linears.items()}
    dtypes = {f"{name}.{SCALE}": dtype for name, dtype in wide.items()}
    check_dtypes(given, dtypes | {name: value.dtype for name, value in own.items()}, str(folder / TENSORS))
    saved = {full[name]: given[f"{name}.{SCALE}"] for name in places}
    ia3.put(model, {full[name]: of_inputs for name, of_inputs in places.items()}, saved)
    with torch.no_grad():
        for name, value in own.items():
            value.copy_(given[name])
    family, trained = family_of(model), tuple(full[head] for head in heads)
    settings = ia3.in_full(Ia3Config(), places, heads)
    remember(model, Tuning("ia3", settings, family.name if family else None, trained))
