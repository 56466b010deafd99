"""LoRA by parts in a folder of peft's: the file has plain LoRA beside the whole linear; which parts it is
made of follows from the settings in petune.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import nn

from petune.methods import lora
from petune.methods.configs import LoraConfig, MethodConfig
from petune.methods.lora_parts import from_one_form
from petune.models import family_of
from petune.models.joined import joined_linears, split_name
from petune.saving.fingerprint import plain_name
from petune.saving.peft import Adapter


def parts_named(
    model: nn.Module, config: MethodConfig, also_train: tuple[str, ...]
) -> dict[str, dict[str, LoraConfig]]:
    """The settings of each part that a tuning of `model` with `config` has, by plain name of the linear and
    role. also_train: modules trained whole, by full name."""
    family = family_of(model)
    joined = joined_linears(model, family)
    if not joined or type(config) is not LoraConfig or isinstance(config.targets, str):
        return {}
    found: dict[str, dict[str, LoraConfig]] = {}
    for name, own in lora.settings_of(model, family, config, also_train).items():
        if (at := split_name(name, joined)) is not None:
            found.setdefault(plain_name(at[0]), {})[at[1]] = own
    return found


def in_parts(
    model: nn.Module, adapter: Adapter, parts: Mapping[str, Mapping[str, LoraConfig]], where: str
) -> Adapter:
    """The same adapter with factors of their own for `parts`, as `parts_named` gives them. where: of the
    file.

    Raises FileError for factors of the whole that are not those of its parts.
    """
    if not parts:
        return adapter
    joined = {plain_name(name): one for name, one in joined_linears(model, family_of(model)).items()}
    layers, state = dict(adapter.layers), dict(adapter.state)
    for name, own in parts.items():
        whole = layers.pop(name, None)
        if whole is None:  # which `check_tensors` has said already
            continue
        factors = state.pop(f"{name}.lora_A"), state.pop(f"{name}.lora_B")
        made = from_one_form(factors, whole.scale, joined[name], own, f"{where}  {name}")
        state |= {f"{name}.{leaf}": value for leaf, value in made.items()}
        layers |= {f"{name}.{role}": one for role, one in own.items()}
    return replace(adapter, layers=layers, state=state)
