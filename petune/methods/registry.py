"""`wrap`: a model is tuned by a method of METHODS, in place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeVar, Unpack, cast, overload

from torch import nn

from petune.errors import UsageError
from petune.kernels.configs import BaseDtype, KernelsName, MemoryConfig, make_memory
from petune.kernels.delta import compute_mixers
from petune.kernels.fuse import check_kernels, fuse
from petune.log import say, warn
from petune.methods.configs import METHODS, MethodConfig, make_config, name_of
from petune.methods.coverage import coverage
from petune.methods.merging import was_merged
from petune.methods.saving import remember
from petune.methods.settings import (
    AdapterSettings,
    HeadSettings,
    Ia3Settings,
    LoraSettings,
    MissSettings,
    SharedSettings,
    SideSettings,
)
from petune.methods.targets import head_modules
from petune.methods.trainable import base_biases, describe, refuse_tied_heads, untouched
from petune.methods.wrapped import REPLICAS, Tuning, refuse_no_model, refuse_replicas, refuse_wrapped
from petune.models import FAMILIES, family_of
from petune.models.linear_attention import tell_samples
from petune.models.multimodal import refuse_whole
from petune.models.quantise import check_base_dtype, quantise_blocks
from petune.models.tuned_linear import tuned_modules

Model = TypeVar("Model", bound=nn.Module)


@overload
def wrap(
    model: Model, method: Literal["lora", "dora"] = "lora", **settings: Unpack[LoraSettings]
) -> Model: ...
@overload
def wrap(model: Model, method: Literal["ia3"], **settings: Unpack[Ia3Settings]) -> Model: ...
@overload
def wrap(model: Model, method: Literal["miss"], **settings: Unpack[MissSettings]) -> Model: ...
@overload
def wrap(model: Model, method: Literal["adapter"], **settings: Unpack[AdapterSettings]) -> Model: ...
@overload
def wrap(model: Model, method: Literal["side"], **settings: Unpack[SideSettings]) -> Model: ...
@overload
def wrap(model: Model, method: Literal["head"], **settings: Unpack[HeadSettings]) -> Model: ...
@overload
def wrap(model: Model, method: Literal["full"], **settings: Unpack[SharedSettings]) -> Model: ...
@overload
def wrap(
    model: Model,
    method: str,
    *,
    kernels: KernelsName = "auto",
    memory: MemoryConfig | Mapping[str, Any] | str = "auto",
    base_dtype: BaseDtype | None = None,
    **settings: Any,
) -> Model: ...
def wrap(
    model: Model,
    method: str = "lora",
    *,
    kernels: KernelsName = "auto",
    memory: MemoryConfig | Mapping[str, Any] | str = "auto",
    base_dtype: BaseDtype | None = None,
    **settings: Any,
) -> Model:
    """Tune `model` with `method`: rewrite its layers in place, mark what trains, fuse what can be, and log
    one line with the counts.

        >>> model = transformers.AutoModelForCausalLM.from_pretrained("my-model")
        >>> model = petune.wrap(model, "lora", r=8, dropout=0.1)
        >>> trained = [value for value in model.parameters() if value.requires_grad]
        >>> optimizer = torch.optim.AdamW(trained, lr=2e-4)

    `settings` are the fields of the method's config in petune/methods/configs.py. New tensors are drawn from
    torch's global generator and are float32 (float64 on a float64 base): LoRA's A [r, in] and B [out, r]
    beside a weight [out, in], an adapter's [width / reduction, width] and back. kernels: "auto" fuses blocks
    and loss head where Triton can run, on the device the model is on now; "reference" and "triton" insist,
    "off" leaves the model's own. memory: "auto", or MemoryConfig's fields. base_dtype: "nf4", "int8" or "fp8"
    for frozen weights of the blocks, which is not exact. Raises UsageError for an unknown method or setting,
    a value out of range, a target that matches nothing, a model that is wrapped or merged already, a family
    the method does not know, or what cannot be fused.
    """
    refuse_no_model(model)
    config = make_config(method, settings)
    if getattr(config, "lr_ratio", None) not in (None, 1):
        remedy = "leave it out, and give parameters named lora_B a group of their own with that rate"
        raise UsageError(
            "lr_ratio is a setting of recipes: here the optimizer is yours", where="lr_ratio", remedy=remedy
        )
    settings_of_memory = make_memory(memory)
    if settings_of_memory.stream != "none":
        remedy = (
            "leave it out, and make a petune.kernels.memory.offloaded_adamw.StreamedAdamW of the wrapped"
            " model"
        )
        what = "memory.stream is a setting of recipes: here the optimizer is yours"
        raise UsageError(what, where="memory.stream", remedy=remedy)
    if METHODS[method].head_alone and settings_of_memory != MemoryConfig():
        what = "memory is about what blocks keep for a backward pass, and under head they have none"
        raise UsageError(what, where="memory", remedy="leave it out")
    check_kernels(model, kernels)
    check_base_dtype(base_dtype)
    tune(model, config)
    say(describe(model))
    if (line := untouched(model)) is not None:
        warn(line)
    if (line := coverage(model, base_dtype)) is not None:
        say(line)
    if base_dtype is not None:
        quantise_blocks(model, family_of(model), base_dtype)
    fuse(model, family_of(model), kernels, settings_of_memory)
    return model


def tune(model: nn.Module, config: MethodConfig) -> None:
    """`wrap` with a finished config, silently."""
    name = name_of(config)
    method = METHODS[name]
    refuse_tuned(model)
    if method.needs_family or (not method.trains_base and getattr(config, "targets", "auto") == "auto"):
        remedy = "petune.wrap(petune.text_model(model), ...), which shares its modules; or name the targets"
        refuse_whole(model, remedy)
    family = family_of(model)
    if method.needs_family and family is None:
        kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
        remedy = "use " + " or ".join(other for other, one in METHODS.items() if not one.needs_family)
        what = f"{name} needs a model family petune knows, not {kind}"
        raise UsageError(what, expected=", ".join(FAMILIES), remedy=remedy)
    if family is not None and (why := family.refused(cast("Any", model).config).get("tuning")) is not None:
        remedy = "use another model of this type"
        raise UsageError(f"this model cannot be tuned: {why}", where="model", remedy=remedy)
    also_train = () if method.trains_base else head_modules(model, family, cast("Any", config).also_train)
    if method.files == "peft":
        refuse_tied_heads(model, also_train)
    method.apply(model, family, config, also_train)
    if family is not None:
        tell_samples(model, family)
        compute_mixers()
    biases = base_biases(model, getattr(config, "bias", "none"), also_train)
    remember(model, Tuning(name, config, family.name if family else None, also_train, biases))


def refuse_tuned(model: nn.Module) -> None:
    """Raise UsageError for a model that is wrapped, that holds parts of a wrapped one, that was merged, or
    that has nothing to tune."""
    refuse_wrapped(model)
    refuse_replicas(model, "petune.wrap(model, ...)", REPLICAS)
    for name, module in tuned_modules(model):
        what = f"a part of this model is tuned already: {type(module).__name__}"
        raise UsageError(what, where=name, remedy="load the base model again")
    if was_merged(model):
        remedy = "to tune on top of it, save it, load it as a model of its own and wrap that"
        raise UsageError("this model's weights contain a merged tuning already", remedy=remedy)
    if next(model.parameters(), None) is None:
        raise UsageError("this model has no parameters to tune")
