"""The base of a model whose blocks are held in NF4, as transformers with bitsandbytes saves it: other
programs load the very weights that a tuning was trained beside."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from petune.errors import PetuneError, UsageError
from petune.files.atomic import commit_folder
from petune.files.ranges import sources
from petune.files.safetensors import read_header, read_json, write_json
from petune.methods import is_wrapped, tuning
from petune.methods.merging import refuse_merged
from petune.methods.pissa import started
from petune.methods.wrapped import bare
from petune.models.bitsandbytes_files import beside, four_bit_weights, has_place_for, in_files, settings_of
from petune.models.damage import refuse_absent
from petune.models.frozen_weight import QuantisedWeight
from petune.models.nf4 import Nf4
from petune.models.tuned_linear import TunedLayer
from petune.saving.export import OURS, Processor, check_complete, write_hugging_face
from petune.saving.fingerprint import base_tensors, plain_name
from petune.saving.multimodal import refuse_part


def save_base(
    model: nn.Module,
    folder: str | Path,
    *,
    tokenizer: Processor | None = None,
    overwrite: bool = False,
) -> Path:
    """Write the base of a model with `base_dtype: nf4`, without its tuning, as transformers with bitsandbytes
    writes a model that it holds in four bits (nf4, double quantisation). Returns the folder's path.

        >>> sizes = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
        >>> config = transformers.LlamaConfig(vocab_size=50, num_hidden_layers=1, **sizes)
        >>> four = transformers.LlamaForCausalLM(config)
        >>> folder = petune.save_base(petune.wrap(four, base_dtype="nf4"), "four", overwrite=True)

    Weights in NF4 are the bits that the model has; the rest is in the dtype that it has there. Modules that
    train whole (`also_train`) are written as they are now, for their former values are gone. Raises
    UsageError for a model that is not transformers', holds nothing in NF4, or holds what those files have no
    place for; for `init: pissa`, which changes the base; inside merged_weights; for an occupied folder
    without `overwrite`. TrainingFault for a NaN or infinity; MachineError.
    """
    model = bare(model)
    refuse_merged(model)
    if not isinstance(model, PreTrainedModel):
        raise UsageError(
            f"{type(model).__name__} is not a transformers model", remedy="give one that wrap was given"
        )
    if components := next(iter(started(model)), None):
        raise UsageError(
            "init: pissa has changed the base's weights, so that they are not those of its files",
            where=components,
            remedy="wrap the model with another init",
        )
    refuse_part(model, "files of bitsandbytes would hold it without the rest")
    state = _base(model)
    held = {name: value for name, value in state.items() if isinstance(value, QuantisedWeight)}
    _refuse(model, held)
    skipped = _dense_linears(model, state)
    for name, value in state.items():
        refuse_absent(name, value)
    for name in held:
        if _is_named(name.removesuffix(".weight"), skipped):
            raise _no_place(name, "its name ends as that of a linear that is not in four bits")

    def fill(work: Path) -> None:
        tensors: dict[str, Tensor] = {}
        dtype = next(iter(held.values())).dtype
        for name, value in state.items():
            form = value.form if isinstance(value, QuantisedWeight) else None
            tensors |= in_files(name, form) if isinstance(form, Nf4) else {name: value.detach()}
        write_hugging_face(model, tensors, work)
        settings = {"quantization_config": settings_of(dtype, skipped)}
        write_json(work / "config.json", read_json(work / "config.json") | settings)
        _check_read(model, state, len(held), work)
        if tokenizer is not None:
            tokenizer.save_pretrained(work)

    return commit_folder(folder, fill, overwrite, OURS)


def _base(model: PreTrainedModel) -> dict[str, Tensor]:
    """Every tensor of the base by its name there, and what trains whole in the place of what it was."""
    heads = tuning(model).also_train if is_wrapped(model) else ()
    whole = {id(value) for head in heads for value in model.get_submodule(head).parameters()}
    every = model.state_dict(keep_vars=True).items()
    return base_tensors(model) | {plain_name(name): value for name, value in every if id(value) in whole}


def _kind(layer: nn.Module) -> type[nn.Module]:
    """The class of the base's layer."""
    return layer.base if isinstance(layer, TunedLayer) else type(layer)


def _dense_linears(model: PreTrainedModel, state: Mapping[str, Tensor]) -> list[str]:
    """The linears that transformers would take for ones in four bits."""
    names = (plain_name(name) for name, layer in model.named_modules() if _kind(layer) is nn.Linear)
    own = {name: state.get(f"{name}.weight") for name in names}  # a method's own linears are not the base's
    return sorted(
        name for name, value in own.items() if value is not None and not isinstance(value, QuantisedWeight)
    )


def _is_named(name: str, patterns: Collection[str]) -> bool:
    """Whether transformers takes a module for one of those that are not in four bits: by a pattern of its
    first parts, or by how its name ends."""
    return any(re.match(rf"(?:{one})(?:(?<=\.)|(?=\.|$))", name) or name.endswith(one) for one in patterns)


def _refuse(model: PreTrainedModel, held: Mapping[str, QuantisedWeight]) -> None:
    """Raise UsageError for a model with nothing in NF4, and for a weight that files have no place for."""
    if not any(isinstance(value.form, Nf4) for value in held.values()):
        raise UsageError(
            "this model holds no weights in nf4",
            where="base_dtype",
            found=next((value.form.name for value in held.values()), "dense weights"),
            remedy='wrap it with base_dtype="nf4"',
        )
    wide = getattr(model, "_keep_in_fp32_modules", None) or ()
    for name, value in held.items():
        path = name.removesuffix(".weight")
        kind = _kind(model.get_submodule(path)) if path != name else None
        if kind is not nn.Linear:
            raise _no_place(name, "experts in one tensor" if kind is None else kind.__name__)
        if _is_named(path, wide):
            raise _no_place(name, f"transformers keeps it in float32 in every {type(model).__name__}")
        if value.part or not isinstance(value.form, Nf4) or not has_place_for(value.form):
            raise _no_place(name, f"a part of a weight, or of {value.dtype}, in {value.form.name}")


def _no_place(name: str, found: str) -> UsageError:
    return UsageError(
        "files of bitsandbytes have no place for this weight in nf4",
        where=name,
        expected="the weight of an nn.Linear, whole",
        found=found,
        remedy="give the base as it was, and let the reader quantise it",
    )


def _check_read(model: PreTrainedModel, state: Mapping[str, Tensor], held: int, work: Path) -> None:
    """Raise PetuneError unless all of `state` is in a folder as petune's own reader finds it, and as many
    weights in four bits."""
    headers = {path: read_header(path) for path in sorted(work.glob("*.safetensors"))}
    found, four = four_bit_weights(sources(headers))
    if len(four) != held:
        raise PetuneError(
            "the model class has renamed parts of weights in four bits; this is a fault of petune",
            where=type(model).__name__,
        )
    kinds = {
        name: torch.empty(one.shape, device="meta") for name, one in found.items() if not beside(four, name)
    }
    check_complete(model, state, kinds)
