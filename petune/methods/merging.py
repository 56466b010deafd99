"""Folding a LoRA update into the weights it tunes: for good (`merge`) or for the length of a block
(`merged_weights`).

A merged weight is a new tensor on its own layer, never an edit of the old one: an embedding tied to the
output head is untied instead of dragging the other end along, and leaving `merged_weights` puts the very same
tensors back.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from petune.errors import UsageError
from petune.kernels.fuse import unfuse
from petune.log import warn
from petune.methods.configs import method_of
from petune.methods.rounding import merged_tensors, refuse_unrounded, rounded_bias
from petune.methods.saving import forget
from petune.methods.several import settle
from petune.methods.trainable import base_dtype, bias_changes, trained_whole
from petune.methods.wrapped import bare, sole_tuning
from petune.models import attention
from petune.models.damage import refuse_absent
from petune.models.frozen_weight import quantised_in, restore_dense
from petune.models.linear_attention import forget_samples
from petune.models.stack import disown_stacks
from petune.models.tuned_linear import TunedLayer, tuned_layers

Model = TypeVar("Model", bound=nn.Module)


def merge(model: Model, name: str | None = None) -> Model:
    """A plain model with the tuning in its weights and nothing of petune left in it; `model` itself, or what
    torch.compile or DistributedDataParallel is around, changed in place.

        >>> base = transformers.AutoModelForCausalLM.from_pretrained("my-model")
        >>> plain = petune.merge(petune.load(base, "tuned"))
        >>> plain.save_pretrained("merged")

    name: which of several adapters on one base; the others are dropped. Its parameters all require gradients
    again, as those of a freshly loaded model do, and have the base's shapes and dtypes: an update [out, in]
    is added in float32 at least and rounded once, and so is what trained in float32 beside a narrower base. A
    quantised base becomes dense, with the values that it was trained with. Raises UsageError for adapter and
    side, and for several adapters without a name.
    """
    model = cast("Model", bare(model))
    if name is not None:
        settle(model, name)
    refuse_unmergeable(model)
    refuse_merged(model)
    _refuse_absent(model)
    warn_of_quantised(model)
    unfuse(model)
    disown_stacks(model)
    attention.leave(model)
    forget_samples(model)
    layers, dtype, whole = list(tuned_layers(model)), base_dtype(model), trained_whole(model)
    made: dict[tuple[int, ...], dict[str, nn.Parameter]] = {}
    for name, layer in layers:
        if (key := tuned_together(layer)) not in made:
            _untie(model, layer)
            made[key] = _parameters(layer.merged_tensors())
        plain = layer.plain()
        for own, value in made[key].items():
            setattr(plain, own, value)
        model.set_submodule(name, plain)
    restore_dense(model)
    for value in whole:
        value.data = value.data.to(dtype)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    forget(model)
    _merged.add(model)
    return model


def _parameters(values: Mapping[str, Tensor]) -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(value, requires_grad=False) for name, value in values.items()}


def tuned_together(layer: TunedLayer) -> tuple[int, ...]:
    """What tells the weight that merging makes of a layer: ends of a tie that train the same tensors stay
    tied."""
    return *(id(getattr(layer, name)) for name in layer.weights), *map(id, layer.tuned().values())


def warn_of_quantised(model: nn.Module) -> None:
    """Say of a quantised base, which is about to be merged, what becomes of it."""
    if (found := next(quantised_in(model), None)) is not None:
        kind, dtype = found[2].form.name, str(found[2].dtype).removeprefix("torch.")
        values = (
            f"this base is held in {kind}: its weights become {dtype} again with the values they have in"
            f" {kind}"
        )
        warn(
            f"{values}; to merge into the weights as they were, save the tuning, load the base and"
            " petune.load it there"
        )


# a merged model itself has nothing left to know it by
_merged: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def was_merged(model: nn.Module) -> bool:
    """Whether `merge` made this very model what it is."""
    return model in _merged


def _refuse_absent(model: nn.Module) -> None:
    """Raise UsageError where a weight that an update goes into has no values, so that both would be lost."""
    for name, layer in tuned_layers(model):
        for own, value in layer.named_parameters(recurse=False):
            refuse_absent(f"{name}.{own}", value)


@contextmanager
def merged_weights(
    model: Model, dtype: torch.dtype | None = None, *, seed: int | None = None
) -> Iterator[Model]:
    """The model with its LoRA updates folded into the weights; the original tensors come back afterwards, on
    exceptions too.

        >>> with petune.merged_weights(model), torch.no_grad():
        ...     logits = model(input_ids=torch.tensor([[9, 10, 11]])).logits

    dtype: of the merged tensors alone; the base's by default, without which the model cannot compute. seed:
    rounds them stochastically by it, where they are bfloat16 and the update has changed them; to nearest
    without it. Training inside raises UsageError at the first forward in train mode, and nothing requires
    gradients. Raises UsageError for adapter and side, when already inside, and for a seed where nothing is
    rounded by it.
    """
    refuse_unmergeable(model)
    _refuse_absent(model)
    named = list(tuned_layers(model))
    layers = [layer for _, layer in named]
    if seed is not None:
        refuse_unrounded(layers, dtype)
    if any(layer.merged for layer in layers):
        raise UsageError(
            "this model's weights are merged already", remedy="leave the outer merged_weights() first"
        )
    originals: list[tuple[TunedLayer, dict[str, nn.Parameter | None]]] = []
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    guard = model.register_forward_pre_hook(_refuse_training)
    try:
        for parameter in trained:
            parameter.requires_grad_(False)
        keys, made = [tuned_together(layer) for layer in layers], dict[tuple[int, ...], Any]()
        for key, (name, layer) in zip(keys, named, strict=True):
            if key not in made:
                made[key] = _parameters(merged_tensors(name, layer, dtype, seed))
        for key, layer in zip(keys, layers, strict=True):
            originals.append((layer, {own: layer._parameters[own] for own in made[key]}))
            layer._parameters.update(made[key])
            layer.merged = True
        yield model
    finally:
        guard.remove()
        for layer, own in originals:
            layer._parameters.update(own)
            layer.merged = False
        for parameter in trained:
            parameter.requires_grad_(True)


@contextmanager
def rounded_whole(model: nn.Module, dtype: torch.dtype, *, seed: int | None = None) -> Iterator[None]:
    """What has trained beside the update, biases with their norms and modules trained whole, in `dtype` for
    the length of a block, as a merged model is written; the values it had come back afterwards.

    seed: rounds biases to bfloat16 stochastically, as `merged_weights` does weights.
    """
    before = {value: value.data for value in trained_whole(model)}
    try:
        for value, own in before.items():
            value.data = own.to(dtype)
        for name, (bias, base) in bias_changes(model).items():
            bias.data = rounded_bias(name, before[bias], base, dtype, seed)
        yield
    finally:
        for value, own in before.items():
            value.data = own


def _refuse_training(model: nn.Module, args: Any) -> None:
    if model.training and torch.is_grad_enabled():
        what = "this model's weights are merged, so training it would change nothing"
        raise UsageError(what, remedy="leave merged_weights() first")


def refuse_merged(model: nn.Module) -> None:
    """Raise UsageError inside `merged_weights`, where the base's weights are not the base's."""
    for name, layer in tuned_layers(model):
        if layer.merged:
            raise UsageError(
                "this model is inside merged_weights()", where=name, remedy="leave the block first"
            )


def refuse_unmergeable(model: nn.Module) -> None:
    """Raise UsageError for a method whose tuning cannot be merged into weights, and for several adapters."""
    record = sole_tuning(model)
    method = method_of(record.config)
    if not method.mergeable:
        remedy = "keep the base model and use petune.load(base, folder)"
        raise UsageError(f"{record.method} cannot be merged into the weights", remedy=remedy)
    assert method.trains_base or method.head_alone or any(True for _ in tuned_layers(model))


def _untie(model: nn.Module, layer: TunedLayer) -> None:
    """Give every layer that shares this one's weight a copy of its own, and tell the config, or saving would
    write one for all."""
    sharing = [
        (module, name)
        for module in model.modules()
        for name in layer.weights
        if getattr(module, name, None) is getattr(layer, name)
        and not (isinstance(module, TunedLayer) and tuned_together(module) == tuned_together(layer))
    ]
    for module, name in sharing:
        setattr(module, name, nn.Parameter(getattr(layer, name).detach().clone(), requires_grad=False))
    config: Any = getattr(model, "config", None)
    if sharing and getattr(config, "tie_word_embeddings", False):
        config.tie_word_embeddings = False
