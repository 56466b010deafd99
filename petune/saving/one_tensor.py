"""Folders of methods with one tensor a layer, as peft lays them out: keys
`base_model.model.<module>.<tensor>` and a config of their own. Read as strictly as LoRA's.

(IA)^3: `ia3_l`, and `feedforward_modules` are the linears whose inputs are scaled. MiSS: `miss_block`; of
peft's variants the plain one, as `bat` and `mini` compute something else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from petune.errors import FileError, Problem
from petune.files.json_fields import (
    Fields,
    IntegerValue,
    Kind,
    ListOf,
    Number,
    OneOf,
    TextValue,
    Truth,
    check_fields,
)
from petune.files.safetensors import check_dtypes
from petune.methods import Tuning, tuning
from petune.methods.configs import Ia3Config, MethodConfig, MissConfig
from petune.methods.ia3 import SCALE, Ia3Linear
from petune.methods.miss import BLOCK, MissLinear
from petune.methods.saving import remember, shapes_of
from petune.methods.trainable import fill
from petune.models import family_of
from petune.models.tuned_linear import tuned_layers
from petune.saving.fingerprint import MOST, plain_name
from petune.saving.peft import (
    CONFIG,
    PREFIX,
    TENSORS,
    fitting,
    is_named,
    is_saved_whole,
    is_target,
    shared_fields,
    strip_wrappers,
)

_NAMES, _MAYBE_TEXT = OneOf(TextValue(), ListOf(TextValue()), None), OneOf(TextValue(), None)
_KINDS: Mapping[str, Kind] = {
    "base_model_name_or_path": _MAYBE_TEXT,
    "exclude_modules": _NAMES,
    "inference_mode": OneOf(Truth(), None),
    "modules_to_save": OneOf(ListOf(TextValue()), None),
    "target_modules": _NAMES,
    "task_type": _MAYBE_TEXT,
}
_READ = {*_KINDS, "auto_mapping", "peft_type", "peft_version", "revision"}
_IDLE: tuple[object, ...] = (None, False, {}, [], "")

Linears = Mapping[str, nn.Linear]  # by plain name


@dataclass(frozen=True)
class PeftLayout:
    """What is a method's own in peft's files.

    tensor: its name in a layer, here and there. kinds: of the fields of its config, of which `required` must
    be there; neutral: what those may say that petune has no setting for. fields: what is written of them, of
    linears and the targets that stand for them, which it may replace. shape: of a linear's tensor by a
    config. put: the layer made of a linear, by a config and its tensor. settings: of petune, with the names
    of the targets.
    """

    peft_type: str
    tensor: str
    kinds: Mapping[str, Kind]
    required: tuple[str, ...]
    fields: Callable[[Mapping[str, Any], list[str]], dict[str, Any]]
    shape: Callable[[str, nn.Linear, Mapping[str, Any]], tuple[int, ...]]
    put: Callable[[str, nn.Linear, Mapping[str, Any], Tensor], nn.Module]
    settings: Callable[[Linears, Mapping[str, Any]], MethodConfig]
    neutral: Mapping[str, tuple[object, ...]] = field(default_factory=dict)


# ---------------------------------------------------------------- (IA)^3


def _scales_inputs(name: str, config: Mapping[str, Any]) -> bool:
    """Whether peft scales the inputs of a linear: it takes the end of a name, whatever stands before it."""
    fed = config["feedforward_modules"] or ()
    return is_named(name, fed) if isinstance(fed, str) else name.endswith(tuple(fed))


def _fields_of_ia3(layers: Mapping[str, Any], targets: list[str]) -> dict[str, Any]:
    scaled = [name for name, layer in layers.items() if layer.of_inputs]
    inputs = {name.rpartition(".")[2] for name in scaled}
    ends = tuple(inputs) if inputs <= set(targets) else tuple(scaled)
    if {name for name in layers if name.endswith(ends)} != set(scaled) or ends == tuple(scaled):
        targets, ends = sorted(layers), tuple(scaled)
    own = {"feedforward_modules": sorted(ends), "fan_in_fan_out": False, "init_ia3_weights": True}
    return own | {"target_modules": targets}


def _settings_of_ia3(linears: Linears, config: Mapping[str, Any]) -> MethodConfig:
    inputs = tuple(name for name in linears if _scales_inputs(name, config))
    return Ia3Config(targets=tuple(linears), inputs=inputs)


_IA3 = PeftLayout(
    peft_type="IA3",
    tensor=SCALE,
    kinds={
        "fan_in_fan_out": OneOf(Truth(), None),
        "feedforward_modules": _NAMES,
        "init_ia3_weights": OneOf(Truth(), None),
    },
    required=("target_modules", "feedforward_modules"),
    fields=_fields_of_ia3,
    shape=lambda name, layer, config: Ia3Linear.shape(layer, _scales_inputs(name, config)),
    put=lambda name, layer, config, own: Ia3Linear.around(layer, _scales_inputs(name, config), own),
    settings=_settings_of_ia3,
)

# ---------------------------------------------------------------- MiSS


def _config_of_miss(config: Mapping[str, Any]) -> MissConfig:
    return MissConfig(r=config["r"], dropout=float(config.get("miss_dropout") or 0.0))


def _fields_of_miss(layers: Mapping[str, Any], targets: list[str]) -> dict[str, Any]:
    first: MissLinear = next(iter(layers.values()))
    return {
        "bias": "none",
        "init_weights": True,
        "layers_pattern": None,
        "layers_to_transform": None,
        "mini_r": 1,
        "miss_dropout": first.dropout,
        "r": len(first.miss_block),
        "target_modules": targets,
    }


_MISS = PeftLayout(
    peft_type="MISS",
    tensor=BLOCK,
    kinds={
        "bias": _MAYBE_TEXT,
        "init_weights": OneOf(Truth(), TextValue(), None),
        "layers_pattern": _NAMES,
        "layers_to_transform": OneOf(IntegerValue(), ListOf(IntegerValue()), None),
        "mini_r": OneOf(IntegerValue(), None),
        "miss_dropout": OneOf(Number(0, 1), None),
        "r": IntegerValue(1, 2**20),
    },
    required=("target_modules", "r", "init_weights"),
    fields=_fields_of_miss,
    shape=lambda name, layer, config: (config["r"], layer.out_features),
    put=lambda name, layer, config, own: MissLinear.around(layer, _config_of_miss(config), own),
    settings=lambda linears, config: replace(_config_of_miss(config), targets=tuple(linears)),
    neutral={"bias": ("none", None), "init_weights": (True, False, None)},
)

LAYOUTS: Mapping[str, PeftLayout] = {"ia3": _IA3, "miss": _MISS}  # by method
BY_TYPE = {layout.peft_type: method for method, layout in LAYOUTS.items()}

# ---------------------------------------------------------------- written and read


def to_one_tensor(
    model: nn.Module, state: Mapping[str, Tensor], base_model: str | None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The config of a model wrapped with a method of LAYOUTS, and its tuned state, as peft names them.

    Raises as `to_peft`.
    """
    layers = {plain_name(name): layer for name, layer in tuned_layers(model)}
    layout, shared = LAYOUTS[tuning(model).method], shared_fields(model, tuple(layers), base_model)
    config = shared | {"peft_type": layout.peft_type} | layout.fields(layers, shared["target_modules"])
    return dict(sorted(config.items())), {PREFIX + name: value for name, value in state.items()}


