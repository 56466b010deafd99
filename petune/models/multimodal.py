"""Checkpoints of several modalities (Gemma 3, Mistral 3 ...), of which petune tunes the text model: which
they are, and what its tensors are called there.

The text model is read into its own class, as if it had been saved by itself, so that plans, kernels and
methods meet a family that they know, and no memory holds the rest. A model that came from such a checkpoint
remembers it (`whole_of`), so that what is written for others has the names of the whole again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedModel

from petune.errors import FileError, UsageError
from petune.files.ranges import TensorSource
from petune.files.safetensors import Header, read_header, read_json
from petune.models import FAMILIES
from petune.models.heads import Head, model_class, refuse_headless
from petune.models.note import Note
from petune.models.source import ModelSource, is_weights, local_folder, model_files

# by model_type: those whose text model computes on texts alone what it computes inside them, as tests show
WHOLES = ("gemma3", "gemma4", "llava", "mistral3", "qwen3_5", "qwen3_5_moe")
INSIDE = "model.language_model"  # the text model's blocks in the classes of transformers
HEAD, TIES = "lm_head.weight", "tie_word_embeddings"
OUTSIDE = "beside the text model: "  # before names of files that are none of its own
_IN_FILES = {f"{INSIDE}.": "model.", "language_model.model.": "model.", "language_model.lm_head.": "lm_head."}
_SAVE = "save its text model by itself, as type {}, and train that"


@dataclass(frozen=True)
class Composite:
    """A checkpoint that a text model is a part of. kind: its model_type; source: where it lies, None for a
    model that was given in memory; ties: whether its config says itself that the head is tied."""

    kind: str
    source: ModelSource | None
    ties: bool = True


def text_part(config: Any, ties: bool | None = None) -> Any:
    """The config of the text model of a config of WHOLES, where petune has a table for it; any other config
    as it is.

    ties: whether the head is tied; None: as the config of the whole says, which is the one that counts.
    """
    inner: Any = getattr(config, "text_config", None)
    if config.model_type not in WHOLES or getattr(inner, "model_type", None) not in FAMILIES:
        return config
    text = deepcopy(inner)
    text.tie_word_embeddings = config.tie_word_embeddings if ties is None else ties
    text.name_or_path, text.dtype = config.name_or_path, config.dtype
    text._commit_hash = getattr(config, "_commit_hash", None)
    return text


def read_part(config: Any, fields: Mapping[str, Any]) -> Any:
    """`text_part` of a config that was read from `fields`: where these say nothing of a tied head, the
    default of the whole's class may be another than its text model's, whose word counts then."""
    inner = getattr(config, "text_config", None)
    said = None if TIES in fields else getattr(inner, TIES, None)
    return text_part(config, said)


def whole_at(source: ModelSource) -> Composite | None:
    """What the files of `source` are the checkpoint of, where petune tunes its text model; None where they
    are a model by themselves, and for random weights and objects."""
    if source.kind in ("config", "object"):
        return None
    folder = local_folder(source.place, source.revision)
    file = (folder or Path(source.place)) / "config.json"
    fields = read_json(file, links=True) if file.is_file() else {}
    if fields.get("model_type") not in WHOLES:
        return None
    config = AutoConfig.from_pretrained(file.parent, trust_remote_code=False)
    if text_part(config) is config:
        return None
    return Composite(str(config.model_type), source, TIES in fields)


def refuse_other_head(source: ModelSource, config: Any, head: Head) -> None:
    """Raise UsageError as `refuse_headless`, for a config of several modalities that `text_part` leaves as it
    is, and for a head that the whole of `source` has no place for."""
    _refuse_unknown(config, head)
    refuse_headless(config, head)
    if head != "causal" and (whole := whole_at(source)) is not None:
        what = f"a model of type {whole.kind} holds more than the text model, and has no head for {head}"
        remedy = f"use a task that writes text, or {_SAVE.format(config.model_type)}"
        raise UsageError(what, where="model", found=whole.kind, remedy=remedy)


def _refuse_unknown(config: Any, head: Head) -> None:
    inner = getattr(getattr(config, "text_config", None), "model_type", None)
    if inner in FAMILIES:
        what = f"a model of type {config.model_type} holds more than the text model that petune tunes"
        remedy = _SAVE.format(inner)
        raise UsageError(what, where="model", expected=inner, found=config.model_type, remedy=remedy)
    auto = model_class(config, head)
    whole = auto is None or auto._model_mapping[type(config)].config_class is type(config)
    if head == "causal" and inner is not None and whole:
        what = f"a model of type {config.model_type} holds a text model for which petune has no table"
        known = f"a text model of petune's families in one of {', '.join(WHOLES)}"
        remedy = "choose another model; in a loop of your own petune.wrap takes targets that you name"
        raise UsageError(what, where="model", expected=known, found=inner, remedy=remedy)


# ---------------------------------------------------------------- names


def name_in_text(key: str) -> str | None:
    """The name, in the text model, of a tensor of the whole's files or of its class; None where it is none of
    its own."""
    for there, here in _IN_FILES.items():
        if key.startswith(there):
            return here + key.removeprefix(there)
    return key if key.startswith("lm_head.") else None


def name_in_whole(name: str) -> str:
    """The name, in the class of the whole, of a module or tensor of the text model."""
    return f"{INSIDE}{name.removeprefix('model')}" if f"{name}.".startswith("model.") else name


def as_text(headers: Mapping[Path, Header]) -> dict[Path, Header]:
    """Headers of the whole's files with the text model's own names; others begin with OUTSIDE.

    Raises FileError for a tensor that is there under two names.
    """
    seen: dict[str, str] = {}
    found = {}
    for path, header in headers.items():
        tensors = {}
        for key, entry in header.tensors.items():
            name = name_in_text(key) or OUTSIDE + key
            if (other := seen.setdefault(name, key)) != key:
                what = "holds a tensor of the text model under two names"
                raise FileError(what, where=str(path), found=f"{other}, {key}", remedy="use another copy")
            tensors[name] = entry
        found[path] = replace(header, tensors=tensors)
    return found


def settle_ties(whole: Composite, config: Any, names: Iterable[str]) -> None:
    """Where the whole's config says nothing of a tied head: it is tied where its files hold none, as
    transformers has it."""
    if not whole.ties:
        config.tie_word_embeddings = HEAD not in set(names)


def settle_ties_here(whole: Composite, config: Any) -> None:
    """`settle_ties` by the files of the whole that are on this machine; where there are none the config stays
    as it is. Raises FileError for files that are damaged."""
    if whole.source is None or whole.ties:
        return
    files = model_files(whole.source.place, whole.source.revision)
    paths = [path for name, path in files.items() if is_weights(name) and path.is_file()]
    if names := [name_in_text(key) for path in paths for key in read_header(path, links=True).tensors]:
        settle_ties(whole, config, filter(None, names))


def note_of(whole: Composite, files: Mapping[str, TensorSource]) -> str:
    """What is read of the whole and what is not, in words. files: tensors by the names of `as_text`, each in
    the shape that it stands for."""
    others = {key.removeprefix(OUTSIDE): one for key, one in files.items() if key.startswith(OUTSIDE)}
    parts = sorted({key.removeprefix("model.").partition(".")[0] for key in others})
    size = sum(math.prod(one.shape) for one in others.values() if one.dtype.is_floating_point)
    rest = f"{', '.join(parts) or 'nothing'} ({size:,} parameters) is left out, and copied by a merge"
    return f"the text model of a {whole.kind}: {rest}"


# ---------------------------------------------------------------- models


_WHOLE = Note[Composite]("petune_whole")  # of a text model that is a part of a checkpoint
remember_whole, whole_of = _WHOLE.put, _WHOLE.of


def is_whole(model: nn.Module) -> bool:
    """Whether a model in memory holds more than a text model that petune has a table for."""
    config = getattr(model, "config", None)
    return isinstance(model, PreTrainedModel) and text_part(config) is not config


def text_model(model: nn.Module) -> PreTrainedModel:
    """The text model inside a model of several modalities, as a model of its own class that shares its
    modules: what is trained in the one is trained in the other.

        >>> sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "head_dim": 16}
        >>> heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 50}
        >>> text = transformers.Gemma3TextConfig(**sizes, **heads, pad_token_id=0)
        >>> sees = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
        >>> config = transformers.Gemma3Config(text_config=text.to_dict(), vision_config=sees)
        >>> gemma = transformers.Gemma3ForConditionalGeneration(config)
        >>> tuned = petune.wrap(petune.text_model(gemma), "lora")

    Files that are written of it have the names of the whole. Raises UsageError for a model that is none of
    WHOLES or has no head over the vocabulary.
    """
    inner = getattr(getattr(model, "model", None), "language_model", None)
    if not is_whole(model) or not isinstance(inner, nn.Module) or not hasattr(model, "lm_head"):
        known = f"a ...ForConditionalGeneration of {', '.join(WHOLES)}"
        raise UsageError("this model has no text model to take", expected=known, found=type(model).__name__)
    outer = cast("Any", model)
    config = text_part(outer.config)
    with torch.device("meta"):
        text = model_class(config, "causal").from_config(config)
    text.model, text.lm_head = inner, outer.lm_head
    text.generation_config = outer.generation_config
    remember_whole(text, Composite(str(outer.config.model_type), None))
    return cast("PreTrainedModel", text.train(model.training))


def refuse_whole(model: nn.Module, how: str) -> None:
    """Raise UsageError for a model in memory that holds more than its text model; `how`: what to do with
    `petune.text_model(model)`."""
    if is_whole(model):
        found = type(model).__name__
        what = "this model holds more than the text model that petune tunes"
        raise UsageError(what, where="model", found=found, remedy=how)