def check_one_tensor(config: Mapping[str, Any], file: Path) -> None:
    """Raise FileError naming every field of such a config that is of another kind, unknown, or asks for what
    petune does not compute."""
    layout = LAYOUTS[BY_TYPE[config["peft_type"]]]
    kinds = {**_KINDS, **layout.kinds}
    check_fields(config, Fields({name: kinds[name] for name in layout.required}, kinds, others=True), file)
    if not config["target_modules"]:
        raise FileError("target_modules is empty", where=str(file), remedy="name the modules that are tuned")
    remedy = "load it with peft, merge it into its base and save that"
    read = _READ | layout.kinds.keys()
    problems = [
        Problem(f"{name} is unknown", str(file), remedy=remedy)
        for name, value in config.items()
        if name not in read and value not in _IDLE
    ]
    problems += [
        Problem(f"{name} = {config[name]!r} is not supported", str(file), repr(known[0]), remedy=remedy)
        for name, known in layout.neutral.items()
        if config.get(name) not in known
    ]
    if problems:
        raise FileError(problems[:MOST])


def load_one_tensor(
    model: nn.Module, config: Mapping[str, Any], tensors: Mapping[str, Tensor], folder: Path
) -> None:
    """Tune `model`, in place, as such a folder says, whose files hold `config` and `tensors`.

    Raises FileError for a setting petune lacks, for a target that is not nn.Linear, and for tensors that are
    missing, unexpected, mis-shaped or no weights, before the model is changed.
    """
    method = BY_TYPE[config["peft_type"]]
    layout = LAYOUTS[method]
    modules = {plain_name(name): module for name, module in model.named_modules() if name}
    full = {plain_name(name): name for name, _ in model.named_modules()}
    heads = tuple(name for name in modules if is_saved_whole(name, config))
    linears: dict[str, nn.Linear] = {}
    for name, module in modules.items():
        if not is_target(name, config, heads):
            continue
        if type(module) is not nn.Linear:
            where, found = f"{folder / CONFIG}  {name}", type(module).__name__
            raise FileError("tunes no linear", where=where, expected="Linear", found=found)
        linears[name] = module
    given = strip_wrappers(tensors, modules, folder)
    shapes = {f"{name}.{layout.tensor}": layout.shape(name, layer, config) for name, layer in linears.items()}
    own = {f"{head}.{key}": value for head in heads for key, value in modules[head].named_parameters()}
    shapes |= shapes_of(own)
    given = fitting(model, shapes, given, heads, folder)
    wide = {name: torch.promote_types(layer.weight.dtype, torch.float32) for name, layer in linears.items()}
    dtypes = {f"{name}.{layout.tensor}": dtype for name, dtype in wide.items()}
    check_dtypes(given, dtypes | {name: value.dtype for name, value in own.items()}, str(folder / TENSORS))
    for name, layer in linears.items():
        made = layout.put(name, layer, config, given[f"{name}.{layout.tensor}"])
        model.set_submodule(full[name], made)
    fill(own, given)
    family, trained = family_of(model), tuple(full[head] for head in heads)
    settings = replace(cast("Any", layout.settings(linears, config)), also_train=heads)
    remember(model, Tuning(method, settings, family.name if family else None, trained))
